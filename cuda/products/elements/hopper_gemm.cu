// Products with weights on Hopper, by the main loop of `hopper_product.cuh`: y = x W^T, alone, with SwiGLU or GeGLU, or added
// to the residual stream. Kernels are named KIND_GROUPS_BN_STAGES_CLUSTER_BUFFERS.
//
//   product_*   y (rows, outputs), elements
//   swiglu_*    W holds F rows of gate, then F of up; y (rows, F), elements = silu(gate) * up, gate and up rounded to such
//               before, as `activate.cu` reads them
//   geglu_*     the same with gelu
//   residual_*  y (rows, outputs) float += x W^T, a sum for the first `first` elements of K, then one for the others
//   addend_*    y = x W^T, from the same sums
//
// y is written once (residual_*: read, too, and with two sums and BUFFERS, twice). y_map: its tensor map, with boxes of 64
// rows by 128 bytes, where there are BUFFERS; else y is used.
//
// Option: -DKERNELS, a GEMM_KERNEL for each tile, as `hopper_tiles.py` writes it.
#include "products/hopper_product.cuh"
#include "products/kinds.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// y += kept, then += acc, for the rows `row` and row + 8 of this thread; y is 0 before where it is not ADDS.
template <int BN, bool ADDS>
static __device__ __forceinline__ void add_to(float* y, const float (&kept)[BN / 2], const float (&acc)[BN / 2],
                                              int row, int column, int rows, int outputs, int t) {
    constexpr int AT_ONCE = BN % 64 == 0 ? 8 : BN % 32 == 0 ? 4 : 2;  // so that loads are under way together
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int my_row = row + 8 * half;
        if (my_row >= rows) continue;
        float* target = y + static_cast<int64_t>(my_row) * outputs + column + 2 * t;
#pragma unroll
        for (int first = 0; first < BN / 8; first += AT_ONCE) {
            float2 old[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                if (!ADDS) old[j] = make_float2(0.0f, 0.0f);
                if (ADDS && column + (first + j) * 8 < outputs)
                    old[j] = *reinterpret_cast<float2*>(target + (first + j) * 8);
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const int at = 4 * (first + j) + 2 * half;
                if (column + (first + j) * 8 < outputs)
                    *reinterpret_cast<float2*>(target + (first + j) * 8) =
                        make_float2(old[j].x + kept[at] + acc[at], old[j].y + kept[at + 1] + acc[at + 1]);
            }
        }
    }
}

// Sends a warpgroup's tile to be added to y, or (not ADDS) stored there, BUFFERS pieces at a time. `wait` before the first:
// till what it sent is there, to which this is added.
template <int BN, int BUFFERS, bool ADDS>
static __device__ __forceinline__ void send_sums(const TensorMap* y_map, const float (&acc)[BN / 2], int top, int column,
                                                 int outputs, const Outbox& outbox, bool wait) {
    constexpr int PIECES = BN / 32;
    static_assert(PIECES % BUFFERS == 0, "the outbox is filled so many times");
#pragma unroll
    for (int first = 0; first < PIECES; first += BUFFERS) {
        outbox.open();
#pragma unroll
        for (int i = 0; i < BUFFERS * 8; ++i) {
            const int j = first * 4 + i / 2, half = i % 2;
            put_floats(outbox.piece(i / 8), half, j % 4, acc[4 * j + 2 * half], acc[4 * j + 2 * half + 1]);
        }
        outbox.send([&] {
            if (wait && first == 0) wait_for_stores();
            for (int i = 0; i < BUFFERS; ++i)
                if (const int at = column + (first + i) * 32; at < outputs) {
                    if (ADDS || wait)
                        add_box(y_map, outbox.piece(i), at, top);
                    else
                        store_box(y_map, outbox.piece(i), at, top);
                }
        });
    }
}

