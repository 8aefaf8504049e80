// GGUF blocks to packets (`common/packed.cuh`): the same bits in another order.
//
// in   `rows` rows of K / SIZE blocks, as they stand in the file
// out  the panels of a matrix with K inputs, into which these rows go from row `first` on
//
// One thread 32 elements of a row, numbered through the rows, 256 a block of threads: it writes their part of each plane and
// their scales. It runs once, behind the upload over PCIe, which is the slower of the two. What the matrix lacks in its last
// panel and steps is zeroed before.
//
// `bad` is set where a weight does not fit into an element, as in dequantize.cu.

#include "common/packed.cuh"
#include "weights/blocks.cuh"

namespace {

// A row's place in a packet: planes, `scales` behind them.
struct Place {
    unsigned char *packet, *scales;
    int row;
};

__device__ __forceinline__ void put_word(unsigned char* place, uint32_t word) { *reinterpret_cast<uint32_t*>(place) = word; }
__device__ __forceinline__ void put_two(unsigned char* place, const uint8_t* source) {
    *reinterpret_cast<uint16_t*>(place) = *reinterpret_cast<const uint16_t*>(source);
}
__device__ __forceinline__ void put_four(unsigned char* place, const uint8_t* source) {
    put_two(place, source), put_two(place + 2, source + 2);
}

// Where element i of a chunk is in its group.
__device__ __forceinline__ int in_group(int chunk, int i) { return 8 * (i / 2) + 2 * chunk + i % 2; }

// The plane of a word for so many chunks, of which a chunk has 4 / CHUNKS bits an element, `shift` up in the file's number.
// Returns where the next one starts.
template <typename Type, int CHUNKS>
__device__ __forceinline__ int put_plane(const Place& at, int plane, int step, const uint8_t* block, int within, int chunk,
                                         int shift) {
    constexpr int BITS = 4 / CHUNKS;
    for (int first = 0; first < 4; first += CHUNKS) {
        uint32_t word = 0;
        for (int c = 0; c < CHUNKS; ++c)
            for (int i = 0; i < 8; ++i) {
                const uint32_t bits = Type::number(block, within + in_group(first + c, i)) >> shift & ((1 << BITS) - 1);
                word |= bits << (4 * (i / 2) + 16 * (i % 2) + BITS * c);
            }
        put_word(at.packet + plane + ((chunk + first) / CHUNKS * packed::ROWS + at.row) * 4, word);
    }
    return plane + step / 8 / CHUNKS * packed::ROWS * 4;
}

// Planes of types by the bits of their numbers; returns the bytes of all.
template <typename Type, int BITS, int STEP>
__device__ __forceinline__ int put_numbers(const Place& at, const uint8_t* block, int within, int chunk) {
    if (BITS == 8) {
        for (int i = 0; i < 32; ++i)
            at.packet[((chunk + i / 8) * packed::ROWS + at.row) * 8 + i % 8] =
                Type::number(block, within + in_group(i / 8, i % 8));
        return STEP * packed::ROWS;
    }
    int plane = 0;
    if (BITS >= 4) plane = put_plane<Type, 1>(at, plane, STEP, block, within, chunk, 0);
    if (BITS % 4 >= 2) plane = put_plane<Type, 2>(at, plane, STEP, block, within, chunk, BITS & 4);
    if (BITS % 2) plane = put_plane<Type, 4>(at, plane, STEP, block, within, chunk, BITS - 1);
    return plane;
}

// Scales of the types with blocks of 32: what stands at their beginning.
template <int BYTES>
struct Beginning {
    static __device__ __forceinline__ void put(const Place& at, const uint8_t* b, int group) {
        for (int i = 0; i < BYTES; i += 2) put_two(at.scales + (at.row * 2 + group) * BYTES + i, b + i);
    }
};

struct OfMXFP4 {
    static __device__ __forceinline__ void put(const Place& at, const uint8_t* b, int group) {
        at.scales[at.row * 2 + group] = b[0];
    }
};

// Whether kernels can use the scales of a group of a block: of MXFP4, 2^14 times as much has to be a half, or a float where elements are bfloat16.
template <typename Type>
__device__ __forceinline__ bool usable(const uint8_t*, int) {
    return true;
}
template <>
__device__ __forceinline__ bool usable<MXFP4>(const uint8_t* block, int) {
#ifdef ELEMENT_BF16
    return block[0] <= 240;
#else
    return block[0] <= 128;
#endif
}

// Scales and minima that are quantised are halves where elements are, and have to fit.
__device__ __forceinline__ bool fit(float scale, float other) {
    return isfinite(to_float(to_element(scale))) && isfinite(to_float(to_element(other)));
}
__device__ __forceinline__ bool lines_fit(const uint8_t* block, int group) {
    int scale, minimum;
    scale_and_minimum(block + 4, group, scale, minimum);
    return fit(half_at(block) * float(scale), half_at(block + 2) * float(minimum));
}
template <>
__device__ __forceinline__ bool usable<Q4_K>(const uint8_t* block, int group) {
    return lines_fit(block, group);
}
template <>
__device__ __forceinline__ bool usable<Q5_K>(const uint8_t* block, int group) {
    return lines_fit(block, group);
}
template <>
__device__ __forceinline__ bool usable<Q6_K>(const uint8_t* block, int group) {
    const float d = half_at(block + 208);
    return fit(d * float(int8_t(block[192 + 2 * group])), d * float(int8_t(block[193 + 2 * group])));
}
template <>
__device__ __forceinline__ bool usable<Q3_K>(const uint8_t* block, int group) {
    const float d = half_at(block + 108);
    return fit(d * float(six_bits(block + 96, 2 * group) - 32), d * float(six_bits(block + 96, 2 * group + 1) - 32));
}
template <>
__device__ __forceinline__ bool usable<Q2_K>(const uint8_t* block, int group) {
    const float d = half_at(block + 80), m = half_at(block + 82);
    const int first = block[2 * group], second = block[2 * group + 1];
    return fit(d * float(first & 15), m * float(first >> 4)) && fit(d * float(second & 15), m * float(second >> 4));
}

struct OfQ4_K {  // and of Q5_K
    static __device__ __forceinline__ void put(const Place& at, const uint8_t* b, int group) {
        unsigned char* row = at.scales + at.row * 16;
        uint32_t low = 0;
        for (int g = 0; g < 8; ++g) {
            int scale, minimum;
            scale_and_minimum(b + 4, g, scale, minimum);
            low |= uint32_t(minimum & 15) << 4 * g;
            if (g == group) row[4 + g] = scale | minimum >> 4 << 6;
        }
        if (group > 0) return;
        put_four(row, b);
        put_word(row + 12, low);
    }
};

struct OfQ6_K {
    static __device__ __forceinline__ void put(const Place& at, const uint8_t* b, int group) {
        put_two(at.scales + at.row * 16 + group * 2, b + 192 + group * 2);
        if (group == 0) put_two(at.scales + packed::ROWS * 16 + at.row * 2, b + 208);
    }
};

struct OfQ3_K {
    static __device__ __forceinline__ void put(const Place& at, const uint8_t* b, int group) {
        unsigned char* row = at.scales + at.row * 12;
        uint32_t high = 0;
        for (int s = 0; s < 16; ++s) {
            const int scale = six_bits(b + 96, s);
            high |= uint32_t(scale >> 4) << 2 * s;
            if (s == 2 * group) row[group] = scale & 15 | (six_bits(b + 96, s + 1) & 15) << 4;
        }
        if (group > 0) return;
        put_word(row + 8, high);
        put_two(at.scales + packed::ROWS * 12 + at.row * 2, b + 108);
    }
};

struct OfQ2_K {
    static __device__ __forceinline__ void put(const Place& at, const uint8_t* b, int group) {
        put_two(at.scales + at.row * 16 + group * 2, b + group * 2);
        if (group == 0) put_four(at.scales + packed::ROWS * 16 + at.row * 4, b + 80);
    }
};

template <typename Type, typename Format, int BITS, typename Scales>
__device__ __forceinline__ void repack(const uint8_t* blocks, unsigned char* out, int64_t first, int64_t rows, int inputs,
                                       int* bad) {
    const int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const int groups = inputs / 32;
    if (index >= rows * groups) return;
    const int64_t row = first + index / groups;
    const int k = int(index % groups) * 32, steps = (inputs + Format::STEP - 1) / Format::STEP;
    const uint8_t* block = blocks + (index * 32) / Type::SIZE * Type::BYTES;
    const int within = k % Type::SIZE, chunk = k % Format::STEP / 8;
    unsigned char* packet = out + (row / packed::ROWS * steps + k / Format::STEP) * Format::PACKET;
    Place at{packet, packet, int(row % packed::ROWS)};
    at.scales += put_numbers<Type, BITS, Format::STEP>(at, block, within, chunk);
    Scales::put(at, block, chunk / 4);
    if (!usable<Type>(block, within / 32)) *bad = 1;
    for (int i = 0; i < 32; ++i)
        if (!isfinite(to_float(to_element(Type::at(block, within + i))))) *bad = 1;
}

}  // namespace

#define REPACK(TYPE, BITS, SCALES)                                                                                        \
    extern "C" __global__ void repack_##TYPE(const uint8_t* blocks, unsigned char* out, int64_t first, int64_t rows,       \
                                             int inputs, int* bad) {                                                      \
        repack<TYPE, packed::TYPE, BITS, SCALES>(blocks, out, first, rows, inputs, bad);                                  \
    }

REPACK(Q8_0, 8, Beginning<2>)
REPACK(Q4_0, 4, Beginning<2>)
REPACK(Q4_1, 4, Beginning<4>)
REPACK(Q5_0, 5, Beginning<2>)
REPACK(Q5_1, 5, Beginning<4>)
REPACK(IQ4_NL, 4, Beginning<2>)
REPACK(MXFP4, 4, OfMXFP4)
REPACK(Q4_K, 4, OfQ4_K)
REPACK(Q5_K, 5, OfQ4_K)
REPACK(Q6_K, 6, OfQ6_K)
REPACK(Q3_K, 3, OfQ3_K)
REPACK(Q2_K, 2, OfQ2_K)
