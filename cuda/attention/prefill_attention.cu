// Attention of chunks of sequences over the paged cache, which already holds the chunks' own keys and values.
//
//   q        the queries inside qkv (T, (H + 2 G) D) elements, rotated;  out (T, H D) elements
//   caches   as `kv_cache.cuh` says;  tables (sequences, stride)
//   starts   (sequences + 1,): sequence s has the rows starts[s] .. starts[s + 1] - 1, the last of lengths[s] tokens
//   tiles    (n, 2): pairs (sequence, i): the i-th group of 128 / (H / G) tokens of its chunk; negative: skipped
//
// A block takes one tile and one KV head: up to 128 rows, a row being a (token, query head) pair, so that the heads
// that share keys share their loads. The grid is (G, tiles). Keys and values come 64 at a time (for D over 128: 32)
// through shared memory, two stages deep, by cp.async; keys past the last visible one arrive as zeros, whatever the page
// holds. In shared memory, rows of 64 and 128 elements have their 16-byte chunks exchanged by row, others a chunk more
// than they need, so that ldmatrix meets no bank conflicts. A warp has 32 rows for D = 64 (4 warps: each fragment of K and V
// read from shared memory serves two products) and 16 for others (8 warps), where the registers do not suffice for more.
// Products m16n8k16, scores and sums FP32.
//
// Key tiles count from the sequence's first key, so that a row's result does not depend on how the prompt was cut into
// chunks; with a window, those are passed over that no token of the tile sees. FLOPs 4 D for each visible (query head,
// key) pair; memory traffic is small beside it.
//
// Options: -DHEAD_DIM, a multiple of 16 from 32 to 256; -DWINDOW, -DSOFTCAP, -DSINKS, -DBIDIRECTIONAL. Dynamic
// shared memory: 4 tiles of KEYS rows of PITCH bytes.
#include "attention/attention.cuh"
#include "common/kv_cache.cuh"

static_assert(D % 16 == 0 && D >= 32 && D <= 256, "other head sizes: attention_any.cu");

static constexpr int ROWS = 128;
static constexpr int KEYS = D > 128 ? 32 : 64;
static constexpr int PARTS = D == 64 ? 2 : 1;  // groups of 16 rows a warp has
static constexpr int WARPS = ROWS / (16 * PARTS);
static constexpr int THREADS = WARPS * 32;
static constexpr int CHUNKS = D / 8;  // 16-byte chunks in a row
static constexpr bool EXCHANGED = D == 64 || D == 128;
static constexpr int PITCH = EXCHANGED ? 2 * D : 2 * D + 16;
static constexpr int TILE_BYTES = KEYS * PITCH;

// Byte offset of a chunk of a row in a tile.
static __device__ __forceinline__ uint32_t place(int row, int chunk) {
    return static_cast<uint32_t>(row * PITCH + (EXCHANGED ? chunk ^ (row & 7) : chunk) * 16);
}

// Brings a chunk of a token's numbers to shared memory, as elements; zeros if it is not `wanted`. Elements may be there later
// (`wait_for_copies`); E4M3 are there after the next barrier.
static __device__ __forceinline__ void load_chunk(uint32_t target, const Kept* part, int token, int chunk, bool wanted) {
#ifdef KV_FP8
    Element8 eight{};
    if (wanted) {
        const Bytes8 bytes = *reinterpret_cast<const Bytes8*>(part + token * D + chunk * 8);
        eight = elements_of(bytes, powers_of(part[PAGE * D + exponent_place(token)] * 0x101u));
    }
    store_shared(target, eight);
#else
    copy_async(target, part + token * D + chunk * 8, wanted);
#endif
}

// Keys `first_key` and on; those before `seen`, and from `keys` on, are zeros: 0 times NaN is NaN.
static __device__ __forceinline__ void load_tile(uint32_t target, const Kept* __restrict__ cache,
                                                 const int* __restrict__ table, int kv_heads, int kv_head,
                                                 int first_key, int seen, int keys) {
    // All at once where registers suffice for as many addresses.
#pragma unroll (D == 64 || D > 192 ? 2 : KEYS)
    for (int i = 0; i < (KEYS * CHUNKS + THREADS - 1) / THREADS; ++i) {
        const int index = i * THREADS + threadIdx.x;
        if (KEYS * CHUNKS % THREADS != 0 && index >= KEYS * CHUNKS) break;
        const int row = index / CHUNKS, chunk = index % CHUNKS;
        const int key = first_key + row;
        const bool wanted = key < keys && (!WINDOWED || key >= seen);
        const int page = wanted ? table[key / PAGE] : 0;
        load_chunk(target + place(row, chunk), cache + part_of(page, kv_head, kv_heads, D), key % PAGE, chunk, wanted);
    }
}

