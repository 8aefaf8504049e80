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
    using Handed = typename Packed::Handed;
    static constexpr int SCALES = HANDED ? 8 * 8 * PANELS * sizeof(Handed) : 0;  // bytes that a warp keeps
    // What is one word a group lies row by row, so that several groups are written and read together; else group by group.
    static constexpr bool BY_ROWS = HANDED && sizeof(Handed) == 4;

    const unsigned char *packets, *scales;
    int to_high, packet_set;

    __device__ __forceinline__ PackedMaker(const unsigned char* packets, unsigned char* scales, int to_high, int packet_set)
        : packets(packets), scales(scales), to_high(to_high), packet_set(packet_set) {
        if (HANDED) {
            constexpr int EACH = 2 * PANELS;  // of a lane
            const int lane = threadIdx.x % 32, t = lane % 4, panel = PANELS == 2 ? t / 2 : 0;
            const int first = (PANELS == 2 ? t % 2 : t) * EACH;
            Handed made[EACH];
            Packed::hand(made, packets + panel * to_high, lane / 4, first);
            auto* out = reinterpret_cast<Handed*>(scales);
            __syncwarp();
            if constexpr (BY_ROWS)
                put_words(out + (panel * 8 + lane / 4) * 8 + first, made);
            else
#pragma unroll
                for (int i = 0; i < EACH; ++i) out[((first + i) * PANELS + panel) * 8 + lane / 4] = made[i];
            __syncwarp();
        }
    }

    // Of a quarter's two groups.
    __device__ __forceinline__ void take(Handed (&two)[2], int panel, int row, int quarter) const {
        const auto* all = reinterpret_cast<const Handed*>(scales);
        if constexpr (BY_ROWS) {
            const uint2 words = *reinterpret_cast<const uint2*>(all + (panel * 8 + row) * 8 + 2 * quarter);
            two[0] = words.x, two[1] = words.y;
        } else if constexpr (HANDED) {
#pragma unroll
            for (int i = 0; i < 2; ++i) two[i] = all[((2 * quarter + i) * PANELS + panel) * 8 + row];
        }
    }
    static __device__ __forceinline__ void put_words(uint32_t* out, const uint32_t (&words)[2]) {
        *reinterpret_cast<uint2*>(out) = make_uint2(words[0], words[1]);
    }
    static __device__ __forceinline__ void put_words(uint32_t* out, const uint32_t (&words)[4]) {
        *reinterpret_cast<uint4*>(out) = make_uint4(words[0], words[1], words[2], words[3]);
    }

    // A quarter of it; a[4 k] .. are of the k-th 16 elements of K.
    __device__ __forceinline__ void make(uint32_t (&a)[16], int quarter) const {
        const int lane = threadIdx.x % 32, row = lane / 4, t = lane % 4;
        const int group = HANDED ? 2 * quarter : 0;
#pragma unroll
        for (int p = 0; p < PANELS; ++p) {
            const unsigned char* packet = packets + p * to_high + (HANDED ? 0 : quarter * packet_set);
            Handed handed[2];
            take(handed, p, row, quarter);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const auto scale = Packed::scale(packet, row, group + i, handed[i]);
                const Element8 chunk = Packed::eight(Packed::raw(packet, row, (group + i) * 4 + t), scale);
#pragma unroll
                for (int word = 0; word < 4; ++word) a[8 * i + 2 * word + p] = chunk.word[word];
            }
        }
        if (PANELS == 1)
#pragma unroll
            for (int i = 1; i < 16; i += 2) a[i] = packed::anything();
    }
};

#endif
