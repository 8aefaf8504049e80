// What the kernels of decode attention compute of pages in registers (`decode_page.cuh`): scores, a warp's running result, and a
// block's, of all of its warps and segments.
//
// Weights are 2^(score - m), where m is the largest score of the first page that the warp takes of a segment, raised only where one is
// higher by more than MOST_ABOVE: else each page would have its maximum found, and most would have sums scaled.
//
// Options: as `decode_page.cuh`.
#pragma once

#include "attention/decode_page.cuh"

// Queries of up to ROWS heads as B fragments, a column for each; columns past the heads are zero.
template <int ROWS>
struct Queries {
    uint32_t b[2 * K_LOADS][ROWS / 8][2];

    __device__ __forceinline__ Queries(const Element* q, int heads, int g, int t) {
#pragma unroll
        for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
            for (int i = 0; i < K_LOADS; ++i) {
                const bool there = has_piece(i * 32 + 32, i * 32 + t * 8) && n * 8 + g < heads;
                const Element8 piece =
                    there ? *reinterpret_cast<const Element8*>(q + (n * 8 + g) * D + i * 32 + t * 8) : Element8{};
#pragma unroll
                for (int word = 0; word < 4; ++word) b[2 * i + word / 2][n][word % 2] = piece.word[word];
            }
    }
};

// A lane's scores of a page: of keys g and g + 8, for heads 2t and 2t + 1 of each eight, as C fragments have them.
template <int ROWS>
struct PageScores {
    static constexpr int TILES = ROWS / 8;
    float product[TILES][4] = {};  // of queries and what is kept of keys; CAPPED: scores
    float scale[2];                // from that to scores, of each key

    // `key(j, i)`: the piece i of the lane's key j.
    template <typename Key>
    __device__ __forceinline__ void multiply(const Queries<ROWS>& queries, Key key) {
#pragma unroll
        for (int i = 0; i < K_LOADS; ++i) {
            const Element8 low = elements_of(key(0, i)), high = elements_of(key(1, i));
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                const uint32_t keys[4] = {low.word[2 * step], high.word[2 * step], low.word[2 * step + 1],
                                          high.word[2 * step + 1]};
                const auto& b = queries.b[2 * i + step];
#pragma unroll
                for (int n = 0; n < TILES; ++n) mma(product[n], keys, b[n][0], b[n][1]);
            }
        }
    }

    // Once products are there: scores are -inf of keys that the token does not see.
    __device__ __forceinline__ void finish(const KeyPowers& of_keys, int first_key, const Cache& cache, const Scores& scores,
                                           int g) {
        scale[0] = scale[1] = scores.scale;
#ifdef KV_FP8
        const float2 powers = to_floats(of_keys);
        scale[0] = __fmul_rn(scale[0], powers.x), scale[1] = __fmul_rn(scale[1], powers.y);  // exact
#endif
        if constexpr (CAPPED) {
#pragma unroll
            for (int n = 0; n < TILES; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) product[n][i] = scores.capped(__fmul_rn(product[n][i], scale[i / 2]));
        }
        if (sees_all(cache, first_key)) return;
        const int left = cache.length - first_key - g, hidden = cache.seen - first_key - g;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (is_seen(j * 8, left, hidden)) continue;
            scale[j] = 1.0f;  // what lies behind a context may stand for 0
#pragma unroll
            for (int n = 0; n < TILES; ++n) product[n][2 * j] = product[n][2 * j + 1] = negative_infinity();
        }
    }

    __device__ __forceinline__ float score(int n, int i) const {
        return CAPPED ? product[n][i] : __fmul_rn(product[n][i], scale[i / 2]);
    }
    // By how much a score is above m, rounded once.
    __device__ __forceinline__ float above(float m, int n, int i) const {
        return CAPPED ? __fsub_rn(product[n][i], m) : __fmaf_rn(product[n][i], scale[i / 2], -m);
    }
};

// A warp's result over the pages it has seen of a segment. Of each eight heads a lane has two, 2t and 2t + 1.
template <int ROWS>
struct Running {
    static constexpr int TILES = ROWS / 8;
    float m[TILES][2];  // what weights are relative to
    float l[TILES][2] = {};               // sums of weights, of the lane's keys
    float o[4 * V_LOADS][TILES][4] = {};  // [4 i + j]: element 64 i + 8 g + 2 j for both heads, and the one after it

    __device__ __forceinline__ Running() {
#pragma unroll
        for (int n = 0; n < TILES; ++n) m[n][0] = m[n][1] = NO_SCORE;
    }

