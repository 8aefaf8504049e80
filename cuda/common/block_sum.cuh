// Sums and maxima over the threads of a block.
#pragma once

#include "common/common.cuh"

// Of whole warps, in an order that depends on their number alone. All threads call it; `partial`: 32 floats in shared memory
// that no other call of a kernel uses.
static __device__ __forceinline__ float block_sum(float value, float* partial) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    value = warp_sum(value);
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    return warp_sum(lane < warps ? partial[lane] : 0.0f);
}

// The largest, of whole warps; all threads call it, with a `partial` of its own.
static __device__ __forceinline__ float block_max(float value, float* partial) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    value = warp_max(value);
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    return warp_max(lane < warps ? partial[lane] : negative_infinity());
}
