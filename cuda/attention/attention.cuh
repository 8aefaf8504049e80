// What the attention kernels share: what becomes of the product of a query and a key, which keys a token sees, and how
// partial results over parts of a context are put together.
//
// A partial result is (m, l, o): the largest score (in units of log2), the sum of 2^(score - m), and the sum of
// 2^(score - m) v, all FP32. The roundings are written out, so that every kernel that merges the same parts in the
// same order arrives at the same bits.
//
// Options: -DHEAD_DIM (64); -DWINDOW: a token sees the last `window` keys, its own included; -DSOFTCAP: scores are
// capped; -DSINKS: each head has a score more, which has no value; -DBIDIRECTIONAL: tokens of a chunk, which is a whole text,
// see those behind them, too; of a window, which is odd, a half to each side. Without them `window`, `cap` and `sinks`
// are not used.
#pragma once

#include "common/common.cuh"
#include "common/page.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif

static constexpr int D = HEAD_DIM;

#ifdef WINDOW
static constexpr bool WINDOWED = true;
#else
static constexpr bool WINDOWED = false;
#endif
#ifdef SINKS
static constexpr bool HAS_SINKS = true;
#else
static constexpr bool HAS_SINKS = false;
#endif
#ifdef BIDIRECTIONAL
static constexpr bool CAUSAL = false;
#else
static constexpr bool CAUSAL = true;
#endif
#ifdef SOFTCAP
static constexpr bool CAPPED = true;
#else
static constexpr bool CAPPED = false;
#endif

// How products of queries and keys become scores, in units of log2: product * scale; CAPPED: c tanh(score / c), with
// cap = c log2(e) and a scale that makes 2^(product * scale) = e^(2 score / c). `sinks`: (H,) float, the scores as they are.
struct Scores {
    float scale, cap;
    int window;
    const float* sinks;

    __device__ __forceinline__ float operator()(float product) const { return capped(product * scale); }

    __device__ __forceinline__ float capped(float scaled) const {
        if constexpr (!CAPPED) return scaled;
        // tanh(x) = 1 - 2 / (e^2x + 1), whose error is 1e-7 of the cap; tanh.approx has 5e-4 of the score.
        return __fmaf_rn(-2.0f * cap, reciprocal_fast(__fadd_rn(exp2_fast(scaled), 1.0f)), cap);
    }

    // The first key that a token sees which is the last of `length` tokens.
    __device__ __forceinline__ int first_seen(int length) const {
        if constexpr (!WINDOWED) return 0;
        return max(length - window, 0);
    }

    // How many keys behind its own a token of a chunk of `tokens` sees, if there are so many.
    __device__ __forceinline__ int ahead(int tokens) const {
        if constexpr (CAUSAL) return 0;
        return WINDOWED ? window / 2 : tokens;
    }

    // The sum l of 2^(score - m) over all keys of a row, with that of its head's sink: what a result is divided by. All parts are
    // merged before that, so that results have the same bits, however a context was shared out.
    __device__ __forceinline__ float total(float l, float m, int head) const {
        if constexpr (!HAS_SINKS) return l;
        return __fadd_rn(l, exp2_fast(__fmaf_rn(sinks[head], LOG2_E, -m)));  // infinity makes the result 0
    }
};

// What the scores of a part without keys are relative to: below all scores, but a number, so that differences are.
static constexpr float NO_SCORE = -1e30f;

// 2^(m - reference).
static __device__ __forceinline__ float weight_of(float m, float reference) { return exp2_fast(__fsub_rn(m, reference)); }

static __device__ __forceinline__ float merged(float kept, float kept_weight, float added, float added_weight) {
    return __fmaf_rn(added, added_weight, __fmul_rn(kept, kept_weight));
}
