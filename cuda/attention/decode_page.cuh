// What the kernels of decode attention share: a page of keys and values in registers, and a warp's running result.
//
// The tensor cores see S = Q K^T and O = P V as m16n8k16 with the query heads as rows. K and V come into registers in
// 16-byte pieces: from memory (`split_attention.cu`), or from a ring in shared memory (`decode_attention.cu`). Sums over D
// do not care for its order, so lane t of a group takes elements 8 t .. 8 t + 7 of a key's row, used as fragments of two
// steps, for queries and keys alike; and for V, lane g takes elements 8 g .. 8 g + 7 of four keys' rows, of which byte
// permutations make the pairs of keys that a fragment holds. Of other sizes than multiples of 64, pieces past a row's end
// are zeros for queries and keys, and of values anything: those columns of the result are dropped.
//
// Pieces of E4M3 (-DKV_FP8) have 8 bytes and become the same elements in the same places: keys before their products, which are
// then multiplied by the power of two that the key's are multiples of, and values with theirs. All of that is exact.
//
// Options: -DHEAD_DIM, a multiple of 16 from 64 to 256; -DWINDOW, -DSOFTCAP.
#pragma once

#include "attention/attention.cuh"

static_assert(D % 16 == 0 && D >= 64 && D <= 256, "other head sizes: attention_any.cu");

static constexpr int WARPS = 4;
static constexpr int THREADS = WARPS * 32;
static constexpr int WIDTH = (D + 63) / 64 * 64;  // of a row in registers and in shared memory
static constexpr int K_LOADS = (D + 31) / 32;     // 16-byte pieces of a key's row a lane takes
static constexpr int V_LOADS = WIDTH / 64;
static constexpr int PITCH = WIDTH + 4;  // floats, of a row of results in shared memory

// Whether a piece that begins with this element of a row is there; whole chunks of 32 or 64 always are.
static __device__ __forceinline__ bool has_piece(int chunk_end, int element) { return chunk_end <= D || element < D; }

#ifdef KV_FP8

using Kept8 = Bytes8;

// Of the keys, or values, of the tokens 2t, 2t+1, 2t+8, 2t+9 of a page, one in a byte; 0, whose power is 0, of a token not seen.
struct Exponents {
    uint32_t all;

    __device__ __forceinline__ Element2 powers(int pair) const { return powers_of(all >> 16 * pair); }
};

// Pairs of keys as fragments hold them: of 2t and 2t+1, of 2t+8 and 2t+9, for each of 8 elements.
static __device__ __forceinline__ void pair_values(uint32_t (&pairs)[8][2], const Kept8 (&v)[4], const Exponents& exponents) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        const Element2 powers = exponents.powers(side);
#pragma unroll
        for (int d = 0; d < 8; d += 2) {
            const uint32_t bytes =
                __byte_perm(v[2 * side].word[d / 4], v[2 * side + 1].word[d / 4], d & 2 ? 0x7362 : 0x5140);
            pairs[d][side] = word_of(__hmul2(elements_of_e4m3x2(bytes), powers));
            pairs[d + 1][side] = word_of(__hmul2(elements_of_e4m3x2(bytes >> 16), powers));
        }
    }
}

static __device__ __forceinline__ Element8 elements_of(const Kept8& piece) {
    Element8 wide;
#pragma unroll
    for (int i = 0; i < 4; ++i) wide.word[i] = word_of(elements_of_e4m3x2(piece.word[i / 2] >> 16 * (i % 2)));
    return wide;
}

#else

using Kept8 = Element8;

struct Exponents {};

static __device__ __forceinline__ void pair_values(uint32_t (&pairs)[8][2], const Kept8 (&v)[4], const Exponents&) {
#pragma unroll
    for (int d = 0; d < 8; ++d)
#pragma unroll
        for (int side = 0; side < 2; ++side)
            pairs[d][side] = __byte_perm(v[2 * side].word[d / 2], v[2 * side + 1].word[d / 2], d & 1 ? 0x7632 : 0x5410);
}

