// Products with weights, written to be read: what `hopper_gemm.cu`, `hopper_split.cu`, `few_rows.cu` and cuBLASLt compute fast.
//
//   sum(row, output) = x[row][0] weight[output][0] + x[row][1] weight[output][1] + ... through all inputs
//
// x (rows, inputs) and weight (outputs, inputs) elements, both row-major, so that a sum reads a row of each.
//   product_reference   y (rows, outputs) float = the sums
//   residual_reference  y += the sums
//   swiglu_reference    weight holds F rows of gate, then F of up; y (rows, F) elements = silu(gate) * up, gate and up rounded
//                       to elements first, as `activate.cu` reads them
//
// A thread makes one result: grid (ceil(outputs / 128), rows), blocks of 128. Every row reads all weights anew, which the fast
// kernels read once for 64 to 256 rows: that, and tensor cores, is all that they do otherwise. Sums are FP32 in order of
// inputs; a tensor core adds 16 products at a time, so the last bits differ.
#include "common/element.cuh"

#include <stdint.h>

static __device__ float sum_of(const Element* x, const Element* weight, int64_t row, int64_t output, int inputs) {
    float sum = 0.0f;
    for (int k = 0; k < inputs; ++k) sum += to_float(x[row * inputs + k]) * to_float(weight[output * inputs + k]);
    return sum;
}

extern "C" __global__ void product_reference(const Element* x, const Element* weight, float* y, int outputs, int inputs) {
    const int row = blockIdx.y, output = blockIdx.x * 128 + threadIdx.x;
    if (output < outputs) y[int64_t(row) * outputs + output] = sum_of(x, weight, row, output, inputs);
}

extern "C" __global__ void residual_reference(const Element* x, const Element* weight, float* y, int outputs, int inputs) {
    const int row = blockIdx.y, output = blockIdx.x * 128 + threadIdx.x;
    if (output < outputs) y[int64_t(row) * outputs + output] += sum_of(x, weight, row, output, inputs);
}

extern "C" __global__ void swiglu_reference(const Element* x, const Element* weight, Element* y, int outputs, int inputs) {
    const int row = blockIdx.y, output = blockIdx.x * 128 + threadIdx.x;
    if (output >= outputs) return;
    const float gate = to_float(to_element(sum_of(x, weight, row, output, inputs)));
    const float up = to_float(to_element(sum_of(x, weight, row, outputs + output, inputs)));
    y[int64_t(row) * outputs + output] = to_element(gate / (1.0f + expf(-gate)) * up);
}
