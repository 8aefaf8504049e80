// RMS norm (Zhang and Sennrich 2019): out = x / sqrt(mean(x^2) + eps) * weight.
//
// x (T, width) float, weight (width,) float; width is a multiple of 8.
//   rms_norm_*      out (T, width) elements
//   rms_norm_fp8_*  out (T, width) E4M3, scales (T,) float: what `quantise.cu` makes of these elements, bit for bit
// Bytes a value: 6, or 5 (the weights stay in cache). A block per row; a thread holds 1, 2 or 4 pieces of 8 values in
// registers, so that the row is read once: the launcher takes the fewest pieces with which 256 threads (4 pieces: 1,024) cover
// the row. Sums are FP32, in an order that depends on the width alone. Where registers suffice, weights are read before the
// kernel waits for the one ahead.
#include "common/rounding.cuh"

// Out: what numbers become, elements or (uint8_t) E4M3.
template <int PIECES, typename Out>
static __device__ __forceinline__ void norm_row(const float* __restrict__ x, const float* __restrict__ weight,
                                                Out* __restrict__ out, float* __restrict__ scales, int width, float eps) {
    constexpr bool FP8 = sizeof(Out) == 1;
    __shared__ float partial[FP8 ? 2 : 1][32];
    constexpr bool EARLY = PIECES <= 2;
    launch_next();
    float values[PIECES][8], gains[PIECES][8];
    auto column_of = [&](int piece) { return static_cast<int>(piece * blockDim.x + threadIdx.x) * 8; };
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece)
        if (EARLY && column_of(piece) < width) load8(weight + column_of(piece), gains[piece]);
    wait_for_previous(x);
    const int64_t row = static_cast<int64_t>(blockIdx.x) * width;
    float sum = 0.0f;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        if (column_of(piece) >= width) continue;
        load8(x + row + column_of(piece), values[piece]);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = fmaf(values[piece][i], values[piece][i], sum);
    }
    const float total = block_sum(sum, partial[0]);
    const float scale = 1.0f / sqrtf(total / static_cast<float>(width) + eps);
    float largest = 0.0f;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        if (column_of(piece) >= width) continue;
        if (!EARLY) load8(weight + column_of(piece), gains[piece]);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[piece][i] *= scale * gains[piece][i];
        if constexpr (FP8) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                values[piece][i] = rounded(values[piece][i]);
                largest = fmaxf(largest, fabsf(values[piece][i]));
            }
        } else {
            *reinterpret_cast<Element8*>(out + row + column_of(piece)) = pack(values[piece]);
        }
    }
    if constexpr (FP8) {
        largest = block_max(largest, partial[1]);
        const float factor = e4m3_factor(largest);
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece)
            if (column_of(piece) < width)
                *reinterpret_cast<uint2*>(out + row + column_of(piece)) = to_e4m3(values[piece], factor);
        if (threadIdx.x == 0) scales[blockIdx.x] = e4m3_scale(largest);
    }
}

#define NORM_KERNELS(PIECES, THREADS)                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                         \
        rms_norm_##PIECES(const float* x, const float* weight, Element* out, int width, float eps) {               \
        norm_row<PIECES>(x, weight, out, nullptr, width, eps);                                                    \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                         \
        rms_norm_fp8_##PIECES(const float* x, const float* weight, uint8_t* out, float* scales, int width,         \
                              float eps) {                                                                        \
        norm_row<PIECES>(x, weight, out, scales, width, eps);                                                     \
    }

NORM_KERNELS(1, 256)
NORM_KERNELS(2, 256)
NORM_KERNELS(4, 1024)
