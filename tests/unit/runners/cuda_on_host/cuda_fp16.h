// Half precision on the host, in place of CUDA's header.
#pragma once

#include "cuda_on_host.h"

struct __half {
    uint16_t bits;
};

inline float __half2float(__half value) { return float(bits_as<_Float16>(value.bits)); }
inline __half __float2half_rn(float value) { return {bits_as<uint16_t>(_Float16(value))}; }
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline uint16_t __half_as_ushort(__half value) { return value.bits; }
