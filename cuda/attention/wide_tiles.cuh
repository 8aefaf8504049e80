// Tiles of rows that are too wide for the registers of a warp, as `wide_attention.cu` goes through them.
//
// Work is tiles of ROWS queries by KEYS keys. A tile of keys comes once to shared memory, by cp.async, STAGES deep, and serves
// both products. Eight warps share them: of the scores Q K^T each has 16 rows, and either some keys, or, of 32 rows, a slice of D, for
// which it holds the queries in registers (what shared memory gives would else be the limit), and slices are added in order; of the
// result P V each has all rows and V / 8 elements, so that no sum is taken twice. Between the two,
// each row is the work of some neighbouring lanes: maximum, exponentials, sums. Scores and sums are FP32, weights are rounded.
//
// Options: as `wide_attention.cu`.
#pragma once
#include "attention/attention.cuh"
#include "common/kv_cache.cuh"

#ifdef VALUE_DIM
static constexpr bool LATENT = true;
static constexpr int V = VALUE_DIM;
#else
static constexpr bool LATENT = false;
static constexpr int V = D;
#endif
static_assert(V == 512 && D % 64 == 0 && !KEPT_AS_FP8, "other sizes: attention_any.cu");
static_assert(!WINDOWED && !CAPPED && !HAS_SINKS, "attention_any.cu");

static constexpr int WARPS = 8, THREADS = 32 * WARPS;
static constexpr int OWN = V / WARPS;  // elements of values that a warp mixes
static constexpr int KEYS = 32;
static constexpr int CHUNKS = D / 8;        // 16-byte pieces of a row
static constexpr int PITCH = 2 * D + 16;    // bytes: ldmatrix finds eight rows in different banks
static constexpr int VALUES_AT = LATENT ? 0 : KEYS * PITCH;  // in a tile: of latents, where keys are
static constexpr int TILE_BYTES = LATENT ? KEYS * PITCH : 2 * KEYS * PITCH;
static constexpr int SCORE_PITCH = KEYS + 8;       // floats
static constexpr int WEIGHT_PITCH = 2 * KEYS + 16;  // bytes

// What a sequence's keys are read by.
struct Cache {
    const Kept *keys, *values;
    const int* table;
    int kv_heads, kv_head;
    int end;  // no key from here on is read
};

// Heads that a token has in queries.
static __device__ __forceinline__ int all_heads(int heads, int kv_heads) { return LATENT ? heads : heads + 2 * kv_heads; }

// Parts of D that scores of so many rows are taken in, each by other warps, which then hold theirs of the queries.
template <int ROWS>
static constexpr int SLICES_OF = ROWS == 32 ? 4 : 1;
static constexpr int SLICE_STEPS = D / 64;  // of 16 elements

// Whether tiles of keys take the room of queries, which warps hold by then.
template <int ROWS, int STAGES>
static constexpr bool QUERIES_LEAVE = !LATENT && STAGES == 1 && SLICES_OF<ROWS> > 1;

// Of 16 rows of queries, where warps have slices of them: as A fragments.
template <int ROWS>
struct QuerySlice {
    static constexpr bool HELD = SLICES_OF<ROWS> > 1;
    uint32_t a[HELD ? SLICE_STEPS : 1][4];

    __device__ __forceinline__ void load(uint32_t queries) {
        if constexpr (HELD) {
            const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % (ROWS / 16), slice = warp / (ROWS / 16);
            const uint32_t own = queries + (part * 16 + lane % 16) * PITCH + slice * SLICE_STEPS * 32 + lane / 16 * 16;
#pragma unroll
            for (int step = 0; step < SLICE_STEPS; ++step) load_matrices(a[step], own + step * 32);
        }
    }
};

// Shared memory of a block, and what it is filled with.
template <int ROWS, int STAGES>
struct Shared {
    static constexpr int PARTS = ROWS / 16, SLICES = SLICES_OF<ROWS>;
    uint32_t queries, tiles, weights;
    float *scores, *shrink, *gain;

    __device__ __forceinline__ explicit Shared(unsigned char* memory) {
        scores = reinterpret_cast<float*>(memory);
        shrink = scores + SLICES * ROWS * SCORE_PITCH;
        gain = shrink + ROWS;
        weights = shared_address(gain + ROWS);
        queries = weights + ROWS * WEIGHT_PITCH;
        tiles = queries + (QUERIES_LEAVE<ROWS, STAGES> ? 0 : ROWS * PITCH);
    }

    // `row_of(row)`: where a row's query is, or null: zeros.
    template <typename RowOf>
    __device__ __forceinline__ void load_queries(RowOf row_of) const {
        for (int index = threadIdx.x; index < ROWS * CHUNKS; index += THREADS) {
            const int row = index / CHUNKS, chunk = index % CHUNKS;
            const Element* source = row_of(row);
            copy_async(queries + row * PITCH + chunk * 16, source + chunk * 8, source != nullptr);
        }
    }

