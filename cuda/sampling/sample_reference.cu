// A draw of the next token, written to be read: what `sample.cu` and `sample_filtered.cu` compute fast. The definition, step by
// step, is worker/runners/sampling.py; slots, Philox and noise are in `sampling.cuh`.
//
// logits (R, vocab rounded up to a multiple of 8) float, which nothing changes; draws (R,) and slots as the samplers have them;
// out_tokens (R,). The slot gets its token, and with a penalty the bit in its bitmap. Rows whose draw has no slot are skipped.
//
// A thread computes a row: grid ceil(R / 32), blocks of 32. Filters keep what is at least as likely as a threshold, which is
// found by going down from the largest logit from one value to the next, each time through the whole vocabulary. The fast
// kernels read a row with a block once or twice, find the threshold by bisection, and skip noise that cannot win.
#include "sampling/sampling.cuh"

// Step 1: the logit of a token, bounded and with the repetition penalty.
static __device__ float logit_of(const Row& row, int token) {
    float four[4];
    load_logits(row, token / 4, four);
    return four[token % 4];
}

// Steps 3 to 6: the least of `scaled`, logits less the largest by the temperature, that filters keep.
template <typename Scaled>
static __device__ float threshold_of(const Slot& slot, int vocab, Scaled scaled) {
    const int most = slot.top_k > 0 ? min(slot.top_k, vocab) : vocab;
    float kept = logf(slot.min_p);
    if (most == vocab && !(slot.top_p < 1.0f)) return kept;
    // Twice down through the values: first to the k-th largest, for the sum of all that top-k keeps, then as far as top-p does.
    double all = 0.0;
    for (int pass = 0; pass < 2; ++pass) {
        float level = __int_as_float(0x7f800000), least = 0.0f;
        double sum = 0.0;
        for (int count = 0; count < most;) {
            float next = negative_infinity();
            int equals = 0;
            for (int token = 0; token < vocab; ++token) {
                const float x = scaled(token);
                if (!(x < level)) continue;
                equals = x > next ? 1 : equals + (x == next);
                next = fmaxf(x, next);
            }
            if (next == negative_infinity()) break;
            if (pass == 1 && slot.top_p < 1.0f && count > 0 && !(sum < double(slot.top_p) * all)) break;
            least = level = next;
            count += equals;
            sum += equals * exp(double(next));
        }
        all = sum;
        if (pass == 1) kept = fmaxf(kept, least);
    }
    return kept;
}

extern "C" __global__ void sample_reference(const float* logits, int vocab, const Draw* draws, Slot* slots, int* out_tokens,
                                            int count) {
    const int row = blockIdx.x * 32 + threadIdx.x;
    if (row >= count || draws[row].slot < 0) return;
    Slot& slot = slots[draws[row].slot];
    const Row source = row_of(logits, row, vocab, slot);
    Best best{negative_infinity(), 0.0f, 0x7fffffff};
    for (int token = 0; token < vocab; ++token) {  // step 2, greedy: the first of the largest
        float four[4];
        if (load_logits(source, token / 4, four)) return finish_row(not_a_number(), row, slot, vocab, out_tokens);  // step 0
        if (four[token % 4] > best.high) best = Best{four[token % 4], 0.0f, token};
    }
    if (slot.temperature > 0.0f && best.high > negative_infinity()) {
        const float largest = best.high;
        const auto scaled = [&](int token) { return (logit_of(source, token) - largest) / slot.temperature; };
        const float threshold = threshold_of(slot, vocab, scaled);
        best.high = negative_infinity();
        for (int token = 0; token < vocab; ++token) {  // step 7: the largest of what is kept, with noise
            const uint4 words = philox(token / 4, draws[row].position, slot.seed);
            const unsigned word[4] = {words.x, words.y, words.z, words.w};
            const float x = scaled(token), noisy = x + gumbel(word[token % 4]);
            if (x >= threshold && noisy > best.high) best = Best{noisy, 0.0f, token};
        }
    }
    finish_row(best, row, slot, vocab, out_tokens);
}
