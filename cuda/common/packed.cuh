// Quantised weights as they lie in device memory, and how they become elements: for each of GGUF's types here, a struct that
// kernels are compiled with (-DFORMAT=Q4_K makes it `Packed`).
//
// A matrix (outputs, K) is panels of 8 rows; a panel goes through K in steps of STEP elements. What the file has of 8 rows
// by STEP elements is one *packet* of PACKET bytes, all of it and no more, a multiple of 16; packets of a panel follow each
// other, and so do panels. Rows and elements that a matrix lacks in its last panel and steps have scales of zero.
// `weights/repack.cuh` makes packets. A packet is planes of numbers, then scales:
//
//   nibbles  [chunk][row]  a word a *chunk*, 8 elements of a row: element 2 i in bits 4 i, element 2 i + 1 in bits 16 + 4 i
//   pairs    [chunk / 2][row]  a word: chunk c has two bits of element 2 i at 4 i + 2 (c % 2), of 2 i + 1 16 bits further up
//   bits     [chunk / 4][row]  a word: chunk c has one bit of element 2 i at 4 i + c % 4, of 2 i + 1 16 bits further up
//   bytes    [chunk][row]  8 bytes a chunk, each 128 more than the number (Q8_0)
//   scales   [row], a row's together, the widest first
//
// So one AND finds two neighbours, 16 bits apart, of any plane where those of the others are, to be put together.
//
// A *group* is 32 elements of a row, four chunks. Chunk t of them has the pairs 8 i + 2 t, + 1 for i = 0 .. 3: what lane t of
// four holds of the operands of two products of 16 elements, by mma.sync or by wgmma with the weights in registers.
//
//   hand(Handed[COUNT], packet, row, first)    what of scales is computed, since they are quantised themselves (STEP 256): of
//                                              COUNT groups, 1, 2 or 4, from a multiple of it on
//   Scale scale(packet, row, group, handed)    the scale, for all chunks of the group
//   Raw raw(packet, row, chunk)                the numbers of a chunk, as they are read; its group is chunk / 4
//   Element8 eight(raw, scale)                 its four pairs
//
// Packets are in shared or global memory, aligned to 16 bytes. Lanes l with row l / 4 and chunk l % 4 of a group read without
// bank conflicts.
//
// How whole numbers become elements, which is their definition: `packed_numbers.cuh`. Types with a half as scale have the bits of
// `weights/dequantize.cu`, but for the sign of some zeros; in half, those of other types are their own.
#pragma once

#include "common/packed_numbers.cuh"

namespace packed {

static constexpr int ROWS = 8;  // of a panel

// What planes of pairs and of nibbles have of a chunk, and of others above it.
static __device__ __forceinline__ uint32_t two_bits(const unsigned char* plane, int row, int chunk) {
    return value_at<uint32_t>(plane + (chunk / 2 * ROWS + row) * 4) >> 2 * (chunk % 2);
}
static __device__ __forceinline__ uint32_t nibbles(const unsigned char* plane, int row, int chunk) {
    return value_at<uint32_t>(plane + (chunk * ROWS + row) * 4);
}

// For the half of an operand whose results nobody reads: a register as it is.
static __device__ __forceinline__ uint32_t anything() {
    uint32_t word;
    asm volatile("" : "=r"(word));
    return word;
}

// Of types whose scales are as they are used.
struct Nothing {};
struct AtOnce {
    using Handed = Nothing;
    template <int COUNT>
    static __device__ __forceinline__ void hand(Handed (&)[COUNT], const unsigned char*, int, int) {}
};

// Of types whose numbers are a plane of nibbles; and of those with fifth bits in another, which come with the scale.
struct Nibbles {
    using Raw = uint32_t;
    static __device__ __forceinline__ Raw raw(const unsigned char* packet, int row, int chunk) {
        return nibbles(packet, row, chunk);
    }
};
struct NibblesAndBits {
    struct Raw {
        uint32_t word;
        int chunk;
    };
    static __device__ __forceinline__ Raw raw(const unsigned char* packet, int row, int chunk) {
        return {nibbles(packet, row, chunk), chunk};
    }
};

struct Q8_0 : AtOnce {  // bytes; half d of two groups
    static constexpr int STEP = 64, PACKET = 544;
    using Scale = Factor;
    using Raw = uint2;

