// Half precision on the host, in place of CUDA's header.
#pragma once

#include "cuda_on_host.h"

struct __half {
    uint16_t bits;
};
struct __half2 {
    __half x, y;
};

inline float __half2float(__half value) { return float(bits_as<_Float16>(value.bits)); }
inline __half __float2half_rn(float value) { return {bits_as<uint16_t>(_Float16(value))}; }
inline float2 __half22float2(__half2 pair) { return {__half2float(pair.x), __half2float(pair.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
