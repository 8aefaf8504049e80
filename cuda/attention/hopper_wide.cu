// Prefill attention with heads of 512 and of latents on Hopper, by wgmma and bulk tensor copies; what it computes is said in
// `wide_attention.cu`.
//
//   queries  elements (T, H, D), of heads of 512 (T, H + 2 G, D), through a tensor map with boxes of 64 columns, `group` heads and a
//            tile's tokens
//   keys, values  elements [pages, G, PAGE, D], through maps with boxes of a page: 64 columns, PAGE rows; of latents V of the columns
//            of keys are values, and the second map is not used
// The other arguments are those of `wide_prefill`. The grid is (H / group, tiles); a tile has ROWS / group tokens.
//
// A block has 64 rows, a row being a (token, query head) pair: their results alone take 512 columns of floats. So three warpgroups
// share them. The first has the scores Q K^T, 64 keys at a time, their exponentials and sums, and leaves the weights in shared
// memory. The two others have half of the columns each: they take the weights into registers, and add P V. The products of scores run
// while those with the values of the tile before do. A further warp loads; queries stay. Of latents there is room for two tiles of
// keys, else for one of keys and one of values: the next keys come while exponentials are taken, and products with values made.
//
// Keys behind the last visible one may hold anything, NaN too: scores are masked, and values set to zero, as in
// `hopper_attention.cu`. A row decides by itself: its bits do not depend on the rows beside it, nor on how a prompt was cut.
//
// FLOPs 2 (D + V) for each visible (query head, key) pair; each tile reads its context once, from L2 mostly.
// Options: -DHEAD_DIM (D): 512; or of latents 576, and -DVALUE_DIM (V): 512. Dynamic shared memory: ROWS + 2 KEYS rows of D elements, the
// weights, and 1,024 bytes.
#include "attention/attention.cuh"
#include "common/hopper.cuh"

#ifdef VALUE_DIM
static constexpr bool LATENT = true;
static constexpr int V = VALUE_DIM;
#else
static constexpr bool LATENT = false;
static constexpr int V = D;
#endif
static_assert(V == 512 && D % 64 == 0 && D <= 576, "other sizes: wide_attention.cu, attention_any.cu");
static_assert(!WINDOWED && !CAPPED && !HAS_SINKS, "attention_any.cu");

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

static constexpr int ROWS = 64, KEYS = 64, STAGES = LATENT ? 2 : 1;
static constexpr int GROUPS = 3, WARPS = 4 * GROUPS;  // that compute; the next warp loads
static constexpr int THREADS = 128 * (GROUPS + 1);
static constexpr int SIDES = D / 64, SIDE_BYTES = 64 * 128;  // tiles of 64 columns, side by side, of queries and of keys
static constexpr int TILE_BYTES = SIDES * SIDE_BYTES;
static constexpr int VALUES_AT = LATENT ? 0 : TILE_BYTES;  // behind keys, or where these are
static constexpr int STAGE_BYTES = LATENT ? TILE_BYTES : 2 * TILE_BYTES;
static constexpr int TILE_PAGES = KEYS / PAGE, BOX_BYTES = PAGE * 128;
static constexpr int OWN = V / 2, SPAN = 128, SPANS = OWN / SPAN;  // columns of a warpgroup, and of one product

// The compiler sees that all lanes have the same, and computes addresses once a warp.
static __device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// `tile_descriptor` in parts: the low word, to which offsets / 16 are added, and the rest, always the same.
static __device__ __forceinline__ uint32_t low_word(uint32_t address, uint32_t side = 16) {
    return static_cast<uint32_t>(tile_descriptor(address, side));
}
static __device__ __forceinline__ uint64_t with_low_word(uint32_t low) {
    return (tile_descriptor(0, 0) & ~uint64_t(0xffffffff)) | low;
}

// Byte offset of a chunk of 8 weights of a row: chunks change places by row, so that eight rows are in different banks.
static __device__ __forceinline__ uint32_t weight_place(int row, int chunk) {
    return static_cast<uint32_t>(row * 2 * KEYS + (chunk ^ (row & 7)) * 16);
}

// Of rows, from those who have the scores to those who have the values.
struct Factors {
    float shrink[ROWS];  // of what is there before a tile
    float inverse[ROWS];  // of all sums, at last
};

// Shared memory, and barriers for what has come (full) and what is done with (empty).
struct Shared {
    static constexpr int BARRIERS = 4 * STAGES + 3;
    Factors* factors;
    uint32_t barriers, queries, tiles, weights;
    unsigned char* weights_here;