    static __device__ __forceinline__ Scale scale(const unsigned char* packet, int row, int group, Handed) {
        return factor_at(packet + 512 + row * 4 + group * 2);
    }
    static __device__ __forceinline__ Raw raw(const unsigned char* packet, int row, int chunk) {
        return value_at<uint2>(packet + (chunk * ROWS + row) * 8);
    }
    static __device__ __forceinline__ Element8 eight(const Raw& words, const Scale& d) {
        Element8 out;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t raised = __byte_perm(i < 2 ? words.x : words.y, 0x64646464u, i % 2 ? 0x4342 : 0x4140);
            out.word[i] = scaled(__hadd2(halves(raised), halves(0xe480e480u)), d);  // 1024 + 128 too many
        }
        return out;
    }
};

struct Q4_0 : AtOnce, Nibbles {  // nibbles, 8 more than the number; half d of two groups
    static constexpr int STEP = 64, PACKET = 288;
    using Scale = Factor;

    static __device__ __forceinline__ Scale scale(const unsigned char* packet, int row, int group, Handed) {
        return factor_at(packet + 256 + row * 4 + group * 2);
    }
    static __device__ __forceinline__ Element8 eight(Raw word, const Scale& d) { return scaled<8>(split(word, 15), d); }
};

struct Q4_1 : AtOnce, Nibbles {  // nibbles; half d and m of two groups
    static constexpr int STEP = 64, PACKET = 320;
    using Scale = Line;

    static __device__ __forceinline__ Scale scale(const unsigned char* packet, int row, int group, Handed) {
        return Line(Line::of_file(value_at<uint32_t>(packet + 256 + row * 8 + group * 4)));
    }
    static __device__ __forceinline__ Element8 eight(Raw word, const Scale& line) { return line.of(split<Line::WITH>(word, 15)); }
};

struct Q5_0 : AtOnce, NibblesAndBits {  // nibbles, bits; half d of two groups
    static constexpr int STEP = 64, PACKET = 352;
    struct Scale {
        Factor d;
        uint32_t fifth;
    };

    static __device__ __forceinline__ Scale scale(const unsigned char* packet, int row, int group, Handed) {
        return {factor_at(packet + 320 + row * 4 + group * 2), value_at<uint32_t>(packet + 256 + (group * ROWS + row) * 4)};
    }
    static __device__ __forceinline__ Element8 eight(const Raw& raw, const Scale& scale) {
        Numbers numbers = split(raw.word, 15);
        join<4>(numbers, scale.fifth >> raw.chunk % 4, 1);
        return scaled<16>(numbers, scale.d);
    }
};

struct Q5_1 : AtOnce, NibblesAndBits {  // nibbles, bits; half d and m of two groups
    static constexpr int STEP = 64, PACKET = 384;
    struct Scale {
        Line line;
        uint32_t fifth;
    };

    static __device__ __forceinline__ Scale scale(const unsigned char* packet, int row, int group, Handed) {
        const uint32_t line = value_at<uint32_t>(packet + 320 + row * 8 + group * 4);
        return {Line(Line::of_file(line)), value_at<uint32_t>(packet + 256 + (group * ROWS + row) * 4)};
    }
    static __device__ __forceinline__ Element8 eight(const Raw& raw, const Scale& scale) {
        Numbers numbers = split<Line::WITH>(raw.word, 15);
        join<4>(numbers, scale.fifth >> raw.chunk % 4, 1);
        return scale.line.of(numbers);
    }
};