    // Scores to weights, as B fragments.
    __device__ __forceinline__ void weigh(uint32_t (&weights)[TILES][2], const PageScores<ROWS>& scores) {
        float above[TILES][4];
        float largest = negative_infinity();
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                above[n][i] = scores.above(m[n][i % 2], n, i);
                largest = fmaxf(largest, above[n][i]);
            }
        if (__any_sync(0xffffffffu, largest > MOST_ABOVE)) raise(above, scores);
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            float p[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) p[i] = exp2_fast(above[n][i]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                l[n][i] = __fadd_rn(l[n][i], __fadd_rn(p[i], p[2 + i]));
                weights[n][i] = transposed(pack(p[2 * i], p[2 * i + 1]));
            }
        }
    }

    // Raises `m` of each head of which a score is above it by more than MOST_ABOVE; `above`: by how much scores are.
    __device__ __forceinline__ void raise(float (&above)[TILES][4], const PageScores<ROWS>& scores) {
        const uint32_t same_heads = 0x11111111u << threadIdx.x % 4;  // lanes
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const bool mine = fmaxf(above[n][i], above[n][2 + i]) > MOST_ABOVE;
                const bool raised = (__ballot_sync(0xffffffffu, mine) & same_heads) != 0;
                float most = fmaxf(scores.score(n, i), scores.score(n, 2 + i));
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, lanes));
                if (!raised) most = m[n][i];
                const float shrink = weight_of(m[n][i], most);
                m[n][i] = most;
                l[n][i] *= shrink;
#pragma unroll
                for (int j = 0; j < 4 * V_LOADS; ++j) {
                    o[j][n][i] *= shrink;
                    o[j][n][2 + i] *= shrink;
                }
                above[n][i] = scores.above(most, n, i), above[n][2 + i] = scores.above(most, n, 2 + i);
            }
    }

    // `value(j, i)`: the piece i of the lane's value j.
    template <typename Value>
    __device__ __forceinline__ void mix(const uint32_t (&weights)[TILES][2], const Exponents& of_values, Value value) {
#pragma unroll
        for (int i = 0; i < V_LOADS; ++i) {
            const Kept8 v[4] = {value(0, i), value(1, i), value(2, i), value(3, i)};
            uint32_t pairs[8][2];
            pair_values(pairs, v, of_values);
#pragma unroll
            for (int d = 0; d < 8; d += 2) {
                const uint32_t values[4] = {pairs[d][0], pairs[d + 1][0], pairs[d][1], pairs[d + 1][1]};
#pragma unroll
                for (int n = 0; n < TILES; ++n) mma(o[i * 4 + d / 2][n], values, weights[n][0], weights[n][1]);
            }
        }
    }
};

// The part of a block's result that a thread has: PART elements of one row.
template <int ROWS>
struct Segment {
    static constexpr int PART = ROWS * WIDTH / THREADS;
    float m = NO_SCORE, l = 0.0f, o[PART] = {};
    static __device__ __forceinline__ int row() { return threadIdx.x * PART / WIDTH; }
    static __device__ __forceinline__ int column() { return threadIdx.x * PART % WIDTH; }
    // Whether the elements from i on are of the result; they are in fours.
    static __device__ __forceinline__ bool has(int i) { return WIDTH == D || column() + i < D; }
};

// The results of the block's warps, merged in order; all threads call it, with a barrier before they do so again.
template <int ROWS>
static __device__ __forceinline__ Segment<ROWS> merge_warps(Running<ROWS>& warp_result) {
    __shared__ __align__(16) float block_o[WARPS][ROWS][PITCH];
    __shared__ float block_m[WARPS][ROWS], block_l[WARPS][ROWS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    auto& [m, l, o] = warp_result;
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = 8 * n + 2 * t + i;
            float sum = l[n][i];
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, lanes));
            if (g == 0) block_m[warp][row] = m[n][i], block_l[warp][row] = sum;
#pragma unroll
            for (int j = 0; j < 4 * V_LOADS; j += 2)
                *reinterpret_cast<float4*>(&block_o[warp][row][j / 4 * 64 + g * 8 + j % 4 * 2]) =
                    make_float4(o[j][n][i], o[j][n][2 + i], o[j + 1][n][i], o[j + 1][n][2 + i]);
        }
    __syncthreads();
    Segment<ROWS> merged_result;
    const int row = Segment<ROWS>::row(), column = Segment<ROWS>::column();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) merged_result.m = fmaxf(merged_result.m, block_m[w][row]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const float weight = weight_of(block_m[w][row], merged_result.m);
        merged_result.l = merged(merged_result.l, 1.0f, block_l[w][row], weight);
#pragma unroll
        for (int i = 0; i < Segment<ROWS>::PART; ++i)
            merged_result.o[i] = merged(merged_result.o[i], 1.0f, block_o[w][row][column + i], weight);
    }
    return merged_result;
}

