// What kernels of layers with states share: pieces of sequences, elements of rows as floats, the functions of gates.
//
// A piece is consecutive rows of a step that go through the state of a slot; `Pieces` in states/operands.py says more. All kernels
// leave a piece of length 0 alone. What is kept of a state is computed with accurate functions: its errors would add up.
#pragma once

#include "common/common.cuh"

struct Piece {
    int row, length, slot, start;
};

// Addresses of int arrays, a number for each piece.
struct Pieces {
    const int *rows, *lengths, *slots, *starts;

    __device__ __forceinline__ Piece operator[](int index) const {
        return {rows[index], lengths[index], slots[index], starts[index]};
    }
};

#define PIECES const int *rows, const int *lengths, const int *slots, const int *starts

static __device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
// x / (1 + exp(-x)), to 2^-21.
static __device__ __forceinline__ float silu(float x) { return x * reciprocal_fast(1.0f + exp2_fast(-x * LOG2_E)); }
// log(1 + exp(x)).
static __device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// Eight elements, one 16-byte access.
static __device__ __forceinline__ void load8_elements(const Element* source, float (&values)[8]) {
    const Element8 packed = *reinterpret_cast<const Element8*>(source);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = to_floats(*reinterpret_cast<const Element2*>(&packed.word[i]));
        values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
    }
}
static __device__ __forceinline__ void store8_elements(Element* target, const float (&values)[8]) {
    Element8 packed;
#pragma unroll
    for (int i = 0; i < 4; ++i) packed.word[i] = pack(values[2 * i], values[2 * i + 1]);
    *reinterpret_cast<Element8*>(target) = packed;
}

// A row's numbers that steer a head: floats of their own, or, where there are none, elements of x from a column on.
struct Controls {
    const float* floats;
    int float_stride;
    const Element* elements;  // from that column on
    int stride;

    __device__ __forceinline__ float operator()(int row, int index) const {
        return floats != nullptr ? floats[static_cast<int64_t>(row) * float_stride + index]
                                 : to_float(elements[static_cast<int64_t>(row) * stride + index]);
    }
};
