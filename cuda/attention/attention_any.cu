// Attention for head sizes that the tensor-core kernels do not take; for correctness, not for speed.
//
// Arguments and layouts as in decode_attention.cu and prefill_attention.cu. A warp takes one query head of one
// token; its lanes share the head's elements (lane, lane + 32, ...), and keys come one after the other: a dot product
// over the warp, then the running softmax, all FP32. Decode: grid (H, S), blocks of one warp. Prefill: grid
// (H, tiles), blocks of 4 warps, which take the tile's tokens in turn.
//
// With -DVALUE_DIM attention is latent: q is (T, H, D) by itself, both caches are one, of one KV head, and the first VALUE_DIM
// elements of a key are its value; out is (T, H, VALUE_DIM).
//
// Options: -DHEAD_DIM, up to 576 (64); -DVALUE_DIM; -DWINDOW, -DSOFTCAP, -DSINKS, -DBIDIRECTIONAL.
#include "attention/attention.cuh"
#include "common/kv_cache.cuh"

static_assert(D <= 576, "head sizes are at most 576");

static constexpr int EACH = (D + 31) / 32;
#ifdef VALUE_DIM
static constexpr int V = VALUE_DIM;
#else
static constexpr int V = D;
#endif

// Heads that a token has in q.
static __device__ __forceinline__ int all_heads(int heads, int kv_heads) { return V == D ? heads + 2 * kv_heads : heads; }

// Element i of a head's part of a page, for a token with this place in it.
static __device__ __forceinline__ float number_in(const Kept* part, int token, int i) {
#ifdef KV_FP8
    const uint32_t exponent = part[PAGE * D + exponent_place(token)];
    return to_floats(elements_of_e4m3x2(part[token * D + i])).x * to_floats(powers_of(exponent)).x;
#else
    return to_float(part[token * D + i]);
#endif
}

static __device__ __forceinline__ void attend(const Element* __restrict__ q, const Kept* __restrict__ k_cache,
                                              const Kept* __restrict__ v_cache, const int* __restrict__ table,
                                              int kv_heads, int head, int group, int visible, int keys, const Scores& scores,
                                              Element* __restrict__ out) {
    const int lane = threadIdx.x % 32;
    float query[EACH], o[EACH] = {};
#pragma unroll
    for (int i = 0; i < EACH; ++i) query[i] = lane + 32 * i < D ? to_float(q[lane + 32 * i]) * scores.scale : 0.0f;
    float m = negative_infinity(), l = 0.0f;
    const int kv_head = head / group;
    for (int key = scores.first_seen(visible); key < (CAUSAL ? visible : min(visible, keys)); ++key) {
        const int64_t part = part_of(table[key / PAGE], kv_head, kv_heads, D);
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (lane + 32 * i < D) score = fmaf(query[i], number_in(k_cache + part, key % PAGE, lane + 32 * i), score);
        score = scores.capped(warp_sum(score));
        const float largest = fmaxf(m, score);
        const float shrink = weight_of(m, largest), p = exp2f(score - largest);
        l = l * shrink + p;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (lane + 32 * i < V) o[i] = o[i] * shrink + p * number_in(v_cache + part, key % PAGE, lane + 32 * i);
        m = largest;
    }
    l = scores.total(l, m, head);
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (lane + 32 * i < V) out[lane + 32 * i] = to_element(o[i] / l);
}

extern "C" __global__ void __launch_bounds__(32)
    decode_attention_any(const Element* __restrict__ qkv, const Kept* __restrict__ k_cache,
                         const Kept* __restrict__ v_cache, const int* __restrict__ tables, int table_stride,
                         const int* __restrict__ lengths, const int* __restrict__ starts,
                         const int* __restrict__ listed, Element* __restrict__ out, int heads, int kv_heads,
                         float scale, float cap, int window, const float* __restrict__ sinks) {
    const int sequence = listed != nullptr ? listed[blockIdx.y] : blockIdx.y;
    if (sequence < 0 || lengths[sequence] <= 0) return;
    const int64_t row = starts != nullptr ? starts[sequence + 1] - 1 : sequence;
    attend(qkv + (row * all_heads(heads, kv_heads) + blockIdx.x) * D, k_cache, v_cache,
           tables + static_cast<int64_t>(sequence) * table_stride, kv_heads, blockIdx.x, heads / kv_heads,
           lengths[sequence], lengths[sequence], Scores{scale, cap, window, sinks}, out + (row * heads + blockIdx.x) * V);
}

extern "C" __global__ void __launch_bounds__(128)
    prefill_attention_any(const Element* __restrict__ qkv, const Kept* __restrict__ k_cache,
                          const Kept* __restrict__ v_cache, const int* __restrict__ tables, int table_stride,
                          const int* __restrict__ lengths, const int* __restrict__ starts,
                          const int* __restrict__ tiles, Element* __restrict__ out, int heads, int kv_heads,
                          float scale, float cap, int window, const float* __restrict__ sinks) {
    const int sequence = tiles[2 * blockIdx.y];
    if (sequence < 0) return;
    const int start = starts[sequence], chunk_tokens = starts[sequence + 1] - start;
    const int tile_tokens = 128 / (heads / kv_heads);
    const int first = tiles[2 * blockIdx.y + 1] * tile_tokens;
    const Scores scores{scale, cap, window, sinks};
    for (int token = first + threadIdx.x / 32; token < min(first + tile_tokens, chunk_tokens); token += 4) {
        const int64_t row = start + token;
        attend(qkv + (row * all_heads(heads, kv_heads) + blockIdx.x) * D, k_cache, v_cache,
               tables + static_cast<int64_t>(sequence) * table_stride, kv_heads, blockIdx.x, heads / kv_heads,
               lengths[sequence] - chunk_tokens + token + 1 + scores.ahead(chunk_tokens), lengths[sequence], scores,
               out + (row * heads + blockIdx.x) * V);
    }
}
