// Rows of the residual stream in registers, and their norms: what `residual.cu` and `experts/combine.cu` share.
//
// A norm divides v by sqrt(mean(v^2) + eps), multiplies by its weight (width,) float and adds its bias, if it has one; v is x
// less its mean where the norm is centred (LayerNorm: Ba et al. 2016), else x (RMS norm). Without a weight it is v = x.
#pragma once

#include "common/block_sum.cuh"

struct Norm {
    const float *weight, *bias;
    float eps;
    int centred;
};

// This thread's pieces of a row.
template <int PIECES>
struct Piece {
    float values[PIECES][8];

    static __device__ __forceinline__ int column(int piece) {
        return static_cast<int>(piece * blockDim.x + threadIdx.x) * 8;
    }
    // Calls take(piece, column) for those that there are.
    template <typename Take>
    static __device__ __forceinline__ void each(int width, Take take) {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece)
            if (column(piece) < width) take(piece, column(piece));
    }
    __device__ __forceinline__ void load(const float* row, int width) {
        each(width, [&](int piece, int at) { load8(row + at, values[piece]); });
    }
    __device__ __forceinline__ void add(const float* row, int width) {
        each(width, [&](int piece, int at) {
            float more[8];
            load8(row + at, more);
#pragma unroll
            for (int i = 0; i < 8; ++i) values[piece][i] += more[i];
        });
    }
};

template <int PIECES>
static __device__ __forceinline__ float inverse_rms(const Piece<PIECES>& row, float eps, int width, float* partial) {
    float squares = 0.0f;
    row.each(width, [&](int piece, int) {
#pragma unroll
        for (int i = 0; i < 8; ++i) squares = fmaf(row.values[piece][i], row.values[piece][i], squares);
    });
    return 1.0f / sqrtf(block_sum(squares, partial) / static_cast<float>(width) + eps);
}

// `gains`: the norm's weight, if it was read already (EARLY).
template <bool EARLY, int PIECES>
static __device__ __forceinline__ void normalise(Piece<PIECES>& row, Piece<PIECES>& gains, const Norm& norm, int width,
                                                 float (*partial)[32]) {
    if (norm.weight == nullptr) return;
    if (norm.centred) {
        float sum = 0.0f;
        row.each(width, [&](int piece, int) {
#pragma unroll
            for (int i = 0; i < 8; ++i) sum += row.values[piece][i];
        });
        const float mean = block_sum(sum, partial[0]) / static_cast<float>(width);
        row.each(width, [&](int piece, int) {
#pragma unroll
            for (int i = 0; i < 8; ++i) row.values[piece][i] -= mean;
        });
    }
    const float scale = inverse_rms(row, norm.eps, width, partial[1]);
    row.each(width, [&](int piece, int at) {
        if (!EARLY) load8(norm.weight + at, gains.values[piece]);
#pragma unroll
        for (int i = 0; i < 8; ++i) row.values[piece][i] *= scale * gains.values[piece][i];
    });
    if (norm.bias != nullptr) row.add(norm.bias, width);
}
