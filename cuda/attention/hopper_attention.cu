// Prefill attention on Hopper, by wgmma and bulk tensor copies.
//
//   queries  half (T, H + 2 G, D), through a tensor map with boxes of 64 columns, H / G heads and a tile's tokens
//   keys, values  half [pages, G, 16, D], through tensor maps of rows of D, with boxes of a page: 64 columns, 16 rows
// Other arguments as in `prefill_attention.cu`, but that `tiles` has `tile_count` pieces of 192 / (H / G) tokens.
//
// A block has three warpgroups that compute, 64 rows each, a row being a (token, query head) pair, and a warp that
// copies. Blocks stay and go through the tiles, forth and back so that all get as many keys; the copying warp runs
// ahead into the next tile: its queries, then keys and values, 64 at a time, STAGES deep. Tiles in shared memory are
// 64 halves wide with wgmma's 128-byte swizzle, D / 64 of them side by side, a page being 16 rows of one.
//
// Scores S = Q K^T are FP32 in registers, and, rounded to half, are the left side of O += P V. While a warpgroup takes
// the exponentials of one tile of keys, the product with the values before them runs, and so do products of the others.
//
// Exponentials are 2^(score - m). m is the largest score of a row among the first 64 keys, and stays until a lane's
// part of the sum over 64 keys is above LIMIT: then it becomes the largest of those, and what was summed shrinks. So
// hardly any tile needs the maximum, on which the exponentials would wait, and P stays far within half. A row decides
// by itself: its bits do not depend on the rows beside it, nor on how a prompt was cut into chunks.
//
// Keys behind the last visible one may hold anything, NaN too, or be those of an earlier tile: scores are masked, and
// values set to zero, since P = 0 times NaN is NaN.
//
// Options: -DHEAD_DIM, 64 or 128. Dynamic shared memory: (2 * 192 + STAGES * 128) * D halves, and 1,024 bytes.
// 512 threads; as many blocks as the device holds, or tiles times KV heads where those are fewer.
#include "attention/attention.cuh"
#include "common/hopper.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "other head sizes: attention_any.cu");

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

static constexpr int D = HEAD_DIM;
static constexpr int GROUPS = 3;  // warpgroups that compute
static constexpr int ROWS = 64 * GROUPS;
static constexpr int KEYS = 64;
static constexpr int STAGES = D == 64 ? 4 : 3;
static constexpr int THREADS = 128 * (GROUPS + 1);
static constexpr bool Q_IN_REGISTERS = D == 64;
static constexpr int SIDES = D / 64;  // swizzled tiles side by side
static constexpr int Q_BYTES = ROWS * D * 2, TILE_BYTES = KEYS * D * 2;
static constexpr int TILE_PAGES = KEYS / PAGE, BOX_BYTES = PAGE * 128;
static constexpr float LIMIT = 4096.0f;
static constexpr float LOWEST = -1e30f;  // stands for -inf where a difference must not be NaN

// What the copying warp tells of a tile.
struct Item {
    int first;          // row of qkv and out of its first token
    int tokens;         // 0: there are no more tiles
    int first_visible;  // keys that the first token sees
    int kv_head;
};