struct IQ4_NL : AtOnce, Nibbles {  // nibbles, which index a table; half d of two groups
    static constexpr int STEP = 64, PACKET = 288;
    using Scale = Factor;

    static __device__ __forceinline__ Scale scale(const unsigned char* packet, int row, int group, Handed) {
        return Q4_0::scale(packet, row, group, {});
    }
    static __device__ __forceinline__ Element8 eight(Raw word, const Scale& d) {
        const uint32_t even = found(word), odd = found(word >> 16);
        Element8 out;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t pair = __byte_perm(even, odd, 0x4400 + 0x1111 * i) & 0x00ff00ffu;
            out.word[i] = scaled(__hadd2(halves(pair | 0x64006400u), halves(0xe480e480u)), d);
        }
        return out;
    }

private:
    // The table's entries, 128 more than the numbers, for four nibbles.
    static __device__ __forceinline__ uint32_t found(uint32_t four) {
        const uint32_t within = four & 0x7777u;
        const uint32_t negative = __byte_perm(0x3f2d1801u, 0x766a5d4fu, within);
        const uint32_t positive = __byte_perm(0xa6998d81u, 0xf1d9c5b5u, within);
        return __byte_perm(negative, positive, 0x3210u | (four & 0x8888u) >> 1);
    }
};

struct MXFP4 : AtOnce, Nibbles {  // nibbles, E2M1 numbers: sign, two bits of exponent, one of mantissa; a byte of exponent a group
    static constexpr int STEP = 64, PACKET = 272;
    using Scale = Factor;

    // Where a half has them, a number's bits are 2^-14 of it, and exact, even those of 0.5; so the scale is as much larger.
    static __device__ __forceinline__ Scale scale(const unsigned char* packet, int row, int group, Handed) {
        return factor_of(__uint_as_float((packet[256 + row * 2 + group] + 14u) << 23));
    }
    static __device__ __forceinline__ Element8 eight(Raw word, const Scale& d) {
        return {scaled(halves(word << 12 & 0x80008000u | word << 9 & 0x0e000e00u), d),
                scaled(halves(word << 8 & 0x80008000u | word << 5 & 0x0e000e00u), d),
                scaled(halves(word << 4 & 0x80008000u | word << 1 & 0x0e000e00u), d),
                scaled(halves(word & 0x80008000u | word >> 3 & 0x0e000e00u), d)};
    }
};

// Scales and minima of COUNT groups of Q4_K and Q5_K, a divisor of 4, from a multiple of it on; of a row's 16 bytes: half d and
// dmin; a byte a group of six bits of scale, two upper ones of minimum; four bits a group, the lower ones of minimum.
template <int COUNT>
static __device__ __forceinline__ void lines_of_k(Two (&lines)[COUNT], const unsigned char* row, int first) {
    const uint4 all = value_at<uint4>(row);
    const uint32_t upper = (first < 4 ? all.y : all.z) >> first % 4 * 8, low = all.w >> 4 * first;
    const uint32_t scales = upper & 0x3f3f3f3fu, high = upper >> 2 & 0x30303030u;
    const uint32_t even = low & 0x0f0fu, odd = low >> 4 & 0x0f0fu;
    const uint32_t minima = __byte_perm(even, odd, 0x5140) | high;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        lines[i] = Line::of(all.x, masked(__byte_perm(scales, minima, i | (4 + i) << 8), 0x003f003fu, RAISED));
}

struct Q4_K : Nibbles {  // nibbles; 16 bytes of scales
    static constexpr int STEP = 256, PACKET = 1152;
    using Scale = Line;
    using Handed = Two;

    template <int COUNT>
    static __device__ __forceinline__ void hand(Handed (&lines)[COUNT], const unsigned char* packet, int row, int first) {
        lines_of_k(lines, packet + 1024 + row * 16, first);
    }
    static __device__ __forceinline__ Scale scale(const unsigned char* packet, int row, int group, Handed line) {
        return Line(line);
    }
    static __device__ __forceinline__ Element8 eight(Raw word, const Scale& line) { return line.of(split<Line::WITH>(word, 15)); }
};

