// `common/basics.cuh` on the host, as far as attention and rows need it. There is no launch to wait for.
#pragma once

#include "warps_on_host.h"

static constexpr float LOG2_E = 1.4426950408889634f;

inline void load8(const float* source, float (&values)[8]) { host::copy(source, source + 8, values); }
inline void store8(float* target, const float (&values)[8]) { host::copy(values, values + 8, target); }
inline float negative_infinity() { return -INFINITY; }
inline float exp2_fast(float x) { return exp2f(x); }
inline float reciprocal_fast(float x) { return 1.0f / x; }
inline float warp_sum(float value) {
    for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}
inline float warp_max(float value) {
    for (int offset = 16; offset > 0; offset >>= 1) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
    return value;
}
inline void launch_next() {}
template <typename... Pointers>
inline void wait_for_previous(Pointers&...) {}
