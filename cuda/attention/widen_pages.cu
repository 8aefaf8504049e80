// Pages of an FP8 cache (-DKV_FP8) as the elements that they stand for, so that `hopper_attention.cu` reads them by bulk copies.
//
//   pages   (count,): the page that becomes the i-th
//   cache   keys or values as `kv_cache.cuh` says;  out (count, kv_heads, PAGE, D) elements; the grid's second row has the values
//
// A thread takes 8 numbers at a time, EACH times, so that loads overlap. 3 bytes a number move, and what is written stays in
// L2 for the kernel that follows, unless there is more.
//
// Options: -DHEAD_DIM, a multiple of 8.
#ifndef KV_FP8
#define KV_FP8
#endif
#include "attention/attention.cuh"
#include "common/kv_cache.cuh"

static constexpr int THREADS = 256, EACH = 4;
static constexpr int PART_CHUNKS = PAGE * D / 8, TOKEN_CHUNKS = D / 8;  // of 8 numbers

extern "C" __global__ void __launch_bounds__(THREADS)
    widen_pages(const int* __restrict__ pages, int count, const Kept* __restrict__ keys, const Kept* __restrict__ values,
                Element* __restrict__ wide_keys, Element* __restrict__ wide_values, int kv_heads) {
    launch_next();
    wait_for_previous(pages, keys, values);
    const Kept* cache = blockIdx.y == 0 ? keys : values;
    Element* out = blockIdx.y == 0 ? wide_keys : wide_values;
    const int chunks = count * kv_heads * PART_CHUNKS;
    Bytes8 bytes[EACH];
    uint32_t exponents[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int index = (blockIdx.x * EACH + i) * THREADS + threadIdx.x;
        if (index >= chunks) continue;
        const int part = index / PART_CHUNKS, chunk = index % PART_CHUNKS;
        const Kept* source = cache + part_of(pages[part / kv_heads], part % kv_heads, kv_heads, D);
        bytes[i] = *reinterpret_cast<const Bytes8*>(source + chunk * 8);
        exponents[i] = source[PAGE * D + exponent_place(chunk / TOKEN_CHUNKS)];
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int index = (blockIdx.x * EACH + i) * THREADS + threadIdx.x;
        if (index >= chunks) continue;
        *reinterpret_cast<Element8*>(out + int64_t(index) * 8) = elements_of(bytes[i], powers_of(exponents[i] * 0x101u));
    }
}
