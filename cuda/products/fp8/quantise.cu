// Rows of elements to FP8 (`common/rounding.cuh`): activations that enter a product with FP8 weights, and weights as they are
// loaded, whose rows are output channels.
//
// x (T, width) elements -> out (T, width) E4M3, scales (T,) float; width is a multiple of 8. 3 bytes a value: bound by memory.
// A block per row; a thread holds 1, 2, 4 or 8 pieces of 8 values, so that the row is read once: the launcher takes the fewest
// with which 256 threads (4 and 8: 1,024) cover the row. A row with NaN or infinity becomes NaN where these are.
#include "common/rounding.cuh"

template <int PIECES>
static __device__ __forceinline__ void quantise_row(const Element* __restrict__ x, uint8_t* __restrict__ out,
                                                    float* __restrict__ scales, int width) {
    __shared__ float partial[32];
    launch_next();
    wait_for_previous(x);
    const int64_t row = static_cast<int64_t>(blockIdx.x) * width;
    auto column_of = [&](int piece) { return static_cast<int>(piece * blockDim.x + threadIdx.x) * 8; };
    Element8 packed[PIECES];
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece)
        if (column_of(piece) < width) packed[piece] = *reinterpret_cast<const Element8*>(x + row + column_of(piece));
    float largest = 0.0f;
    float values[8];
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        if (column_of(piece) >= width) continue;
        unpack(packed[piece], values);
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(values[i]));
    }
    largest = block_max(largest, partial);
    const float factor = e4m3_factor(largest);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        if (column_of(piece) >= width) continue;
        unpack(packed[piece], values);
        *reinterpret_cast<uint2*>(out + row + column_of(piece)) = to_e4m3(values, factor);
    }
    if (threadIdx.x == 0) scales[blockIdx.x] = e4m3_scale(largest);
}

#define QUANTISE_KERNEL(PIECES, THREADS)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                         \
        quantise_##PIECES(const Element* x, uint8_t* out, float* scales, int width) {                             \
        quantise_row<PIECES>(x, out, scales, width);                                                              \
    }

QUANTISE_KERNEL(1, 256)
QUANTISE_KERNEL(2, 256)
QUANTISE_KERNEL(4, 1024)
QUANTISE_KERNEL(8, 1024)