// A thread's part of an A fragment.
struct Fragment {
    uint32_t of[4];
};

// A warp's queries as A fragments, and how many keys its rows g and g + 8 of each part see, of those that there are: 0 if
// there is no such token.
struct Queries {
    Fragment held[PARTS][D / 16];
    int visible[PARTS][2];

    // `first_row`: of qkv, the tile's first token.
    __device__ __forceinline__ void load(const Element* __restrict__ qkv, int first_row, int all_heads, int first_head,
                                         int group, int tokens, int first_visible) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = (warp * PARTS + part) * 16 + g + 8 * half;
                const int token = row / group;
                const bool exists = token < tokens;
                visible[part][half] = exists ? first_visible + token : 0;
                const int64_t place = static_cast<int64_t>(first_row + token) * all_heads + first_head;
                const Element* source = qkv + (place + row % group) * D + 2 * t;
#pragma unroll
                for (int step = 0; step < D / 16; ++step) {
                    Fragment& target = held[part][step];
                    target.of[half] = exists ? *reinterpret_cast<const uint32_t*>(source + step * 16) : 0;
                    target.of[half + 2] = exists ? *reinterpret_cast<const uint32_t*>(source + step * 16 + 8) : 0;
                }
            }
    }
};

// Whether a token that sees `visible` keys, of these the last `window`, does not see this one of `keys`.
static __device__ __forceinline__ bool is_hidden(int key, int visible, int window, int keys) {
    const bool behind = key >= (CAUSAL ? visible : min(visible, keys));
    if constexpr (!WINDOWED) return behind;
    return behind || key < visible - window;
}

// A warp's scores of a tile of keys, then their weights, as C fragments.
using Tile = float[PARTS][KEYS / 8][4];

// A warp's result so far.
struct Running {
    float o[PARTS][D / 8][4] = {};
    float m[PARTS][2], l[PARTS][2] = {};

    __device__ __forceinline__ Running() {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) m[part][0] = m[part][1] = negative_infinity();
    }

    static __device__ __forceinline__ void score(Tile& s, const Queries& queries, uint32_t keys) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
#pragma unroll
            for (int block = 0; block < KEYS / 16; ++block) {
                // Matrices: keys 0-7 and 8-15 of the block, for the low and the high 8 elements of the step.
                uint32_t b[4];
                const int row = block * 16 + (lane & 7) + ((lane >> 4) << 3);
                load_matrices(b, keys + place(row, step * 2 + ((lane >> 3) & 1)));
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    mma(s[part][2 * block], queries.held[part][step].of, b[0], b[1]);
                    mma(s[part][2 * block + 1], queries.held[part][step].of, b[2], b[3]);
                }
            }
        }
    }

    // `masked`: some rows do not see all keys of the tile; `keys`: that there are.
    __device__ __forceinline__ void weigh(Tile& s, const Queries& queries, int first_key, bool masked, int keys,
                                          const Scores& scores) {
        const int t = threadIdx.x % 32 % 4;
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float largest = m[part][half];
#pragma unroll
                for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float& score = s[part][n][2 * half + i];
                        score = scores(score);
                        const int key = first_key + n * 8 + 2 * t + i;
                        if (masked && is_hidden(key, queries.visible[part][half], scores.window, keys))
                            score = negative_infinity();
                        largest = fmaxf(largest, score);
                    }
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
                // Rows without a token see nothing: any finite reference keeps their zeros zero.
                const float reference = largest == negative_infinity() ? 0.0f : largest;
                const float shrink = exp2f(m[part][half] - reference);
                m[part][half] = largest;
                l[part][half] *= shrink;
#pragma unroll
                for (int n = 0; n < D / 8; ++n) {
                    o[part][n][2 * half] *= shrink;
                    o[part][n][2 * half + 1] *= shrink;
                }
#pragma unroll
                for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float& score = s[part][n][2 * half + i];
                        score = exp2f(score - reference);
                        l[part][half] += score;
                    }
            }
    }

    __device__ __forceinline__ void mix(const Tile& s, uint32_t values) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int block = 0; block < KEYS / 16; ++block) {
            uint32_t p[PARTS][4];
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* pair = &s[part][2 * block + (i >> 1)][2 * (i & 1)];
                    p[part][i] = pack(pair[0], pair[1]);
                }