static __device__ __forceinline__ const Element8& elements_of(const Kept8& piece) { return piece; }

#endif

struct Page {
    Kept8 k[2][K_LOADS];  // [tile of 8 keys][piece]
    Kept8 v[4][V_LOADS];  // keys 2t, 2t+1, 2t+8, 2t+9
    Exponents of_keys, of_values;
};

struct Cache {
    const Kept* k;
    const Kept* v;
    const int* table;
    int kv_heads;
    int kv_head;
    int length;
    int seen;  // the first key that the token sees: those before are as those past the end
};

// Whether a token sees a key at `place`, of which `left` lie before the end and `hidden` before the window.
static __device__ __forceinline__ bool is_seen(int place, int left, int hidden) {
    if constexpr (!WINDOWED) return place < left;
    return place < left && place >= hidden;
}

static constexpr Kept8 NO_PIECE{};

static __device__ __forceinline__ Kept8 load_if(bool wanted, const Kept* source) {
    if (!wanted) return NO_PIECE;  // 0, not what lies in the page: 0 times NaN is NaN
#ifdef KV_FP8
    return load_streaming_8(source);
#else
    return load_streaming(source);
#endif
}

static __device__ __forceinline__ int64_t page_offset(const Cache& cache, int page) {
    return part_of(cache.table[page], cache.kv_head, cache.kv_heads, D);
}

#ifdef KV_FP8
// A lane's exponents of the page that begins with `first_key`, from the word with all four.
static __device__ __forceinline__ Exponents seen_exponents(uint32_t word, const Cache& cache, int first_key, int t) {
    if (first_key + PAGE <= cache.length && (!WINDOWED || first_key >= cache.seen)) return {word};
    const int left = cache.length - first_key - 2 * t, hidden = cache.seen - first_key - 2 * t;
    uint32_t mask = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (is_seen(i % 2 + i / 2 * 8, left, hidden)) mask |= 0xffu << 8 * i;
    return {word & mask};
}

static __device__ __forceinline__ Exponents load_exponents(const Kept* part, const Cache& cache, int page, int t) {
    if (page * PAGE >= cache.length) return {0};
    return seen_exponents(load_streaming_4(part + PAGE * D + 4 * t), cache, page * PAGE, t);
}
#else
static __device__ __forceinline__ Exponents load_exponents(const Kept*, const Cache&, int, int) { return {}; }
#endif

// All addresses are one of the lane's and a constant, for which a load has room.
static __device__ __forceinline__ void load_keys(Page& tile, const Cache& cache, int64_t offset, int page, int g,
                                                 int t) {
    const Kept* mine = cache.k + offset + (g * D + t * 8);
    const int left = cache.length - page * PAGE - g, hidden = cache.seen - page * PAGE - g;
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int i = 0; i < K_LOADS; ++i)
            tile.k[j][i] = load_if(is_seen(j * 8, left, hidden) && has_piece(i * 32 + 32, i * 32 + t * 8),
                                   mine + j * 8 * D + i * 32);
    tile.of_keys = load_exponents(cache.k + offset, cache, page, t);
}

static __device__ __forceinline__ void load_values(Page& tile, const Cache& cache, int64_t offset, int page, int g,
                                                   int t) {
    const Kept* mine = cache.v + offset + (2 * t * D + g * 8);
    const int left = cache.length - page * PAGE - 2 * t, hidden = cache.seen - page * PAGE - 2 * t;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int key = (j & 1) + (j >> 1) * 8;
#pragma unroll
        for (int i = 0; i < V_LOADS; ++i)
            tile.v[j][i] = load_if(is_seen(key, left, hidden) && has_piece(i * 64 + 64, i * 64 + g * 8),
                                   mine + key * D + i * 64);
    }
    tile.of_values = load_exponents(cache.v + offset, cache, page, t);
}