static __device__ __forceinline__ float exp2_fast(float x) {  // -inf gives 0; x is never large but where P is discarded
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The compiler sees that all lanes have the same, and computes addresses once a warp.
static __device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// `tile_descriptor` in parts: the low word, to which offsets / 16 are added, and the rest, always the same.
static __device__ __forceinline__ uint32_t low_word(uint32_t address, uint32_t side = 16) {
    return static_cast<uint32_t>(tile_descriptor(address, side));
}
static __device__ __forceinline__ uint64_t with_low_word(uint32_t low) {
    return (tile_descriptor(0, 0) & ~uint64_t(0xffffffff)) | low;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_attention(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                     const __grid_constant__ TensorMap v_map, const int* __restrict__ tables, int table_stride,
                     const int* __restrict__ lengths, const int* __restrict__ starts, const int* __restrict__ tiles,
                     __half* __restrict__ out, int tile_count, int heads, int kv_heads, float scale) {
    extern __shared__ unsigned char shared[];
    __shared__ uint64_t barriers[4 * STAGES + 4];
    __shared__ Item ring[2];
    // Barriers of a stage: its keys have come, its values; keys are no longer needed, nor are values.
    constexpr int VALUES = 8 * STAGES, KEYS_DONE = 16 * STAGES, VALUES_DONE = 24 * STAGES;
    const uint32_t full = shared_address(barriers), full_q = full + 32 * STAGES, empty_q = full_q + 16;
    const uint32_t k_tiles = (shared_address(shared) + 1023) & ~1023u, v_tiles = k_tiles + TILE_BYTES;
    const uint32_t q_tiles = k_tiles + STAGES * 2 * TILE_BYTES;
    const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const int group = heads / kv_heads, tile_tokens = ROWS / group;
    launch_next();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + 8 * stage, 1);
            barrier_init(full + VALUES + 8 * stage, 1);
            barrier_init(full + KEYS_DONE + 8 * stage, 4 * GROUPS);
            barrier_init(full + VALUES_DONE + 8 * stage, 4 * GROUPS);
        }
        for (int slot = 0; slot < 2; ++slot) {
            barrier_init(full_q + 8 * slot, 1);
            barrier_init(empty_q + 8 * slot, 4 * GROUPS);
        }
        publish_barriers();
    }
    __syncthreads();

    if (warp >= 4 * GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (warp > 4 * GROUPS) return;
        if (lane == 0) {
            prefetch_map(&q_map);
            prefetch_map(&k_map);
            prefetch_map(&v_map);
        }
        wait_for_previous(tables, lengths, starts, tiles);
        int stage = 0, parity = 1, count = 0;  // waiting for the odd phase before a barrier's first returns at once
        auto announce = [&](const Item& item) {
            const int slot = count & 1;
            barrier_wait(empty_q + 8 * slot, (count >> 1 & 1) ^ 1);
            if (lane == 0) {
                ring[slot] = item;
                if (item.tokens > 0) {
                    barrier_expect(full_q + 8 * slot, SIDES * 128 * group * tile_tokens);
                    for (int side = 0; side < SIDES; ++side)
                        load_box(q_tiles + slot * Q_BYTES + side * ROWS * 128, &q_map, full_q + 8 * slot, side * 64,
                                 item.kv_head * group, item.first);
                } else {
                    barrier_arrive(full_q + 8 * slot);
                }
            }
            __syncwarp();
            ++count;
        };
        // A lane copies one box of a stage: the page `place`, columns from 64 `side`.
        const int side = lane / TILE_PAGES, place = lane % TILE_PAGES;
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
            const int* table = tables + static_cast<int64_t>(sequence) * table_stride;
            const int pages = (item.first_visible + tokens - 1 + PAGE - 1) / PAGE;
            int page = place < pages ? table[place] : 0;
            announce(item);
            for (int first_page = 0; first_page < pages; first_page += TILE_PAGES) {
                const int here = min(TILE_PAGES, pages - first_page);
                const int row = static_cast<int>(page_row(page, item.kv_head, kv_heads));
                if (first_page + TILE_PAGES + place < pages) page = table[first_page + TILE_PAGES + place];
                const bool copies = side < SIDES && place < here;
                const uint32_t barrier = full + 8 * stage;
                const uint32_t target = stage * 2 * TILE_BYTES + side * KEYS * 128 + place * BOX_BYTES;
                barrier_wait(barrier + KEYS_DONE, parity);
                if (lane == 0) barrier_expect(barrier, here * SIDES * BOX_BYTES);
                __syncwarp();
                if (copies) load_box(k_tiles + target, &k_map, barrier, side * 64, row);
                barrier_wait(barrier + VALUES_DONE, parity);
                if (lane == 0) barrier_expect(barrier + VALUES, here * SIDES * BOX_BYTES);
                __syncwarp();
                if (copies) load_box(v_tiles + target, &v_map, barrier + VALUES, side * 64, row);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        announce(Item{});
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    wait_for_previous();

    const int warpgroup = warp / 4, g = lane / 4, t = lane % 4;
    const uint32_t k_low = low_word(k_tiles), v_low = low_word(v_tiles, KEYS * 128);
    auto release = [&](uint32_t barrier) {
        if (lane == 0) barrier_arrive(barrier);
    };
    // Of this thread's rows g and g + 8 of the warp: the token in the tile, and how far a row of `out` lies from the
    // first token's. Divisions take long: once, not for every tile.
    int token[2], place[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = warp * 16 + g + 8 * half;
        token[half] = row / group;
        place[half] = token[half] * heads + row % group;
    }
    const int first_of_warp = warp * 16 / group;
    const int first_of_warpgroup = warpgroup * 64 / group, last_of_warpgroup = (warpgroup * 64 + 63) / group;
    int stage = 0, parity = 0;  // of the next keys
    auto advance = [&]() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    };
    for (int count = 0;; ++count) {
        const int slot = count & 1;
        barrier_wait(full_q + 8 * slot, count >> 1 & 1);
        const int tokens = uniform(ring[slot].tokens);
        if (tokens == 0) break;
        const int first = uniform(ring[slot].first), first_head = uniform(ring[slot].kv_head) * group;
        const int first_visible = uniform(ring[slot].first_visible);
        const int keys = first_visible + tokens - 1, key_tiles = (keys + KEYS - 1) / KEYS;
        // Tiles of keys that this warpgroup's rows see, and keys that all rows of the warp see.
        const bool has_tokens = first_of_warpgroup < tokens;
        const int seen = first_visible + min(last_of_warpgroup, tokens - 1);
        const int visible_tiles = has_tokens ? (seen + KEYS - 1) / KEYS : 0;
        const int warp_visible = first_visible + first_of_warp;
        const uint32_t q_tile = q_tiles + slot * Q_BYTES + warpgroup * 64 * 128;

        // For D = 64 queries go to registers: shared memory could hardly feed both sides of the product.
        uint32_t q[Q_IN_REGISTERS ? D / 16 : 1][4];
        if constexpr (Q_IN_REGISTERS) {
            const int row = warp % 4 * 16 + lane % 16;
#pragma unroll
            for (int step = 0; step < D / 16; ++step)
                load_matrices(q[step], q_tile + row * 128 + (((step * 2 + lane / 16) ^ (row & 7)) * 16));
        }
        const uint32_t q_low = low_word(q_tile);
        float o[D / 2] = {}, s[KEYS / 2], weights[KEYS / 2];
        uint32_t p[KEYS / 16][4];
        float m[2], l[2], sum[2], shrink[2] = {1.0f, 1.0f};  // m in units of log2
        bool raised = false;                                 // m of a row of the warp
        auto score = [&]() {
            const uint32_t low = k_low + stage * (2 * TILE_BYTES / 16);
            wgmma_begin();
#pragma unroll
            for (int step = 0; step < D / 16; ++step) {
                const uint64_t b = with_low_word(low + (step / 4 * KEYS * 128 + step % 4 * 32) / 16);
                if constexpr (Q_IN_REGISTERS)
                    wgmma(s, q[step], b, step > 0);
                else
                    wgmma(s, with_low_word(q_low + (step / 4 * ROWS * 128 + step % 4 * 32) / 16), b, step > 0);
            }
            wgmma_commit();
        };
        auto add_values = [&](int of_stage) {
            const uint32_t low = v_low + of_stage * (2 * TILE_BYTES / 16);
            wgmma_begin();
#pragma unroll
            for (int block = 0; block < KEYS / 16; ++block)
                wgmma_rows(o, p[block], with_low_word(low + block * 16 * 128 / 16));
            wgmma_commit();
        };
        auto mask = [&](int tile) {
            if ((tile + 1) * KEYS <= warp_visible) return;
            int visible[2];  // keys of the tile, from this thread's first on
#pragma unroll
            for (int half = 0; half < 2; ++half)
                visible[half] = (token[half] < tokens ? first_visible + token[half] : 0) - tile * KEYS - 2 * t;
#pragma unroll
            for (int i = 0; i < KEYS / 2; ++i)
                if (i / 4 * 8 + i % 2 >= visible[i >> 1 & 1]) s[i] = negative_infinity();
        };
        auto largest = [&](int half) {
            float top[4];
#pragma unroll
            for (int i = 0; i < KEYS / 4; ++i) {
                const float value = s[i / 2 * 4 + 2 * half + i % 2];
                top[i % 4] = i < 4 ? value : fmaxf(top[i % 4], value);
            }
            float value = fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
            value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
            value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
            return fmaxf(__fmul_rn(value, scale), LOWEST);
        };
        auto weigh = [&]() {  // weights and their sums, in an order that the column gives
            float part[2][4];
#pragma unroll
            for (int i = 0; i < KEYS / 2; ++i) {
                const int half = i >> 1 & 1, chain = i / 4 % 2 * 2 + i % 2;
                weights[i] = exp2_fast(__fmaf_rn(s[i], scale, -m[half]));
                part[half][chain] = i < 8 ? weights[i] : __fadd_rn(part[half][chain], weights[i]);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half)
                sum[half] = __fadd_rn(__fadd_rn(part[half][0], part[half][1]), __fadd_rn(part[half][2], part[half][3]));
        };
        auto raise = [&]() {  // m of the rows where a lane's sum is too large
            const uint32_t over[2] = {__ballot_sync(0xffffffffu, sum[0] > LIMIT),
                                      __ballot_sync(0xffffffffu, sum[1] > LIMIT)};
            raised = (over[0] | over[1]) != 0;
            if (!raised) return;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const bool mine = over[half] >> (lane & 28) & 15;
                const float top = largest(half);
                shrink[half] = mine ? exp2_fast(__fsub_rn(m[half], top)) : 1.0f;
                m[half] = mine ? top : m[half];
                l[half] = __fmul_rn(l[half], shrink[half]);
            }
            weigh();  // the same again for the other rows
        };
        auto round_weights = [&]() {
#pragma unroll
            for (int block = 0; block < KEYS / 16; ++block)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* pair = &weights[4 * (2 * block + (i >> 1)) + 2 * (i & 1)];
                    p[block][i] = pack(pair[0], pair[1]);
                }
        };

        if (has_tokens) {
            barrier_wait(full + 8 * stage, parity);
            score();
            wgmma_wait<0>();
            wgmma_keep(s);
            release(full + KEYS_DONE + 8 * stage);
            if (Q_IN_REGISTERS) release(empty_q + 8 * slot);
            mask(0);
            m[0] = largest(0), m[1] = largest(1);
            weigh();
            l[0] = sum[0], l[1] = sum[1];
            round_weights();
            barrier_wait(full + VALUES + 8 * stage, parity);
            for (int tile = 1; tile < visible_tiles; ++tile) {
                const int before = stage;
                advance();
                barrier_wait(full + 8 * stage, parity);
                score();
                add_values(before);
                wgmma_wait<1>();
                wgmma_keep(s);
                release(full + KEYS_DONE + 8 * stage);
                mask(tile);
                weigh();
                raise();
                l[0] = __fadd_rn(l[0], sum[0]), l[1] = __fadd_rn(l[1], sum[1]);
                // The loop that waits for values keeps the compiler from waiting for the product first.
                wgmma_keep(weights);
                barrier_wait(full + VALUES + 8 * stage, parity);
                wgmma_wait<0>();
                wgmma_keep(o);
                release(full + VALUES_DONE + 8 * before);
                if (raised) {
#pragma unroll
                    for (int i = 0; i < D / 2; ++i) o[i] *= shrink[i >> 1 & 1];
                }
                round_weights();
            }
            if (visible_tiles * KEYS > keys) {  // every warpgroup clears what it reads: none waits for another
                const int behind = keys - (visible_tiles - 1) * KEYS;
                for (int i = behind * 8 + threadIdx.x % 128; i < KEYS * 8; i += 128)
                    for (int side = 0; side < SIDES; ++side)
                        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(v_tiles + stage * 2 * TILE_BYTES +
                                                                                      side * KEYS * 128 + i * 16),
                                     "r"(0)
                                     : "memory");
                publish_to_wgmma();
                group_sync(warpgroup);
            }
            add_values(stage);
            wgmma_wait<0>();
            wgmma_keep(o);
            release(full + VALUES_DONE + 8 * stage);
            advance();
        }
        if (!Q_IN_REGISTERS || !has_tokens) release(empty_q + 8 * slot);
        for (int tile = visible_tiles; tile < key_tiles; ++tile, advance()) {  // of the other warpgroups
            barrier_wait(full + 8 * stage, parity);
            release(full + KEYS_DONE + 8 * stage);
            barrier_wait(full + VALUES + 8 * stage, parity);
            release(full + VALUES_DONE + 8 * stage);
        }
        if (!has_tokens) continue;

        __half* first_out = out + (static_cast<int64_t>(first) * heads + first_head) * D;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total = l[half];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            const float inverse = 1.0f / total;
            store_row<D>(first_out + place[half] * D, token[half] < tokens, D, t, [&](int n) {
                return pack(o[4 * n + 2 * half] * inverse, o[4 * n + 2 * half + 1] * inverse);
            });
        }
    }
}
#endif
