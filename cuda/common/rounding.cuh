// Rows of elements as FP8: E4M3 numbers and a scale, a float, for each row; a number stands for itself times its row's scale.
//
// The scale is the row's largest magnitude over 448, the largest number of E4M3. It hangs on that row alone.
#pragma once

#include "common/block_sum.cuh"
#include "common/e4m3.cuh"

static constexpr float LARGEST_E4M3 = 448.0f;
static constexpr float LEAST_SCALED = 1e-30f;  // what a row of less is taken for: 448 over it has to be a float

// What the numbers of a row are multiplied by before they are rounded.
static __device__ __forceinline__ float e4m3_factor(float largest) { return LARGEST_E4M3 / fmaxf(largest, LEAST_SCALED); }
static __device__ __forceinline__ float e4m3_scale(float largest) { return fmaxf(largest, LEAST_SCALED) / LARGEST_E4M3; }

// Eight numbers of a row, one 8-byte access.
static __device__ __forceinline__ uint2 to_e4m3(const float (&values)[8], float factor) {
    const auto pair = [&](int i) { return to_e4m3x2(values[i] * factor, values[i + 1] * factor); };
    return make_uint2(pair(0) | pair(2) << 16, pair(4) | pair(6) << 16);
}