// Takes the next segment, or section, into what is kept of those before it.
template <int ROWS>
static __device__ __forceinline__ void merge_next(Segment<ROWS>& kept, const Segment<ROWS>& next) {
    const float largest = fmaxf(kept.m, next.m);
    const float old_weight = weight_of(kept.m, largest), new_weight = weight_of(next.m, largest);
    kept.l = merged(kept.l, old_weight, next.l, new_weight);
#pragma unroll
    for (int i = 0; i < Segment<ROWS>::PART; ++i) kept.o[i] = merged(kept.o[i], old_weight, next.o[i], new_weight);
    kept.m = largest;
}

// `head`: the block's first.
template <int ROWS>
static __device__ __forceinline__ void store_result(const Segment<ROWS>& kept, const Scores& scores, int head,
                                                    Element* out) {
    const float inverse = __frcp_rn(scores.total(kept.l, kept.m, head + Segment<ROWS>::row()));
    Element2* target = reinterpret_cast<Element2*>(out + Segment<ROWS>::row() * D + Segment<ROWS>::column());
#pragma unroll
    for (int i = 0; i < Segment<ROWS>::PART; i += 2)
        if (Segment<ROWS>::has(i))
            target[i / 2] = to_elements(__fmul_rn(kept.o[i], inverse), __fmul_rn(kept.o[i + 1], inverse));
}

// What was computed of a context, merged in order: segments to sections, and these.
template <int ROWS>
struct Merged {
    Segment<ROWS> all, section;

    __device__ __forceinline__ void take(const Segment<ROWS>& segment, bool last_of_section) {
        merge_next(section, segment);
        if (last_of_section) end_section();
    }
    __device__ __forceinline__ void end_section() {
        merge_next(all, section);
        section = Segment<ROWS>();
    }
};

static __device__ __forceinline__ bool ends_section(int segment) { return (segment + 1) % SECTION == 0; }

// Where segments, or sections, of a sequence meet that several blocks compute: o (segments, H, D) and (m, l) (segments, H, 2) from
// the block's first head on, and how many there are so far, zero before and after.
struct Meeting {
    float *partials, *sums;
    unsigned* counter;
    int heads;

    template <int ROWS>
    __device__ __forceinline__ void leave(const Segment<ROWS>& result, int segment) const {
        const int64_t place = static_cast<int64_t>(segment) * heads + Segment<ROWS>::row();
#pragma unroll
        for (int i = 0; i < Segment<ROWS>::PART; ++i)
            if (Segment<ROWS>::has(i)) partials[place * D + Segment<ROWS>::column() + i] = result.o[i];
        if (Segment<ROWS>::column() == 0) sums[place * 2] = result.m, sums[place * 2 + 1] = result.l;
    }

    // Whether this block, which left `done` segments, is the last of those that compute them; its threads all call this.
    __device__ __forceinline__ bool is_last(int done, int segments) const {
        __shared__ bool last;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) last = atomicAdd(counter, done) == static_cast<unsigned>(segments - done);
        __syncthreads();
        if (!last) return false;
        __threadfence();
        if (threadIdx.x == 0) *counter = 0;
        return true;
    }

    // Hands out the results `first` to `end` - 1, in order. Many loads are under way at once: with four, attention of 32,000
    // tokens took 34 us, not 24.
    template <int ROWS, typename Take>
    __device__ __forceinline__ void take_all(int first, int end, Take take) const {
        constexpr int PART = Segment<ROWS>::PART, AT_ONCE = PART <= 4 ? 16 : PART <= 8 ? 8 : 4;
        for (int begin = first; begin < end; begin += AT_ONCE) {
            Segment<ROWS> next[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (begin + i >= end) break;
                const int64_t place = static_cast<int64_t>(begin + i) * heads + Segment<ROWS>::row();
                const float2 sum = __ldcg(reinterpret_cast<const float2*>(sums + place * 2));
                next[i].m = sum.x, next[i].l = sum.y;
#pragma unroll
                for (int j = 0; j < PART; j += 4) {
                    if (!Segment<ROWS>::has(j)) continue;
                    const float4 o =
                        __ldcg(reinterpret_cast<const float4*>(partials + place * D + Segment<ROWS>::column() + j));
                    next[i].o[j] = o.x, next[i].o[j + 1] = o.y, next[i].o[j + 2] = o.z, next[i].o[j + 3] = o.w;
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (begin + i < end) take(next[i], begin + i);
        }
    }
};

// The row of q and out that is sequence s's.
static __device__ __forceinline__ int64_t row_of(const int* starts, int sequence) {
    return starts != nullptr ? starts[sequence + 1] - 1 : sequence;
}
