// What a feed-forward network does between its matrices, where no product has it inside.
//
//   swiglu, geglu  silu(gate) * up, gelu(gate) * up of inner (T, 2 F) elements, gate first (Shazeer 2020)
//   silu, gelu     of inner (T, F)
//   geglu_erf, gelu_erf  the same with gelu by the error function, of which the others have an approximation by tanh
//   reglu_squared, relu_squared  the same with max(x, 0)^2
// out (T, F) elements; bias float, as long as a row of inner, or null, is added first; F is a multiple of 8. 6 bytes a
// result, or 4 without a gate: bound by memory. A thread makes 8 results; threads are numbered through the whole output.
#include "common/common.cuh"

static __device__ __forceinline__ void read(const Element* source, const float* bias, float (&values)[8]) {
    unpack(*reinterpret_cast<const Element8*>(source), values);
    if (bias == nullptr) return;
    float more[8];
    load8(bias, more);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] += more[i];
}

template <bool GATED, typename Times>
static __device__ __forceinline__ void activate(const Element* __restrict__ inner, const float* __restrict__ bias,
                                                Element* __restrict__ out, int count, int ffn_width, Times times) {
    launch_next();
    wait_for_previous(inner);
    const int chunks = ffn_width / 8;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
    if (index >= static_cast<int64_t>(count) * chunks) return;
    const int column = static_cast<int>(index % chunks) * 8;
    const Element* source = inner + index / chunks * (GATED ? 2 : 1) * ffn_width + column;
    float gate[8], up[8];
    read(source, bias == nullptr ? nullptr : bias + column, gate);
    if (GATED) read(source + ffn_width, bias == nullptr ? nullptr : bias + ffn_width + column, up);
#pragma unroll
    for (int i = 0; i < 8; ++i) gate[i] = times(gate[i], GATED ? up[i] : 1.0f);
    *reinterpret_cast<Element8*>(out + index * 8) = pack(gate);
}

#define ACTIVATE_KERNEL(NAME, GATED, TIMES)                                                                       \
    extern "C" __global__ void __launch_bounds__(256)                                                             \
        NAME(const Element* inner, const float* bias, Element* out, int count, int ffn_width) {                   \
        activate<GATED>(inner, bias, out, count, ffn_width, [](float gate, float up) { return TIMES(gate, up); }); \
    }

ACTIVATE_KERNEL(swiglu, true, silu_times)
ACTIVATE_KERNEL(geglu, true, gelu_times)
ACTIVATE_KERNEL(silu, false, silu_times)
ACTIVATE_KERNEL(gelu, false, gelu_times)
ACTIVATE_KERNEL(geglu_erf, true, gelu_erf_times)
ACTIVATE_KERNEL(gelu_erf, false, gelu_erf_times)
ACTIVATE_KERNEL(reglu_squared, true, relu_squared_times)
ACTIVATE_KERNEL(relu_squared, false, relu_squared_times)

// mixed (T, width) elements times the sigmoids of gates (T, width): of `chunks` of 8. 6 bytes a result.
extern "C" __global__ void __launch_bounds__(256)
    open_gates(Element* __restrict__ mixed, const Element* __restrict__ gates, int chunks) {
    launch_next();
    wait_for_previous(mixed, gates);
    const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
    if (index >= chunks) return;
    float values[8], gate[8];
    unpack(reinterpret_cast<const Element8*>(mixed)[index], values);
    unpack(reinterpret_cast<const Element8*>(gates)[index], gate);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = logistic_times(values[i], __fmul_rn(gate[i], -LOG2_E), 1.0f);
    reinterpret_cast<Element8*>(mixed)[index] = pack(values);
}
