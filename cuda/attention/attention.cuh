// What the attention kernels share: how partial results over parts of a context are put together.
//
// A partial result is (m, l, o): the largest score (in units of log2), the sum of 2^(score - m), and the sum of
// 2^(score - m) v, all FP32. The roundings are written out, so that every kernel that merges the same parts in the
// same order arrives at the same bits.
//
// Option: -DHEAD_DIM (64).
#pragma once

#include "common/common.cuh"
#include "common/kv_cache.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif

static constexpr int D = HEAD_DIM;

// 2^(m - reference), where m may be -inf (a part without keys), and then 0.
static __device__ __forceinline__ float weight_of(float m, float reference) {
    return m == negative_infinity() ? 0.0f : exp2f(__fsub_rn(m, reference));
}

static __device__ __forceinline__ float merged(float kept, float kept_weight, float added, float added_weight) {
    return __fmaf_rn(added, added_weight, __fmul_rn(kept, kept_weight));
}
