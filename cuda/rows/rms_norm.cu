// RMS norm (Zhang and Sennrich 2019): out = x / sqrt(mean(x^2) + eps) * weight.
//
// x (T, width) float, out (T, width) elements, weight (width,) float; width is a multiple of 8. Bytes a value: 6 (the weights
// stay in cache). A block per row; a thread holds 1, 2 or 4 pieces of 8 values in registers, so that the row is read once:
// the launcher takes the fewest pieces with which 256 threads (4 pieces: 1,024) cover the row. Sums are FP32, in an order
// that depends on the width alone. Where registers suffice, weights are read before the kernel waits for the one ahead.
#include "common/common.cuh"

template <int PIECES>
static __device__ __forceinline__ void norm_row(const float* __restrict__ x, const float* __restrict__ weight,
                                                Element* __restrict__ out, int width, float eps) {
    __shared__ float partial[32];
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
        if (column_of(piece) >= width) continue;
        if (!EARLY) load8(weight + column_of(piece), gains[piece]);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[piece][i] *= scale * gains[piece][i];
        *reinterpret_cast<Element8*>(out + row + column_of(piece)) = pack(values[piece]);
    }
}

#define NORM_KERNELS(PIECES, THREADS)                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                         \
        rms_norm_##PIECES(const float* x, const float* weight, Element* out, int width, float eps) {               \
        norm_row<PIECES>(x, weight, out, width, eps);                                                             \
    }

NORM_KERNELS(1, 256)
NORM_KERNELS(2, 256)
NORM_KERNELS(4, 1024)
