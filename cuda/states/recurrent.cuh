// The matrix of a head in a block's registers, for tokens that go through it one by one.
//
// A block takes one (piece, head) after the other, and asks for the next one's matrix before it computes: each thread copies what
// will be its own to shared memory, so that nobody has to wait for others. Without that, a multiprocessor that computes does not read:
// 76% of a copy's bandwidth for 256 sequences of 32 heads on an H200, two blocks to a multiprocessor in either case.
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

    // Shared memory of a block.
    static constexpr int BYTES = HELD * WARPS * 32 * 16;

    // Copies this thread's numbers to shared memory; zeros where it has none, or the state counts as zeros (not `present`).
    __device__ __forceinline__ void ask(unsigned char* room, const float* matrix, bool present) const {
        const uint32_t place = shared_address(room) + threadIdx.x * 16;
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            copy_async(place + i * (WARPS * 32 * 16), matrix + row(i) * COLUMNS + column, present && mine);
        commit_copies();
    }
    // What it has asked for last.
    __device__ __forceinline__ void take(const unsigned char* room) {
        wait_for_copies<0>();
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            held[i] = *reinterpret_cast<const float4*>(room + (i * WARPS * 32 + threadIdx.x) * 16);
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
