// Changes the logits of rows that ask for it, before they are drawn from: bans, biases, and penalties by how often the
// answer holds a token. The definition is worker/runners/adjusting.py; such a row's repetition penalty, which comes in
// between, is applied here, too, and not again when it is drawn from.
//
//   logits (R, V) float, rows with room for a multiple of 8; draws (R,); slots: of the sequences (slots.cuh)
//   history: the token at each place of the KV cache, pages of 16; tables (S, width): the pages of each chunk
//   starts (S + 1,): where the step's chunks begin; a draw's row lies in the chunk of its sequence
//
// A sequence's wishes, as worker/runners/gpu/sampling/logit_adjustments.py writes them: N tokens, N floats, their biases; W + 1
// places where runs of banned tokens begin, and these. The answer is read from the cache's history, so nothing is kept
// of it here, and a sequence that takes a slot again brings nothing but its wishes.
//
// A block of 1,024 threads takes a row, and does nothing for most. Counts are made in shared memory for 8,192 token ids
// at a time, by integer atomics, whose sum does not depend on their order: all in all V / 8,192 passes over the answer
// (19 for a vocabulary of 152,000), and, if there is a repetition penalty, one over its bitmap.
#include "common/basics.cuh"
#include "common/page.cuh"
#include "sampling/sampling.cuh"

static constexpr int THREADS = 1024;
static constexpr int RANGE = 8192;  // token ids that are counted at a time

static __device__ __forceinline__ float bounded(float x) {
    return isfinite(x) ? fminf(fmaxf(x, -LARGEST_LOGIT), LARGEST_LOGIT) : x;
}

// The tokens of a sequence, by position.
struct History {
    const int* tokens;
    const int* pages;

    __device__ __forceinline__ int operator[](int position) const {
        return tokens[static_cast<int64_t>(pages[position / PAGE]) * PAGE + position % PAGE];
    }
};

// The chunk that a token of the step lies in.
static __device__ __forceinline__ int chunk_of(int row, const int* starts, int chunks) {
    int low = 0, high = chunks;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (starts[middle] <= row ? low : high) = middle;
    }
    return low;
}

// Whether the answer, positions `first` to `next`, ends with these tokens.
static __device__ __forceinline__ bool ends_with(const History& history, int first, int next, const int* tokens,
                                                 int count) {
    if (next - first < count) return false;
    for (int i = 0; i < count; ++i)
        if (history[next - count + i] != tokens[i]) return false;
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    adjust(float* __restrict__ logits, int vocab, const Draw* __restrict__ draws, const Slot* __restrict__ slots,
           const int* __restrict__ history, const int* __restrict__ tables, int width,
           const int* __restrict__ starts, int chunks) {
    __shared__ int counts[RANGE];
    launch_next();
    wait_for_previous(logits, draws, slots, history, tables, starts);
    const Draw draw = draws[blockIdx.x];
    if (draw.slot < 0) return;
    const Slot& slot = slots[draw.slot];
    if (!slot.adjusted) return;
    float* row = logits + static_cast<int64_t>(blockIdx.x) * ((vocab + 7) / 8 * 8);
    const int64_t table = static_cast<int64_t>(chunk_of(draw.row, starts, chunks)) * width;
    const History tokens{history, tables + table};

    const int* biased = reinterpret_cast<const int*>(slot.adjustments);
    const float* biases = reinterpret_cast<const float*>(biased + slot.biases);
    const int* runs = biased + 2 * slot.biases;
    const int* banned = runs + slot.words + 1;
    for (int word = threadIdx.x; word < slot.words; word += THREADS) {
        const int begin = runs[word], last = runs[word + 1] - 1;
        const int token = banned[last];
        if (token < vocab && ends_with(tokens, slot.answer_from, draw.position, banned + begin, last - begin))
            row[token] = negative_infinity();
    }
    __syncthreads();
    for (int i = threadIdx.x; i < slot.biases; i += THREADS) {
        const int token = biased[i];
        if (token < vocab) row[token] = __fadd_rn(bounded(row[token]), biases[i]);
    }
    __syncthreads();
    const unsigned* seen = reinterpret_cast<const unsigned*>(slot.seen);
    if (seen != nullptr) {
        for (int word = threadIdx.x; word < (vocab + 31) / 32; word += THREADS) {
            for (unsigned bits = seen[word]; bits != 0; bits &= bits - 1) {
                const int token = word * 32 + __ffs(bits) - 1;
                if (token >= vocab) break;
                const float x = bounded(row[token]);
                row[token] = x > 0.0f ? __fdiv_rn(x, slot.repetition_penalty) : __fmul_rn(x, slot.repetition_penalty);
            }
        }
    }
    if (slot.presence_penalty == 0.0f && slot.frequency_penalty == 0.0f) return;
    for (int i = threadIdx.x; i < RANGE; i += THREADS) counts[i] = 0;
    __syncthreads();
    for (int base = 0; base < vocab; base += RANGE) {
        for (int position = slot.answer_from + threadIdx.x; position < draw.position; position += THREADS) {
            const unsigned place = tokens[position] - base;
            if (place < RANGE) atomicAdd(counts + place, 1);
        }
        __syncthreads();
        for (int position = slot.answer_from + threadIdx.x; position < draw.position; position += THREADS) {
            const unsigned place = tokens[position] - base;
            const int times = place < RANGE ? atomicExch(counts + place, 0) : 0;
            if (times == 0) continue;  // in another range, or another thread has taken it
            float& x = row[base + place];
            const float before = seen == nullptr ? bounded(x) : x;  // all that it counts were seen
            x = __fsub_rn(__fsub_rn(before, __fmul_rn(slot.frequency_penalty, static_cast<float>(times))),
                          slot.presence_penalty);
        }
        __syncthreads();
    }
}
