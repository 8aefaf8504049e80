// Products with quantised weights on Hopper, by the main loop of `packed_product.cuh`: the kinds of `hopper_gemm.cu`, to the
// bits of those over the dequantised weights.
//
//   product_*   y (rows, outputs), elements, rows `pitch` apart
//   swiglu_*    W holds F rows of gate, then F of up; y (rows, F), elements = silu(gate) * up, gate and up rounded to such
//   geglu_*     the same with gelu
//   residual_*  y (rows, outputs) float += x W^T, a sum for the first `first` elements of K, then one for the others
//   addend_*    y = x W^T, from the same sums
//   float_*     y (rows, outputs) float = x W^T, one sum
//
// A lane's results are of one output, or two, and every other pair of rows. Floats are written as they are: eight lanes have 32
// bytes of a row. Pairs of elements are turned first, so that a lane has two outputs of a row.
//
// Options: -DFORMAT; -DKERNELS, a PACKED_KERNEL for each tile, as `packed_tiles.py` writes it. Kernels are named
// KIND_GROUPS_BN_BOXES_STAGES_PACKETS_CLUSTER_BLOCKS_RELAY_TURN.
#include "products/kinds.cuh"
#include "products/packed/packed_product.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// y = acc, or that added to what is there: of a panel. AT_ONCE rows are under way together.
template <int BN>
static __device__ __forceinline__ void put_floats(float* y, const float (&acc)[BN / 2], int panel, int row, int rows, int outputs,
                                                  bool adds) {
    constexpr int AT_ONCE = BN < 64 ? BN / 4 : 16;
#pragma unroll
    for (int first = 0; first < BN / 4; first += AT_ONCE) {
        float old[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = row + (first + i) / 2 * 8 + i % 2;
            old[i] = adds && at < rows ? y[static_cast<int64_t>(at) * outputs] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = row + (first + i) / 2 * 8 + i % 2;
            if (at < rows) y[static_cast<int64_t>(at) * outputs] = old[i] + acc[4 * ((first + i) / 2) + 2 * panel + i % 2];
        }
    }
}

template <typename Loop, Kind KIND, typename Result>
static __device__ __forceinline__ void product(const TensorMap* x_map, const TensorMap* w_map, Result* __restrict__ y, int rows,
                                               int outputs, int inputs, int first, int pitch) {
    constexpr int BN = Loop::BN, PANELS = Loop::PANELS;
    constexpr bool GATED = Written<KIND>::GATED, SUMS = Written<KIND>::SUMMED;
    constexpr int OWN = GATED ? 1 : PANELS;  // panels of results
    const auto put = [&](const float(&acc)[BN / 2], const Place& place, bool adds) {
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel)
            if (const int output = place.output + panel * place.next; output < outputs)
                put_floats<BN>(reinterpret_cast<float*>(y) + output, acc, panel, place.row, rows, outputs, adds);
    };
    const auto keep = [&](const float(&acc)[BN / 2], const Place& place) { put(acc, place, KIND == Kind::RESIDUAL); };
    const auto finish = [&](const float(&acc)[BN / 2], const Place& place) {
        if constexpr (Written<KIND>::FLOATS) {
            put(acc, place, KIND == Kind::RESIDUAL || SUMS && first < inputs);
        } else {
            const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
            const int column = place.output - g + 2 * t, row = place.row - 2 * t + g;
#pragma unroll
            for (int j = 0; j < BN / 8; ++j)
#pragma unroll
                for (int panel = 0; panel < OWN; ++panel) {
                    float pair[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        pair[e] = acc[4 * j + 2 * panel + e];
                        if constexpr (GATED) {
                            const float gate = rounded(pair[e]), up = rounded(acc[4 * j + 2 + e]);
                            pair[e] = KIND == Kind::GEGLU ? gelu_times(gate, up) : silu_times(gate, up);
                        }
                    }
                    const uint32_t word = turned(pack(pair[0], pair[1]));
                    const int at = row + 8 * j, output = column + panel * place.next;
                    if (at < rows && output < outputs)
                        *reinterpret_cast<uint32_t*>(y + static_cast<int64_t>(at) * pitch + output) = word;
                }
        }
    };
    Loop::template run<GATED ? 2 : 1, SUMS ? 2 : 1>(x_map, w_map, rows, outputs, inputs, first, blockIdx.x, gridDim.x, keep,
                                                    finish);
}

#define PACKED_KERNEL(NAME, WHICH, GROUPS, BN, BOXES, STAGES, PACKETS, CLUSTER, BLOCKS, RELAY, TURN)                          \
    extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1)                                                                \
        __launch_bounds__(PackedLoop<Packed, GROUPS, BN, BOXES, STAGES, PACKETS, CLUSTER, BLOCKS, RELAY, TURN>::THREADS,      \
                          BLOCKS)                                                                                             \
            NAME##_##GROUPS##_##BN##_##BOXES##_##STAGES##_##PACKETS##_##CLUSTER##_##BLOCKS##_##RELAY##_##TURN(                \
                const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,                                     \
                Written<Kind::WHICH>::type* y, int rows, int outputs, int inputs, int first, int pitch) {                     \
        KERNEL_BEGINS();                                                                                                      \
        product<PackedLoop<Packed, GROUPS, BN, BOXES, STAGES, PACKETS, CLUSTER, BLOCKS, RELAY, TURN>, Kind::WHICH>(           \
            &x, &w, y, rows, outputs, inputs, first, pitch);                                                                  \
    }
#else
#define PACKED_KERNEL(...)
#endif

KERNELS  // of `packed_tiles.py`
