// E4M3, numbers of 8 bits: sign, 4 bits of exponent, 3 of mantissa; up to 448, below 2^-6 in steps of 2^-9, no infinity (Open
// Compute Project, "8-bit floating point specification", 2023). Every one of them is an element.
#pragma once

#include "common/element.cuh"

// The nearest number, even where two are as near; 448 for all that is larger; NaN is 0x7f.
static __device__ __forceinline__ uint32_t to_e4m3(float value) {
    constexpr float STEPS = 16384.0f;  // from here on floats are 2^-9 apart, as E4M3 below 2^-6
    const uint32_t sign = __float_as_uint(value) >> 24 & 0x80;
    const float magnitude = fabsf(value);
    if (!(magnitude <= 448.0f)) return sign | (magnitude > 448.0f ? 0x7e : 0x7f);
    if (magnitude < 0.015625f) return sign | (__float_as_uint(__fadd_rn(magnitude, STEPS)) - __float_as_uint(STEPS));
    const uint32_t bits = __float_as_uint(magnitude);
    return sign | ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
}

// Two of them, the first in the low byte.
static __device__ __forceinline__ uint32_t to_e4m3x2(float low, float high) {
#if __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return to_e4m3(low) | to_e4m3(high) << 8;
#endif
}

// Two of the four numbers in a word, the lower or the upper, none of them NaN, as elements. To say which costs nothing, a shift does.
static __device__ __forceinline__ Element2 elements_of_e4m3x2(uint32_t word, bool upper = false) {
#if __CUDA_ARCH__ >= 890 && !defined(ELEMENT_BF16)
    uint32_t halves;
    if (upper)
        asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high;}" : "=r"(halves) : "r"(word));
    else
        asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}" : "=r"(halves) : "r"(word));
    return *reinterpret_cast<const Element2*>(&halves);
#else
    // Exponent and mantissa where an element has them: that is the number times a power of two, even below 2^-6.
    const uint32_t top = __byte_perm(word, 0, upper ? 0x3424 : 0x1404);
#ifdef ELEMENT_BF16
    const uint32_t bits = (top & 0x80008000) | (top & 0x7f007f00) >> 4, power = 0x7b807b80;  // 2^120
#else
    const uint32_t bits = (top & 0x80008000) | (top & 0x7f007f00) >> 1, power = 0x5c005c00;  // 2^8
#endif
    return __hmul2(*reinterpret_cast<const Element2*>(&bits), *reinterpret_cast<const Element2*>(&power));
#endif
}
