// As much of CUDA as kernels need in which threads do not meet: they become functions of C++, called once for each thread.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define __device__
#define __global__
#define __forceinline__ inline

struct Index {
    unsigned x, y, z;
};
struct float2 {
    float x, y;
};

using std::isfinite;

extern "C" {
Index blockIdx, blockDim, threadIdx;  // set by who calls
}

template <typename To, typename From>
inline To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To result;
    memcpy(&result, &value, sizeof(To));
    return result;
}

inline float __uint_as_float(uint32_t bits) { return bits_as<float>(bits); }
inline uint32_t __float_as_uint(float value) { return bits_as<uint32_t>(value); }

// Compiled without contraction, so each rounds for itself.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
