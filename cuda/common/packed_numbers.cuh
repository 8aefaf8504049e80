// The whole numbers of packed weights (`packed.cuh`), and how they become elements: with a scale, or on a line, s q + m.
//
// In half, the arithmetic is that of halves, each operation rounded once (NumPy's words for it: `tests/support/packed_elements.py`).
// A scale that is quantised itself is a half, d times its number; so is a minimum. An element is (q - offset) s, or one fma of q, s
// and m. In bfloat16 both are what `weights/dequantize.cu` computes: exact in float, or rounded once there, then to the element.
//
// Small whole numbers become halves without a conversion, behind the bits of 1024, which is then taken away; or, for bfloat16,
// as denormal ones, or floats, behind the bits of 128, which an fma takes away with the multiplication. Instructions a pair of
// elements, of which products with many rows are made: 3 (Q4_0) to 5 (Q6_K).
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

static __device__ __forceinline__ __half2 both(uint32_t half) { return halves(half * 0x00010001u); }

// (word & mask) | with, in one instruction: of two constants nvcc would make two, which take no more than one each.
static __device__ __forceinline__ uint32_t masked(uint32_t word, uint32_t mask, uint32_t with) {
#ifdef __CUDA_ARCH__
    uint32_t out;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(word), "r"(mask), "r"(with));
    return out;
#else
    return word & mask | with;
#endif
}

static constexpr uint32_t RAISED = 0x64006400u;  // whole numbers below 1024 in the lower bits of this are halves, 1024 more

// Whole numbers of a chunk, no more than 10 bits with their place: elements 2 i and 2 i + 1 in the lanes of pair[i], those of
// pairs 1 and 3 times 16; RAISED, if nothing else is said.
struct Numbers {
    uint32_t pair[4];
};

// The bits `mask` of each of a word's 4-bit places.
template <uint32_t WITH = RAISED>
static __device__ __forceinline__ Numbers split(uint32_t word, uint32_t mask) {
    const uint32_t even = mask * 0x00010001u, odd = mask * 0x00100010u, upper = word >> 8;
    return {{masked(word, even, WITH), masked(word, odd, WITH), masked(upper, even, WITH), masked(upper, odd, WITH)}};
}

// Upper bits, `mask` times 2^SHIFT of numbers, of a word whose lower places have them where `split` finds its own.
template <int SHIFT>
static __device__ __forceinline__ void join(Numbers& numbers, uint32_t more, uint32_t mask) {
    const uint32_t lower = more << SHIFT, upper = more >> (8 - SHIFT), even = (mask << SHIFT) * 0x00010001u;
    numbers.pair[0] = masked(lower, even, numbers.pair[0]);
    numbers.pair[1] = masked(lower, even << 4, numbers.pair[1]);
    numbers.pair[2] = masked(upper, even, numbers.pair[2]);
    numbers.pair[3] = masked(upper, even << 4, numbers.pair[3]);
}

