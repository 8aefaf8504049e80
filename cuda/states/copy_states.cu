// States of whole sequences from one place to another: a slot begins as a snapshot, or a snapshot is taken of it.
//
//   arrays  (A, 2) int64: for each array of each layer its address, and the bytes of a place, a multiple of 16
//   pairs   (P, 2) int32: the place that is read, and the one that is written; none is in two pairs, one way or the other,
//           but that several may be read from one
// Grid (chunks, A, P), blocks of 256 threads, which take 16 bytes at a time, in turn. Each byte is read and written once.
#include "common/basics.cuh"

extern "C" __global__ void __launch_bounds__(256)
    copy_states(const longlong2* __restrict__ arrays, const int2* __restrict__ pairs) {
    launch_next();
    wait_for_previous(arrays, pairs);
    const longlong2 array = arrays[blockIdx.y];
    const int2 pair = pairs[blockIdx.z];
    const int64_t count = array.y / 16;
    const uint4* source = reinterpret_cast<const uint4*>(array.x + pair.x * array.y);
    uint4* target = reinterpret_cast<uint4*>(array.x + pair.y * array.y);
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < count; i += 256 * gridDim.x)
        target[i] = source[i];
}