    __device__ __forceinline__ Shared(const uint64_t* memory_of_barriers, unsigned char* memory, Factors* factors)
        : factors(factors) {
        barriers = shared_address(memory_of_barriers);
        queries = (shared_address(memory) + 1023) & ~1023u;
        tiles = queries + TILE_BYTES;
        weights = tiles + STAGES * STAGE_BYTES;
        weights_here = memory + (weights - shared_address(memory));
    }
    // BARRIER keys_full, values_full: of a stage. One lane of the warp that loads arrives, and expects the bytes; it does so again when
    // the stage's `..._empty` said that all warps have done with it. The first warpgroup's warps wait for all phases of keys, those of
    // the others for all of values, one after the other. Of latents both are one.
    // BARRIER keys_empty, values_empty: of a stage. Each warp of the first warpgroup arrives at that of keys once for each filling, when
    // its scores are there, and each of the others at that of values, when its product with them is; of latents both are one, at which
    // all arrive. The warp that loads waits for all phases, one after the other, the first of which is over before it begins;
    // before it fills a stage nobody can arrive again.
    // BARRIER queries_full: has one phase. One lane of the warp that loads arrives, and expects the bytes; the first warpgroup waits.
    // BARRIER weights_full: each of the first warpgroup's four warps arrives once for each tile, and once at the end, when its rows'
    // weights and factors are written; the warps of the others wait for all phases, one after the other.
    // BARRIER weights_empty: each of the eight warps of the others arrives once for each tile, when it has taken weights and factors into
    // registers; the first warpgroup's warps wait for all phases, the first of which is over before they begin, and only then
    // write, and arrive at `weights_full`, which the others have to wait for before they can arrive here again.
    __device__ __forceinline__ uint32_t keys_full(int stage) const { return barriers + 8 * stage; }
    __device__ __forceinline__ uint32_t keys_empty(int stage) const { return barriers + 8 * STAGES + 8 * stage; }
    __device__ __forceinline__ uint32_t values_full(int stage) const { return keys_full(stage) + (LATENT ? 0 : 16 * STAGES); }
    __device__ __forceinline__ uint32_t values_empty(int stage) const { return keys_empty(stage) + (LATENT ? 0 : 16 * STAGES); }
    __device__ __forceinline__ uint32_t queries_full() const { return barriers + 32 * STAGES; }
    __device__ __forceinline__ uint32_t weights_full() const { return barriers + 32 * STAGES + 8; }
    __device__ __forceinline__ uint32_t weights_empty() const { return barriers + 32 * STAGES + 16; }

    __device__ __forceinline__ void init_barriers() const {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(keys_full(stage), 1);
            barrier_init(keys_empty(stage), LATENT ? WARPS : 4);
            if constexpr (!LATENT) {
                barrier_init(values_full(stage), 1);
                barrier_init(values_empty(stage), WARPS - 4);
            }
        }
        barrier_init(queries_full(), 1);
        barrier_init(weights_full(), 4);
        barrier_init(weights_empty(), WARPS - 4);
        publish_barriers();
    }
};

// What a block computes.
struct Item {
    int first, tokens;  // row of queries and out of its first token; tokens
    int first_visible;  // keys that this one sees
    int first_head, group;
    int kv_head, kv_heads;

    __device__ __forceinline__ int keys() const { return first_visible + tokens - 1; }  // that the last token sees
    __device__ __forceinline__ int tiles() const { return (keys() + KEYS - 1) / KEYS; }
};

// BARRIER barrier: one of those of `Shared`. A warp arrives when all its lanes have waited for the filling, since a warp-wide
// instruction stands in between; it waits there for nothing.
static __device__ __forceinline__ void release(uint32_t barrier, int lane) {
    if (lane == 0) barrier_arrive(barrier);
}

