// GGUF blocks to numbers: what `gguf.quants.dequantize` computes, bit for bit in float32.
//
// in   blocks of BYTES bytes as they stand in the file, each holding SIZE consecutive weights of a row; for types that have
//      one, their `grid` (grid_blocks.cuh); other types are in blocks.cuh
// out  the weights in the same order: float (vectors), or elements, rounded to nearest even (matrices)
//
// One thread a weight, 256 a block of threads; neighbours share their block's bytes through L1. Moves BYTES / SIZE
// bytes in and 4 or 2 out a weight. It runs once, behind the upload over PCIe, which is the slower of the two.
//
// `bad` is set where a weight does not fit into an element: an infinity would spread through the whole model.

#include "weights/blocks.cuh"
#include "weights/grid_blocks.cuh"

namespace {

template <typename Type>
__device__ __forceinline__ auto at(const uint8_t* block, int i, const int8_t*) -> decltype(Type::at(block, i)) {
    return Type::at(block, i);
}

template <typename Type>
__device__ __forceinline__ auto at(const uint8_t* block, int i, const int8_t* grid) -> decltype(Type::at(block, i, grid)) {
    return Type::at(block, i, grid);
}

template <typename Type>
__device__ __forceinline__ float weight(const uint8_t* blocks, int64_t i, const int8_t* grid) {
    return at<Type>(blocks + i / Type::SIZE * Type::BYTES, int(i % Type::SIZE), grid);
}

}  // namespace

#define DEQUANTIZE(TYPE)                                                                                      \
    extern "C" __global__ void dequantize_##TYPE##_f32(const uint8_t* blocks, float* out, int64_t count,       \
                                                       const int8_t* grid, int*) {                            \
        const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;                                     \
        if (i < count) out[i] = weight<TYPE>(blocks, i, grid);                                                \
    }                                                                                                         \
    extern "C" __global__ void dequantize_##TYPE##_element(const uint8_t* blocks, Element* out, int64_t count, \
                                                           const int8_t* grid, int* bad) {                    \
        const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;                                     \
        if (i >= count) return;                                                                               \
        const Element value = to_element(weight<TYPE>(blocks, i, grid));                                      \
        out[i] = value;                                                                                       \
        if (!isfinite(to_float(value))) *bad = 1;                                                             \
    }

DEQUANTIZE(F32)
DEQUANTIZE(F16)
DEQUANTIZE(BF16)
DEQUANTIZE(Q4_0)
DEQUANTIZE(Q4_1)
DEQUANTIZE(Q5_0)
DEQUANTIZE(Q5_1)
DEQUANTIZE(Q8_0)
DEQUANTIZE(Q2_K)
DEQUANTIZE(Q3_K)
DEQUANTIZE(Q4_K)
DEQUANTIZE(Q5_K)
DEQUANTIZE(Q6_K)
DEQUANTIZE(TQ1_0)
DEQUANTIZE(TQ2_0)
DEQUANTIZE(MXFP4)
DEQUANTIZE(IQ4_NL)
DEQUANTIZE(IQ4_XS)
DEQUANTIZE(IQ3_XXS)
DEQUANTIZE(IQ3_S)
DEQUANTIZE(IQ2_XXS)
DEQUANTIZE(IQ2_XS)
DEQUANTIZE(IQ2_S)
DEQUANTIZE(IQ1_S)
DEQUANTIZE(IQ1_M)
