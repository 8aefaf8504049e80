// Prefill attention on Hopper, by wgmma and bulk tensor copies.
//
//   queries  elements (T, H + 2 G, D), through a tensor map with boxes of 64 columns, H / G heads and a tile's tokens
//   keys, values  elements [pages, G, PAGE, D], through tensor maps of rows of D, with boxes of a page: 64 columns, PAGE rows
// Other arguments as in `prefill_attention.cu`, but that `tiles` has `tile_count` pieces of ROWS / (H / G) tokens.
//
// An item of work is a tile of tokens and a KV head. Three warpgroups compute (for D over 128 two, whose results fill
// the registers), 64 rows each, a row being a (token, query head) pair, and a warp loads. Blocks stay and go through the
// items, forth and back so that all get as many keys; the warp that loads runs ahead into the next item: its queries (for
// D over 128 once those before are done with), then keys and values, 64 at a time, STAGES deep. Tiles in shared memory
// are 64 elements wide with wgmma's 128-byte swizzle, SIDES of them side by side, a page being 16 rows of one; columns past
// D are zeros, by the maps. There are as many blocks as the device holds, or items if those are fewer.
//
// Scores S = Q K^T are FP32 in registers, and, rounded to elements, are the left side of O += P V. While a warpgroup takes
// the exponentials of one tile of keys, the product with the values before them runs, and so do products of the others.
//
// Keys behind the last visible one may hold anything, NaN too, or be those of an earlier tile: scores are masked, and
// values set to zero, since P = 0 times NaN is NaN. With a window, tiles of keys wholly before that of an item's first
// token are not loaded, and a warpgroup passes over those before its own; other hidden keys and values are the
// sequence's, and finite.
//
// Of an FP8 cache, the pages that prompts see are made elements first (`widen_pages.cu`): many tiles read each of them.
//
// FLOPs 4 D for each visible (query head, key) pair; memory traffic is small beside it.
// Options: -DHEAD_DIM, a multiple of 16 from 64 to 256; -DWINDOW, -DSOFTCAP, -DSINKS. Dynamic shared memory: (SLOTS * ROWS +
// STAGES * 2 * KEYS) * WIDTH elements, and 1,024 bytes.
#include "attention/attention.cuh"
#include "common/hopper.cuh"

static_assert(D % 16 == 0 && D >= 64 && D <= 256, "other head sizes: attention_any.cu");

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "attention/hopper_rows.cuh"
#include "attention/hopper_tiles.cuh"

// The compiler sees that all lanes have the same, and computes addresses once a warp.
static __device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// Load: one warp.
struct Loader {
    const Shared& shared;
    const TensorMap *q_map, *k_map, *v_map;
    const Scores& scores;
    int lane, group, tile_tokens, kv_heads;
    Stage stage{0, 1};  // waiting for the odd phase before a barrier's first returns at once
    unsigned count = 0; // of items

    __device__ __forceinline__ void load_queries(const Item& item) {
        const int slot = count % SLOTS;
        barrier_wait(shared.queries_empty(slot), (count / SLOTS & 1) ^ 1);
        if (lane == 0) {
            shared.items[slot] = item;
            if (item.tokens > 0) {
                barrier_expect(shared.queries_full(slot), SIDES * 128 * group * tile_tokens);
                for (int side = 0; side < SIDES; ++side)
                    load_box(shared.q_tiles + slot * Q_BYTES + side * ROWS * 128, q_map, shared.queries_full(slot),
                             side * 64, item.kv_head * group, item.first);
            } else {
                barrier_arrive(shared.queries_full(slot));
            }
        }
        __syncwarp();
        ++count;
    }

    // A lane copies one box of a stage: the page `place`, columns from 64 `side`.
    __device__ __forceinline__ void load_item(const Item& item, const int* table) {
        const int side = lane / TILE_PAGES, place = lane % TILE_PAGES;
        const int pages = (item.keys() + PAGE - 1) / PAGE;
        const int begin = first_tile(item.first_visible, scores) * TILE_PAGES;
        int page = begin + place < pages ? table[begin + place] : 0;
        load_queries(item);
        for (int first = begin; first < pages; first += TILE_PAGES) {
            const int here = min(TILE_PAGES, pages - first);
            const int row = (page * kv_heads + item.kv_head) * PAGE;
            if (first + TILE_PAGES + place < pages) page = table[first + TILE_PAGES + place];
            const uint32_t target = stage.index * STAGE_BYTES + side * KEYS * 128 + place * BOX_BYTES;
            // BARRIER full, empty: of the stage's keys or values (`hopper_tiles.cuh`): the warp waits, and one lane arrives, for each.
            auto load = [&](const TensorMap* map, uint32_t tiles, uint32_t full, uint32_t empty) {
                barrier_wait(empty, stage.parity);
                if (lane == 0) barrier_expect(full, here * SIDES * BOX_BYTES);
                __syncwarp();
                if (side < SIDES && place < here) load_box(tiles + target, map, full, side * 64, row);
            };
            load(k_map, shared.k_tiles, shared.keys_full(stage.index), shared.keys_empty(stage.index));
            load(v_map, shared.v_tiles, shared.values_full(stage.index), shared.values_empty(stage.index));
            stage.advance();
        }
    }
};

