// What products of experts share, by mma.sync (`grouped.cu`) and by wgmma (`hopper_grouped.cu`): weights of any format on their
// way to operands, and what becomes of sums. Those files say what operands are.
//
// Options: -DFORMAT, a struct of `packed.cuh`; -DFP8; or none, for elements.
#pragma once

#ifdef FORMAT
#include "common/packed.cuh"
#else
#include "common/common.cuh"
#endif
#ifdef FP8
#include "common/e4m3.cuh"
#endif

static constexpr int PANEL = 8;  // rows of weights that lie together in packed formats

enum Activation { SILU, GELU, RELU_SQUARED, CLAMPED_SWIGLU };

static __device__ __forceinline__ float activated(int activation, float gate, float up) {
    if (activation == SILU) return silu_times(gate, up);
    if (activation == GELU) return gelu_times(gate, up);
    if (activation == RELU_SQUARED) return relu_squared_times(gate, up);
    constexpr float LIMIT = 7.0f, STEEP = -1.702f * LOG2_E;
    const float g = gate > LIMIT ? LIMIT : gate, u = up > LIMIT ? LIMIT : up < -LIMIT ? -LIMIT : up;
    return logistic_times(g, __fmul_rn(g, STEEP), u + 1.0f);
}

// A panel's weights, as they lie in memory and in shared memory, and those of a lane of 32 elements of row lane / 4.
#if defined(FORMAT)
struct Weights {
    static constexpr int STEP = Packed::STEP, PACKET = Packed::PACKET, GROUPS = STEP / 32;
    static constexpr int DEPTH = STEP == 256 ? 256 : 128, PACKETS = DEPTH / STEP, BYTES = PACKETS * PACKET;

    static __device__ __forceinline__ void fetch(uint32_t target, const unsigned char* weights, int64_t row, int inputs,
                                                 int step) {
        const int packets = (inputs + STEP - 1) / STEP, bytes = min(PACKETS, packets - step * PACKETS) * PACKET;
        const unsigned char* own = weights + (row / PANEL * packets + step * PACKETS) * PACKET;
        for (int at = threadIdx.x % 32 * 16; at < BYTES; at += 32 * 16)  // packets that there are not have scales of zero
            copy_async(target + at, at < bytes ? own + at : weights, at < bytes);
    }
    // What of scales is computed: a lane has that of its row and of group `first` + lane % 4, and takes the others from there.
    using Handed = typename Packed::Handed;
    static __device__ __forceinline__ Handed hand(const unsigned char* panel, int first) {
        Handed own[1];
        const int lane = threadIdx.x % 32, group = first + lane % 4;
        Packed::hand(own, panel + group / GROUPS * PACKET, lane / 4, group % GROUPS);
        return own[0];
    }
    static __device__ __forceinline__ Element8 group(const unsigned char* panel, int group, const Handed& handed) {
        const int lane = threadIdx.x % 32;
        const unsigned char* packet = panel + group / GROUPS * PACKET;
        const auto scale = Packed::scale(packet, lane / 4, group % GROUPS, taken(handed, lane / 4 * 4 + group % 4));
        return Packed::eight(Packed::raw(packet, lane / 4, group % GROUPS * 4 + lane % 4), scale);
    }
    static __device__ __forceinline__ packed::Nothing taken(packed::Nothing, int) { return {}; }
    static __device__ __forceinline__ uint32_t taken(uint32_t own, int lane) { return __shfl_sync(0xffffffffu, own, lane); }
    static __device__ __forceinline__ uint2 taken(const uint2& own, int lane) { return {taken(own.x, lane), taken(own.y, lane)}; }
    static __device__ __forceinline__ float2 taken(const float2& own, int lane) {
        return make_float2(__shfl_sync(0xffffffffu, own.x, lane), __shfl_sync(0xffffffffu, own.y, lane));
    }
    static __device__ __forceinline__ float4 taken(const float4& own, int lane) {
        const float2 first = taken(make_float2(own.x, own.y), lane), second = taken(make_float2(own.z, own.w), lane);
        return make_float4(first.x, first.y, second.x, second.y);
    }
};
#else
struct Weights {
#ifdef FP8
    static constexpr int DEPTH = 128, SIZE = 1;
#else
    static constexpr int DEPTH = 128, SIZE = 2;
#endif
    static constexpr int PITCH = DEPTH * SIZE + 16, BYTES = PANEL * PITCH;  // lanes meet no conflict

