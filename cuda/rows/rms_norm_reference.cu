// RMS norm (Zhang and Sennrich 2019), written to be read: what `rms_norm.cu`, `residual.cu` and `few_rows.cu` compute fast.
//
//   out = x / sqrt(mean(x^2) + eps) * weight
//
// x (rows, width) float, weight (width,) float, out (rows, width) elements. A thread computes a row, which it reads twice:
// grid ceil(rows / 32), blocks of 32. The fast kernel has a block for each row, and keeps it in registers between the sum and
// the result; its threads add their parts of the sum together, so the last bits differ.
#include "common/element.cuh"

#include <stdint.h>

extern "C" __global__ void rms_norm_reference(const float* x, const float* weight, Element* out, int rows, int width,
                                              float eps) {
    const int64_t row = blockIdx.x * 32 + threadIdx.x;
    if (row >= rows) return;
    float sum = 0.0f;
    for (int i = 0; i < width; ++i) sum += x[row * width + i] * x[row * width + i];
    const float scale = 1.0f / sqrtf(sum / width + eps);
    for (int i = 0; i < width; ++i) out[row * width + i] = to_element(x[row * width + i] * scale * weight[i]);
}
