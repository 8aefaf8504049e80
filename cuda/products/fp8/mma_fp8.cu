// Products with FP8 weights on GPUs that multiply FP8 and are no Hopper: Ada, and Blackwell's RTX (sm_89, sm_120).
//
//   x  (rows, K) E4M3, x_scales (rows,) float       W  (outputs, K) E4M3, w_scales (outputs,) float
//   y  (rows, outputs) as `Written` says; with a gate, W is F rows of gate, then F of up, and y (rows, F), as in `mma_gemm.cu`
//
// As in `hopper_fp8.cu`, sums go through K 128 numbers at a time, each from zero, and these are added as floats, in order; a sum is
// multiplied by the row's scale, then the output's. So all tiles give the same bits. Tiles: products/mma_tile.cuh.
#include "common/mma_fp8.cuh"
#include "products/mma_tile.cuh"

#if __CUDA_ARCH__ >= 890 || !defined(__CUDACC__)

struct Fp8 {
    using Number = uint8_t;
    static constexpr bool ALONE = true;
    static __device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        mma_e4m3(c, a, b0, b1);
    }
};

#define MMA_KERNEL(NAME, WHICH, BM, BN, WM, WN, STAGES)                                                                   \
    extern "C" __global__ void __launch_bounds__(32 * WM * WN)                                                            \
        mma_fp8_##NAME##_##BM##_##BN##_##WM##_##WN##_##STAGES(                                                            \
            const uint8_t* x, const float* x_scales, const uint8_t* w, const float* w_scales,                             \
            Written<Kind::WHICH>::type* y, int rows, int outputs, int inputs) {                                           \
        extern __shared__ __align__(128) unsigned char shared[];                                                          \
        MmaTile<Fp8, Kind::WHICH, BM, BN, WM, WN, STAGES> tile;                                                           \
        tile.compute({x, w, y, rows, outputs, inputs, outputs, inputs, x_scales, w_scales}, shared_address(shared));      \
    }
#else
#define MMA_KERNEL(NAME, WHICH, BM, BN, WM, WN, STAGES)
#endif

KERNELS  // of `mma_fp8.py`