    static __device__ __forceinline__ void fetch(uint32_t target, const unsigned char* weights, int64_t row, int inputs,
                                                 int step) {
        constexpr int PIECES = DEPTH * SIZE / 16;
        for (int piece = threadIdx.x % 32; piece < PANEL * PIECES; piece += 32) {
            const int within = piece / PIECES, k = step * DEPTH + piece % PIECES * (16 / SIZE);
            const bool inside = k < inputs;
            copy_async(target + within * PITCH + piece % PIECES * 16,
                       weights + (inside ? ((row + within) * inputs + k) * SIZE : 0), inside);
        }
    }
    struct Handed {};
    static __device__ __forceinline__ Handed hand(const unsigned char*, int) { return {}; }
    static __device__ __forceinline__ Element8 group(const unsigned char* panel, int group, Handed) {
        const int lane = threadIdx.x % 32;
        const unsigned char* row = panel + lane / 4 * PITCH + (group * 32 + lane % 4 * 2) * SIZE;
        Element8 out;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#ifdef FP8
            const Element2 pair = elements_of_e4m3x2(*reinterpret_cast<const uint16_t*>(row + 8 * i));
            out.word[i] = *reinterpret_cast<const uint32_t*>(&pair);
#else
            out.word[i] = *reinterpret_cast<const uint32_t*>(row + 16 * i);
#endif
        }
        return out;
    }
};
#endif

#ifdef FP8
using Input = uint8_t;
#else
using Input = Element;
#endif

// What a kernel is given.
struct Operands {
    const Input* x;
    const float* x_scales;
    const int* sources;
    const unsigned char* weights;
    const float *w_scales, *bias, *first_scales, *second_scales, *other;
    int outputs, inputs, stride, side, activation;
};

// A number of the product, of its sum: `row` of x and of W, an expert.
static __device__ __forceinline__ float finished(float sum, const Operands& given, int source, int64_t row, const float* scales,
                                                 int expert) {
#ifdef FP8
    sum = __fmul_rn(__fmul_rn(sum, given.x_scales[source]), given.w_scales[row]);
#endif
    if (scales != nullptr) sum = __fmul_rn(sum, scales[expert]);
    return given.bias == nullptr ? sum : __fadd_rn(sum, given.bias[row]);
}

// What a kernel writes: numbers, or their activations, of one matrix or of gate and up.
enum class Result { FLOATS, ONE, TWO };

template <Result RESULT>
struct Stored {
    using type = Element;
};
template <>
struct Stored<Result::FLOATS> {
    using type = float;
};

// A kernel of that name, which computes PRODUCT(given, tiles, total, y).
#define EXPERTS_KERNEL(NAME, RESULT, BOUNDS, PRODUCT)                                                                         \
    extern "C" __global__ void BOUNDS NAME(                                                                                   \
        const Input* x, const float* x_scales, const int* sources, const int4* tiles, const int* total,                       \
        const unsigned char* weights, const float* w_scales, const float* bias, const float* first_scales,                    \
        const float* second_scales, const float* other, Stored<RESULT>::type* y, int outputs, int inputs, int stride,         \
        int side, int activation) {                                                                                           \
        launch_next();                                                                                                        \
        wait_for_previous(x, x_scales, sources, tiles, total, other, y);                                                      \
        PRODUCT({x, x_scales, sources, weights, w_scales, bias, first_scales, second_scales, other, outputs, inputs, stride,  \
                 side, activation},                                                                                           \
                tiles, total, y);                                                                                             \
    }
