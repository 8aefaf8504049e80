// What the sampling kernels share: the state of slots, Philox, Gumbel noise, and the choice of the best token.
// The definition is worker/runners/sampling.py; Philox4x32-10 is laid out as worker/runners/philox.py says
// (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3, SC'11).
#pragma once

#include "common/basics.cuh"
#include "sampling/slots.cuh"

static constexpr float LARGEST_NOISE = 22.88f;  // -ln(-ln(1 - 2^-33)) = 22.874, rounded up
static constexpr float LARGEST_LOGIT = 1e30f;   // see `bounded`
static constexpr int NOT_A_NUMBER = -1;         // in place of a token, as in worker/runners/base.py
static constexpr float COLDEST_FAST = 0.01f;    // below it l / T is too coarse beside the noise: `sample_filtered`

// A row of logits has room for a multiple of 8: what is behind the vocabulary may be anything.
struct Row {
    const float* logits;
    // Bit t % 32 of word t / 32 is set where the sequence has token t; null: there is no penalty, or `adjust` applied it.
    const unsigned* seen;
    float penalty;
    int vocab;
    bool whole;  // the vocabulary ends with a group of four
};

static __device__ __forceinline__ Row row_of(const float* logits, int row, int vocab, const Slot& slot) {
    return Row{logits + static_cast<int64_t>(row) * ((vocab + 7) / 8 * 8),
               slot.adjusted ? nullptr : reinterpret_cast<const unsigned*>(slot.seen), slot.repetition_penalty,
               vocab, vocab % 4 == 0};
}

// Logits of tokens 4 * block .. 4 * block + 3; -inf past the vocabulary.
static __device__ __forceinline__ void plain_logits(const Row& row, int block, float (&x)[4]) {
    const int token = block * 4;
    const float4 four = *reinterpret_cast<const float4*>(row.logits + token);
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    if (!row.whole) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = token + i < row.vocab ? x[i] : negative_infinity();
    }
}

// Whether one of four logits is NaN or +inf; takes finite ones beyond LARGEST_LOGIT as that, so that neither the penalty
// nor a temperature makes infinity of them. Nearly always a sum of absolute values settles it.
static __device__ __forceinline__ bool bounded(float (&x)[4]) {
    if ((fabsf(x[0]) + fabsf(x[1])) + (fabsf(x[2]) + fabsf(x[3])) <= LARGEST_LOGIT) return false;
    bool bad = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        bad |= !(x[i] < __int_as_float(0x7f800000));
        if (x[i] > negative_infinity()) x[i] = fminf(fmaxf(x[i], -LARGEST_LOGIT), LARGEST_LOGIT);
    }
    return bad;
}

static __device__ __forceinline__ void penalise(const Row& row, int block, float (&x)[4]) {
    if (row.seen == nullptr) return;
    const int token = block * 4;
    const unsigned bits = row.seen[token / 32] >> (token % 32);
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (bits >> i & 1) x[i] = x[i] > 0.0f ? __fdiv_rn(x[i], row.penalty) : __fmul_rn(x[i], row.penalty);
}

// As the definition takes them; whether one is no number.
static __device__ __forceinline__ bool load_logits(const Row& row, int block, float (&x)[4]) {
    plain_logits(row, block, x);
    const bool bad = bounded(x);
    penalise(row, block, x);
    return bad;
}

static __device__ __forceinline__ bool needs_filter(const Slot& slot, int vocab) {
    return slot.temperature > 0.0f && ((slot.top_k > 0 && slot.top_k < vocab) || slot.top_p < 1.0f ||
                                       slot.min_p > 0.0f || slot.temperature < COLDEST_FAST);
}

static __device__ __forceinline__ uint4 philox(unsigned block, unsigned position, unsigned long long seed) {
    uint4 c = make_uint4(block, position, 0u, 0u);
    unsigned k0 = static_cast<unsigned>(seed), k1 = static_cast<unsigned>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned left_high = __umulhi(c.x, 0xD2511F53u), left_low = c.x * 0xD2511F53u;
        const unsigned right_high = __umulhi(c.z, 0xCD9E8D57u), right_low = c.z * 0xCD9E8D57u;
        c = make_uint4(right_high ^ c.y ^ k0, right_low, left_high ^ c.w ^ k1, left_low);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

// -ln(-ln(1 - v)) of v = min((word + 0.5) * 2^-32, 1 - 2^-24), rounded once as the definition says.
static __device__ __forceinline__ float gumbel(unsigned word) {
    const float doubled = __ull2float_rn(2ull * word + 1ull);
    const float v = fminf(doubled * 0x1p-33f, 1.0f - 0x1p-24f);
    return -logf(-log1pf(-v));
}

// Floats to integers in the same order, and back.
static __device__ __forceinline__ unsigned ordered(float x) {
    const unsigned bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static __device__ __forceinline__ float from_ordered(unsigned key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

static __device__ double warp_sum_double(double value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

// The best token so far; its score is high + low, normalised, so that scores compare as pairs.
struct Best {
    float high, low;
    int token;
};

// What beats all tokens.
static __device__ __forceinline__ Best not_a_number() {
    return Best{__int_as_float(0x7f800000), 0.0f, NOT_A_NUMBER};
}

static __device__ __forceinline__ bool beats(const Best& a, const Best& b) {
    if (a.high != b.high) return a.high > b.high;
    if (a.low != b.low) return a.low > b.low;
    return a.token < b.token;
}

// The best of the block, in all threads of warp 0. `scratch` has 32 places.
static __device__ __forceinline__ Best best_of_block(Best best, Best* scratch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
#pragma unroll
        for (int offset = 16; offset > 0; offset >>= 1) {
            const Best other{__shfl_xor_sync(0xffffffffu, best.high, offset),
                             __shfl_xor_sync(0xffffffffu, best.low, offset),
                             __shfl_xor_sync(0xffffffffu, best.token, offset)};
            if (beats(other, best)) best = other;
        }
        if (pass == 1) return best;
        if (lane == 0) scratch[warp] = best;
        __syncthreads();
        best = lane < warps ? scratch[lane] : Best{negative_infinity(), 0.0f, 0x7fffffff};
    }
    return best;
}

// Called by one thread a row. Where no token was found, since a logit was no number or none was above -inf, the slot goes
// on with token 0, which is not marked as seen.
static __device__ __forceinline__ void finish_row(const Best& best, int row, Slot& slot, int vocab,
                                                  int* out_tokens) {
    const bool found = best.token >= 0 && best.token < vocab;
    const int token = found ? best.token : 0;
    out_tokens[row] = found ? token : NOT_A_NUMBER;
    slot.last_token = token;
    if (found && slot.seen != 0)
        atomicOr(reinterpret_cast<unsigned*>(slot.seen) + token / 32, 1u << (token % 32));
}
