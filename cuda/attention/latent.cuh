// The rotated part of a row of latent attention: its pairs, and their angles.
//
//   table   (table_rows, rotated / 2, 2) float: cosines and sines of positions. Pairs are neighbours if `neighbours`, else i and
//           i + rotated / 2
#pragma once

#include "common/common.cuh"

// Where the two elements of pair i are.
static __device__ __forceinline__ int2 places_of(int pair, int rotated, int neighbours) {
    return neighbours ? make_int2(2 * pair, 2 * pair + 1) : make_int2(pair, pair + rotated / 2);
}

static __device__ __forceinline__ float2 turned_by(float first, float second, float2 angle) {
    return make_float2(__fmaf_rn(first, angle.x, -__fmul_rn(second, angle.y)),
                       __fmaf_rn(second, angle.x, __fmul_rn(first, angle.y)));
}

static __device__ __forceinline__ int row_of_table(int position, int rows) { return min(max(position, 0), rows - 1); }
