// A page of keys and values in registers, for the kernels of decode attention; what they compute of it: `decode_results.cuh`.
//
// The tensor cores see S^T = K Q^T and O^T = V^T P^T as m16n8k16: the 16 keys of a page, or 16 elements of their values, are rows
// on the left, and eight query heads are columns on the right, so that few of them waste neither products nor registers. A warp
// has each number of a page in one register of one lane, converts it once, and uses it for all heads. K and V come into registers
// in 16-byte pieces: from memory (`split_attention.cu`), or from a ring in shared memory (`decode_attention.cu`). Sums over D do
// not care for its order, so lane t of a group takes elements 8 t .. 8 t + 7 of the rows of keys g and g + 8, used as fragments of
// two steps, for queries and keys alike; and for V, lane g takes elements 8 g .. 8 g + 7 of four keys' rows, of which byte
// permutations make the pairs of keys that a fragment holds. Weights come out of S^T a key in a row, and P^T wants them in a
// column: each 8 x 8 is transposed between lanes. Of other sizes than multiples of 64, pieces past a row's end are zeros for
// queries and keys, and of values anything: those rows of the result are dropped.
//
// Pieces of E4M3 (-DKV_FP8) have 8 bytes and become the same elements in the same places: keys before their products, which are
// then multiplied by the power of two that the key's are multiples of, and values with theirs. All of that is exact.
//
// Options: -DHEAD_DIM, a multiple of 16 from 64 to 256; -DWINDOW, -DSOFTCAP, -DSINKS.
#pragma once

#include "attention/attention.cuh"
#include "common/kv_cache.cuh"

static_assert(D % 16 == 0 && D >= 64 && D <= 256, "other head sizes: attention_any.cu");

static constexpr int WARPS = 4;
static constexpr int THREADS = WARPS * 32;
static constexpr int WIDTH = (D + 63) / 64 * 64;  // of a row in registers and in shared memory
static constexpr int K_LOADS = (D + 31) / 32;     // 16-byte pieces of a key's row a lane takes
static constexpr int V_LOADS = WIDTH / 64;
static constexpr int PITCH = WIDTH + 4;  // floats, of a row of results in shared memory
static constexpr float MOST_ABOVE = 8;   // a weight is at most 2^8: half holds it, and float the sums
static constexpr int SECTION = 4;        // segments

// Whether a piece that begins with this element of a row is there; whole chunks of 32 or 64 always are.
static __device__ __forceinline__ bool has_piece(int chunk_end, int element) { return chunk_end <= D || element < D; }

#ifdef KV_FP8

using Kept8 = Bytes8;

// Of keys g and g + 8: what their products are multiplied by.
using KeyPowers = Element2;

// From the word that has their exponents; `order`: of its bytes, `order_of_keys(g)`.
static __device__ __forceinline__ KeyPowers key_powers(uint32_t word, uint32_t order) {
    const uint32_t bits = __byte_perm(word, 0, order) << EXPONENT_AT;
    return *reinterpret_cast<const Element2*>(&bits);
}
static __device__ __forceinline__ uint32_t order_of_keys(int g) { return g % 2 ? 0x4341 : 0x4240; }

// Of the values of the tokens 2t, 2t+1, 2t+8, 2t+9 of a page, one in a byte; 0, whose power is 0, of a token not seen.
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
            pairs[d + 1][side] = word_of(__hmul2(elements_of_e4m3x2(bytes, true), powers));
        }
    }
}

static __device__ __forceinline__ Element8 elements_of(const Kept8& piece) {
    Element8 wide;
#pragma unroll
    for (int i = 0; i < 4; ++i) wide.word[i] = word_of(elements_of_e4m3x2(piece.word[i / 2], i % 2 == 1));
    return wide;
}

#else

using Kept8 = Element8;

struct KeyPowers {};
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
    Kept8 k[2][K_LOADS];  // of keys g and g + 8
    Kept8 v[4][V_LOADS];  // of keys 2t, 2t+1, 2t+8, 2t+9
    KeyPowers of_keys;
    Exponents of_values;
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

// Whether a token sees all keys of the page that begins with `first_key`.
static __device__ __forceinline__ bool sees_all(const Cache& cache, int first_key) {
    return first_key + PAGE <= cache.length && (!WINDOWED || first_key >= cache.seen);
}

#ifdef KV_FP8
// The exponents of four values, 0 of those that the token does not see: what is there may stand for infinity.
static __device__ __forceinline__ Exponents seen_exponents(uint32_t word, const Cache& cache, int first_key, int t) {
    if (sees_all(cache, first_key)) return {word};
    const int left = cache.length - first_key - 2 * t, hidden = cache.seen - first_key - 2 * t;
    uint32_t mask = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (is_seen(i % 2 + i / 2 * 8, left, hidden)) mask |= 0xffu << 8 * i;
    return {word & mask};
}
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
#ifdef KV_FP8
    uint32_t exponents = 0;
    if (page * PAGE < cache.length) exponents = load_streaming_4(cache.k + offset + PAGE * D + 4 * (g / 2));
    tile.of_keys = key_powers(exponents, order_of_keys(g));
#endif
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
#ifdef KV_FP8
    tile.of_values = {0};
    if (page * PAGE < cache.length)
        tile.of_values = seen_exponents(load_streaming_4(cache.v + offset + PAGE * D + 4 * t), cache, page * PAGE, t);
#endif
}
