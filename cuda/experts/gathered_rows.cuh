// Rows of x on their way to wgmma, or to mma.sync, in `hopper_grouped.cu`, `packed_experts.cu` and `expert_gemm.cu`: rows that lie
// anywhere, copied one by one to where the 128-byte swizzle wants them.
#pragma once

#include "experts/grouped.cuh"

#include "common/hopper.cuh"

// Where 8 elements of a position lie in a box of 64 elements of K, of all positions; `piece`: which eight of these.
static __device__ __forceinline__ uint32_t place_in_box(int position, int piece) {
    return position * 128 + ((piece ^ position & 7) << 4);
}

// The number, which the compiler then knows to be one for all lanes: what hangs on it does not part them.
static __device__ __forceinline__ int same_in_warp(int number) { return __shfl_sync(0xffffffffu, number, 0); }

// What a thread of WARPS warps copies of a tile of N positions: of every AT_ONCE-th 16 bytes of a box, 64 elements or 128 numbers of
// E4M3.
template <int N, int WARPS>
struct RowCopier {
    static constexpr int AT_ONCE = 4 * WARPS, EACH = N / AT_ONCE, PIECE = 16 / sizeof(Input);
    int row, piece, positions;
    uint32_t from[EACH];  // in pieces

    // thread: of those warps
    __device__ __forceinline__ RowCopier(int thread) : row(thread / 8), piece(thread % 8), positions(0) {}

    // The tile whose boxes are copied from now on.
    __device__ __forceinline__ void take(const Operands& given, const int4& tile) {
        positions = tile.z;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int position = tile.y + min(row + i * AT_ONCE, tile.z - 1);
            from[i] = (given.sources == nullptr ? position : given.sources[position]) * (given.inputs / PIECE);
        }
    }
    // A box, zeros beyond the end of K; of positions that the tile lacks nothing.
    __device__ __forceinline__ void copy(const Operands& given, uint32_t target, int box) const {
        const int k = (box * 8 + piece) * PIECE;
        const bool inside = k < given.inputs;
        const Input* own = given.x + (inside ? k : 0);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int at = row + i * AT_ONCE;
            if (at < positions)
                copy_async(target + place_in_box(at, piece), own + static_cast<int64_t>(from[i]) * PIECE, inside);
        }
    }
};
