// What kernels for steps of a few tokens share (`few_rows.cu`, `few_fp8.cu`): sums of squares as `rms_norm` adds them, and pairs that
// are rotated.
#pragma once

#include "common/qkv.cuh"

static constexpr int MAX_PARTS = 32;

// How norm(x) is summed in the order of `rms_norm`: the warps of the block that a row has there are parts here, which the warps of
// this block share out.
struct NormShape {
    int tokens, width, chunks, pieces, parts, warps, warp, lane;
    const float* gains;

    __device__ __forceinline__ NormShape(int tokens, int width, const float* gains, bool one_piece)
        : tokens(tokens), width(width), gains(gains) {
        chunks = width / 8, pieces = one_piece || chunks <= 256 ? 1 : chunks <= 512 ? 2 : 4;
        parts = (chunks + 32 * pieces - 1) / (32 * pieces);
        warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    }

    __device__ __forceinline__ float scale_of(const float* sums, float eps) const {
        float total;
        if (parts <= 4) {  // as `warp_sum` adds them
            const float4 four = *reinterpret_cast<const float4*>(sums);
            const float third = parts > 2 ? four.z : 0.0f, fourth = parts > 3 ? four.w : 0.0f;
            total = (four.x + third) + ((parts > 1 ? four.y : 0.0f) + fourth);
        } else {
            total = warp_sum(lane < parts ? sums[lane] : 0.0f);
        }
        return 1.0f / sqrtf(total / static_cast<float>(width) + eps);
    }

    static __device__ __forceinline__ void store(unsigned char* target, float (&values)[8], const float (&gains)[8],
                                                 float scale) {
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] *= scale * gains[i];
        *reinterpret_cast<Element8*>(target) = pack(values);
    }
};

// A pair of results that is rotated together: elements `low` and `high` of a head of a token.
struct Pair {
    int head, token, low, high, cache_row = 0;
    float low_bias = 0.0f, high_bias = 0.0f;
    float2 angle = make_float2(1.0f, 0.0f);

    static __device__ __forceinline__ int element(int pair, int which) {
        return INTERLEAVED ? 2 * pair + which : pair + which * (HEAD_DIM / 2);
    }

    Pair() = default;

    // Loads what the step's arrays hold: it is there before the step starts.
    __device__ __forceinline__ Pair(const Qkv& to, int head, int token, int pair, bool exists)
        : head(head), token(token), low(element(pair, 0)), high(element(pair, 1)) {
        if (!exists) return;
        if (to.bias != nullptr)
            low_bias = to.bias[head * HEAD_DIM + low], high_bias = to.bias[head * HEAD_DIM + high];
        angle = *reinterpret_cast<const float2*>(to.angles(to.table_row(to.positions[token])) + 2 * pair);
        cache_row = to.cache_rows[token];
    }

    __device__ __forceinline__ void finish(const Qkv& to, float x, float y) const {
        x = rounded(x), y = rounded(y);
        if (to.bias != nullptr) x += low_bias, y += high_bias;
        if (!to.is_value(head)) rotate(x, y, angle.x, angle.y);
        Element* target = to.in_qkv(token, head);
#ifndef KV_FP8
        if (!to.is_query(head)) {
            if (cache_row < 0) return;
            target = to.in_cache(cache_row, head);
        }
#endif
        target[low] = to_element(x);
        target[high] = to_element(y);
    }
};
