// Draws tokens of rows without top-k, top-p and min-p: greedy, or temperature and Gumbel-max, in one pass.
//
//   logits (R, V) float; draws (R,): a negative slot skips the row; slots: of the sequences (slots.cuh)
//   out_tokens (R,): NOT_A_NUMBER where a row holds NaN or +inf, or nothing but -inf
//   partial (R, gridDim.x) and counters (R,), zero before and after: where blocks of a row meet
//
// Rows that need a threshold are left to `sample_filtered`. 4 V bytes a row are read once, nothing is written: bound by
// memory while a row's random numbers are few. The grid is (C, R): C blocks share a row where R does not fill the
// chip. The last one to finish takes the best of all; a maximum does not depend on who takes it, so C changes
// nothing. A thread takes 4 tokens, which share one Philox counter.
//
// The definition draws with (l - max l) / T, which needs a pass for the maximum. Here the score is l / T + noise, in a
// pair of floats, which is more exact than the definition: choices differ only where its own rounding decides.
//
// Few tokens need their noise: with d = what the noise must reach to win, noise >= d only where v <= e^-d, since
// v <= -ln(1 - v). Four tokens of which none passes this, the largest logit taken with the smallest v, cost Philox and one
// exponential, and none at all where the largest could not win with the largest noise. So that this holds from the start,
// a block first looks at its first tokens with a lower bound of their noise: -ln(1 - v) <= v / (1 - v).
#include "sampling/sampling.cuh"

static constexpr int THREADS = 512;
#if __CUDA_ARCH__ >= 900
static constexpr int BLOCKS = 3;  // of a multiprocessor
#else
static constexpr int BLOCKS = 2;
#endif

