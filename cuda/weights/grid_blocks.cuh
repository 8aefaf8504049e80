// Blocks of GGUF's IQ types of one to three bits: groups of 4 or 8 weights are rows of a table, the grid, with signs or a shift.
//
// `grid` is that table, (rows, 4 or 8) signed bytes, row-major. `gguf` holds it packed; the dequantizer unpacks and uploads
// it, so that no number of it stands here. Included by dequantize.cu, whose rules hold: intrinsics, one weight a call.
#pragma once

namespace {

__device__ __forceinline__ uint32_t u16_at(const uint8_t* p) { return *reinterpret_cast<const uint16_t*>(p); }

__device__ __forceinline__ uint32_t u32_at(const uint8_t* p) { return u16_at(p) | u16_at(p + 2) << 16; }  // of 2-byte blocks

__device__ __forceinline__ int four_bits(const uint8_t* p, int i) { return p[i >> 1] >> (i & 1 ? 4 : 0) & 15; }

// Eight signs in seven bits: the number of minus signs is even.
__device__ __forceinline__ uint32_t eight_signs(uint32_t seven) {
    const uint32_t folded = seven ^ seven >> 4;
    return seven | (0x6996u >> (folded & 15) & 1) << 7;
}

__device__ __forceinline__ float signed_by(uint32_t signs, int i, float value) { return signs >> (i & 7) & 1 ? -value : value; }

__device__ __forceinline__ float half_steps(const uint8_t* d, uint32_t scale, float step) {
    return __fmul_rn(__fmul_rn(half_at(d), __fadd_rn(0.5f, float(scale))), step);
}

struct IQ2_XXS {  // half d; a 32 weights four rows of the grid, then four times seven bits of signs and four of scale
    static constexpr int SIZE = 256, BYTES = 66;
    static __device__ float at(const uint8_t* b, int i, const int8_t* grid) {
        const uint8_t* group = b + 2 + (i >> 5) * 8;
        const int eighth = i >> 3 & 3;
        const uint32_t rest = u32_at(group + 4);
        const float value = __fmul_rn(half_steps(b, rest >> 28, 0.25f), float(grid[group[eighth] * 8 + (i & 7)]));
        return signed_by(eight_signs(rest >> 7 * eighth & 127), i, value);
    }
};

struct IQ2_XS {  // half d; an eight weights nine bits of row and seven of signs; 16 scales of four bits
    static constexpr int SIZE = 256, BYTES = 74;
    static __device__ float at(const uint8_t* b, int i, const int8_t* grid) {
        const uint32_t q = u16_at(b + 2 + (i >> 3) * 2);
        const float d = half_steps(b, four_bits(b + 66, i >> 4), 0.25f);
        return signed_by(eight_signs(q >> 9), i, __fmul_rn(d, float(grid[(q & 511) * 8 + (i & 7)])));
    }
};

struct IQ2_S {  // half d, 32 bytes of rows, 32 of signs, 8 of the rows' two high bits, 16 scales of four bits
    static constexpr int SIZE = 256, BYTES = 82;
    static __device__ float at(const uint8_t* b, int i, const int8_t* grid) {
        const int eighth = i >> 3;
        const int row = b[2 + eighth] | (b[66 + (i >> 5)] >> 2 * (eighth & 3) & 3) << 8;
        const float d = half_steps(b, four_bits(b + 74, i >> 4), 0.25f);
        return signed_by(b[34 + eighth], i, __fmul_rn(d, float(grid[row * 8 + (i & 7)])));
    }
};

struct IQ3_XXS {  // half d, 64 bytes of rows; a 32 weights four times seven bits of signs and four of scale
    static constexpr int SIZE = 256, BYTES = 98;
    static __device__ float at(const uint8_t* b, int i, const int8_t* grid) {
        const uint32_t rest = u32_at(b + 66 + (i >> 5) * 4);
        const float value = __fmul_rn(half_steps(b, rest >> 28, 0.5f), float(grid[b[2 + (i >> 2)] * 4 + (i & 3)]));
        return signed_by(eight_signs(rest >> 7 * (i >> 3 & 3) & 127), i, value);
    }
};

struct IQ3_S {  // half d, 64 bytes of rows, 8 of the rows' high bits, 32 of signs, 8 scales of four bits
    static constexpr int SIZE = 256, BYTES = 110;
    static __device__ float at(const uint8_t* b, int i, const int8_t* grid) {
        const int quarter = i >> 2;
        const int row = b[2 + quarter] | (b[66 + (i >> 5)] >> (quarter & 7) & 1) << 8;
        const float d = __fmul_rn(half_at(b), float(1 + 2 * four_bits(b + 106, i >> 5)));
        return signed_by(b[74 + (i >> 3)], i, __fmul_rn(d, float(grid[row * 4 + (i & 3)])));
    }
};

__device__ __forceinline__ float shifted(float d, int value, bool down) {
    return __fmul_rn(d, __fadd_rn(float(value), down ? -0.125f : 0.125f));
}

struct IQ1_S {  // half d, 32 bytes of rows; a 32 weights four times three high bits of rows, three of scale, one of the shift
    static constexpr int SIZE = 256, BYTES = 50;
    static __device__ float at(const uint8_t* b, int i, const int8_t* grid) {
        const uint32_t high = u16_at(b + 34 + (i >> 5) * 2);
        const int row = b[2 + (i >> 3)] | (high >> 3 * (i >> 3 & 3) & 7) << 8;
        const float d = __fmul_rn(half_at(b), float(2 * (high >> 12 & 7) + 1));
        return shifted(d, grid[row * 8 + (i & 7)], high >> 15);
    }
};

struct IQ1_M {  // 32 bytes of rows; 16 of their three high bits and the shift; four times four scales of three bits, four of d
    static constexpr int SIZE = 256, BYTES = 56;
    static __device__ float at(const uint8_t* b, int i, const int8_t* grid) {
        const uint8_t* scales = b + 48;
        const uint32_t bits = scales[1] >> 4 | (scales[3] & 0xf0) | (scales[5] & 0xf0) << 4 | (scales[7] & 0xf0) << 8;
        const int high = four_bits(b + 32, i >> 3);
        const int row = b[i >> 3] | (high & 7) << 8;
        const uint32_t scale = u16_at(scales + (i >> 6) * 2) >> 3 * (i >> 4 & 3) & 7;
        const float d = __fmul_rn(__half2float(__ushort_as_half(uint16_t(bits))), float(2 * scale + 1));
        return shifted(d, grid[row * 8 + (i & 7)], high & 8);
    }
};

}  // namespace
