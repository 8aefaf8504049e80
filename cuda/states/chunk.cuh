// Chunks of 64 tokens on tensor cores with nearly the precision of float.
//
// A float is the sum of two bfloat16, a high and a low part, but for 2^-17 of it. A product of two such is three products of parts:
// high high, high low, low high; what is left out is as small. Sums are float. So three instructions for bfloat16 do what TF32 does
// in two, of which each has half the depth and 2^-11.
//
// A recurrence is computed transposed: a warp has 16 columns of the state as rows of a left operand, (16, KEYS) in registers, and a
// product's result is the next one's left operand where it lies. The right operands are in shared memory, where all warps read them:
//   keys, queries   (64, KEYS) each, rows padded by 16 bytes so that eight of them are in different banks
//   squares         lower triangles (64, 64), of which the 10 blocks of 16 x 16 at or below the diagonal are kept; rows of 32 bytes, of
//                   which every other four have their halves exchanged, for the same end
#pragma once

#include <cuda_bf16.h>

#include "common/mma_bf16.cuh"
#include "states/mixing.cuh"

static constexpr int CHUNK = 64;

// Two floats: their high parts in one word, the low ones in another.
static __device__ __forceinline__ void split(float x, float y, uint32_t& high, uint32_t& low) {
    const __nv_bfloat162 rounded_pair = __floats2bfloat162_rn(x, y);
    high = *reinterpret_cast<const uint32_t*>(&rounded_pair);
    const __nv_bfloat162 rest =
        __floats2bfloat162_rn(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xffff0000u));
    low = *reinterpret_cast<const uint32_t*>(&rest);
}

// Parts of 16 x 16 numbers, as a left operand or as two right ones of 8 columns.
struct Parts {
    uint32_t high[4], low[4];
};

// A left operand of two results beside each other, of 8 columns each.
static __device__ __forceinline__ Parts left_of(const float (&a)[4], const float (&b)[4]) {
    Parts parts;
    split(a[0], a[1], parts.high[0], parts.low[0]);
    split(a[2], a[3], parts.high[1], parts.low[1]);
    split(b[0], b[1], parts.high[2], parts.low[2]);
    split(b[2], b[3], parts.high[3], parts.low[3]);
    return parts;
}

// c, d (16 x 8 each) += left times the two right operands.
static __device__ __forceinline__ void multiply(float (&c)[4], float (&d)[4], const Parts& left, const Parts& right) {
    mma_bf16(c, left.low, right.high[0], right.high[1]);
    mma_bf16(d, left.low, right.high[2], right.high[3]);
    mma_bf16(c, left.high, right.low[0], right.low[1]);
    mma_bf16(d, left.high, right.low[2], right.low[3]);
    mma_bf16(c, left.high, right.high[0], right.high[1]);
    mma_bf16(d, left.high, right.high[2], right.high[3]);
}

// 64 rows of KEYS numbers in shared memory.
template <int KEYS>
struct Rows64 {
    static constexpr int STRIDE = 2 * (KEYS + 8), PART = CHUNK * STRIDE, BYTES = 2 * PART;

    unsigned char* base;

    __device__ __forceinline__ void store(int row, int pair, float x, float y) const {
        uint32_t high, low;
        split(x, y, high, low);
        store_parts(row, pair, high, low);
    }
    __device__ __forceinline__ void store_parts(int row, int pair, uint32_t high, uint32_t low) const {
        unsigned char* const place = base + row * STRIDE + pair * 4;
        *reinterpret_cast<uint32_t*>(place) = high;
        *reinterpret_cast<uint32_t*>(place + PART) = low;
    }
    // 16 rows from `row` on, 16 numbers from `column` on: as a left operand, ...
    __device__ __forceinline__ Parts left(int row, int column) const {
        const int lane = threadIdx.x % 32;
        return read<false>(row + lane % 16, column + lane / 16 * 8);
    }
    // ... as right operands whose columns are the rows, ...
    __device__ __forceinline__ Parts right(int row, int column) const {
        const int lane = threadIdx.x % 32;
        return read<false>(row + lane / 16 * 8 + lane % 8, column + lane / 8 % 2 * 8);
    }
    // ... and whose rows are the rows.
    __device__ __forceinline__ Parts right_rows(int row, int column) const {
        const int lane = threadIdx.x % 32;
        return read<true>(row + lane % 16, column + lane / 16 * 8);
    }

private:
    template <bool TRANSPOSED>
    __device__ __forceinline__ Parts read(int row, int column) const {
        const uint32_t place = shared_address(base) + row * STRIDE + column * 2;
        Parts parts;
        if (TRANSPOSED) {
            load_matrices_transposed(parts.high, place);
            load_matrices_transposed(parts.low, place + PART);
        } else {
            load_matrices(parts.high, place);
            load_matrices(parts.low, place + PART);
        }
        return parts;
    }
};

// A lower triangle of 64 x 64 numbers in shared memory.
struct Triangle {
    static constexpr int BLOCK = 512, PART = 10 * BLOCK, BYTES = 2 * PART;

    unsigned char* base;

