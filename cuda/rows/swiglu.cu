// silu(gate) * up (Shazeer 2020).
//
// gate_up (T, 2 F) half, gate first; out (T, F) half; F is a multiple of 8. 6 bytes a result: bound by memory.
// A thread makes 8 results from two 16-byte reads; threads are numbered through the whole output.
#include "common/common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    swiglu(const Element* __restrict__ gate_up, Element* __restrict__ out, int count, int ffn_width) {
    launch_next();
    wait_for_previous(gate_up);
    const int chunks = ffn_width / 8;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
    if (index >= static_cast<int64_t>(count) * chunks) return;
    const int64_t row = index / chunks;
    const Element* source = gate_up + row * 2 * ffn_width + (index % chunks) * 8;
    float gate[8], up[8];
    unpack(*reinterpret_cast<const Element8*>(source), gate);
    unpack(*reinterpret_cast<const Element8*>(source + ffn_width), up);
#pragma unroll
    for (int i = 0; i < 8; ++i) gate[i] = silu_times(gate[i], up[i]);
    *reinterpret_cast<Element8*>(out + index * 8) = pack(gate);
}