// Compute and store: three warpgroups.
struct Warpgroup {
    const Shared& shared;
    int warp, lane, heads, group;
    Scores scores;
    float scale;             // of what is left of it after `cap`
    int token[2], place[2];  // of this thread's rows, in the tile: the token, and the row of `out`
    int first_of_warp, last_of_warp, first_of_warpgroup, last_of_warpgroup;  // tokens
    uint32_t k_low, v_low;
    Stage stage{0, 0};  // of the next keys

    __device__ __forceinline__ Warpgroup(const Shared& shared, int warp, int lane, int heads, int group,
                                         const Scores& scores)
        : shared(shared), warp(warp), lane(lane), heads(heads), group(group), scores(scores),
          scale(CAPPED ? 1.0f : scores.scale) {
        k_low = low_word(shared.k_tiles), v_low = low_word(shared.v_tiles, KEYS * 128);
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // divisions take long: once, not for every tile
            const int row = warp * 16 + lane / 4 + 8 * half;
            token[half] = row / group;
            place[half] = token[half] * heads + row % group;
        }
        first_of_warp = warp * 16 / group, last_of_warp = (warp * 16 + 15) / group;
        first_of_warpgroup = warp / 4 * 64 / group, last_of_warpgroup = (warp / 4 * 64 + 63) / group;
    }

    // BARRIER barrier: one of the `..._empty` of `hopper_tiles.cuh`. A warp arrives when all its lanes have waited for the filling, since a
    // warp-wide instruction stands in between; it waits there for nothing.
    __device__ __forceinline__ void release(uint32_t barrier) const {
        if (lane == 0) barrier_arrive(barrier);
    }

    __device__ __forceinline__ void mask(Running& running, const Item& item, int tile) const {
        // A token's window begins behind the tile's first key.
        const bool begins = WINDOWED && tile * KEYS < scores.first_seen(item.first_visible + last_of_warp);
        if ((tile + 1) * KEYS <= item.first_visible + first_of_warp && !begins) return;
        int visible[2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
            visible[half] = (token[half] < item.tokens ? item.first_visible + token[half] : 0) - tile * KEYS;
        running.mask(visible, lane % 4, scores.window);
    }

    // Zeros for the stage's values from key `first` on. Every warpgroup clears what it reads: none waits for another.
    __device__ __forceinline__ void clear_values(int first) const {
        for (int i = first * 8 + threadIdx.x % 128; i < KEYS * 8; i += 128)
            for (int side = 0; side < SIDES; ++side)
                store_zeros(shared.v_tiles + stage.index * STAGE_BYTES + side * KEYS * 128 + i * 16);
        publish_to_wgmma();
        group_sync(warp / 4);
    }

    // Attention over the tiles `first` to `end` - 1 of keys; values are taken in one tile behind the keys.
    __device__ __forceinline__ void attend(Running& running, const Queries& q, const Item& item, int first, int end,
                                           int slot) {
        barrier_wait(shared.keys_full(stage.index), stage.parity);
        running.start_scores(q, k_low + stage.index * (STAGE_BYTES / 16));
        wgmma_wait<0>();
        wgmma_keep(running.s);
        release(shared.keys_empty(stage.index));
        if (Q_IN_REGISTERS) release(shared.queries_empty(slot));
        running.cap(scores);
        mask(running, item, first);
        running.weigh_first(scale);
        running.round_weights();
        barrier_wait(shared.values_full(stage.index), stage.parity);
        for (int tile = first + 1; tile < end; ++tile) {
            const int before = stage.index;
            stage.advance();
            barrier_wait(shared.keys_full(stage.index), stage.parity);
            running.start_scores(q, k_low + stage.index * (STAGE_BYTES / 16));
            running.start_values(v_low + before * (STAGE_BYTES / 16));
            wgmma_wait<1>();
            wgmma_keep(running.s);
            release(shared.keys_empty(stage.index));
            running.cap(scores);
            mask(running, item, tile);
            running.weigh_next(scale, lane);
            // The loop that waits for values keeps the compiler from waiting for the product first.
            wgmma_keep(running.weights);
            barrier_wait(shared.values_full(stage.index), stage.parity);
            wgmma_wait<0>();
            running.keep_values();
            release(shared.values_empty(before));
            running.shrink_values();
            running.round_weights();
        }
        if (end * KEYS > item.keys()) clear_values(item.keys() - (end - 1) * KEYS);
        running.start_values(v_low + stage.index * (STAGE_BYTES / 16));
        wgmma_wait<0>();
        running.keep_values();
        release(shared.values_empty(stage.index));
        stage.advance();
    }

    // Passes a tile of keys that only other warpgroups see.
    __device__ __forceinline__ void skip() {
        barrier_wait(shared.keys_full(stage.index), stage.parity);
        __syncwarp();
        release(shared.keys_empty(stage.index));
        barrier_wait(shared.values_full(stage.index), stage.parity);
        __syncwarp();
        release(shared.values_empty(stage.index));
        stage.advance();
    }

    // `out`: the item's first row; `head`: its first.
    __device__ __forceinline__ void store(const Running& running, Element* out, int tokens, int head) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total = running.l[half];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            const float inverse = 1.0f / scores.total(total, running.m[half], head + place[half] - token[half] * heads);
#pragma unroll
            for (int span = 0; span < SPANS; ++span)
                store_row<SPAN>(
                    out + place[half] * D + span * SPAN, token[half] < tokens, D - span * SPAN, lane % 4, [&](int n) {
                        const float* pair = &running.o[span][4 * n + 2 * half];
                        return pack(pair[0] * inverse, pair[1] * inverse);
                    });
        }
    }

    __device__ __forceinline__ void compute_items(Element* out) {
        for (unsigned count = 0;; ++count) {
            const int slot = count % SLOTS;
            barrier_wait(shared.queries_full(slot), count / SLOTS & 1);
            Item item;
            item.tokens = uniform(shared.items[slot].tokens);
            if (item.tokens == 0) return;
            item.first = uniform(shared.items[slot].first), item.kv_head = uniform(shared.items[slot].kv_head);
            item.first_visible = uniform(shared.items[slot].first_visible);
            const bool has_tokens = first_of_warpgroup < item.tokens;
            const int seen = item.first_visible + min(last_of_warpgroup, item.tokens - 1);  // keys, by the warpgroup
            const int first = first_tile(item.first_visible, scores), end = (item.keys() + KEYS - 1) / KEYS;
            const int seen_first = has_tokens ? first_tile(item.first_visible + first_of_warpgroup, scores) : first;
            const int seen_end = has_tokens ? (seen + KEYS - 1) / KEYS : first;
            const Queries q(shared.q_tiles + slot * Q_BYTES + warp / 4 * 64 * 128, warp, lane);
            Running running;
            for (int tile = first; tile < seen_first; ++tile) skip();
            if (has_tokens) attend(running, q, item, seen_first, seen_end, slot);
            if (!Q_IN_REGISTERS || !has_tokens) release(shared.queries_empty(slot));
            for (int tile = seen_end; tile < end; ++tile) skip();
            const int64_t row = static_cast<int64_t>(item.first) * heads + item.kv_head * group;
            if (has_tokens) store(running, out + row * D, item.tokens, item.kv_head * group);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_attention(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                     const __grid_constant__ TensorMap v_map, const int* __restrict__ tables, int table_stride,
                     const int* __restrict__ lengths, const int* __restrict__ starts, const int* __restrict__ tiles,
                     Element* __restrict__ out, int tile_count, int heads, int kv_heads, float scale, float cap,
                     int window, const float* __restrict__ sinks) {
    KERNEL_BEGINS();
    extern __shared__ unsigned char dynamic[];
    __shared__ uint64_t barriers[Shared::BARRIERS];
    __shared__ Item told[SLOTS];
    const Shared shared(barriers, dynamic, told);
    const Scores scores{scale, cap, window, sinks};
    const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const int group = heads / kv_heads, tile_tokens = ROWS / group;
    launch_next();
    if (threadIdx.x == 0) shared.init_barriers();
    __syncthreads();

    if (warp >= WARPS) {
        give_registers<LARGE ? 40 : 32>();
        if (warp > WARPS) return;
        if (lane == 0) {
            prefetch_map(&q_map);
            prefetch_map(&k_map);
            prefetch_map(&v_map);
        }
        wait_for_previous(tables, lengths, starts, tiles);
        Loader loader{shared, &q_map, &k_map, &v_map, scores, lane, group, tile_tokens, kv_heads};
        const int items = tile_count * kv_heads, blocks = gridDim.x;
        for (int round = 0; round * blocks < items; ++round) {
            const int index = round * blocks + (round & 1 ? blocks - 1 - blockIdx.x : blockIdx.x);
            if (index >= items) continue;
            const int sequence = tiles[index / kv_heads * 2];
            if (sequence < 0) continue;
            const int start = starts[sequence], chunk_tokens = starts[sequence + 1] - start;
            const int length = lengths[sequence];
            const int first_token = tiles[index / kv_heads * 2 + 1] * tile_tokens;
            const int tokens = min(tile_tokens, chunk_tokens - first_token);
            if (tokens <= 0 || length <= 0) continue;
            const Item item{start + first_token, tokens, length - chunk_tokens + first_token + 1, index % kv_heads};
            loader.load_item(item, tables + static_cast<int64_t>(sequence) * table_stride);
        }
        loader.load_queries(Item{});
        return;
    }
    take_registers<LARGE ? 232 : 160>();
    wait_for_previous();
    Warpgroup(shared, warp, lane, heads, group, scores).compute_items(out);
}
#endif