    static __device__ __forceinline__ int offset(int block_row, int block_column, int row, int half) {
        return (block_row * (block_row + 1) / 2 + block_column) * BLOCK + row * 32 + (half ^ (row / 4 & 1)) * 16;
    }
    // Numbers 2 pair, + 1 of 8 in that half of a block's row.
    __device__ __forceinline__ void store(int block_row, int block_column, int row, int half, int pair, float x, float y) const {
        uint32_t high, low;
        split(x, y, high, low);
        unsigned char* const place = base + offset(block_row, block_column, row, half) + pair * 4;
        *reinterpret_cast<uint32_t*>(place) = high;
        *reinterpret_cast<uint32_t*>(place + PART) = low;
    }
    __device__ __forceinline__ void store_one(int block, int row, int column, float x) const {
        uint32_t high, low;
        split(x, 0.0f, high, low);
        unsigned char* const place = base + offset(block, block, row, column / 8) + column % 8 * 2;
        *reinterpret_cast<uint16_t*>(place) = static_cast<uint16_t>(high);
        *reinterpret_cast<uint16_t*>(place + PART) = static_cast<uint16_t>(low);
    }
    // A block as right operands whose columns are its rows.
    __device__ __forceinline__ Parts right(int block_row, int block_column) const {
        const int lane = threadIdx.x % 32;
        const uint32_t place =
            shared_address(base) + offset(block_row, block_column, lane / 16 * 8 + lane % 8, lane / 8 % 2);
        Parts parts;
        load_matrices(parts.high, place);
        load_matrices(parts.low, place + PART);
        return parts;
    }
};

// What a chunk's tokens keep of what was before them, in shared memory. Tokens that there are not keep all and write nothing.
struct Times {
    float sums[CHUNK];   // of the logarithms of what is kept, up to and with a token
    float kept[CHUNK];   // of the state before the chunk, at a token
    float last[CHUNK];   // of what a token writes, at the chunk's end
    float weight[CHUNK];  // of what a token writes: beta, or dt

    // By one warp; decay and weight of tokens 2 lane, + 1.
    __device__ __forceinline__ void make(const float (&decay)[2], const float (&weights)[2]) {
        const int lane = threadIdx.x % 32;
        const float pair = decay[0] + decay[1];
        float before = pair;  // becomes the sum up to this lane's tokens, then up to those before them
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const float more = __shfl_sync(0xffffffffu, before, max(lane - distance, 0));
            if (lane >= distance) before += more;
        }
        before = __shfl_sync(0xffffffffu, before, max(lane - 1, 0));
        if (lane == 0) before = 0.0f;
        const float sum[2] = {before + decay[0], before + pair};
        const float end = __shfl_sync(0xffffffffu, sum[1], 31);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = 2 * lane + i;
            sums[token] = sum[i], kept[token] = expf(sum[i]), last[token] = expf(end - sum[i]), weight[token] = weights[i];
        }
    }
    // The share of what token `from` writes that is kept at token `to`, which is not before it.
    __device__ __forceinline__ float between(int to, int from) const {
        return exp2_fast((sums[to] - sums[from]) * LOG2_E);
    }
};

// The 10 blocks of a triangle, in order.
static __device__ __forceinline__ int block_row_of(int block) { return block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3; }

// A block of queries keys^T (or keys keys^T).
template <int KEYS>
static __device__ __forceinline__ void multiply_rows(float (&c)[2][4], const Rows64<KEYS>& left, int block_row,
                                                     const Rows64<KEYS>& right, int block_column) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) c[i][j] = 0.0f;
#pragma unroll 4
    for (int column = 0; column < KEYS; column += 16)
        multiply(c[0], c[1], left.left(16 * block_row, column), right.right(16 * block_column, column));
}

// A block of how much of what tokens (columns) write is read at tokens (rows): no token reads what a later one writes.
static __device__ __forceinline__ void store_reading(const Triangle& reading, const Times& times, int block_row, int block_column,
                                                     const float (&c)[2][4]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
            const int row = g + 8 * lower, to = 16 * block_row + row, from = 16 * block_column + 8 * half + 2 * t;
            const float x = from <= to ? c[half][2 * lower] * times.between(to, from) : 0.0f;
            const float y = from + 1 <= to ? c[half][2 * lower + 1] * times.between(to, from + 1) : 0.0f;
            reading.store(block_row, block_column, row, half, t, x, y);
        }
}

// A warp's 16 columns of a state (KEYS, columns), transposed.
template <int KEYS>
struct HeldColumns {
    float tiles[KEYS / 8][4];