// One warp.
static __device__ __forceinline__ void load(const Shared& shared, const Item& item, const TensorMap* q_map, const TensorMap* k_map,
                                            const TensorMap* v_map, const int* table, int lane) {
    if (lane == 0) {
        barrier_expect(shared.queries_full(), SIDES * 128 * item.group * (ROWS / item.group));
        for (int side = 0; side < SIDES; ++side)
            load_box(shared.queries + side * SIDE_BYTES, q_map, shared.queries_full(), side * 64, item.first_head, item.first);
    }
    __syncwarp();
    const int pages = (item.keys() + PAGE - 1) / PAGE;
    for (int tile = 0; tile < item.tiles(); ++tile) {
        const int stage = tile % STAGES, here = min(TILE_PAGES, pages - tile * TILE_PAGES);
        const int place = lane % TILE_PAGES;
        const int row = place < here ? (table[tile * TILE_PAGES + place] * item.kv_heads + item.kv_head) * PAGE : 0;
        // BARRIER full, empty: of the stage's keys or values (`Shared`): the warp waits, and one lane arrives, for each.
        auto fill = [&](const TensorMap* map, uint32_t target, uint32_t full, uint32_t empty) {
            barrier_wait(empty, (tile / STAGES & 1) ^ 1);
            if (lane == 0) barrier_expect(full, here * SIDES * BOX_BYTES);
            __syncwarp();
            for (int side = lane / TILE_PAGES; side < SIDES; side += 32 / TILE_PAGES)
                if (place < here) load_box(target + side * SIDE_BYTES + place * BOX_BYTES, map, full, side * 64, row);
        };
        const uint32_t target = shared.tiles + stage * STAGE_BYTES;
        fill(k_map, target, shared.keys_full(stage), shared.keys_empty(stage));
        if constexpr (!LATENT) fill(v_map, target + VALUES_AT, shared.values_full(stage), shared.values_empty(stage));
    }
}

// The first warpgroup. A thread has two rows of scores, g and g + 8 of its warp's 16 (`half`).
static __device__ __forceinline__ void weigh(const Shared& shared, const Item& item, float scale, int warp, int lane) {
    const uint32_t queries = low_word(shared.queries), keys = low_word(shared.tiles);
    const int row = warp * 16 + lane / 4;
    int seen[2];  // keys, less the lane's first in a tile
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int token = (row + 8 * half) / item.group;
        seen[half] = (token < item.tokens ? item.first_visible + token : 0) - lane % 4 * 2;
    }
    float m[2] = {NO_SCORE, NO_SCORE}, l[2] = {};  // l: of the lane's keys
    barrier_wait(shared.queries_full(), 0);
    const int tiles = item.tiles();
    for (int tile = 0; tile < tiles; ++tile) {
        const int stage = tile % STAGES;
        barrier_wait(shared.keys_full(stage), tile / STAGES & 1);
        float s[KEYS / 2];
        wgmma_begin();
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
            const int along = (step / 4 * SIDE_BYTES + step % 4 * 32) / 16;
            wgmma(s, with_low_word(queries + along), with_low_word(keys + stage * (STAGE_BYTES / 16) + along), step > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_keep(s);
        release(shared.keys_empty(stage), lane);
        if ((tile + 1) * KEYS > item.first_visible) {
#pragma unroll
            for (int i = 0; i < KEYS / 2; ++i)
                if (i / 4 * 8 + i % 2 >= seen[i >> 1 & 1] - tile * KEYS) s[i] = negative_infinity();
        }
        float shrink[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = s[2 * half];
#pragma unroll
            for (int i = 1; i < KEYS / 4; ++i) largest = fmaxf(largest, s[i / 2 * 4 + 2 * half + i % 2]);
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            largest = fmaxf(m[half], __fmul_rn(largest, scale));
            shrink[half] = weight_of(m[half], largest);
            m[half] = largest;
            float part[2] = {};
#pragma unroll
            for (int i = 0; i < KEYS / 4; ++i) {
                float& weight = s[i / 2 * 4 + 2 * half + i % 2];
                weight = exp2_fast(__fmaf_rn(weight, scale, -largest));
                part[i % 2] = __fadd_rn(part[i % 2], weight);
            }
            l[half] = merged(l[half], shrink[half], __fadd_rn(part[0], part[1]), 1.0f);
        }
        barrier_wait(shared.weights_empty(), (tile & 1) ^ 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
                *reinterpret_cast<uint32_t*>(shared.weights_here + weight_place(row + 8 * half, n) + lane % 4 * 4) =
                    pack(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]);
            if (lane % 4 == 0) shared.factors->shrink[row + 8 * half] = shrink[half];
        }
        __syncwarp();
        release(shared.weights_full(), lane);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float total = l[half];
        total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, 1));
        total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, 2));
        if (lane % 4 == 0) shared.factors->inverse[row + 8 * half] = __frcp_rn(total);
    }
    barrier_wait(shared.weights_empty(), (tiles & 1) ^ 1);  // else some might still wait for the phase before
    __syncwarp();
    release(shared.weights_full(), lane);
}

