// What is prepared of a chunk of Mamba-2 (`mamba_chunked.cu`), and what its tokens write and read of each other.
#pragma once

#include "states/chunk.cuh"

using Products = float[10][16][16];  // C B^T, the blocks of a triangle

// P of a head.
template <int THREADS>
static __device__ __forceinline__ void make_reading(const Triangle& reading, const Products& products, const Times& times) {
    for (int i = threadIdx.x; i < 10 * 16 * 8; i += THREADS) {
        const int block = i / 128, row = i % 128 / 8, column = i % 8 * 2;
        const int block_row = block_row_of(block), block_column = block - block_row * (block_row + 1) / 2;
        const int to = 16 * block_row + row, first = 16 * block_column + column;
        const float x = first <= to ? products[block][row][column] * times.between(to, first) : 0.0f;
        const float y = first + 1 <= to ? products[block][row][column + 1] * times.between(to, first + 1) : 0.0f;
        reading.store(block_row, block_column, row, column / 8, column % 8 / 2, x, y);
    }
}

// `own`, x, becomes what tokens write, dt x; `mixed`, C S, what they read of the state, with the skip. `written`: left operands.
static __device__ __forceinline__ void take_inputs(Tokens& own, Tokens& mixed, const Times& times, float skip, Parts (&written)[4]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int tile = 0; tile < 8; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = 8 * tile + 2 * t + i % 2;
            float &x = own.tiles[tile][i], &y = mixed.tiles[tile][i];
            y = __fmaf_rn(skip, x, y * times.kept[token]);
            x *= times.weight[token];
        }
#pragma unroll
    for (int block = 0; block < 4; ++block) written[block] = own.left(block);
}