    // Starts copying keys `tile * KEYS` and on; those from the end on are zeros: 0 times NaN is NaN.
    __device__ __forceinline__ void load_tile(const Cache& from, int tile) const {
        const int first = tile * KEYS;
        if (first < from.end) {
            const uint32_t target = tiles + tile % STAGES * TILE_BYTES;
#pragma unroll
            for (int i = 0; i < (KEYS * CHUNKS + THREADS - 1) / THREADS; ++i) {
                const int index = i * THREADS + threadIdx.x;
                if (KEYS * CHUNKS % THREADS != 0 && index >= KEYS * CHUNKS) break;
                const int row = index / CHUNKS, chunk = index % CHUNKS, key = first + row;
                const bool wanted = key < from.end;
                const int page = wanted ? from.table[key / PAGE] : 0;
                const int64_t place = part_of(page, from.kv_head, from.kv_heads, D) + key % PAGE * D + chunk * 8;
                copy_async(target + row * PITCH + chunk * 16, from.keys + place, wanted);
                if constexpr (!LATENT) copy_async(target + VALUES_AT + row * PITCH + chunk * 16, from.values + place, wanted);
            }
        }
        commit_copies();
    }

    // This warp's part of Q K^T, to `scores`: 16 rows, all keys and a slice of D, or all of D and some keys.
    __device__ __forceinline__ void score(const QuerySlice<ROWS>& slice, int tile) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int part = warp % PARTS, rest = warp / PARTS;
        const uint32_t keys = tiles + tile % STAGES * TILE_BYTES;
        float* target = scores + (part * 16 + lane / 4) * SCORE_PITCH + lane % 4 * 2;
        // Matrices: 8 keys and the 8 after them, for the low and the high 8 elements of a step.
        const uint32_t own = keys + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16;
        if constexpr (SLICES > 1) {
            float c[KEYS / 8][4] = {};
#pragma unroll
            for (int step = 0; step < SLICE_STEPS; ++step)
#pragma unroll
                for (int n = 0; n < KEYS / 8; n += 2) {
                    uint32_t b[4];
                    load_matrices(b, own + n * 8 * PITCH + (rest * SLICE_STEPS + step) * 32);
                    mma(c[n], slice.a[step], b[0], b[1]);
                    mma(c[n + 1], slice.a[step], b[2], b[3]);
                }
            target += rest * ROWS * SCORE_PITCH;
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n) {
                *reinterpret_cast<float2*>(target + n * 8) = make_float2(c[n][0], c[n][1]);
                *reinterpret_cast<float2*>(target + 8 * SCORE_PITCH + n * 8) = make_float2(c[n][2], c[n][3]);
            }
        } else {
            const uint32_t queries_of_rows = queries + (part * 16 + lane % 16) * PITCH + lane / 16 * 16;
            float c[2][2][4] = {};
#pragma unroll 6
            for (int step = 0; step < D / 16; ++step) {
                uint32_t a[4], b[4];
                load_matrices(a, queries_of_rows + step * 32);
                load_matrices(b, own + rest * 16 * PITCH + step * 32);
                mma(c[0][step % 2], a, b[0], b[1]);
                mma(c[1][step % 2], a, b[2], b[3]);
            }
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    *reinterpret_cast<float2*>(target + half * 8 * SCORE_PITCH + rest * 16 + n * 8) =
                        make_float2(__fadd_rn(c[n][0][2 * half], c[n][1][2 * half]),
                                    __fadd_rn(c[n][0][2 * half + 1], c[n][1][2 * half + 1]));
        }
    }
};

// A row's running sums, which the LANES neighbouring lanes have that work on it.
template <int ROWS>
struct RowSums {
    static constexpr int LANES = THREADS / ROWS, EACH = KEYS / LANES / 4;
    float m = NO_SCORE, l = 0.0f;

    static __device__ __forceinline__ int row() { return threadIdx.x / LANES; }
    static __device__ __forceinline__ bool is_first() { return threadIdx.x % LANES == 0; }