    // `matrix`: from this warp's first column on.
    __device__ __forceinline__ void load(const float* matrix, int columns, bool present) {
        each(columns, [&](float& value, int place) { value = present ? matrix[place] : 0.0f; });
    }
    __device__ __forceinline__ void store(float* matrix, int columns) {
        each(columns, [&](float& value, int place) { matrix[place] = value; });
    }
    __device__ __forceinline__ void scale(float factor) {
#pragma unroll
        for (int tile = 0; tile < KEYS / 8; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) tiles[tile][i] *= factor;
    }
    // += what the chunk writes: `written` times rows of keys.
    __device__ __forceinline__ void add(const Parts (&written)[4], const Rows64<KEYS>& keys) {
#pragma unroll
        for (int block = 0; block < 4; ++block)
#pragma unroll
            for (int column = 0; column < KEYS; column += 16)
                multiply(tiles[column / 8], tiles[column / 8 + 1], written[block], keys.right_rows(16 * block, column));
    }

private:
    template <typename Take>
    __device__ __forceinline__ void each(int columns, Take take) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int tile = 0; tile < KEYS / 8; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) take(tiles[tile][i], (8 * tile + 2 * t + i % 2) * columns + g + 8 * (i / 2));
    }
};

// 64 tokens (columns) of a warp's 16 columns (rows): of values, or of results. Those of tokens from `length` on are zeros.
struct Tokens {
    float tiles[8][4];

    __device__ __forceinline__ void load(const float* source, int stride, int length) {
        each([&](float& value, int token, int row) {
            value = token < length ? source[static_cast<int64_t>(token) * stride + row] : 0.0f;
        });
    }
    __device__ __forceinline__ void store(float* target, int stride, int length) {
        const int t = threadIdx.x % 4;
        int at = 2 * t * stride + threadIdx.x % 32 / 4;
#pragma unroll
        for (int tile = 0; tile < 8; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (8 * tile + 2 * t + i % 2 < length) target[at + i % 2 * stride + 8 * (i / 2)] = tiles[tile][i];
            at += 8 * stride;
            asm volatile("" : "+r"(at));  // or all addresses are made first, for which there are not enough registers
        }
    }
    __device__ __forceinline__ void clear() {
        each([](float& value, int, int) { value = 0.0f; });
    }
    // Calls take(value, token, row).
    template <typename Take>
    __device__ __forceinline__ void each(Take take) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int tile = 0; tile < 8; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) take(tiles[tile][i], 8 * tile + 2 * t + i % 2, g + 8 * (i / 2));
    }
    // 16 tokens as a left operand, ...
    __device__ __forceinline__ Parts left(int block) const { return left_of(tiles[2 * block], tiles[2 * block + 1]); }
    // ... each times its factor.
    __device__ __forceinline__ Parts left(int block, const float* factors) const {
        const int t = threadIdx.x % 4;
        float scaled[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                scaled[half][i] = tiles[2 * block + half][i] * factors[16 * block + 8 * half + 2 * t + i % 2];
        return left_of(scaled[0], scaled[1]);
    }
    // += what tokens read of what earlier ones have written.
    __device__ __forceinline__ void read(const Parts (&written)[4], const Triangle& reading) {
#pragma unroll
        for (int row = 0; row < 4; ++row)
#pragma unroll
            for (int column = 0; column <= row; ++column)
                multiply(tiles[2 * row], tiles[2 * row + 1], written[column], reading.right(row, column));
    }
};

// Chunk c of piece p has the records (row_p - row_0) / 64 + p + c of what is prepared for all chunks at once, where row_0 is the first
// piece's row: no two share one, and there are no more than T / 64 + pieces.
static __device__ __forceinline__ int record_of(const int* rows, int piece) { return (rows[piece] - rows[0]) / CHUNK + piece; }

// The chunk whose records have a number: of which piece, its first token there, and its length, which is not positive where there
// is no such chunk.
struct Chunk {
    int piece, first, length;
};

static __device__ __forceinline__ Chunk chunk_of(const int* rows, const int* lengths, int count, int record) {
    int index = 0;
    for (int above = count; above - index > 1;) {
        const int middle = (index + above) / 2;
        (record_of(rows, middle) <= record ? index : above) = middle;
    }
    const int first = (record - record_of(rows, index)) * CHUNK;
    return {index, first, min(lengths[index] - first, CHUNK)};
}

// Rows in parts to shared memory; zeros behind the last.
template <int KEYS, int THREADS>
static __device__ __forceinline__ void copy_rows(unsigned char* target, const float* source, int stride, int length) {
    constexpr int PIECES_OF_PART = KEYS / 8, EACH = 2 * PIECES_OF_PART;  // of 16 bytes
    const uint32_t place = shared_address(target);
    for (int i = threadIdx.x; i < CHUNK * EACH; i += THREADS) {
        const int row = i / EACH, part = i % EACH / PIECES_OF_PART, column = i % PIECES_OF_PART;
        const bool wanted = row < length;
        copy_async(place + part * Rows64<KEYS>::PART + row * Rows64<KEYS>::STRIDE + column * 16,
                   source + static_cast<int64_t>(wanted ? row : 0) * stride + i % EACH * 4, wanted);
    }
}

// Whole, a multiple of 16 bytes.
template <int THREADS>
static __device__ __forceinline__ void copy_bytes(void* target, const void* source, int bytes) {
    const uint32_t place = shared_address(target);
    for (int at = threadIdx.x * 16; at < bytes; at += THREADS * 16)
        copy_async(place + at, static_cast<const unsigned char*>(source) + at, true);
}