// Queries of up to ROWS heads as A fragments; rows past the heads are zero.
template <int ROWS>
static __device__ __forceinline__ void load_queries(uint32_t (&qa)[2 * K_LOADS][4], const Element* q, int heads, int g,
                                                    int t) {
#pragma unroll
    for (int i = 0; i < K_LOADS; ++i) {
        const bool there = has_piece(i * 32 + 32, i * 32 + t * 8);
        const Element8 zero{{0, 0, 0, 0}};
        const Element8 low =
            there && g < heads ? *reinterpret_cast<const Element8*>(q + g * D + i * 32 + t * 8) : zero;
        const Element8 high = there && ROWS > 8 && g + 8 < heads
                                  ? *reinterpret_cast<const Element8*>(q + (g + 8) * D + i * 32 + t * 8)
                                  : zero;
        qa[2 * i][0] = low.word[0], qa[2 * i][1] = high.word[0];
        qa[2 * i][2] = low.word[1], qa[2 * i][3] = high.word[1];
        qa[2 * i + 1][0] = low.word[2], qa[2 * i + 1][1] = high.word[2];
        qa[2 * i + 1][2] = low.word[3], qa[2 * i + 1][3] = high.word[3];
    }
}

// A warp's result over the pages it has seen of a segment.
template <int ROWS>
struct Running {
    static constexpr int HALVES = ROWS > 8 ? 2 : 1;
    float m[2] = {negative_infinity(), negative_infinity()};
    float l[2] = {};
    float o[8 * V_LOADS][4] = {};

    // `key(j, i)`: the piece i of the lane's key of tile j.
    template <typename Key>
    __device__ __forceinline__ void score(float (&s)[2][4], const uint32_t (&qa)[2 * K_LOADS][4], Key key) {
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int i = 0; i < K_LOADS; ++i) {
                const Element8 piece = elements_of(key(j, i));
                mma(s[j], qa[2 * i], piece.word[0], piece.word[1]);
                mma(s[j], qa[2 * i + 1], piece.word[2], piece.word[3]);
            }
    }

    // Products of what the cache keeps to products of what that stands for.
    static __device__ __forceinline__ void scale(float (&s)[2][4], const Exponents& of_keys) {
#ifdef KV_FP8
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float2 powers = to_floats(of_keys.powers(j));
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                s[j][2 * half] = __fmul_rn(s[j][2 * half], powers.x);
                s[j][2 * half + 1] = __fmul_rn(s[j][2 * half + 1], powers.y);
            }
        }
#endif
    }

    // Products to scores, -inf for keys that the token does not see; `largest`: raised to each row's largest.
    static __device__ __forceinline__ void hide(float (&largest)[2], float (&s)[2][4], int first_key, const Cache& cache,
                                                const Scores& scores, int t) {
        const int left = cache.length - first_key - 2 * t, hidden = cache.seen - first_key - 2 * t;
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& score = s[j][2 * half + i];
                    score = is_seen(j * 8 + i, left, hidden) ? scores(score) : negative_infinity();
                    largest[half] = fmaxf(largest[half], score);
                }
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 1));
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 2));
        }
    }

    // Brings the sums of half the rows to a new maximum.
    __device__ __forceinline__ void rescale(int half, float largest) {
        const float shrink = weight_of(m[half], largest);
        l[half] *= shrink;
#pragma unroll
        for (int i = 0; i < 8 * V_LOADS; ++i) {
            o[i][2 * half] *= shrink;
            o[i][2 * half + 1] *= shrink;
        }
        m[half] = largest;
    }

    // Scores to weights, as an A fragment.
    __device__ __forceinline__ void weigh(uint32_t (&pa)[4], const float (&s)[2][4]) {
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            const float reference = m[half] == negative_infinity() ? 0.0f : m[half];  // -inf: no key so far
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float p0 = exp2f(__fsub_rn(s[j][2 * half], reference));
                const float p1 = exp2f(__fsub_rn(s[j][2 * half + 1], reference));
                l[half] = __fadd_rn(l[half], __fadd_rn(p0, p1));
                pa[2 * j + half] = pack(p0, p1);
            }
        }
    }

    // `value(j, i)`: the piece i of the lane's value j.
    template <typename Value>
    __device__ __forceinline__ void mix(const uint32_t (&pa)[4], const Exponents& of_values, Value value) {
#pragma unroll
        for (int i = 0; i < V_LOADS; ++i) {
            const Kept8 v[4] = {value(0, i), value(1, i), value(2, i), value(3, i)};
            uint32_t pairs[8][2];
            pair_values(pairs, v, of_values);
#pragma unroll
            for (int d = 0; d < 8; ++d) mma(o[i * 8 + d], pa, pairs[d][0], pairs[d][1]);
        }
    }
};

