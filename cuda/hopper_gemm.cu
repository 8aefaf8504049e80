// Products with weights on Hopper, by the main loop of `hopper_product.cuh`: y = x W^T, alone, with SwiGLU, or added to the
// residual stream. Kernels are named KIND_GROUPS_BN_STAGES_CLUSTER.
//
//   product_*   y (rows, outputs) half
//   swiglu_*    W holds F rows of gate, then F of up; y (rows, F) half = silu(gate) * up, gate and up rounded to half
//               before, as `swiglu.cu` reads them
//   residual_*  y (rows, outputs) float += x W^T
//
// y is written once (residual_*: read, too).
#include "hopper_product.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

enum class Kind { PRODUCT, SWIGLU, RESIDUAL };

// y += acc for the rows `row` and row + 8 of this thread.
template <int BN>
static __device__ __forceinline__ void add_to(float* y, const float (&acc)[BN / 2], int row, int column, int rows,
                                              int outputs, int t) {
    constexpr int AT_ONCE = BN / 8 < 8 ? BN / 8 : 8;  // so that loads are under way together
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int my_row = row + 8 * half;
        if (my_row >= rows) continue;
        float* target = y + static_cast<int64_t>(my_row) * outputs + column + 2 * t;
#pragma unroll
        for (int first = 0; first < BN / 8; first += AT_ONCE) {
            float2 old[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j)
                if (column + (first + j) * 8 < outputs) old[j] = *reinterpret_cast<float2*>(target + (first + j) * 8);
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const int at = 4 * (first + j) + 2 * half;
                if (column + (first + j) * 8 < outputs)
                    *reinterpret_cast<float2*>(target + (first + j) * 8) =
                        make_float2(old[j].x + acc[at], old[j].y + acc[at + 1]);
            }
        }
    }
}

template <Kind KIND, int GROUPS, int BN, int STAGES, int CLUSTER, typename Result>
static __device__ __forceinline__ void product(const TensorMap* x_map, const TensorMap* w_map, Result* __restrict__ y,
                                               int rows, int outputs, int inputs) {
    constexpr int SIDES = KIND == Kind::SWIGLU ? 2 : 1;
    auto finish = [&](const float(&acc)[BN / 2], int row, int column, int) {
        const int t = threadIdx.x % 4;
        if constexpr (KIND == Kind::RESIDUAL) {
            add_to<BN>(y, acc, row, column, rows, outputs, t);
        } else {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int my_row = row + 8 * half;
                __half* target = y + static_cast<int64_t>(my_row) * outputs + column;
                store_row<BN / SIDES>(target, my_row < rows, outputs - column, t, [&](int j) {
                    float pair[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        pair[e] = acc[4 * j + 2 * half + e];
                        if constexpr (KIND == Kind::SWIGLU) {
                            const float up = acc[BN / 4 + 4 * j + 2 * half + e];
                            pair[e] = silu_times(rounded(pair[e]), rounded(up));
                        }
                    }
                    return pack(pair[0], pair[1]);
                });
            }
        }
    };
    const auto nothing = [](int, int) { return 0; };
    multiply<GROUPS, BN, STAGES, CLUSTER, SIDES>(x_map, w_map, rows, outputs, inputs, nothing, finish);
}

#define GEMM_KERNEL(NAME, KIND, RESULT, GROUPS, BN, STAGES, CLUSTER)                                               \
    extern "C" __global__ void __launch_bounds__(128 * GROUPS + 32) __cluster_dims__(CLUSTER, 1, 1)                \
        NAME##_##GROUPS##_##BN##_##STAGES##_##CLUSTER(                                                                \
            const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, RESULT* y, int rows,        \
            int outputs, int inputs) {                                                                            \
        product<Kind::KIND, GROUPS, BN, STAGES, CLUSTER>(&x, &w, y, rows, outputs, inputs);                        \
    }
#else
#define GEMM_KERNEL(NAME, KIND, RESULT, GROUPS, BN, STAGES, CLUSTER)
#endif

GEMM_KERNEL(product, PRODUCT, __half, 1, 64, 12, 1)
GEMM_KERNEL(product, PRODUCT, __half, 1, 32, 14, 1)
GEMM_KERNEL(product, PRODUCT, __half, 1, 32, 8, 1)
GEMM_KERNEL(swiglu, SWIGLU, __half, 2, 256, 4, 2)
GEMM_KERNEL(swiglu, SWIGLU, __half, 2, 256, 4, 1)
GEMM_KERNEL(swiglu, SWIGLU, __half, 2, 160, 5, 2)
GEMM_KERNEL(swiglu, SWIGLU, __half, 2, 160, 5, 1)
GEMM_KERNEL(swiglu, SWIGLU, __half, 1, 160, 7, 2)
GEMM_KERNEL(swiglu, SWIGLU, __half, 1, 160, 7, 1)
GEMM_KERNEL(swiglu, SWIGLU, __half, 1, 128, 8, 1)
GEMM_KERNEL(swiglu, SWIGLU, __half, 1, 128, 4, 1)
GEMM_KERNEL(swiglu, SWIGLU, __half, 1, 64, 13, 1)
GEMM_KERNEL(swiglu, SWIGLU, __half, 1, 64, 6, 1)
GEMM_KERNEL(residual, RESIDUAL, float, 2, 256, 4, 2)
GEMM_KERNEL(residual, RESIDUAL, float, 2, 128, 6, 1)
GEMM_KERNEL(residual, RESIDUAL, float, 2, 64, 8, 1)
GEMM_KERNEL(residual, RESIDUAL, float, 1, 64, 12, 1)
GEMM_KERNEL(residual, RESIDUAL, float, 1, 64, 6, 1)
GEMM_KERNEL(residual, RESIDUAL, float, 1, 32, 16, 1)
GEMM_KERNEL(residual, RESIDUAL, float, 1, 32, 8, 1)
GEMM_KERNEL(residual, RESIDUAL, float, 1, 16, 20, 1)
