// Products with weights that are elements, on every GPU from sm_80 on: tiles by mma.sync, copies by cp.async.
//
//   x  (rows, K) elements     W  (outputs, K) elements, both row-major
//   y  (rows, outputs), rows `pitch` numbers apart, as `Written` says: elements, float, or float that the product is added to
//
// With a gate, W is F rows of gate, then F of up, and y (rows, F) their SwiGLU or GeGLU: sums are rounded to elements first, as
// `activate.cu` reads them.
//
// Sums are float and go through K in order, 16 elements at a time, from one accumulator; where `first` < K, a second
// accumulator begins there, and is added after the first (`first_sum` in shapes.py). So all tiles give the same bits, and
// those of the kernels for Hopper (on an H200; other GPUs were not at hand). That makes this kernel the one that algorithms of
// cuBLASLt are held against before they are chosen (`products/agreeing.py`).
//
// Tiles: products/mma_tile.cuh.
#include "products/mma_tile.cuh"

#define MMA_KERNEL(NAME, WHICH, BM, BN, WM, WN, STAGES)                                                                   \
    extern "C" __global__ void __launch_bounds__(32 * WM * WN)                                                            \
        mma_##NAME##_##BM##_##BN##_##WM##_##WN##_##STAGES(                                                                \
            const Element* x, const Element* w, Written<Kind::WHICH>::type* y, int rows, int outputs, int inputs,          \
            int pitch, int first) {                                                                                       \
        extern __shared__ __align__(128) unsigned char shared[];                                                          \
        MmaTile<Elements, Kind::WHICH, BM, BN, WM, WN, STAGES> tile;                                                      \
        tile.compute({x, w, y, rows, outputs, inputs, pitch, first}, shared_address(shared));                             \
    }

KERNELS  // of `mma_gemm.py`
