// RMS norm, alone or with the residual addition before it (Zhang and Sennrich 2019).
//
//   rms_norm       out = x / sqrt(mean(x^2) + eps) * weight
//   add_rms_norm   x += delta first, written back
//
// x (T, width) float, delta and out (T, width) half, weight (width,) float; width is a multiple of 8. Bytes a value:
// 6 without the addition, 12 with it (the weights stay in cache). A block per row; a thread holds 1, 2 or 4 pieces of
// 8 values in registers, so that the row is read once: the launcher takes the fewest pieces with which 256 threads
// (4 pieces: 1,024) cover the row. Sums are FP32, in an order that depends on the width alone.
#include "common.cuh"

template <int PIECES, bool ADD>
static __device__ __forceinline__ void norm_row(float* __restrict__ x, const __half* __restrict__ delta,
                                                const float* __restrict__ weight, __half* __restrict__ out,
                                                int width, float eps) {
    __shared__ float partial[32];
    launch_next();
    wait_for_previous(x, delta);
    const int64_t row = static_cast<int64_t>(blockIdx.x) * width;
    float values[PIECES][8];
    float sum = 0.0f;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        const int column = (piece * blockDim.x + threadIdx.x) * 8;
        if (column >= width) continue;
        load8(x + row + column, values[piece]);
        if (ADD) {
            float more[8];
            unpack(*reinterpret_cast<const Half8*>(delta + row + column), more);
#pragma unroll
            for (int i = 0; i < 8; ++i) values[piece][i] += more[i];
            store8(x + row + column, values[piece]);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = fmaf(values[piece][i], values[piece][i], sum);
    }
    sum = warp_sum(sum);
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (lane == 0) partial[warp] = sum;
    __syncthreads();
    const int warps = blockDim.x / 32;
    const float total = warp_sum(lane < warps ? partial[lane] : 0.0f);
    const float scale = 1.0f / sqrtf(total / static_cast<float>(width) + eps);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        const int column = (piece * blockDim.x + threadIdx.x) * 8;
        if (column >= width) continue;
        float gains[8];
        load8(weight + column, gains);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[piece][i] *= scale * gains[i];
        *reinterpret_cast<Half8*>(out + row + column) = pack(values[piece]);
    }
}

#define NORM_KERNELS(PIECES, THREADS)                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                         \
        rms_norm_##PIECES(const float* x, const float* weight, __half* out, int width, float eps) {               \
        norm_row<PIECES, false>(const_cast<float*>(x), nullptr, weight, out, width, eps);                         \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                         \
        add_rms_norm_##PIECES(float* x, const __half* delta, const float* weight, __half* out, int width,         \
                              float eps) {                                                                        \
        norm_row<PIECES, true>(x, delta, weight, out, width, eps);                                                \
    }

NORM_KERNELS(1, 256)
NORM_KERNELS(2, 256)
NORM_KERNELS(4, 1024)
