// How a warp makes the left operand of wgmma, in registers, of weights in the packed layout of `packed.cuh`.
#pragma once

#include "common/common.cuh"
#include "common/packed.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// What a warp makes of a chunk, 256 elements of K, of its panels, the first of whose packets begin at `packets` and are
// `packet_set` apart, those of the other `to_high` behind them. With one panel, half of the operand is anything. Scales that
// have to be computed are, once, and kept at `scales`.
template <typename Packed, int PANELS>
struct PackedMaker {
    static constexpr bool HANDED = Packed::STEP == 256;
    static constexpr int SCALES = HANDED ? 8 * 8 * PANELS * sizeof(typename Packed::Handed) : 0;  // bytes that a warp keeps

    const unsigned char *packets, *scales;
    int to_high, packet_set;

    __device__ __forceinline__ PackedMaker(const unsigned char* packets, unsigned char* scales, int to_high, int packet_set)
        : packets(packets), scales(scales), to_high(to_high), packet_set(packet_set) {
        if (HANDED) {
            constexpr int EACH = 2 * PANELS;  // of a lane
            const int lane = threadIdx.x % 32, t = lane % 4, panel = PANELS == 2 ? t / 2 : 0;
            const int first = (PANELS == 2 ? t % 2 : t) * EACH;
            typename Packed::Handed made[EACH];
            Packed::hand(made, packets + panel * to_high, lane / 4, first);
            auto* out = reinterpret_cast<typename Packed::Handed*>(scales) + (first * PANELS + panel) * 8 + lane / 4;
            __syncwarp();
#pragma unroll
            for (int i = 0; i < EACH; ++i) out[i * 8 * PANELS] = made[i];
            __syncwarp();
        }
    }

    // A quarter of it; a[4 k] .. are of the k-th 16 elements of K.
    __device__ __forceinline__ void make(uint32_t (&a)[16], int quarter) const {
        const int lane = threadIdx.x % 32, row = lane / 4, t = lane % 4;
        const int group = HANDED ? 2 * quarter : 0;
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int p = 0; p < PANELS; ++p) {
                const unsigned char* packet = packets + p * to_high + (HANDED ? 0 : quarter * packet_set);
                const auto* handed = reinterpret_cast<const typename Packed::Handed*>(scales) + p * 8 + row;
                const auto scale = Packed::scale(packet, row, group + i,
                                                 HANDED ? handed[(group + i) * 8 * PANELS] : typename Packed::Handed());
                const Element8 chunk = Packed::eight(Packed::raw(packet, row, (group + i) * 4 + t), scale);
#pragma unroll
                for (int word = 0; word < 4; ++word) a[8 * i + 2 * word + p] = chunk.word[word];
            }
        if (PANELS == 1)
#pragma unroll
            for (int i = 1; i < 16; i += 2) a[i] = packed::anything();
    }
};

#endif