    // Scores of a tile to weights; the row sees its first `visible` keys.
    template <typename Shared>
    __device__ __forceinline__ void weigh(const Shared& shared, int visible, float scale) {
        const int lane = threadIdx.x % LANES;
        float s[EACH][4], largest = m, sum = 0.0f;
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const int key = (j * LANES + lane) * 4;
            const float* source = shared.scores + row() * SCORE_PITCH + key;
            const float4 four = *reinterpret_cast<const float4*>(source);
            s[j][0] = four.x, s[j][1] = four.y, s[j][2] = four.z, s[j][3] = four.w;
#pragma unroll
            for (int slice = 1; slice < SLICES_OF<ROWS>; ++slice) {  // in order
                const float4 more = *reinterpret_cast<const float4*>(source + slice * ROWS * SCORE_PITCH);
                s[j][0] = __fadd_rn(s[j][0], more.x), s[j][1] = __fadd_rn(s[j][1], more.y);
                s[j][2] = __fadd_rn(s[j][2], more.z), s[j][3] = __fadd_rn(s[j][3], more.w);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[j][i] = key + i < visible ? __fmul_rn(s[j][i], scale) : negative_infinity();
                largest = fmaxf(largest, s[j][i]);
            }
        }
#pragma unroll
        for (int lanes = 1; lanes < LANES; lanes *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
        const float shrink = weight_of(m, largest);
        m = largest;
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[j][i] = exp2_fast(__fsub_rn(s[j][i], m));
            sum = __fadd_rn(sum, __fadd_rn(__fadd_rn(s[j][0], s[j][1]), __fadd_rn(s[j][2], s[j][3])));
            unsigned char* target = reinterpret_cast<unsigned char*>(shared.gain + ROWS) + row() * WEIGHT_PITCH +
                                    (j * LANES + lane) * 8;
            *reinterpret_cast<uint2*>(target) = make_uint2(pack(s[j][0], s[j][1]), pack(s[j][2], s[j][3]));
        }
#pragma unroll
        for (int lanes = 1; lanes < LANES; lanes *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, lanes));
        l = merged(l, shrink, sum, 1.0f);
        if (is_first()) shared.shrink[row()] = shrink;
    }
};

// A warp's part of the result: all rows, OWN elements from warp * OWN on, as C fragments.
template <int ROWS>
struct Mixed {
    static constexpr int PARTS = ROWS / 16;
    float o[PARTS][OWN / 8][4] = {};

    // Takes in a tile: shrinks, and adds P V.
    template <typename Shared>
    __device__ __forceinline__ void mix(const Shared& shared, uint32_t values) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
        float shrink[PARTS][2];
        bool changed = false;
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                shrink[part][half] = shared.shrink[part * 16 + g + 8 * half];
                changed |= shrink[part][half] != 1.0f;
            }
        if (__any_sync(0xffffffffu, changed)) {
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int n = 0; n < OWN / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) o[part][n][i] *= shrink[part][i / 2];
        }
#pragma unroll
        for (int block = 0; block < KEYS / 16; ++block) {
            uint32_t p[PARTS][4];
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                load_matrices(p[part], shared.weights + (part * 16 + lane % 16) * WEIGHT_PITCH + block * 32 + lane / 16 * 16);
#pragma unroll
            for (int n = 0; n < OWN / 16; ++n) {
                uint32_t b[4];  // transposed: keys 0-7 and 8-15 of the block, for two groups of 8 elements
                load_matrices_transposed(
                    b, values + (block * 16 + lane % 16) * PITCH + (warp * OWN + n * 16 + lane / 16 * 8) * 2);
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    mma(o[part][2 * n], p[part], b[0], b[1]);
                    mma(o[part][2 * n + 1], p[part], b[2], b[3]);
                }
            }
        }
    }

    // `take(row, column, pair)` for all pairs of neighbours in a row: `pair` is one's first element.
    template <typename Take>
    __device__ __forceinline__ void each(Take take) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int n = 0; n < OWN / 8; ++n)
                    take(part * 16 + lane / 4 + 8 * half, warp * OWN + n * 8 + lane % 4 * 2, o[part][n] + 2 * half);
    }
};

// Goes through the tiles `first` to `end` - 1 of keys. `visible()`: keys that this thread's row sees; `ended(tile)` is called by all
// threads after each tile.
template <int ROWS, int STAGES, typename Visible, typename Ended>
static __device__ __forceinline__ void attend(const Shared<ROWS, STAGES>& shared, const Cache& from, int first, int end,
                                              float scale, RowSums<ROWS>& sums, Mixed<ROWS>& mixed, Visible visible,
                                              Ended ended) {
    QuerySlice<ROWS> slice;
    if constexpr (QUERIES_LEAVE<ROWS, STAGES>) {
        commit_copies();
        wait_for_copies<0>();
        __syncthreads();
        slice.load(shared.queries);
    }
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) shared.load_tile(from, first + i);
    for (int tile = first; tile < end; ++tile) {
        if constexpr (STAGES == 1) {
            __syncthreads();  // nobody reads the tile before it any more
            shared.load_tile(from, tile);
            wait_for_copies<0>();
            __syncthreads();
        } else {
            wait_for_copies<STAGES - 2>();
            __syncthreads();  // the tile is here, and nobody reads that before it any more
            shared.load_tile(from, tile + STAGES - 1);
        }
        if (!QUERIES_LEAVE<ROWS, STAGES> && tile == first) slice.load(shared.queries);
        shared.score(slice, tile);
        __syncthreads();
        sums.weigh(shared, visible() - tile * KEYS, scale);
        __syncthreads();
        mixed.mix(shared, shared.tiles + tile % STAGES * TILE_BYTES + VALUES_AT);
        ended(tile);
    }
}