static __device__ __forceinline__ float power_of_two(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

static __device__ __forceinline__ float log_of_two(float x) {
    float result;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// Not above gumbel(word), but for errors of rounding.
static __device__ __forceinline__ float least_noise(unsigned word) {
    const float v = (__uint2float_rn(word) + 0.5f) * 0x1p-32f;
    return (log_of_two(1.0f - v) - log_of_two(v)) * (1.0f / LOG2_E);
}

static __device__ __forceinline__ Best scored(float x, float temperature, float noise, int token) {
    const float quotient = __fdiv_rn(x, temperature);
    const float rest = __fdiv_rn(__fmaf_rn(-quotient, temperature, x), temperature);
    const float sum = quotient + noise;
    const float back = sum - quotient;
    const float low = ((quotient - (sum - back)) + (noise - back)) + rest;  // TwoSum (Knuth), plus the rest
    const float high = sum + low;
    return Best{high, low - (high - sum), token};
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    sample(const float* __restrict__ logits, int vocab, const Draw* __restrict__ draws, Slot* slots,
           Best* __restrict__ partial, unsigned* __restrict__ counters, int* __restrict__ out_tokens) {
    __shared__ Best scratch[32];
    // By a thread of the block: a lower bound of the best score. Warps read and write it as they come, which `volatile`
    // makes relaxed accesses (PTX ISA, "ld"): an old value costs time, not the result. racecheck reports them.
    __shared__ volatile float reached;
    __shared__ float looked_at[32];  // by each warp: the best lower bound
    launch_next();
    wait_for_previous(logits);
    const int row = blockIdx.y;
    const Draw draw = draws[row];
    if (draw.slot < 0) return;
    Slot& slot = slots[draw.slot];
    if (needs_filter(slot, vocab)) return;
    const float temperature = slot.temperature;
    const Row source = row_of(logits, row, vocab, slot);
    const int blocks = (vocab + 3) / 4;
    const int share = (blocks + gridDim.x - 1) / gridDim.x;
    const int first = blockIdx.x * share, end = min(first + share, blocks);

    Best best{negative_infinity(), 0.0f, 0x7fffffff};
    bool bad = false;
    if (temperature > 0.0f) {
        const unsigned position = static_cast<unsigned>(draw.position);
        const unsigned long long seed = slot.seed;
        const float inverse = 1.0f / temperature;
        float start = negative_infinity(), next[4];  // the logits that the loop takes next
        if (first + threadIdx.x < end) {
            plain_logits(source, first + threadIdx.x, next);
            float x[4] = {next[0], next[1], next[2], next[3]};
            bounded(x);  // what is no number is found below
            penalise(source, first + threadIdx.x, x);
            const uint4 words4 = philox(first + threadIdx.x, position, seed);
            const unsigned word[4] = {words4.x, words4.y, words4.z, words4.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) start = fmaxf(start, __fmaf_rn(x[i], inverse, least_noise(word[i])));
        }
        start = warp_max(start);
        if (threadIdx.x % 32 == 0) looked_at[threadIdx.x / 32] = start;
        __syncthreads();
        if (threadIdx.x < 32) {
            start = warp_max(threadIdx.x < THREADS / 32 ? looked_at[threadIdx.x] : negative_infinity());
            if (threadIdx.x == 0) reached = start;
        }
        __syncthreads();
        for (int base = first; base < end; base += THREADS) {
            const int block = base + threadIdx.x;
            // What has been reached, less the error of estimates.
            const float bar = reached - (1e-3f + 1e-6f * fabsf(reached));
            bool improved = false;
            if (block < end) {
                float x[4] = {next[0], next[1], next[2], next[3]};
                if (block + THREADS < end) plain_logits(source, block + THREADS, next);
                bad |= bounded(x);
                penalise(source, block, x);
                const float largest = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])) * inverse;
                if (!(largest + LARGEST_NOISE < bar)) {
                    const uint4 words4 = philox(block, position, seed);
                    const unsigned word[4] = {words4.x, words4.y, words4.z, words4.w};
                    const auto may_win = [&](unsigned least, float logit) {
                        return __uint2float_rn(least) * (0.9999f * 0x1p-32f) <= power_of_two((logit - bar) * LOG2_E);
                    };
                    const bool any = may_win(min(min(word[0], word[1]), min(word[2], word[3])), largest);
                    for (int i = 0; any && i < 4; ++i) {
                        if (x[i] == negative_infinity() || !may_win(word[i], x[i] * inverse)) continue;
                        const Best candidate = scored(x[i], temperature, gumbel(word[i]), block * 4 + i);
                        if (beats(candidate, best)) best = candidate, improved = true;
                    }
                }
            }
            if (__any_sync(0xffffffffu, improved)) {
                const float highest = warp_max(best.high);  // a lower bound, too, where another warp writes after
                if (threadIdx.x % 32 == 0 && highest > reached) reached = highest;
            }
        }
    } else {
        for (int block = first + threadIdx.x; block < end; block += THREADS) {
            float x[4];
            bad |= load_logits(source, block, x);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (x[i] > best.high) best = Best{x[i], 0.0f, block * 4 + i};
        }
    }
    bad = __syncthreads_or(bad);
    best = best_of_block(best, scratch);
    if (bad) best = not_a_number();  // which the other blocks of the row learn from `partial`
    if (gridDim.x > 1) {
        __shared__ bool last;
        Best* shares = partial + row * gridDim.x;
        if (threadIdx.x == 0) {
            shares[blockIdx.x] = best;
            __threadfence();
            last = atomicAdd(counters + row, 1u) == gridDim.x - 1;
        }
        __syncthreads();
        if (!last) return;
        __threadfence();
        best = Best{negative_infinity(), 0.0f, 0x7fffffff};
        for (int i = threadIdx.x; i < gridDim.x; i += THREADS) {
            const volatile Best* other = shares + i;
            const Best copy{other->high, other->low, other->token};
            if (beats(copy, best)) best = copy;
        }
        best = best_of_block(best, scratch);
        if (threadIdx.x == 0) counters[row] = 0;
    }
    if (threadIdx.x == 0) finish_row(best, row, slot, vocab, out_tokens);
}
