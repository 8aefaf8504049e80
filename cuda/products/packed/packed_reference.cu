// A product with packed weights, written to be read: what `packed_gemm.cu`, `packed_few.cu` and `packed_rows.cu` compute fast.
//
//   y[row][output] = x[row][0] weight[output][0] + x[row][1] weight[output][1] + ... through all inputs
//
// x (rows, inputs) elements; weight (outputs, inputs) in panels of packets, as `common/packed.cuh` says; y (rows, outputs)
// float. Eight neighbours of a row of weights become elements, with the bits of `weights/dequantize.cu`, and are multiplied:
// the product is that of `product_reference.cu` over the dequantised matrix, bit for bit.
//
// A thread makes one result: grid (ceil(outputs / 128), rows), blocks of 128. Every thread unpacks what it needs. The fast
// kernels unpack a packet once, for as many rows as share it, straight into the operands of tensor cores.
//
// Option: -DFORMAT, a struct of `packed.cuh`.
#include "common/packed.cuh"

extern "C" __global__ void packed_reference(const Element* x, const unsigned char* weight, float* y, int outputs, int inputs) {
    const int64_t row = blockIdx.y;
    const int output = blockIdx.x * 128 + threadIdx.x;
    if (output >= outputs) return;
    float sum = 0.0f;
    for (int eighth = 0; eighth < inputs / 8; ++eighth) {
        float weights[8];
        unpack(packed::neighbours_of<Packed>(weight, inputs, output, eighth), weights);
        for (int i = 0; i < 8; ++i) sum += to_float(x[row * inputs + 8 * eighth + i]) * weights[i];
    }
    y[row * outputs + output] = sum;
}