// The part of a block's result that a thread has: PART elements of one row.
template <int ROWS>
struct Segment {
    static constexpr int PART = ROWS * WIDTH / THREADS;
    float m, l, o[PART];
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
    // To shared memory: lane t has elements 16t .. 16t + 15 of each 64 of its rows.
#pragma unroll
    for (int half = 0; half < Running<ROWS>::HALVES; ++half) {
        l[half] += __shfl_xor_sync(0xffffffffu, l[half], 1);
        l[half] += __shfl_xor_sync(0xffffffffu, l[half], 2);
        const int row = g + 8 * half;
        if (t == 0) block_m[warp][row] = m[half], block_l[warp][row] = l[half];
#pragma unroll
        for (int i = 0; i < V_LOADS; ++i)
#pragma unroll
            for (int part = 0; part < 2; ++part)  // column 2t, column 2t + 1 of the fragments
#pragma unroll
                for (int d = 0; d < 8; d += 4)
                    *reinterpret_cast<float4*>(&block_o[warp][row][i * 64 + t * 16 + part * 8 + d]) =
                        make_float4(o[i * 8 + d][2 * half + part], o[i * 8 + d + 1][2 * half + part],
                                    o[i * 8 + d + 2][2 * half + part], o[i * 8 + d + 3][2 * half + part]);
    }
    __syncthreads();
    Segment<ROWS> merged_result{negative_infinity(), 0.0f, {}};
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

// Takes the next segment into what is kept of those before it.
template <int ROWS>
static __device__ __forceinline__ void merge_segment(Segment<ROWS>& kept, const Segment<ROWS>& next) {
    const float largest = fmaxf(kept.m, next.m);
    const float old_weight = weight_of(kept.m, largest), new_weight = weight_of(next.m, largest);
    kept.l = merged(kept.l, old_weight, next.l, new_weight);
#pragma unroll
    for (int i = 0; i < Segment<ROWS>::PART; ++i) kept.o[i] = merged(kept.o[i], old_weight, next.o[i], new_weight);
    kept.m = largest;
}

template <int ROWS>
static __device__ __forceinline__ void store_result(const Segment<ROWS>& kept, Element* out) {
    const float inverse = __frcp_rn(kept.l);
    Element2* target = reinterpret_cast<Element2*>(out + Segment<ROWS>::row() * D + Segment<ROWS>::column());
#pragma unroll
    for (int i = 0; i < Segment<ROWS>::PART; i += 2)
        if (Segment<ROWS>::has(i))
            target[i / 2] = to_elements(__fmul_rn(kept.o[i], inverse), __fmul_rn(kept.o[i + 1], inverse));
}

// Where the segments of a sequence meet that several blocks compute: o (segments, H, D) and (m, l) (segments, H, 2) from
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

    // The segments `first` to `end` - 1, merged in order. Many loads are under way at once: with four, attention of 32,000
    // tokens took 34 us, not 24.
    template <int ROWS>
    __device__ __forceinline__ Segment<ROWS> merged_segments(int first, int end) const {
        constexpr int PART = Segment<ROWS>::PART, AT_ONCE = PART <= 4 ? 16 : PART <= 8 ? 8 : 4;
        Segment<ROWS> kept{negative_infinity(), 0.0f, {}};
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
                if (begin + i < end) merge_segment(kept, next[i]);
        }
        return kept;
    }
};

// The row of q and out that is sequence s's.
static __device__ __forceinline__ int64_t row_of(const int* starts, int sequence) {
    return starts != nullptr ? starts[sequence + 1] - 1 : sequence;
}
