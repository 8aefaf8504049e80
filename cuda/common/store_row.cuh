// Results of tensor cores on their way to memory: rows in 16-byte pieces.
#pragma once

#include "common/common.cuh"

// Four words a lane, word i of which belongs to column group i: afterwards lane t of each four has group t whole.
static __device__ __forceinline__ uint4 transposed(uint32_t a, uint32_t b, uint32_t c, uint32_t d, int t) {
    const bool odd = t & 1, high = t & 2;
    uint32_t give = odd ? a : b, keep = odd ? b : a;
    uint32_t got = __shfl_xor_sync(0xffffffffu, give, 1);
    const uint32_t p0 = odd ? got : keep, p1 = odd ? keep : got;
    give = odd ? c : d, keep = odd ? d : c;
    got = __shfl_xor_sync(0xffffffffu, give, 1);
    const uint32_t q0 = odd ? got : keep, q1 = odd ? keep : got;
    const uint32_t r0 = __shfl_xor_sync(0xffffffffu, high ? p0 : q0, 2);
    const uint32_t r1 = __shfl_xor_sync(0xffffffffu, high ? p1 : q1, 2);
    return high ? make_uint4(r0, r1, q0, q1) : make_uint4(p0, p1, r0, r1);
}

// Writes COLUMNS elements of a row that four lanes have between them, lane t the words `word(i)` of column groups i
// (columns 8 i + 2 t, + 1): those groups that begin before `limit`. All lanes of the warp call it.
template <int COLUMNS, typename Word>
static __device__ __forceinline__ void store_row(Element* target, bool exists, int limit, int t, Word word) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; i += 4) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = i + j < COLUMNS / 8 ? word(i + j) : 0;
        const uint4 eight = transposed(words[0], words[1], words[2], words[3], t);
        const int group = i + t;
        if (exists && group < COLUMNS / 8 && group * 8 < limit)
            *reinterpret_cast<uint4*>(target + group * 8) = eight;
    }
}
