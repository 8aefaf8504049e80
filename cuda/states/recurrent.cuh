// The matrix of a head in a block's registers, for tokens that go through it one by one.
//
// STATE (ROWS, COLUMNS) float, row-major. A thread has four columns of every GROUPS-th row: a warp reads whole lines, and sums over
// rows are a sum in a thread, then over GROUPS in shared memory, in the order of the groups.
#pragma once

#include "states/mixing.cuh"

template <int ROWS, int COLUMNS, int WARPS>
struct HeldMatrix {
    static_assert(COLUMNS % 4 == 0 && COLUMNS <= 128, "a warp has whole rows");
    static constexpr int LANES = COLUMNS / 4;  // of a row
    static constexpr int TOGETHER = 32 / LANES;  // rows of a warp
    static constexpr int GROUPS = WARPS * TOGETHER;
    static constexpr int HELD = ROWS / GROUPS;
    static_assert(HELD * GROUPS == ROWS, "all threads have as many rows");

    float4 held[HELD];
    int group, column;
    bool mine;  // lanes that are over have no column

    __device__ __forceinline__ HeldMatrix() {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        mine = lane < TOGETHER * LANES;
        group = warp * TOGETHER + (mine ? lane / LANES : 0);
        column = lane % LANES * 4;
    }
    __device__ __forceinline__ int row(int i) const { return i * GROUPS + group; }

    // `present`: false where the state counts as zeros.
    __device__ __forceinline__ void load(const float* matrix, bool present) {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            held[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (present && mine) held[i] = *reinterpret_cast<const float4*>(matrix + row(i) * COLUMNS + column);
        }
    }
    __device__ __forceinline__ void store(float* matrix) const {
        if (!mine) return;
#pragma unroll
        for (int i = 0; i < HELD; ++i) *reinterpret_cast<float4*>(matrix + row(i) * COLUMNS + column) = held[i];
    }
    // This thread's part of sums over rows, where the block finds it.
    __device__ __forceinline__ void put(float (*partial)[COLUMNS], const float4& sum) const {
        if (mine) *reinterpret_cast<float4*>(partial[group] + column) = sum;
    }
    // The sums of its columns.
    __device__ __forceinline__ float4 total(const float (*partial)[COLUMNS]) const {
        float4 sum = *reinterpret_cast<const float4*>(partial[0] + column);
#pragma unroll
        for (int i = 1; i < GROUPS; ++i) {
            const float4 more = *reinterpret_cast<const float4*>(partial[i] + column);
            sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        return sum;
    }
};

static __device__ __forceinline__ void add_scaled(float4& sum, float scale, const float4& values) {
    sum.x = __fmaf_rn(scale, values.x, sum.x), sum.y = __fmaf_rn(scale, values.y, sum.y);
    sum.z = __fmaf_rn(scale, values.z, sum.z), sum.w = __fmaf_rn(scale, values.w, sum.w);
}
static __device__ __forceinline__ void scale_by(float4& values, float scale) {
    values.x *= scale, values.y *= scale, values.z *= scale, values.w *= scale;
}
