// Logits as a model scales, caps and suppresses them: cap * tanh(scale * logit / cap), or without a cap (0) scale * logit, in place.
//
// logits (R, V) float, V a multiple of 8. 8 bytes a logit: bound by memory. A thread takes 8 of them; threads are numbered
// through all rows.
#include "common/basics.cuh"

extern "C" __global__ void __launch_bounds__(256) scale_logits(float* logits, int rows, int vocab, float scale, float cap) {
    launch_next();
    wait_for_previous(logits);
    const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
    if (index >= static_cast<int64_t>(rows) * (vocab / 8)) return;
    float values[8];
    load8(logits + index * 8, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        values[i] *= scale;
        if (cap > 0.0f) values[i] = cap * tanhf(values[i] / cap);
    }
    store8(logits + index * 8, values);
}

// logits[r][tokens[i]] = -infinity for `count` tokens of each row: those that are never drawn (Gemma 4). Threads are numbered
// through all of them.
extern "C" __global__ void __launch_bounds__(256)
    suppress_logits(float* logits, const int* __restrict__ tokens, int rows, int vocab, int count) {
    launch_next();
    wait_for_previous(logits);
    const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
    if (index >= static_cast<int64_t>(rows) * count) return;
    logits[index / count * vocab + tokens[index % count]] = negative_infinity();
}
