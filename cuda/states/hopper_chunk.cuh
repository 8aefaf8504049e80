// Chunks on Hopper: products with the state by wgmma, of floats in two parts (`chunk.cuh`).
//
// A warpgroup has 64 columns of a state (KEYS, columns) in registers, as rows of the left operands. Right operands are rows of keys or
// queries in tiles of 64 x 64 with the 128-byte swizzle, the high parts' tiles, then the low ones'; all four warps read them once.
// Whoever includes this says before that elements are bfloat16: `hopper.cuh` multiplies elements.
#pragma once

#include "common/hopper.cuh"
#include "states/chunk.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

static constexpr int TILE = CHUNK * 128;  // bytes

template <int KEYS>
struct Tiles {
    static constexpr int COUNT = KEYS / 64, PART = COUNT * TILE, BYTES = 2 * PART;
};

// Rows in parts to tiles; zeros behind the last. A thread has the same 16 bytes of every so manieth row.
template <int KEYS, int THREADS>
static __device__ __forceinline__ void copy_tiles(unsigned char* target, const float* source, int stride, int length) {
    constexpr int OF_PART = KEYS / 8, EACH = 2 * OF_PART, STEP = THREADS / EACH;  // pieces of 16 bytes; rows
    const int row = threadIdx.x / EACH, piece = threadIdx.x % EACH;
    const int part = piece / OF_PART, tile = piece % OF_PART / 8, column = piece % 8;
    const uint32_t place = shared_address(target) + part * Tiles<KEYS>::PART + tile * TILE + row * 128;
    const uint32_t even = place + (column ^ (row & 7)) * 16, odd = place + (column ^ ((row + STEP) & 7)) * 16;
    const float* from = source + static_cast<int64_t>(row) * stride + piece * 4;
#pragma unroll
    for (int i = 0; i < CHUNK / STEP; ++i, from += STEP * stride)
        copy_async((i % 2 ? odd : even) + i * STEP * 128, from, row + i * STEP < length);
}

// result (64 columns of the state by 64 tokens) += 64 rows of the state times a tile of keys or queries.
template <int KEYS>
static __device__ __forceinline__ void start_products(Tokens& result, const Parts (&state)[4], const unsigned char* tile, bool more) {
    float(&sums)[32] = reinterpret_cast<float(&)[32]>(result.tiles);
    const uint64_t high = tile_descriptor(shared_address(tile)), low = tile_descriptor(shared_address(tile) + Tiles<KEYS>::PART);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        wgmma(sums, state[step].low, further(high, 2 * step), more || step > 0);
        wgmma(sums, state[step].high, further(low, 2 * step), 1);
        wgmma(sums, state[step].high, further(high, 2 * step), 1);
    }
}

// Starts result (+)= 64 rows of the state times that tile of keys or queries; `left`: room for its left operands, until it is done.
template <int KEYS>
static __device__ __forceinline__ void start_tile(Tokens& result, Parts (&left)[4], const HeldColumns<KEYS>& state,
                                                  const unsigned char* rows, int tile) {
#pragma unroll
    for (int step = 0; step < 4; ++step)
        left[step] = left_of(state.tiles[8 * tile + 2 * step], state.tiles[8 * tile + 2 * step + 1]);
    wgmma_begin();
    start_products<KEYS>(result, left, rows + tile * TILE, tile > 0);
    wgmma_commit();
}
static __device__ __forceinline__ void finish(Tokens& result) {
    wgmma_wait<0>();
    wgmma_keep(reinterpret_cast<float(&)[32]>(result.tiles));
}

// Starts: the state += what tokens write times rows of keys.
template <int KEYS>
static __device__ __forceinline__ void start_addition(HeldColumns<KEYS>& held, const Parts (&written)[4], const unsigned char* rows) {
    float(&sums)[KEYS / 2] = reinterpret_cast<float(&)[KEYS / 2]>(held.tiles);
    const uint64_t high = tile_descriptor(shared_address(rows), TILE), low = tile_descriptor(shared_address(rows) + Tiles<KEYS>::PART, TILE);
#pragma unroll
    for (int block = 0; block < 4; ++block) {
        const int at = block * 16 * 128 / 16;
        wgmma_rows(sums, written[block].low, further(high, at));
        wgmma_rows(sums, written[block].high, further(low, at));
        wgmma_rows(sums, written[block].high, further(high, at));
    }
}

// A chunk's values, 16 columns for each warp, which copies and reads them by itself; rows are padded so that lanes read different banks.
struct Values {
    static constexpr int STRIDE = 20;  // floats

    float rows[CHUNK][STRIDE];

    __device__ __forceinline__ void copy(const float* source, int stride, int length) {
        const uint32_t place = shared_address(rows);
        __syncwarp();  // nobody reads the chunk before any more
#pragma unroll
        for (int i = 0; i < CHUNK * 4 / 32; ++i) {
            const int row = i * 8 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 4;
            const bool wanted = row < length;
            copy_async(place + (row * STRIDE + column) * 4, source + static_cast<int64_t>(wanted ? row : 0) * stride + column,
                       wanted);
        }
        commit_copies();
    }
};

#endif