// A pair of a chunk's raised numbers less OFFSET, exactly.
template <int OFFSET>
static __device__ __forceinline__ __half2 centred(const Numbers& numbers, int pair) {
    constexpr uint32_t EVEN = 0xe400u + OFFSET, ODD = 0xd400u + OFFSET * 16;  // -(1024 + OFFSET), -(64 + OFFSET)
    static_assert(OFFSET < 64, "an exact half");
    const __half2 raised = halves(numbers.pair[pair]);
    if (pair % 2 == 0) return __hadd2(raised, both(EVEN));
    return __hfma2(raised, both(0x2c00u), both(ODD));  // a sixteenth of it
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
static __device__ __forceinline__ Factor factor_at(const unsigned char* place) { return both(value_at<uint16_t>(place)); }
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

// What is computed of quantised scales: for two of 16 elements each, or a scale and a minimum; and for two of the latter.
#ifdef ELEMENT_BF16
using Two = float2;
using Four = float4;
static __device__ __forceinline__ Four joined(Two a, Two b) { return make_float4(a.x, a.y, b.x, b.y); }
static __device__ __forceinline__ Two first_of(Four both) { return make_float2(both.x, both.y); }
static __device__ __forceinline__ Two second_of(Four both) { return make_float2(both.z, both.w); }
#else
using Two = uint32_t;
using Four = uint2;
static __device__ __forceinline__ Four joined(Two a, Two b) { return make_uint2(a, b); }
static __device__ __forceinline__ Two first_of(Four both) { return both.x; }
static __device__ __forceinline__ Two second_of(Four both) { return both.y; }
#endif

// Two scales of 16 elements each: the half d times whole numbers, which are raised by RAISE beyond 1024.
template <int RAISE>
static __device__ __forceinline__ Two two_scales(uint32_t numbers, uint32_t d) {
    const __half2 exact = __hadd2(halves(numbers), both(0xe400u + RAISE));
#ifdef ELEMENT_BF16
    const float2 pair = __half22float2(exact);
    const float scale = float_pair(d).x;
    return {__fmul_rn(scale, pair.x), __fmul_rn(scale, pair.y)};
#else
    return as_word(__hmul2(exact, both(d)));
#endif
}

// By these, numbers less OFFSET.
template <int OFFSET>
struct Scales {
#ifdef ELEMENT_BF16
    // As third byte of a float, behind 0x43, a byte is 128 more than its number; what that is too much, the fma takes away, exactly.
    // Zeros are +0, where `dequantize.cu` gives them the sign of the scale.
    static constexpr uint32_t WITH = 0;
    float d[2], more[2];

    Scales() = default;
    __device__ __forceinline__ explicit Scales(Two handed)
        : d{handed.x, handed.y}, more{__fmul_rn(handed.x, -128.0f - OFFSET), __fmul_rn(handed.y, -128.0f - OFFSET)} {}

    __device__ __forceinline__ Element8 of(const Numbers& numbers) const {
        const auto one = [&](int pair, int lane) {
            const uint32_t raised = __byte_perm(numbers.pair[pair] >> pair % 2 * 4, 0x43000000u, 0x7044 | lane << 9);
            return __fmaf_rn(__uint_as_float(raised), d[pair / 2], more[pair / 2]);
        };
        return {pack(one(0, 0), one(0, 1)), pack(one(1, 0), one(1, 1)), pack(one(2, 0), one(2, 1)), pack(one(3, 0), one(3, 1))};
    }
#else
    static constexpr uint32_t WITH = RAISED;
    __half2 first, second;

    Scales() = default;
    __device__ __forceinline__ explicit Scales(Two handed)
        : first(__half2half2(__low2half(halves(handed)))), second(__half2half2(__high2half(halves(handed)))) {}

    __device__ __forceinline__ Element8 of(const Numbers& numbers) const {
        return {scaled(centred<OFFSET>(numbers, 0), first), scaled(centred<OFFSET>(numbers, 1), first),
                scaled(centred<OFFSET>(numbers, 2), second), scaled(centred<OFFSET>(numbers, 3), second)};
    }
#endif
};

// s q + m: a line, of a half s and a half m as they stand in the file (`handed`), or of d, dmin and two raised numbers.
struct Line {
#ifdef ELEMENT_BF16
    static constexpr uint32_t WITH = 0;  // numbers as denormal halves, 2^-24 of what they are: scales are as much larger
    float even, odd, m;

    Line() = default;
    __device__ __forceinline__ explicit Line(Two handed) : even(handed.x), odd(__fmul_rn(handed.x, 0x1p-4f)), m(handed.y) {}

    static __device__ __forceinline__ Two handed(float d, float m) { return make_float2(__fmul_rn(d, 0x1p24f), m); }
    static __device__ __forceinline__ Two of_file(uint32_t line) {
        const float2 pair = float_pair(line);
        return handed(pair.x, pair.y);
    }
    static __device__ __forceinline__ Two of(uint32_t d, uint32_t numbers) {
        const float2 scale = float_pair(d), q = __half22float2(__hadd2(halves(numbers), both(0xe400u)));
        return handed(__fmul_rn(scale.x, q.x), __fmul_rn(-scale.y, q.y));
    }
    __device__ __forceinline__ uint32_t pair(const Numbers& numbers, int i) const {
        const float2 q = float_pair(numbers.pair[i]);
        const float d = i % 2 ? odd : even;
        return pack(__fmaf_rn(q.x, d, m), __fmaf_rn(q.y, d, m));
    }
#else
    static constexpr uint32_t WITH = RAISED;
    __half2 s, m;

    Line() = default;
    __device__ __forceinline__ explicit Line(Two handed)
        : s(__half2half2(__low2half(halves(handed)))), m(__half2half2(__high2half(halves(handed)))) {}

    static __device__ __forceinline__ Two of_file(uint32_t line) { return line; }
    static __device__ __forceinline__ Two of(uint32_t d, uint32_t numbers) {  // the minimum is taken away
        return as_word(__hmul2(__hadd2(halves(numbers), both(0xe400u)), halves(d ^ 0x80000000u)));
    }
    __device__ __forceinline__ uint32_t pair(const Numbers& numbers, int i) const {
        return as_word(__hfma2(centred<0>(numbers, i), s, m));
    }
#endif
    __device__ __forceinline__ Element8 of(const Numbers& numbers) const {
        return {pair(numbers, 0), pair(numbers, 1), pair(numbers, 2), pair(numbers, 3)};
    }
};

}  // namespace packed
