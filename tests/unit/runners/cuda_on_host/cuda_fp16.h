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
inline __half __low2half(__half2 pair) { return pair.x; }
inline __half __high2half(__half2 pair) { return pair.y; }
inline __half2 __half2half2(__half one) { return {one, one}; }
// Rounded once: of halves, products and sums with exponents that are not far apart are exact in double.
template <typename Operation>
inline __half2 rounded_pairs(__half2 a, __half2 b, __half2 c, Operation operation) {
    auto of = [&](__half x, __half y, __half z) {
        return __half{bits_as<uint16_t>(_Float16(operation(double(__half2float(x)), __half2float(y), __half2float(z))))};
    };
    return {of(a.x, b.x, c.x), of(a.y, b.y, c.y)};
}
inline __half2 __hadd2(__half2 a, __half2 b) {
    return rounded_pairs(a, b, b, [](double x, double y, double) { return x + y; });
}
inline __half2 __hmul2(__half2 a, __half2 b) {
    return rounded_pairs(a, b, b, [](double x, double y, double) { return x * y; });
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return rounded_pairs(a, b, c, [](double x, double y, double z) { return x * y + z; });
}
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