struct Q5_K : NibblesAndBits {  // nibbles, bits; 16 bytes of scales
    static constexpr int STEP = 256, PACKET = 1408;
    struct Scale {
        Line line;
        uint32_t fifth;
    };

    using Handed = Two;

    template <int COUNT>
    static __device__ __forceinline__ void hand(Handed (&lines)[COUNT], const unsigned char* packet, int row, int first) {
        lines_of_k(lines, packet + 1280 + row * 16, first);
    }
    static __device__ __forceinline__ Scale scale(const unsigned char* packet, int row, int group, Handed line) {
        return {Line(line), value_at<uint32_t>(packet + 1024 + (group * ROWS + row) * 4)};
    }
    static __device__ __forceinline__ Element8 eight(const Raw& raw, const Scale& scale) {
        Numbers numbers = split<Line::WITH>(raw.word, 15);
        join<4>(numbers, scale.fifth >> raw.chunk % 4, 1);
        return scale.line.of(numbers);
    }
};

struct Q6_K {  // nibbles, pairs; 16 signed bytes of scales, then half d of all rows
    static constexpr int STEP = 256, PACKET = 1680;
    using Scale = Scales<32>;
    using Raw = uint2;
    using Handed = Two;

    template <int COUNT>
    static __device__ __forceinline__ void hand(Handed (&out)[COUNT], const unsigned char* packet, int row, int first) {
        const uint32_t d = value_at<uint16_t>(packet + 1664 + row * 2);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const uint32_t two = value_at<uint16_t>(packet + 1536 + row * 16 + (first + i) * 2) ^ 0x8080u;  // 128 more
            out[i] = two_scales<128>(__byte_perm(two, RAISED, 0x7170), d);
        }
    }
    static __device__ __forceinline__ Scale scale(const unsigned char* packet, int row, int group, Handed d) { return Scale(d); }
    static __device__ __forceinline__ Raw raw(const unsigned char* packet, int row, int chunk) {
        return {nibbles(packet, row, chunk), two_bits(packet + 1024, row, chunk)};
    }
    static __device__ __forceinline__ Element8 eight(const Raw& raw, const Scale& scale) {
        Numbers numbers = split<Scale::WITH>(raw.x, 15);
        join<4>(numbers, raw.y, 3);
        return scale.of(numbers);
    }
};

struct Q3_K {  // pairs, bits; 12 bytes of scales, four lower bits each of 16, then two upper; then half d of all rows
    static constexpr int STEP = 256, PACKET = 880;
    struct Scale {
        Scales<4> d;
        uint32_t third;
    };
    struct Raw {
        uint32_t low;
        int chunk;
    };

    using Handed = Two;

    template <int COUNT>
    static __device__ __forceinline__ void hand(Handed (&out)[COUNT], const unsigned char* packet, int row, int first) {
        const unsigned char* scales = packet + 768 + row * 12;
        const uint32_t d = value_at<uint16_t>(packet + 864 + row * 2), all = value_at<uint32_t>(scales + 8);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const uint32_t low = scales[first + i], high = all >> 4 * (first + i) & 15;
            const uint32_t lower = masked(low | low << 12, 0x000f000fu, RAISED);
            out[i] = two_scales<32>(masked(high << 4 | high << 18, 0x00300030u, lower), d);
        }
    }
    static __device__ __forceinline__ Scale scale(const unsigned char* packet, int row, int group, Handed d) {
        return {Scales<4>(d), value_at<uint32_t>(packet + 512 + (group * ROWS + row) * 4)};
    }
    static __device__ __forceinline__ Raw raw(const unsigned char* packet, int row, int chunk) {
        return {two_bits(packet, row, chunk), chunk};
    }
    static __device__ __forceinline__ Element8 eight(const Raw& raw, const Scale& scale) {
        Numbers numbers = split<Scales<4>::WITH>(raw.low, 3);
        join<2>(numbers, scale.third >> raw.chunk % 4, 1);
        return scale.d.of(numbers);
    }
};

