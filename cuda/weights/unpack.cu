// Packed weights (`common/packed.cuh`) to elements, row-major: for products over elements, which then have the same bits.
//
// in   the panels of a matrix of `outputs` rows, K inputs
// out  elements (outputs, K)
//
// One thread a chunk of 8 elements, numbered through a panel's rows first, 256 a block of threads: eight lanes read what lies
// together, four write 64 bytes of a row together. Bound by what it writes, 2 bytes an element.
//
// Kernels fetch weights before they wait for the kernel ahead of them, also by bulk copies. So this one lets none start
// before all is written, and what it wrote is there for any kind of access.

#include "common/packed.cuh"

static __device__ __forceinline__ void publish() {
    __threadfence();
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

template <typename Format>
static __device__ __forceinline__ void unpack(const unsigned char* __restrict__ panels, Element8* __restrict__ out, int outputs,
                                              int inputs) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
    const int chunks = inputs / 8, row = static_cast<int>(index % packed::ROWS);
    const int64_t place = index / packed::ROWS, panel = place / chunks;
    const int64_t output = panel * packed::ROWS + row;
    if (output >= outputs) return;
    const int chunk = static_cast<int>(place % chunks);
    out[output * chunks + chunk] = packed::chunk_of<Format>(panels, inputs, output, chunk);
}

#define UNPACK(FORMAT)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                   \
        unpack_##FORMAT(const unsigned char* __restrict__ panels, Element8* __restrict__ out, int outputs, int inputs) { \
        wait_for_previous(panels, out);                                                                                 \
        unpack<packed::FORMAT>(panels, out, outputs, inputs);                                                           \
        publish();                                                                                                      \
    }

PACKED_FORMATS(UNPACK)