template <Kind KIND, int GROUPS, int BN, int STAGES, int CLUSTER, int BUFFERS, typename Result>
static __device__ __forceinline__ void product(const TensorMap* x_map, const TensorMap* w_map, const TensorMap* y_map,
                                               Result* __restrict__ y, int rows, int outputs, int inputs, int first) {
    constexpr bool GATED = Written<KIND>::GATED, ADDS = Written<KIND>::ADDS, SUMMED = Written<KIND>::SUMMED;
    constexpr int SIDES = GATED ? 2 : 1, SUMS = SUMMED ? 2 : 1;
    constexpr bool KEEPS = SUMS > 1 && BUFFERS == 0;  // the first sum, in registers
    const int t = threadIdx.x % 4, in_tile = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    float kept[KEEPS ? BN / 2 : 1];
    if constexpr (KEEPS)
#pragma unroll
        for (float& value : kept) value = -0.0f;  // which changes nothing
    auto keep = [&](const float(&acc)[BN / 2], int row, int column, const Outbox& outbox) {
        if constexpr (KEEPS)
#pragma unroll
            for (int i = 0; i < BN / 2; ++i) kept[i] = acc[i];
        else if constexpr (SUMS > 1)
            send_sums<BN, BUFFERS, ADDS>(y_map, acc, row - in_tile, column, outputs, outbox, false);
    };
    auto finish = [&](const float(&acc)[BN / 2], int row, int column, int, const Outbox& outbox) {
        auto word = [&](int half, int j) {  // of elements
            float pair[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                pair[e] = acc[4 * j + 2 * half + e];
                if constexpr (GATED) {
                    const float gate = rounded(pair[e]), up = rounded(acc[BN / 4 + 4 * j + 2 * half + e]);
                    pair[e] = KIND == Kind::GEGLU ? gelu_times(gate, up) : silu_times(gate, up);
                }
            }
            return pack(pair[0], pair[1]);
        };
        if constexpr (SUMMED && BUFFERS > 0) {
            send_sums<BN, BUFFERS, ADDS>(y_map, acc, row - in_tile, column, outputs, outbox, first < inputs);
        } else if constexpr (SUMMED) {
            add_to<BN, ADDS>(y, kept, acc, row, column, rows, outputs, t);
        } else if constexpr (BUFFERS > 0) {
            static_assert(BUFFERS * 64 == BN / SIDES, "a tile's results fill the outbox");
            outbox.open();
#pragma unroll
            for (int i = 0; i < BUFFERS * 4; ++i) {
                const int half = i % 2, from = i / 2 * 4;
                const uint32_t words[4] = {word(half, from), word(half, from + 1), word(half, from + 2),
                                           word(half, from + 3)};
                put_elements(outbox.piece(from / 8), half, from % 8, words);
            }
            outbox.send([&] {
                for (int i = 0; i < BUFFERS; ++i)
                    if (const int at = column + i * 64; at < outputs)
                        store_box(y_map, outbox.piece(i), at, row - in_tile);
            });
        } else {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int my_row = row + 8 * half;
                Element* target = y + static_cast<int64_t>(my_row) * outputs + column;
                store_row<BN / SIDES>(target, my_row < rows, outputs - column, t,
                                      [&](int j) { return word(half, j); });
            }
        }
    };
    const auto nothing = [](int, int) { return 0; };
    multiply<GROUPS, BN, STAGES, CLUSTER, SIDES, BUFFERS, SUMS>(x_map, w_map, rows, outputs, inputs, first, nothing,
                                                                keep, finish);
}

#define GEMM_KERNEL(NAME, WHICH, GROUPS, BN, STAGES, CLUSTER, BUFFERS)                                             \
    extern "C" __global__ void __launch_bounds__(128 * GROUPS + 32) __cluster_dims__(CLUSTER, 1, 1)                \
        NAME##_##GROUPS##_##BN##_##STAGES##_##CLUSTER##_##BUFFERS(                                                 \
            const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,                             \
            const __grid_constant__ TensorMap y_map, Written<Kind::WHICH>::type* y, int rows, int outputs,         \
            int inputs, int first) {                                                                              \
        KERNEL_BEGINS();                                                                                          \
        product<Kind::WHICH, GROUPS, BN, STAGES, CLUSTER, BUFFERS>(&x, &w, &y_map, y, rows, outputs, inputs,       \
                                                                  first);                                         \
    }
#else
#define GEMM_KERNEL(NAME, WHICH, GROUPS, BN, STAGES, CLUSTER, BUFFERS)
#endif

KERNELS  // of `hopper_tiles.py`
