// What a warpgroup of `hopper_attention.cu` computes of its 64 rows with a tile of keys and values: products, exponentials and sums.
//
// Exponentials are 2^(score - m). m is the largest score of a row in the first 64 keys of which it sees any, and stays until a lane's
// part of the sum over 64 keys is above LIMIT: then it becomes the largest of those, and what was summed shrinks. So
// hardly any tile needs the maximum, on which the exponentials would wait, and P stays far within half's range. A row decides
// by itself: its bits do not depend on the rows beside it, nor on how a prompt was cut into chunks.
#pragma once

#include "attention/hopper_tiles.cuh"

// Of results that one product adds to, of which SPANS make a row.
static constexpr int SPAN = WIDTH % 128 == 0 ? 128 : 64, SPANS = WIDTH / SPAN;
static constexpr float LIMIT = 4096.0f;
static constexpr float LOWEST = -1e30f;  // stands for -inf where a difference must not be NaN

// `tile_descriptor` in parts: the low word, to which offsets / 16 are added, and the rest, always the same.
static __device__ __forceinline__ uint32_t low_word(uint32_t address, uint32_t side = 16) {
    return static_cast<uint32_t>(tile_descriptor(address, side));
}
static __device__ __forceinline__ uint64_t with_low_word(uint32_t low) {
    return (tile_descriptor(0, 0) & ~uint64_t(0xffffffff)) | low;
}

// The queries of a warpgroup's 64 rows.
struct Queries {
    uint32_t fragments[Q_IN_REGISTERS ? D / 16 : 1][4];
    uint32_t low;

    __device__ __forceinline__ Queries(uint32_t tile, int warp, int lane) {
        if constexpr (Q_IN_REGISTERS) {
            const int row = warp % 4 * 16 + lane % 16;
#pragma unroll
            for (int step = 0; step < D / 16; ++step)
                load_matrices(fragments[step], tile + row * 128 + (((step * 2 + lane / 16) ^ (row & 7)) * 16));
        }
        low = low_word(tile);
    }
};

// What a thread has of its two rows, g and g + 8 of its warp's 16 (`half`): the result so far (m, l, o), and the tile of
// keys that is being taken into it.
struct Running {
    float o[SPANS][SPAN / 2] = {}, s[KEYS / 2], weights[KEYS / 2];
    uint32_t p[KEYS / 16][4];                            // the weights, rounded to elements
    float m[2], l[2], sum[2], shrink[2] = {1.0f, 1.0f};  // m in units of log2
    bool raised = false;                                 // m of a row of the warp

    // Starts S = Q K^T; `keys`: the low word of their tile.
    __device__ __forceinline__ void start_scores(const Queries& q, uint32_t keys) {
        wgmma_begin();
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
            const uint64_t b = with_low_word(keys + (step / 4 * KEYS * 128 + step % 4 * 32) / 16);
            if constexpr (Q_IN_REGISTERS)
                wgmma(s, q.fragments[step], b, step > 0);
            else
                wgmma(s, with_low_word(q.low + (step / 4 * ROWS * 128 + step % 4 * 32) / 16), b, step > 0);
        }
        wgmma_commit();
    }

    // Starts O += P V.
    __device__ __forceinline__ void start_values(uint32_t values) {
        wgmma_begin();
#pragma unroll
        for (int block = 0; block < KEYS / 16; ++block)
#pragma unroll
            for (int span = 0; span < SPANS; ++span)
                wgmma_rows(o[span], p[block],
                           with_low_word(values + (span * SPAN / 64 * KEYS * 128 + block * 16 * 128) / 16));
        wgmma_commit();
    }

    // Products to scores with a cap, in units of log2; else they stay as they are, and are scaled as they are used.
    __device__ __forceinline__ void cap(const Scores& scores) {
        if constexpr (CAPPED) {
#pragma unroll
            for (int i = 0; i < KEYS / 2; ++i) s[i] = scores(s[i]);
        }
    }

    // `visible`: keys of the tile up to the last that the rows see; of these, the last `window`.
    __device__ __forceinline__ void mask(const int (&visible)[2], int t, int window) {
        const int mine[2] = {visible[0] - 2 * t, visible[1] - 2 * t};  // from this thread's first on
#pragma unroll
        for (int i = 0; i < KEYS / 2; ++i) {
            const int key = i / 4 * 8 + i % 2, end = mine[i >> 1 & 1];
            if (key >= end || (WINDOWED && key < end - window)) s[i] = negative_infinity();
        }
    }

    __device__ __forceinline__ float largest(int half, float scale) const {
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
    }

    // Weights and their sums, in an order that the column gives.
    __device__ __forceinline__ void weigh(float scale) {
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
    }

    // The first tile of keys: m and l begin with it.
    __device__ __forceinline__ void weigh_first(float scale) {
        m[0] = largest(0, scale), m[1] = largest(1, scale);
        weigh(scale);
        l[0] = sum[0], l[1] = sum[1];
    }

    // A further one. m is raised in the rows where a lane's sum is too large.
    __device__ __forceinline__ void weigh_next(float scale, int lane) {
        weigh(scale);
        const uint32_t over[2] = {__ballot_sync(0xffffffffu, sum[0] > LIMIT),
                                  __ballot_sync(0xffffffffu, sum[1] > LIMIT)};
        raised = (over[0] | over[1]) != 0;
        if (raised) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const bool mine = over[half] >> (lane & 28) & 15;
                const float top = largest(half, scale);
                shrink[half] = mine ? exp2_fast(__fsub_rn(m[half], top)) : 1.0f;
                m[half] = mine ? top : m[half];
                l[half] = __fmul_rn(l[half], shrink[half]);
            }
            weigh(scale);  // the same again for the other rows
        }
        l[0] = __fadd_rn(l[0], sum[0]), l[1] = __fadd_rn(l[1], sum[1]);
    }

    __device__ __forceinline__ void shrink_values() {
        if (!raised) return;
#pragma unroll
        for (int span = 0; span < SPANS; ++span)
#pragma unroll
            for (int i = 0; i < SPAN / 2; ++i) o[span][i] *= shrink[i >> 1 & 1];
    }

    __device__ __forceinline__ void keep_values() {
#pragma unroll
        for (int span = 0; span < SPANS; ++span) wgmma_keep(o[span]);
    }

    __device__ __forceinline__ void round_weights() {
#pragma unroll
        for (int block = 0; block < KEYS / 16; ++block)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = &weights[4 * (2 * block + (i >> 1)) + 2 * (i & 1)];
                p[block][i] = pack(pair[0], pair[1]);
            }
    }
};
