// What `hopper_attention.cu` works on: an item, and how a block's shared memory is divided among items, keys and values.
#pragma once

#include "attention/attention.cuh"
#include "common/hopper.cuh"

static constexpr bool LARGE = D > 128;
static constexpr int GROUPS = LARGE ? 2 : 3;  // warpgroups that compute
static constexpr int WARPS = 4 * GROUPS;  // of those; the next one loads
static constexpr int ROWS = 64 * GROUPS;
static constexpr int KEYS = 64;
static constexpr int STAGES = D == 64 ? 4 : LARGE ? 2 : 3;
static constexpr int SLOTS = LARGE ? 1 : 2;  // for items and their queries
static constexpr int THREADS = 128 * (GROUPS + 1);
static constexpr bool Q_IN_REGISTERS = D == 64;  // shared memory could hardly feed both sides of the product
static constexpr int SIDES = (D + 63) / 64;      // swizzled tiles side by side
static constexpr int WIDTH = 64 * SIDES;
static constexpr int Q_BYTES = ROWS * WIDTH * 2, TILE_BYTES = KEYS * WIDTH * 2, STAGE_BYTES = 2 * TILE_BYTES;
static constexpr int TILE_PAGES = KEYS / PAGE, BOX_BYTES = PAGE * 128;

struct Item {
    int first;          // row of qkv and out of its first token
    int tokens;         // 0: there are no more items
    int first_visible;  // keys that the first token sees
    int kv_head;

    __device__ __forceinline__ int keys() const { return first_visible + tokens - 1; }  // that the last token sees
};

// The tile of keys with which a token's begin, `visible` keys being there with its own.
static __device__ __forceinline__ int first_tile(int visible, const Scores& scores) {
    return scores.first_seen(visible) / KEYS;
}

// A place in the ring of keys and values, and the parity of its barriers' phase.
struct Stage {
    int index, parity;

    __device__ __forceinline__ void advance() {
        if (++index == STAGES) index = 0, parity ^= 1;
    }
};

// Shared memory: STAGES of keys and values, SLOTS of an item and its queries, and barriers for what has come
// (full) and what all warps are done with (empty).
struct Shared {
    static constexpr int BARRIERS = 4 * STAGES + 2 * SLOTS;
    Item* items;
    uint32_t full, full_q, k_tiles, v_tiles, q_tiles;

    __device__ __forceinline__ Shared(const uint64_t* barriers, const unsigned char* tiles, Item* items) : items(items) {
        full = shared_address(barriers), full_q = full + 32 * STAGES;
        k_tiles = (shared_address(tiles) + 1023) & ~1023u, v_tiles = k_tiles + TILE_BYTES;
        q_tiles = k_tiles + STAGES * STAGE_BYTES;
    }
    // BARRIER keys_full, values_full: of a stage. One lane of the warp that loads arrives, and expects the bytes; it does so again when
    // the stage's `..._empty` said that all warps have done with it. Each warp that computes waits for all phases, one after the
    // other, its lanes together: also for tiles that it only passes (`skip`).
    // BARRIER keys_empty, values_empty: of a stage. Each of the WARPS warps that compute arrives once for each filling, when all its lanes
    // have waited for that; the lanes of the warp that loads wait for all phases, one after the other, the first of which is over before
    // it begins. Before it fills a stage nobody can arrive again.
    // BARRIER queries_full: of a slot. One lane of the warp that loads arrives when the item is written, and expects the queries' bytes;
    // each warp that computes waits for all phases, one after the other.
    // BARRIER queries_empty: of a slot. Each of the WARPS warps arrives once for each item that has tokens, when it has taken item and
    // queries; the warp that loads waits for all phases, one after the other, and only then writes the next item, which a warp has to
    // wait for before it can arrive again.
    __device__ __forceinline__ uint32_t keys_full(int stage) const { return full + 8 * stage; }
    __device__ __forceinline__ uint32_t values_full(int stage) const { return full + 8 * stage + 8 * STAGES; }
    __device__ __forceinline__ uint32_t keys_empty(int stage) const { return full + 8 * stage + 16 * STAGES; }
    __device__ __forceinline__ uint32_t values_empty(int stage) const { return full + 8 * stage + 24 * STAGES; }
    __device__ __forceinline__ uint32_t queries_full(int slot) const { return full_q + 8 * slot; }
    __device__ __forceinline__ uint32_t queries_empty(int slot) const { return full_q + 8 * SLOTS + 8 * slot; }

    __device__ __forceinline__ void init_barriers() const {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(keys_full(stage), 1);
            barrier_init(values_full(stage), 1);
            barrier_init(keys_empty(stage), WARPS);
            barrier_init(values_empty(stage), WARPS);
        }
        for (int slot = 0; slot < SLOTS; ++slot) {
            barrier_init(queries_full(slot), 1);
            barrier_init(queries_empty(slot), WARPS);
        }
        publish_barriers();
    }
};
