// From the QKV product to what attention reads, written to be read: what `qkv_rope.cu`, `hopper_qkv.cu`, `packed_qkv.cu` and
// `few_rows.cu` do fast. A bias, an RMS norm of each head's query and key (Qwen3), and rotation (Su et al. 2021):
//
//   a pair (a, b) of a head, by its angle at the token's position:  a cos - b sin,  b cos + a sin
//
// qkv (T, H + 2 G, D) elements: heads of queries, of keys, of values; bias ((H + 2 G) D,) float or null; q_norm and k_norm
// (D,) float or null; positions (T,); table (positions, D / 2, 2) float: cosine and sine of each pair; out (T, H + 2 G, D)
// float. Values have the bias alone.
//
// A thread computes a head: grid (ceil((H + 2 G) / 32), T), blocks of 32. The fast kernels have 2 to 32 threads for a head,
// write queries in place and keys and values to their pages, or do all of this as a product ends, before its sums leave
// registers. They also know norms of all heads at once, norms after rotation, and heads that are rotated in part.
//
// Options: -DHEAD_DIM; -DINTERLEAVED: pairs are (2 i, 2 i + 1), not (i, i + D / 2).
#include "common/element.cuh"

#include <stdint.h>

extern "C" __global__ void rope_reference(const Element* qkv, const float* bias, const float* q_norm, const float* k_norm,
                                          float eps, const int* positions, const float* table, float* out, int heads,
                                          int kv_heads) {
    const int token = blockIdx.y, head = blockIdx.x * 32 + threadIdx.x, all_heads = heads + 2 * kv_heads;
    if (head >= all_heads) return;
    const int64_t first = (int64_t(token) * all_heads + head) * HEAD_DIM;
    float x[HEAD_DIM];
    for (int i = 0; i < HEAD_DIM; ++i) x[i] = to_float(qkv[first + i]) + (bias ? bias[head * HEAD_DIM + i] : 0.0f);
    if (head < heads + kv_heads) {
        if (const float* weight = head < heads ? q_norm : k_norm) {
            float sum = 0.0f;
            for (int i = 0; i < HEAD_DIM; ++i) sum += x[i] * x[i];
            for (int i = 0; i < HEAD_DIM; ++i) x[i] *= 1.0f / sqrtf(sum / HEAD_DIM + eps) * weight[i];
        }
        const float* angles = table + int64_t(positions[token]) * HEAD_DIM;
        for (int i = 0; i < HEAD_DIM / 2; ++i) {
            float& a = x[INTERLEAVED ? 2 * i : i];
            float& b = x[INTERLEAVED ? 2 * i + 1 : i + HEAD_DIM / 2];
            const float turned = a * angles[2 * i] - b * angles[2 * i + 1];
            b = b * angles[2 * i] + a * angles[2 * i + 1];
            a = turned;
        }
    }
    for (int i = 0; i < HEAD_DIM; ++i) out[first + i] = x[i];
}
