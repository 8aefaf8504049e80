// The log-probabilities of tokens, and the most likely ones, of rows that ask for them; launched when the step's tokens
// are drawn. The definition is `log_probabilities` in worker/runners/sampling.py: of the logits as masks, biases and
// penalties leave them, which `apply_masks` and `adjust` have written, before temperature and filters.
//
//   logits (R, V) float, rows with room for a multiple of 8; draws (R,)
//   tokens (R,): what was drawn; of a draw whose token is given that one is written there, or NOT_A_NUMBER
//   found (R,): of rows that ask for none nothing is written
//
// A block of 1,024 threads takes a row and reads its 4 V bytes once: each thread keeps its largest logit and the sum of
// exp(l - largest), which are then joined in double precision; the order of additions is fixed. If the k most likely
// are wanted, then the k-th largest of the threads' largest logits is a bound that at least k tokens reach. Threads that
// have such a logit read their part again, which is a small one, and list what reaches the bound: k tokens and a few
// more, unless many are equal. If they do not fit the list, the k are found one by one, each by another pass.
//
// On an H200, 152,000 tokens: 56 us for 256 rows without likely tokens, 91 us with 5, 95 us with 20.
#include "sampling/sampling.cuh"

static constexpr int THREADS = 1024;
static constexpr int MOST = MOST_LIKELY;
static constexpr int LIST = THREADS;

struct Found {
    float logprob;  // of the token
    int tokens[MOST];
    float logprobs[MOST];
};

struct Scratch {
    float maxima[32];
    double sums[32];
    Best list[LIST];
    Best best[32];
    int listed;
};

// The k-th largest of the block's values, at the latest the lowest number there is.
static __device__ float kth_largest(float value, int k) {
    const unsigned own = ordered(value);
    unsigned key = 0;  // the largest that k values reach
    for (int bit = 31; bit >= 0; --bit) {
        const unsigned tried = key | 1u << bit;
        if (__syncthreads_count(own >= tried) >= k) key = tried;
    }
    return from_ordered(max(key, ordered(-LARGEST_LOGIT)));  // a token of -inf is not listed
}

// Tokens of a thread that reach the bound.
static __device__ void list_tokens(const Row& row, int blocks, float bound, Scratch& scratch) {
#pragma unroll 1
    for (int block = threadIdx.x; block < blocks; block += THREADS) {
        float x[4];
        plain_logits(row, block, x);
        bounded(x);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (!(x[i] >= bound)) continue;
            const int place = atomicAdd(&scratch.listed, 1);
            if (place < LIST) scratch.list[place] = Best{x[i], 0.0f, block * 4 + i};
        }
    }
}

// The best token that `last` beats, in all threads of warp 0.
static __device__ Best next_best(const Row& row, int blocks, const Best& last, Scratch& scratch) {
    Best best{negative_infinity(), 0.0f, 0x7fffffff};
#pragma unroll 1
    for (int block = threadIdx.x; block < blocks; block += THREADS) {
        float x[4];
        plain_logits(row, block, x);
        bounded(x);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Best candidate{x[i], 0.0f, block * 4 + i};
            if (x[i] > negative_infinity() && beats(last, candidate) && beats(candidate, best)) best = candidate;
        }
    }
    return best_of_block(best, scratch.best);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    log_probabilities(const float* __restrict__ logits, int vocab, const Draw* __restrict__ draws, int* tokens,
                      Found* __restrict__ found) {
    __shared__ Scratch scratch;
    __shared__ Best last;
    launch_next();
    wait_for_previous(logits, draws);
    const Draw draw = draws[blockIdx.x];
    const int most = min(draw.likely, MOST);
    if (most < 0) return;
    const Row row{logits + static_cast<int64_t>(blockIdx.x) * ((vocab + 7) / 8 * 8), nullptr, 1.0f, vocab,
                  vocab % 4 == 0};
    const int blocks = (vocab + 3) / 4;
    if (threadIdx.x == 0) scratch.listed = 0;

    float largest = negative_infinity(), sum = 0.0f;
    bool bad = false;
#pragma unroll 4
    for (int block = threadIdx.x; block < blocks; block += THREADS) {
        float x[4];
        plain_logits(row, block, x);
        bad |= bounded(x);
        const float most_of_four = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
        if (most_of_four == negative_infinity()) continue;
        if (most_of_four > largest) {
            sum *= expf(largest - most_of_four);
            largest = most_of_four;
        }
        sum += (expf(x[0] - largest) + expf(x[1] - largest)) + (expf(x[2] - largest) + expf(x[3] - largest));
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float maximum = warp_max(largest);
    if (lane == 0) scratch.maxima[warp] = maximum;
    bad = __syncthreads_or(bad);
    maximum = warp_max(scratch.maxima[lane]);
    bad |= maximum == negative_infinity();
    const double own = sum == 0.0f ? 0.0 : sum * exp(static_cast<double>(largest) - maximum);
    const double of_warp = warp_sum_double(own);
    if (lane == 0) scratch.sums[warp] = of_warp;
    __syncthreads();
    const double log_of_sum = log(warp_sum_double(scratch.sums[lane]));
    const auto logprob = [&](float x) { return static_cast<float>(static_cast<double>(x) - maximum - log_of_sum); };

    Found& result = found[blockIdx.x];
    if (threadIdx.x == 0) {
        int token = draw.given >= 0 ? draw.given : tokens[blockIdx.x];
        if (bad || token >= vocab) token = NOT_A_NUMBER;
        if (draw.given >= 0) tokens[blockIdx.x] = token;
        float x = __int_as_float(0x7fc00000);
        if (token >= 0) {
            x = row.logits[token];
            if (x > negative_infinity()) x = fminf(fmaxf(x, -LARGEST_LOGIT), LARGEST_LOGIT);
        }
        result.logprob = logprob(x);
    }
    if (threadIdx.x < MOST) result.tokens[threadIdx.x] = -1;
    if (bad || most == 0) return;  // the same for all threads

    const float bound = kth_largest(largest, most);
    if (largest >= bound) list_tokens(row, blocks, bound, scratch);
    __syncthreads();
    const int listed = scratch.listed;
    if (listed <= LIST) {
        if (threadIdx.x >= listed) return;
        const Best mine = scratch.list[threadIdx.x];
        int rank = 0;
        for (int i = 0; i < listed; ++i) rank += beats(scratch.list[i], mine);
        if (rank >= most) return;
        result.tokens[rank] = mine.token;
        result.logprobs[rank] = logprob(mine.high);
        return;
    }
    if (threadIdx.x == 0) last = not_a_number();
    __syncthreads();
#pragma unroll 1
    for (int rank = 0; rank < most; ++rank) {
        const Best best = next_best(row, blocks, last, scratch);
        __syncthreads();
        if (threadIdx.x == 0) {
            last = best;
            result.tokens[rank] = best.token;
            result.logprobs[rank] = logprob(best.high);
        }
        __syncthreads();
    }
}