#pragma unroll
            for (int n = 0; n < D / 16; ++n) {
                // Transposed: keys 0-7 and 8-15 of the block, for two groups of 8 elements.
                uint32_t b[4];
                const int row = block * 16 + (lane & 15);
                load_matrices_transposed(b, values + place(row, n * 2 + (lane >> 4)));
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    mma(o[part][2 * n], p[part], b[0], b[1]);
                    mma(o[part][2 * n + 1], p[part], b[2], b[3]);
                }
            }
        }
    }

    __device__ __forceinline__ void store(const Queries& queries, Element* __restrict__ out, int first_row, int heads,
                                          int first_head, int group, const Scores& scores) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float sum = l[part][half];
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                if (queries.visible[part][half] == 0) continue;
                const int row = (warp * PARTS + part) * 16 + g + 8 * half;
                const float inverse = 1.0f / scores.total(sum, m[part][half], first_head + row % group);
                const int64_t place = static_cast<int64_t>(first_row + row / group) * heads + first_head;
                Element* target = out + (place + row % group) * D + 2 * t;
#pragma unroll
                for (int n = 0; n < D / 8; ++n)
                    *reinterpret_cast<Element2*>(target + n * 8) =
                        to_elements(o[part][n][2 * half] * inverse, o[part][n][2 * half + 1] * inverse);
            }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    prefill_attention(const Element* __restrict__ qkv, const Kept* __restrict__ k_cache,
                      const Kept* __restrict__ v_cache, const int* __restrict__ tables, int table_stride,
                      const int* __restrict__ lengths, const int* __restrict__ starts,
                      const int* __restrict__ tiles, Element* __restrict__ out, int heads, int kv_heads,
                      float scale, float cap, int window, const float* __restrict__ sinks) {
    extern __shared__ __align__(128) unsigned char shared[];
    launch_next();
    wait_for_previous(qkv, k_cache, v_cache);
    const int sequence = tiles[2 * blockIdx.y];
    if (sequence < 0) return;
    const int group = heads / kv_heads, kv_head = blockIdx.x;
    const int start = starts[sequence], chunk_tokens = starts[sequence + 1] - start;
    const int length = lengths[sequence];
    const int tile_tokens = ROWS / group;
    const int first_token = tiles[2 * blockIdx.y + 1] * tile_tokens;
    const int tokens = min(tile_tokens, chunk_tokens - first_token);
    if (tokens <= 0 || length <= 0) return;
    const int before = length - chunk_tokens;                // tokens of the context before the chunk
    const Scores scores{scale, cap, window, sinks};
    const int first_visible = before + first_token + 1 + scores.ahead(chunk_tokens);  // keys that the tile's first token sees
    const int last_visible = first_visible + tokens - 1;                              // and the last one
    const int keys = CAUSAL ? last_visible : min(last_visible, length);               // and those that there are
    const int seen = scores.first_seen(first_visible);       // the first of those
    const int first_tile = seen / KEYS;
    const int* table = tables + static_cast<int64_t>(sequence) * table_stride;

    const uint32_t base = shared_address(shared);
    auto k_tile = [&](int stage) { return base + stage * 2 * TILE_BYTES; };
    auto v_tile = [&](int stage) { return base + stage * 2 * TILE_BYTES + TILE_BYTES; };
    load_tile(k_tile(first_tile & 1), k_cache, table, kv_heads, kv_head, first_tile * KEYS, seen, keys);
    load_tile(v_tile(first_tile & 1), v_cache, table, kv_heads, kv_head, first_tile * KEYS, seen, keys);
    commit_copies();
    Queries queries;
    queries.load(qkv, start + first_token, heads + 2 * kv_heads, kv_head * group, group, tokens, first_visible);
    Running running;
    const int key_tiles = (keys + KEYS - 1) / KEYS;
    for (int tile = first_tile; tile < key_tiles; ++tile) {
        const int stage = tile & 1;
        if (tile + 1 < key_tiles) {
            load_tile(k_tile(stage ^ 1), k_cache, table, kv_heads, kv_head, (tile + 1) * KEYS, seen, keys);
            load_tile(v_tile(stage ^ 1), v_cache, table, kv_heads, kv_head, (tile + 1) * KEYS, seen, keys);
        }
        commit_copies();
        wait_for_copies<1>();
        __syncthreads();
        Tile s = {};
        running.score(s, queries, k_tile(stage));
        const bool begins = WINDOWED && tile * KEYS < scores.first_seen(last_visible);  // a token's window, behind the first key
        running.weigh(s, queries, tile * KEYS, (tile + 1) * KEYS > min(first_visible, keys) || begins, keys, scores);
        running.mix(s, v_tile(stage));
        __syncthreads();  // the stage is overwritten next
    }
    running.store(queries, out, start + first_token, heads, kv_head * group, group, scores);
}
