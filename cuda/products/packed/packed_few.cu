// Products of few rows with quantised weights on Hopper, by the main loop of `packed_few.cuh`: the kinds of `packed_gemm.cu`, to
// the bits of those over the dequantised weights.
//
//   product_*   y (rows, outputs), elements, rows `pitch` apart
//   swiglu_*    W holds F rows of gate, then F of up; y (rows, F), elements = silu(gate) * up, gate and up rounded to such
//   geglu_*     the same with gelu
//   residual_*  y (rows, outputs) float += x W^T: a sum for the first `first` elements of K, then one for the others
//   addend_*    y = x W^T, from the same sums
//   float_*     y (rows, outputs) float = x W^T, one sum
//
// Options: -DFORMAT; -DKERNELS, a PACKED_FEW for each kernel, as `packed_few.py` writes it. Kernels are named
// KIND_PANELS_TILES_SUMS. outputs and F are multiples of 8.
#include "products/kinds.cuh"
#include "products/packed/packed_few.cuh"

static constexpr int MOST_THREADS = 640;  // of a block

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <Kind KIND, int PANELS, int TILES, int SUMS, typename Result>
static __device__ __forceinline__ void product(const Element* x, const unsigned char* weights, Result* y, int rows, int outputs,
                                               int inputs, int first, int pitch, FewMemory memory) {
    constexpr bool GATED = Written<KIND>::GATED;
    static_assert(!GATED || PANELS == 2, "a panel of gate and one of up");
    constexpr int OWN = GATED ? 1 : PANELS;  // panels of results
    const int all = outputs / packed::ROWS, tasks = (all + OWN - 1) / OWN, lane = threadIdx.x % 32;
    // Of an odd number of panels the last task has the last two, one of them a second time.
    const auto panels = [&](int task) { return min(task * OWN, all - OWN); };
    const auto finish = [&](const float(&acc)[TILES][4], const float(&others)[TILES][4], int task) {
#pragma unroll
        for (int p = 0; p < OWN; ++p) {
            const int panel = panels(task) + p, output = panel * packed::ROWS + lane / 4;
            if (panel < task * OWN) continue;
#pragma unroll
            for (int i = 0; i < TILES; ++i)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int row = 8 * i + lane % 4 * 2 + e;
                    if (row >= rows) continue;
                    Result& place = y[static_cast<int64_t>(row) * pitch + output];
                    const float sum = acc[i][2 * p + e];
                    if constexpr (GATED) {
                        const float gate = rounded(sum), up = rounded(acc[i][2 + e]);
                        place = to_element(KIND == Kind::GEGLU ? gelu_times(gate, up) : silu_times(gate, up));
                    } else if constexpr (Written<KIND>::FLOATS) {
                        float value = KIND == Kind::RESIDUAL ? __fadd_rn(place, sum) : sum;
                        if (SUMS > 1) value = __fadd_rn(value, others[i][2 * p + e]);
                        place = value;
                    } else {
                        place = to_element(sum);
                    }
                }
        }
    };
    PackedFew<PANELS, TILES>::template run<SUMS>(x, weights, rows, inputs, first, tasks, GATED ? all : 1, memory, panels, finish);
}

#define PACKED_FEW(NAME, WHICH, PANELS, TILES, SUMS)                                                                          \
    extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1) NAME##_##PANELS##_##TILES##_##SUMS(                            \
        const Element* x, const unsigned char* weights, Written<Kind::WHICH>::type* y, int rows, int outputs,                 \
        int inputs, int first, int pitch, int window, int stages) {                                                           \
        KERNEL_BEGINS();                                                                                                      \
        product<Kind::WHICH, PANELS, TILES, SUMS>(x, weights, y, rows, outputs, inputs, first, pitch, {window, stages});      \
    }
#else
#define PACKED_FEW(...)
#endif

KERNELS  // of `packed_few.py`
