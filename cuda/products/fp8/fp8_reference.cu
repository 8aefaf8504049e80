// A product of FP8 by FP8, written to be read: what `hopper_fp8.cu` computes fast.
//
//   y[row][output] = (x[row][0] weight[output][0] + ... through all inputs) * x_scales[row] * weight_scales[output]
//
// x (rows, inputs) and weight (outputs, inputs) E4M3, bytes, row-major; x_scales (rows,) and weight_scales (outputs,) float;
// y (rows, outputs) float. A number of a matrix is its byte's (`e4m3.cuh`) times the scale of its row: scales of whole rows
// can be multiplied last.
//
// A thread makes one result: grid (ceil(outputs / 128), rows), blocks of 128. Products of two E4M3 are exact in FP32, sums are
// FP32 in order of inputs. Tensor cores sum 128 of them with fewer bits, which the fast kernel then adds in FP32.
#include <stdint.h>

#include "common/e4m3.cuh"

static __device__ __forceinline__ float number_of(uint8_t byte) { return to_floats(elements_of_e4m3x2(byte)).x; }

extern "C" __global__ void fp8_reference(const uint8_t* x, const float* x_scales, const uint8_t* weight,
                                         const float* weight_scales, float* y, int outputs, int inputs) {
    const int64_t row = blockIdx.y;
    const int output = blockIdx.x * 128 + threadIdx.x;
    if (output >= outputs) return;
    float sum = 0.0f;
    for (int k = 0; k < inputs; ++k) sum += number_of(x[row * inputs + k]) * number_of(weight[int64_t(output) * inputs + k]);
    y[row * outputs + output] = sum * x_scales[row] * weight_scales[output];
}
