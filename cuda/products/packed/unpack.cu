// Packed weights (`common/packed.cuh`) to elements, row-major: for products over elements, which then have the same bits.
//
// in   the panels of a matrix of `outputs` rows, K inputs
// out  elements (outputs, K)
//
// A block has PIECE chunks of 8 elements along K and goes through panels with stride gridDim.y; eight lanes read what lies
// together, four write 16 bytes of a row at a time. Bound by what it writes, 2 bytes an element.
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

static constexpr int EACH = 2;                    // chunks of a thread in a panel
static constexpr int PIECE = 256 / packed::ROWS * EACH;

template <typename Format>
static __device__ __forceinline__ void unpack(const unsigned char* __restrict__ panels, uint32_t* __restrict__ out, int outputs,
                                              int inputs) {
    const int row = threadIdx.x % packed::ROWS, chunks = inputs / 8;
    const int first = blockIdx.x * PIECE + threadIdx.x / 32 * (4 * EACH) + threadIdx.x / packed::ROWS % 4;
    for (int output = blockIdx.y * packed::ROWS + row; output < outputs; output += gridDim.y * packed::ROWS) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int chunk = first + 4 * i;
            if (chunk >= chunks) continue;
            const Element8 pairs = packed::chunk_of<Format>(panels, inputs, output, chunk);
            uint32_t* place = out + (static_cast<int64_t>(output) * chunks + chunk / 4 * 4) * 4 + chunk % 4;
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) place[4 * pair] = pairs.word[pair];
        }
    }
}

#define UNPACK(FORMAT)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                   \
        unpack_##FORMAT(const unsigned char* __restrict__ panels, uint32_t* __restrict__ out, int outputs, int inputs) { \
        wait_for_previous(panels, out);                                                                                 \
        unpack<packed::FORMAT>(panels, out, outputs, inputs);                                                           \
        publish();                                                                                                      \
    }

PACKED_FORMATS(UNPACK)