struct Q2_K {  // pairs; 16 bytes of scales, four bits of scale and of minimum each; then half d and dmin of all rows
    static constexpr int STEP = 256, PACKET = 672;
    struct Scale {
        Line of[2];  // 16 elements each
    };
    using Raw = uint32_t;

    using Handed = Four;

    template <int COUNT>
    static __device__ __forceinline__ void hand(Handed (&out)[COUNT], const unsigned char* packet, int row, int first) {
        const uint32_t d = value_at<uint32_t>(packet + 640 + row * 4);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const uint32_t two = value_at<uint16_t>(packet + 512 + row * 16 + (first + i) * 2);
            const auto of = [&](uint32_t byte) { return Line::of(d, masked(byte | byte << 12, 0x000f000fu, RAISED)); };
            out[i] = joined(of(two), of(two >> 8));
        }
    }
    static __device__ __forceinline__ Scale scale(const unsigned char* packet, int row, int group, Handed lines) {
        return {{Line(first_of(lines)), Line(second_of(lines))}};
    }
    static __device__ __forceinline__ Raw raw(const unsigned char* packet, int row, int chunk) {
        return two_bits(packet, row, chunk);
    }
    static __device__ __forceinline__ Element8 eight(Raw word, const Scale& scale) {
        const Numbers numbers = split<Line::WITH>(word, 3);
        return {scale.of[0].pair(numbers, 0), scale.of[0].pair(numbers, 1), scale.of[1].pair(numbers, 2),
                scale.of[1].pair(numbers, 3)};
    }
};

// A scale that is computed where it is used.
template <typename Format>
static __device__ __forceinline__ typename Format::Scale scale_of(const unsigned char* packet, int row, int group) {
    typename Format::Handed handed[1];
    Format::hand(handed, packet, row, group);
    return Format::scale(packet, row, group, handed[0]);
}

// A chunk of a row of a whole matrix with so many inputs.
template <typename Format>
static __device__ __forceinline__ Element8 chunk_of(const unsigned char* matrix, int inputs, int64_t row, int chunk) {
    constexpr int CHUNKS = Format::STEP / 8;
    const int steps = (inputs + Format::STEP - 1) / Format::STEP, place = static_cast<int>(row % ROWS);
    const unsigned char* packet = matrix + (row / ROWS * steps + chunk / CHUNKS) * Format::PACKET;
    const auto scale = scale_of<Format>(packet, place, chunk % CHUNKS / 4);
    return Format::eight(Format::raw(packet, place, chunk % CHUNKS), scale);
}

// Elements 8 index .. 8 index + 7 of a row, of which the four chunks of their group have two each.
template <typename Format>
static __device__ __forceinline__ Element8 neighbours_of(const unsigned char* matrix, int inputs, int64_t row, int index) {
    Element8 out;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        const Element8 chunk = chunk_of<Format>(matrix, inputs, row, index / 4 * 4 + t);
        out.word[t] = index & 2 ? index & 1 ? chunk.word[3] : chunk.word[2] : index & 1 ? chunk.word[1] : chunk.word[0];
    }
    return out;
}

}  // namespace packed

// For a kernel of each.
#define PACKED_FORMATS(KERNEL) \
    KERNEL(Q8_0)               \
    KERNEL(Q6_K)               \
    KERNEL(Q5_K)               \
    KERNEL(Q4_K)               \
    KERNEL(Q3_K)               \
    KERNEL(Q2_K)               \
    KERNEL(Q5_1)               \
    KERNEL(Q5_0)               \
    KERNEL(Q4_1)               \
    KERNEL(Q4_0)               \
    KERNEL(IQ4_NL)             \
    KERNEL(MXFP4)

#ifdef FORMAT
using Packed = packed::FORMAT;
#endif
