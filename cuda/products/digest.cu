// Whether two kernels give the same bits, told by digests: numbers to multiply, and a digest of what became of them.
//
//   random_rows  x (count) elements in [-1, 1), each by its number alone
//   digest       adds to `sum` a hash of each word of `words` and its place; words are floats, or pairs of elements where `pairs`.
//                The sum, modulo 2^64, does not depend on the order of threads. Zeros of either sign count as one.
//
// Run while products are tuned, never in a step. Bytes: the array once. Grids of any size, blocks of 256.
#include "common/basics.cuh"
#include "common/element.cuh"

static __device__ __forceinline__ uint64_t mixed(uint64_t value) {
    value = (value ^ value >> 33) * 0xff51afd7ed558ccdull;
    value = (value ^ value >> 33) * 0xc4ceb9fe1a85ec53ull;
    return value ^ value >> 33;
}

static __device__ __forceinline__ uint32_t without_sign_of_zeros(uint32_t word, int pairs) {
    if (!pairs) return word == 0x80000000u ? 0 : word;
    if ((word & 0x0000ffffu) == 0x00008000u) word &= 0xffff0000u;
    if ((word & 0xffff0000u) == 0x80000000u) word &= 0x0000ffffu;
    return word;
}

extern "C" __global__ void __launch_bounds__(256) random_rows(Element* x, int64_t count) {
    const int64_t stride = static_cast<int64_t>(gridDim.x) * 256;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < count; i += stride)
        x[i] = to_element(static_cast<float>(static_cast<int>(mixed(i + 1) & 0xffffu) - 0x8000) * 0x1p-15f);
}

extern "C" __global__ void __launch_bounds__(256)
    digest(const uint32_t* words, int64_t count, int pairs, unsigned long long* sum) {
    const int64_t stride = static_cast<int64_t>(gridDim.x) * 256;
    unsigned long long own = 0;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < count; i += stride)
        own += mixed(static_cast<uint64_t>(without_sign_of_zeros(words[i], pairs)) << 32 | static_cast<uint32_t>(i));
    atomicAdd(sum, own);
}
