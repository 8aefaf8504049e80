// What is prepared of a chunk of a delta net (`delta_chunked.cu`), and what its tokens write and read of each other.
#pragma once

#include "states/chunk.cuh"
#include "states/delta_heads.cuh"

// Of a chunk and value head: A without its diagonal's blocks, the sign changed, and these inverted; P; what tokens keep.
struct alignas(16) Record {
    unsigned char before[Triangle::BYTES], reading[Triangle::BYTES];
    Times times;
};

// `own`, the values, become what tokens write; `known` is K S. `written`: the former as left operands.
static __device__ __forceinline__ void solve(Tokens& own, const Tokens& known, Record& record, Parts (&written)[4]) {
    const Times& times = record.times;
    const Triangle before{record.before};
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int tile = 0; tile < 8; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = 8 * tile + 2 * t + i % 2;
            own.tiles[tile][i] = times.weight[token] * (own.tiles[tile][i] - times.kept[token] * known.tiles[tile][i]);
        }
#pragma unroll
    for (int block = 0; block < 4; ++block) {
        float(&low)[4] = own.tiles[2 * block];
        float(&high)[4] = own.tiles[2 * block + 1];
#pragma unroll
        for (int earlier = 0; earlier < block; ++earlier)
            multiply(low, high, written[earlier], before.right(block, earlier));
        const Parts left = left_of(low, high);
#pragma unroll
        for (int i = 0; i < 4; ++i) low[i] = high[i] = 0.0f;
        multiply(low, high, left, before.right(block, block));
        written[block] = left_of(low, high);
    }
}

// `mixed`, Q S, becomes what tokens read.
static __device__ __forceinline__ void read(Tokens& mixed, Record& record, const Parts (&written)[4]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int tile = 0; tile < 8; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) mixed.tiles[tile][i] *= record.times.kept[8 * tile + 2 * t + i % 2];
    mixed.read(written, {record.reading});
}

// `written`: of what tokens write, the share that is kept at the chunk's end.
static __device__ __forceinline__ void weigh(const Tokens& own, const Times& times, Parts (&written)[4]) {
#pragma unroll
    for (int block = 0; block < 4; ++block) written[block] = own.left(block, times.last);
}
