// GGUF blocks, one struct a type: `at(block, i)` is weight i of a block of BYTES bytes that holds SIZE of them, in float, what
// `gguf.quants.dequantize` computes, bit for bit.
//
// Products and sums are written as intrinsics, because contraction into an FMA would round once instead of twice. Types that
// can be kept packed (`repack.cu`) also give `number(block, i)`, the whole number in the file, or so much more
// that it is from 0 on.
#pragma once

#include "common/element.cuh"
#include <cuda_fp16.h>
#include <stdint.h>

namespace {

__device__ __forceinline__ float half_at(const uint8_t* p) {
    return __half2float(__ushort_as_half(*reinterpret_cast<const uint16_t*>(p)));
}

struct F32 {
    static constexpr int SIZE = 1, BYTES = 4;
    static __device__ float at(const uint8_t* b, int) { return *reinterpret_cast<const float*>(b); }
};

struct F16 {
    static constexpr int SIZE = 1, BYTES = 2;
    static __device__ float at(const uint8_t* b, int) { return half_at(b); }
};

struct BF16 {
    static constexpr int SIZE = 1, BYTES = 2;
    static __device__ float at(const uint8_t* b, int) {
        return __uint_as_float(uint32_t(*reinterpret_cast<const uint16_t*>(b)) << 16);
    }
};

// In the 32-weight types the low nibbles are the first 16 weights, the high nibbles the last.
__device__ __forceinline__ int nibble(const uint8_t* qs, int i) { return (qs[i & 15] >> (i & 16 ? 4 : 0)) & 15; }

__device__ __forceinline__ int fifth_bit(const uint8_t* qh, int i) { return (qh[i >> 3] >> (i & 7) & 1) << 4; }

struct Q4_0 {  // half d, 16 nibbles pairs
    static constexpr int SIZE = 32, BYTES = 18;
    static __device__ __forceinline__ int number(const uint8_t* b, int i) { return nibble(b + 2, i); }
    static __device__ float at(const uint8_t* b, int i) { return __fmul_rn(half_at(b), float(number(b, i) - 8)); }
};

struct Q4_1 {  // half d, half m, nibbles
    static constexpr int SIZE = 32, BYTES = 20;
    static __device__ __forceinline__ int number(const uint8_t* b, int i) { return nibble(b + 4, i); }
    static __device__ float at(const uint8_t* b, int i) {
        return __fadd_rn(__fmul_rn(half_at(b), float(number(b, i))), half_at(b + 2));
    }
};

struct Q5_0 {  // half d, 32 high bits, nibbles
    static constexpr int SIZE = 32, BYTES = 22;
    static __device__ __forceinline__ int number(const uint8_t* b, int i) { return nibble(b + 6, i) | fifth_bit(b + 2, i); }
    static __device__ float at(const uint8_t* b, int i) { return __fmul_rn(half_at(b), float(number(b, i) - 16)); }
};

struct Q5_1 {  // half d, half m, 32 high bits, nibbles
    static constexpr int SIZE = 32, BYTES = 24;
    static __device__ __forceinline__ int number(const uint8_t* b, int i) { return nibble(b + 8, i) | fifth_bit(b + 4, i); }
    static __device__ float at(const uint8_t* b, int i) {
        return __fadd_rn(__fmul_rn(half_at(b), float(number(b, i))), half_at(b + 2));
    }
};

struct Q8_0 {  // half d, 32 signed bytes
    static constexpr int SIZE = 32, BYTES = 34;
    static __device__ __forceinline__ int number(const uint8_t* b, int i) { return int8_t(b[2 + i]) + 128; }
    static __device__ float at(const uint8_t* b, int i) { return __fmul_rn(float(number(b, i) - 128), half_at(b)); }
};

__device__ __forceinline__ float uneven(int nibble) {  // closer together around 0
    constexpr int8_t values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    return float(values[nibble]);
}

struct IQ4_NL {  // half d, nibbles that index a table
    static constexpr int SIZE = 32, BYTES = 18;
    static __device__ __forceinline__ int number(const uint8_t* b, int i) { return nibble(b + 2, i); }
    static __device__ float at(const uint8_t* b, int i) { return __fmul_rn(half_at(b), uneven(number(b, i))); }
};

struct IQ4_XS {  // half d, 8 times two high bits of scales, 4 bytes of their low bits, 128 of nibbles that index the table
    static constexpr int SIZE = 256, BYTES = 136;
    static __device__ float at(const uint8_t* b, int i) {
        const int group = i >> 5;
        const int low = b[4 + (group >> 1)] >> (group & 1 ? 4 : 0) & 15;
        const int high = b[2 + (group >> 2)] >> 2 * (group & 3) & 3;
        const float d = __fmul_rn(half_at(b), float((low | high << 4) - 32));
        return __fmul_rn(d, uneven(nibble(b + 8 + group * 16, i)));
    }
};

struct MXFP4 {  // an exponent, nibbles that are E2M1 numbers (OCP Microscaling Formats 1.0)
    static constexpr int SIZE = 32, BYTES = 17;
    static __device__ __forceinline__ int number(const uint8_t* b, int i) { return nibble(b + 1, i); }
    static __device__ float at(const uint8_t* b, int i) {
        constexpr int8_t doubled[8] = {0, 1, 2, 3, 4, 6, 8, 12};
        const int q = number(b, i), e = b[0];
        const float d = __uint_as_float(e < 2 ? 0x00200000u << e : uint32_t(e - 1) << 23);  // half of 2^(e - 127)
        return __fmul_rn(d, float(q & 8 ? -doubled[q & 7] : doubled[q & 7]));
    }
};

// Two bits of weight i of a Q2_K or Q3_K block: 32 bytes hold 128 weights, four planes of two bits.
__device__ __forceinline__ int two_bits(const uint8_t* qs, int i) {
    return qs[(i >> 7) * 32 + (i & 31)] >> (2 * (i >> 5 & 3)) & 3;
}

struct Q2_K {  // 16 bytes (scale, minimum) a 16 weights, 64 bytes of two bits, half d, half dmin
    static constexpr int SIZE = 256, BYTES = 84;
    static __device__ __forceinline__ int number(const uint8_t* b, int i) { return two_bits(b + 16, i); }
    static __device__ float at(const uint8_t* b, int i) {
        const int scale = b[i >> 4];
        const float d = __fmul_rn(half_at(b + 80), float(scale & 15));
        const float m = __fmul_rn(half_at(b + 82), float(scale >> 4));
        return __fsub_rn(__fmul_rn(d, float(number(b, i))), m);
    }
};

// Scale s of 16 weights in the 12 bytes of a Q3_K block.
__device__ __forceinline__ int six_bits(const uint8_t* scales, int s) {
    const int low = scales[s & 7] >> (s & 8 ? 4 : 0) & 15;
    const int high = scales[8 + (s & 3)] >> (2 * (s >> 2)) & 3;
    return low | high << 4;
}

struct Q3_K {  // 32 bytes of third bits, 64 of two bits, 12 of 16 six-bit scales, half d
    static constexpr int SIZE = 256, BYTES = 110;
    static __device__ __forceinline__ int number(const uint8_t* b, int i) {  // 4 more than it means
        return two_bits(b + 32, i) | (b[i & 31] >> (i >> 5) & 1) << 2;
    }
    static __device__ float at(const uint8_t* b, int i) {
        const float d = __fmul_rn(half_at(b + 108), float(six_bits(b + 96, i >> 4) - 32));
        return __fmul_rn(d, float(number(b, i) - 4));
    }
};

// Scale and minimum of 32-weight group g, six bits each in 12 bytes (Q4_K, Q5_K).
__device__ __forceinline__ void scale_and_minimum(const uint8_t* s, int g, int& scale, int& minimum) {
    if (g < 4) {
        scale = s[g] & 63;
        minimum = s[g + 4] & 63;
    } else {
        scale = (s[g + 4] & 15) | (s[g - 4] >> 2 & 0x30);
        minimum = (s[g + 4] >> 4) | (s[g] >> 2 & 0x30);
    }
}

__device__ __forceinline__ float scaled_k(const uint8_t* b, int i, int q) {
    int scale, minimum;
    scale_and_minimum(b + 4, i >> 5, scale, minimum);
    const float d = __fmul_rn(half_at(b), float(scale));
    return __fsub_rn(__fmul_rn(d, float(q)), __fmul_rn(half_at(b + 2), float(minimum)));
}

struct Q4_K {  // half d, half dmin, 12 bytes of scales, 128 of nibbles
    static constexpr int SIZE = 256, BYTES = 144;
    static __device__ __forceinline__ int number(const uint8_t* b, int i) {
        return b[16 + (i >> 6) * 32 + (i & 31)] >> (i & 32 ? 4 : 0) & 15;
    }
    static __device__ float at(const uint8_t* b, int i) { return scaled_k(b, i, number(b, i)); }
};

struct Q5_K {  // half d, half dmin, 12 bytes of scales, 32 of fifth bits, 128 of nibbles
    static constexpr int SIZE = 256, BYTES = 176;
    static __device__ __forceinline__ int number(const uint8_t* b, int i) {
        const int low = b[48 + (i >> 6) * 32 + (i & 31)] >> (i & 32 ? 4 : 0) & 15;
        return low | (b[16 + (i & 31)] >> (i >> 5) & 1) << 4;
    }
    static __device__ float at(const uint8_t* b, int i) { return scaled_k(b, i, number(b, i)); }
};

struct Q6_K {  // 128 bytes of low nibbles, 64 of two high bits, 16 signed scales, half d
    static constexpr int SIZE = 256, BYTES = 210;
    static __device__ __forceinline__ int number(const uint8_t* b, int i) {
        const int low = b[(i >> 7) * 64 + (i & 63)] >> (i & 64 ? 4 : 0) & 15;
        return low | two_bits(b + 128, i) << 4;
    }
    static __device__ float at(const uint8_t* b, int i) {
        const float d = __fmul_rn(half_at(b + 208), float(int8_t(b[192 + (i >> 4)])));
        return __fmul_rn(d, float(number(b, i) - 32));
    }
};

// Digit `place` of five in base 3, of a byte that holds their number as a fraction of 256; less 1.
__device__ __forceinline__ float ternary(uint8_t digits, int place) {
    constexpr uint8_t powers[5] = {1, 3, 9, 27, 81};
    return float((uint8_t(digits * powers[place]) * 3 >> 8) - 1);
}

struct TQ1_0 {  // -1, 0 and 1: 32 bytes of five weights, 16 of five, 4 of four; half d
    static constexpr int SIZE = 256, BYTES = 54;
    static __device__ float at(const uint8_t* b, int i) {
        const float q = i < 160   ? ternary(b[i & 31], i >> 5)
                        : i < 240 ? ternary(b[32 + (i & 15)], (i - 160) >> 4)
                                  : ternary(b[48 + (i & 3)], (i - 240) >> 2);
        return __fmul_rn(half_at(b + 52), q);
    }
};

struct TQ2_0 {  // -1, 0 and 1: 64 bytes of two bits, half d
    static constexpr int SIZE = 256, BYTES = 66;
    static __device__ float at(const uint8_t* b, int i) { return __fmul_rn(half_at(b + 64), float(two_bits(b, i) - 1)); }
};

}  // namespace
