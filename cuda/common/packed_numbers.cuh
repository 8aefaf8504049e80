// The whole numbers of packed weights (`packed.cuh`), and how they become elements: with a half as scale, with a product of
// scales, or on a line, d q + m.
//
// Small whole numbers become halves without a conversion: as denormal ones, or behind the bits of 1024, which is then taken
// away; or floats, behind the bits of 128, which an fma takes away with the multiplication. Instructions a pair of elements, of
// which products with many rows are made: 3 (Q4_0) to 7 (Q5_K).
#pragma once

#include "common/common.cuh"
#include <cuda_fp16.h>

namespace packed {

template <typename Value>
static __device__ __forceinline__ Value value_at(const unsigned char* place) {
    return *reinterpret_cast<const Value*>(place);
}

static __device__ __forceinline__ __half2 halves(uint32_t word) { return *reinterpret_cast<const __half2*>(&word); }

static __device__ __forceinline__ float2 float_pair(uint32_t word) { return __half22float2(halves(word)); }

static __device__ __forceinline__ uint32_t as_word(__half2 pair) { return *reinterpret_cast<const uint32_t*>(&pair); }

// Whole numbers of a chunk, no more than 10 bits with their place: elements 2 i and 2 i + 1 in the lanes of pair[i], those of
// pairs 1 and 3 times 16.
struct Numbers {
    uint32_t pair[4];
};

// The bits `mask` of each of a word's 4-bit places.
static __device__ __forceinline__ Numbers split(uint32_t word, uint32_t mask) {
    const uint32_t even = mask * 0x00010001u, odd = mask * 0x00100010u, upper = word >> 8;
    return {{word & even, word & odd, upper & even, upper & odd}};
}

// A fifth bit, of a word whose bits are where those of `split` are.
static __device__ __forceinline__ void join(Numbers& numbers, uint32_t fifth) {
    const uint32_t lower = fifth << 4, upper = fifth >> 4;
    numbers.pair[0] |= lower & 0x00100010u;
    numbers.pair[1] |= lower & 0x01000100u;
    numbers.pair[2] |= upper & 0x00100010u;
    numbers.pair[3] |= upper & 0x01000100u;
}

// A pair of a chunk's numbers less OFFSET, exactly.
template <int OFFSET>
static __device__ __forceinline__ __half2 centred(const Numbers& numbers, int pair) {
    constexpr uint32_t EVEN = 0xe400u + OFFSET, ODD = 0xd400u + OFFSET * 16;  // -(1024 + OFFSET), -(64 + OFFSET)
    static_assert(OFFSET < 64, "an exact half");
    const __half2 raised = halves(numbers.pair[pair] | 0x64006400u);  // 1024 more
    if (pair % 2 == 0) return __hadd2(raised, halves(EVEN * 0x00010001u));
    return __hfma2(raised, halves(0x2c002c00u), halves(ODD * 0x00010001u));  // a sixteenth of it
}

// What becomes of whole numbers by a scale that is a half in the file.
#ifdef ELEMENT_BF16
using Factor = float;
static __device__ __forceinline__ Factor factor_at(const unsigned char* place) { return __half2float(value_at<__half>(place)); }
static __device__ __forceinline__ Factor factor_of(float power) { return power; }
static __device__ __forceinline__ uint32_t scaled(__half2 numbers, Factor d) {
    const float2 pair = __half22float2(numbers);
    return pack(__fmul_rn(pair.x, d), __fmul_rn(pair.y, d));
}
#else
using Factor = __half2;
static __device__ __forceinline__ Factor factor_at(const unsigned char* place) {
    return halves(value_at<uint16_t>(place) * 0x00010001u);
}
static __device__ __forceinline__ Factor factor_of(float power) { return __floats2half2_rn(power, power); }
static __device__ __forceinline__ uint32_t scaled(__half2 numbers, Factor d) { return as_word(__hmul2(numbers, d)); }
#endif

template <int OFFSET>
static __device__ __forceinline__ Element8 scaled(const Numbers& numbers, Factor d) {
    Element8 out;
#pragma unroll
    for (int i = 0; i < 4; ++i) out.word[i] = scaled(centred<OFFSET>(numbers, i), d);
    return out;
}

// Whole numbers of a chunk, no more than 6 bits, a byte each: elements 0, 4, 1 and 5, and 2, 6, 3 and 7.
struct Bytes {
    uint32_t even, odd;
};

// What becomes of these, less OFFSET, by scales that are products of 18 bits, for 16 elements each. As third byte of a float,
// behind 0x43, a byte is 128 more than its number; what that is too much, the fma takes away, exactly. Zeros are +0, where
// `dequantize.cu` gives them the sign of the scale.
template <int OFFSET>
static __device__ __forceinline__ Element8 scaled(const Bytes& bytes, const float (&d)[2]) {
    const float more[2] = {__fmul_rn(d[0], -128.0f - OFFSET), __fmul_rn(d[1], -128.0f - OFFSET)};
    const auto one = [&](uint32_t four, int byte, int half) {
        return __fmaf_rn(__uint_as_float(__byte_perm(four, 0x43000000u, 0x7044 | byte << 8)), d[half], more[half]);
    };
    return {pack(one(bytes.even, 0, 0), one(bytes.even, 2, 0)), pack(one(bytes.odd, 0, 0), one(bytes.odd, 2, 0)),
            pack(one(bytes.even, 1, 1), one(bytes.even, 3, 1)), pack(one(bytes.odd, 1, 1), one(bytes.odd, 3, 1))};
}

// d q + m: as denormal halves, numbers are 2^-24 of what they are, so scales are as much larger; `handed` has that and m.
struct Line {
    float even, odd, m;

    Line() = default;
    __device__ __forceinline__ explicit Line(float2 handed) : even(handed.x), odd(__fmul_rn(handed.x, 0x1p-4f)), m(handed.y) {}

    static __device__ __forceinline__ float2 handed(float d, float m) { return make_float2(__fmul_rn(d, 0x1p24f), m); }

    __device__ __forceinline__ uint32_t pair(const Numbers& numbers, int i) const {
        const float2 q = float_pair(numbers.pair[i]);
        const float d = i % 2 ? odd : even;
        return pack(__fmaf_rn(q.x, d, m), __fmaf_rn(q.y, d, m));
    }
    __device__ __forceinline__ Element8 of(const Numbers& numbers) const {
        return {pair(numbers, 0), pair(numbers, 1), pair(numbers, 2), pair(numbers, 3)};
    }
};

}  // namespace packed
