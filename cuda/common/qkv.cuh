// Queries, keys and values on their way from their product to attention: rotation (RoPE), and where they go. The kernels
// that finish them (`qkv_rope.cu`, `hopper_qkv.cu`, `few_rows.cu`) agree to the bit, so roundings are written out.
//
// Options: -DHEAD_DIM (64); -DINTERLEAVED (0): pairs are (2 i, 2 i + 1), as in GGUF files of llama, not (i, i + D / 2).
#pragma once

#include "common/common.cuh"
#include "common/kv_cache.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef INTERLEAVED
#define INTERLEAVED 0
#endif

// A pair of elements (Su et al. 2021).
static __device__ __forceinline__ void rotate(float& x, float& y, float cosine, float sine) {
    const float first = __fmaf_rn(x, cosine, -__fmul_rn(y, sine));
    y = __fmaf_rn(y, cosine, __fmul_rn(x, sine));
    x = first;
}

struct Qkv {
    Element* qkv;                 // (T, (H + 2 G) D): here only queries go
    Kept *keys, *values;          // pages, as `kv_cache.cuh` says
    const float* bias;            // ((H + 2 G) D,), or null
    const int *positions;         // (T,)
    const int *cache_rows;        // (T,): page * 16 + the place in it; negative: not written
    const float* table;           // (table_rows, D / 2, 2): cosine and sine, from `rope_table`
    int table_rows, heads, kv_heads;

    __device__ __forceinline__ int all_heads() const { return heads + 2 * kv_heads; }
    __device__ __forceinline__ bool is_query(int head) const { return head < heads; }
    __device__ __forceinline__ bool is_value(int head) const { return head >= heads + kv_heads; }
    __device__ __forceinline__ int table_row(int position) const { return min(max(position, 0), table_rows - 1); }
    __device__ __forceinline__ const float* angles(int table_row) const {
        return table + static_cast<int64_t>(table_row) * HEAD_DIM;
    }

    // The D elements of a head.
    __device__ __forceinline__ Element* in_qkv(int token, int head) const {
        return qkv + (static_cast<int64_t>(token) * all_heads() + head) * HEAD_DIM;
    }
    __device__ __forceinline__ Kept* in_cache(int cache_row, int head) const {
        return pages_of(head) + token_of(cache_row, (head - heads) % kv_heads, kv_heads, HEAD_DIM);
    }
    // Where the exponent of these numbers is, in an FP8 cache.
    __device__ __forceinline__ Kept* exponent_in_cache(int cache_row, int head) const {
        return pages_of(head) + part_of(cache_row / PAGE, (head - heads) % kv_heads, kv_heads, HEAD_DIM) +
               PAGE * HEAD_DIM + exponent_place(cache_row % PAGE);
    }
    __device__ __forceinline__ Kept* pages_of(int head) const { return is_value(head) ? values : keys; }
};
