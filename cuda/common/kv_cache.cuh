// The KV cache: pages of PAGE tokens, for each layer parts [pages, kv_heads] of keys, and as many of values. Where numbers lie, and
// what they mean, is said here alone; `worker/runners/gpu/kv_cache.py` allocates the pages.
//
// A part is numbers [PAGE, head_dim]: elements, or with -DKV_FP8 E4M3, and behind them an exponent for each token
// (`exponent_place`): of the power of two that its numbers are multiples of, the least with which none is over 448. A byte is enough for that, and E4M3 has the same
// relative precision everywhere, so that a finer scale would gain nothing; and a number times its power of two is an element. So
// attention over such pages is, to the bit, attention over the elements that they stand for.
#pragma once

#include "common/common.cuh"
#include "common/e4m3.cuh"
#include "common/page.cuh"

#ifdef KV_FP8
using Kept = uint8_t;
static constexpr bool KEPT_AS_FP8 = true;
static constexpr int EXPONENTS = PAGE;  // of a part
#else
using Kept = Element;
static constexpr bool KEPT_AS_FP8 = false;
static constexpr int EXPONENTS = 0;
#endif

// Of what a page has of a KV head, keys or values: where it begins.
static __device__ __forceinline__ int64_t part_of(int page, int kv_head, int kv_heads, int head_dim) {
    return (static_cast<int64_t>(page) * kv_heads + kv_head) * (PAGE * head_dim + EXPONENTS);
}

// Where behind a part's numbers the exponent of a token is: lane t of four, which has scores and values of the tokens 2 t, 2 t + 1,
// 2 t + 8 and 2 t + 9 (`common.cuh`), finds theirs in one word.
static __device__ __forceinline__ int exponent_place(int token) { return (token & 6) * 2 + (token >> 3) * 2 + (token & 1); }

// Where in its part a token's numbers begin; `cache_row` is page * PAGE + its place in the page.
static __device__ __forceinline__ int64_t token_of(int cache_row, int kv_head, int kv_heads, int head_dim) {
    return part_of(cache_row / PAGE, kv_head, kv_heads, head_dim) + cache_row % PAGE * head_dim;
}

// An exponent is that of an element: its bits where elements have theirs make the power of two.
#ifdef ELEMENT_BF16
static constexpr int EXPONENT_AT = 7, EXPONENT_BIAS = 127, LARGEST_EXPONENT = 246;
#else
static constexpr int EXPONENT_AT = 10, EXPONENT_BIAS = 15, LARGEST_EXPONENT = 22;  // 448 * 2^7 is the most that half holds of these
#endif
static constexpr int NO_NUMBERS = 2 * EXPONENT_BIAS + 1;  // infinity, by which zeros become NaN

// What a head's numbers of a token are divided by, and its exponent. `largest`: the bits of their largest magnitude as floats, which
// rank as the magnitudes do, infinity and NaN last: then all become NaN. Of what is over 448 times the largest power, that remains.
struct Power {
    int exponent;

    __device__ __forceinline__ explicit Power(uint32_t largest) {
        // 448 is 1.75 * 2^8: up to a mantissa of 1.75 the power is 8 below the number's, above it 7.
        const int biased = static_cast<int>((largest + 0x1fffff) >> 23) - 8 - 127 + EXPONENT_BIAS;
        exponent = largest >= 0x7f800000 ? NO_NUMBERS : min(max(biased, 1), LARGEST_EXPONENT);
    }

    __device__ __forceinline__ uint32_t quantised(float low, float high) const {  // two, in the low half
        if (exponent == NO_NUMBERS) return 0;
        const float inverse = __uint_as_float((127 + EXPONENT_BIAS - exponent) << 23);
        return to_e4m3x2(__fmul_rn(low, inverse), __fmul_rn(high, inverse));
    }
};

static __device__ __forceinline__ uint32_t magnitude_bits(float value) { return __float_as_uint(value) & 0x7fffffff; }

// The powers of two exponents, in the low half of a word.
static __device__ __forceinline__ Element2 powers_of(uint32_t exponents) {
    const uint32_t bits = __byte_perm(exponents, 0, 0x4140) << EXPONENT_AT;
    return *reinterpret_cast<const Element2*>(&bits);
}

static __device__ __forceinline__ uint32_t word_of(Element2 pair) { return *reinterpret_cast<const uint32_t*>(&pair); }

// Eight numbers of a token as elements; `power`: twice the power of two that they are multiples of.
static __device__ __forceinline__ Element8 elements_of(const Bytes8& bytes, Element2 power) {
    Element8 eight;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        eight.word[i] = word_of(__hmul2(elements_of_e4m3x2(bytes.word[i / 2] >> 16 * (i % 2)), power));
    return eight;
}