// Another warpgroup, with the columns from `which` * OWN on.
static __device__ __forceinline__ void mix(const Shared& shared, const Item& item, Element* out, int heads, int which, int warp,
                                           int lane) {
    const uint32_t values = low_word(shared.tiles + VALUES_AT, SIDE_BYTES) + which * (OWN / 64 * SIDE_BYTES / 16);
    const int row = warp * 16 + lane / 4;
    float o[SPANS][SPAN / 2] = {};
    const int tiles = item.tiles();
    for (int tile = 0; tile < tiles; ++tile) {
        const int stage = tile % STAGES;
        barrier_wait(shared.weights_full(), tile & 1);
        uint32_t p[KEYS / 16][4];
#pragma unroll
        for (int block = 0; block < KEYS / 16; ++block)
            load_matrices(p[block], shared.weights + weight_place(warp * 16 + lane % 16, block * 2 + lane / 16));
        const float shrink[2] = {shared.factors->shrink[row], shared.factors->shrink[row + 8]};
        __syncwarp();
        release(shared.weights_empty(), lane);
        if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
            for (int span = 0; span < SPANS; ++span)
#pragma unroll
                for (int i = 0; i < SPAN / 2; ++i) o[span][i] *= shrink[i >> 1 & 1];
        }
        barrier_wait(shared.values_full(stage), tile / STAGES & 1);
        if ((tile + 1) * KEYS > item.keys()) {  // the first warpgroup has done with them
            const int first = item.keys() - tile * KEYS;
            for (int i = first * 8 + threadIdx.x % 128; i < KEYS * 8; i += 128)
                for (int side = 0; side < OWN / 64; ++side)
                    store_zeros(shared.tiles + stage * STAGE_BYTES + VALUES_AT + (which * (OWN / 64) + side) * SIDE_BYTES + i * 16);
            publish_to_wgmma();
            group_sync(which + 1);
        }
        wgmma_begin();
#pragma unroll
        for (int block = 0; block < KEYS / 16; ++block)
#pragma unroll
            for (int span = 0; span < SPANS; ++span)
                wgmma_rows(o[span], p[block],
                           with_low_word(values + (stage * STAGE_BYTES + span * (SPAN / 64) * SIDE_BYTES + block * 16 * 128) / 16));
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int span = 0; span < SPANS; ++span) wgmma_keep(o[span]);
        release(shared.values_empty(stage), lane);
    }
    barrier_wait(shared.weights_full(), tiles & 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int mine = row + 8 * half, token = mine / item.group;
        const float inverse = shared.factors->inverse[mine];
        Element* target = out + (static_cast<int64_t>(item.first + token) * heads + item.first_head + mine % item.group) * V;
#pragma unroll
        for (int span = 0; span < SPANS; ++span)
            store_row<SPAN>(target + which * OWN + span * SPAN, token < item.tokens, SPAN, lane % 4, [&](int n) {
                const float* pair = &o[span][4 * n + 2 * half];
                return pack(__fmul_rn(pair[0], inverse), __fmul_rn(pair[1], inverse));
            });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_wide(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                const __grid_constant__ TensorMap v_map, const int* __restrict__ tables, int table_stride,
                const int* __restrict__ lengths, const int* __restrict__ starts, const int* __restrict__ tiles,
                Element* __restrict__ out, int heads, int kv_heads, int group, float scale) {
    KERNEL_BEGINS();
    extern __shared__ unsigned char memory[];
    __shared__ uint64_t barriers[Shared::BARRIERS];
    __shared__ Factors factors;
    const Shared shared(barriers, memory, &factors);
    const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    launch_next();
    if (threadIdx.x == 0) shared.init_barriers();
    __syncthreads();
    wait_for_previous(tables, lengths, starts, tiles);
    const int sequence = tiles[2 * blockIdx.y];
    if (sequence < 0) return;
    const int start = starts[sequence], chunk_tokens = starts[sequence + 1] - start;
    const int length = lengths[sequence], first_token = tiles[2 * blockIdx.y + 1] * (ROWS / group);
    const int tokens = min(ROWS / group, chunk_tokens - first_token);
    if (tokens <= 0 || length <= 0) return;
    const int first_head = blockIdx.x * group;  // and those after it have the same KV head
    const Item item{start + first_token, tokens, length - chunk_tokens + first_token + 1, first_head, group,
                    first_head / (heads / kv_heads), kv_heads};
    if (warp >= WARPS) {
        give_registers<40>();
        if (warp == WARPS)
            load(shared, item, &q_map, &k_map, &v_map, tables + static_cast<int64_t>(sequence) * table_stride, lane);
    } else if (warp < 4) {
        give_registers<112>();
        weigh(shared, item, scale, warp, lane);
    } else {
        take_registers<176>();
        mix(shared, item, out, heads, warp / 4 - 1, warp % 4, lane);
    }
}
#endif
