// Tiles of products by mma.sync and cp.async, for `mma_gemm.cu` (elements) and `mma_fp8.cu`, on every GPU from sm_80 on.
//
// A block of WM x WN warps computes BM rows by BN rows of the weight; it goes through K by lines of 128 bytes, STAGES - 1 copies
// ahead. 16-byte pieces of a line are swizzled, so that ldmatrix meets no conflict. Fragments of 16 elements and of 32 numbers in
// FP8 lie alike in bytes. Blocks are numbered through 8 tiles of rows at a time, then through outputs: what runs at once shares
// rows and weights in L2. Bytes: W once for BM rows that do not fit L2, x once for all that run at once.
#pragma once

#include "common/store_row.cuh"
#include "products/kinds.cuh"

static constexpr int LINE = 128;  // bytes of a row in a stage
static constexpr int GROUP = 8;   // tiles of rows whose blocks run one after the other

// Numbers that are elements: a stage has 64 of K, and one accumulator goes through all.
struct Elements {
    using Number = Element;
    static constexpr bool ALONE = false;
    static __device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        mma(c, a, b0, b1);
    }
};

// Where a tile's operands and results are. Scales, of FP8: of rows, and of outputs; a gate's, then those of ups.
template <typename Number, typename Result>
struct Operands {
    const Number *x, *w;
    Result* y;
    int rows, outputs, inputs, pitch, first;
    const float *x_scales = nullptr, *w_scales = nullptr;
};

static __device__ __forceinline__ uint32_t swizzled(int row, int piece) { return row * LINE + (piece ^ row % 8) * 16; }

template <typename Numbers, Kind KIND, int BM, int BN, int WM, int WN, int STAGES>
struct MmaTile {
    using Number = typename Numbers::Number;
    using Result = typename Written<KIND>::type;
    static constexpr int DEPTH = LINE / sizeof(Number), PIECE = 16 / sizeof(Number);  // numbers of K in a stage, in 16 bytes
    static constexpr bool GATED = Written<KIND>::GATED, FLOATS = Written<KIND>::FLOATS;
    static constexpr int THREADS = 32 * WM * WN;
    static constexpr int MT = BM / WM / 16, NT = BN / WN / 8;  // tiles of 16 rows and of 8 outputs that a warp has
    static constexpr int STAGE = (BM + BN) * LINE, STEP = THREADS / 8;
    static constexpr int X_COPIES = (BM + STEP - 1) / STEP, W_COPIES = (BN + STEP - 1) / STEP;  // of a thread
    static constexpr int RESULTS = GATED ? BN / 2 : BN;
    static_assert(!GATED || NT % 2 == 0, "a warp has gate and up of its outputs");
    static_assert(MT * WM * 16 == BM && NT * WN * 8 == BN, "warps share a tile");

    float c[MT][NT][4];

    static __device__ __forceinline__ void clear(float (&c)[MT][NT][4]) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) c[m][n][i] = 0.0f;
    }

    // The products of a stage, 32 bytes of K after 32; of numbers that are summed ALONE, added when all are there.
    __device__ __forceinline__ void multiply(uint32_t stage) {
        if constexpr (Numbers::ALONE) {
            float own[MT][NT][4];
            clear(own);
            multiply(stage, own);
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) c[m][n][i] = __fadd_rn(c[m][n][i], own[m][n][i]);
        } else {
            multiply(stage, c);
        }
    }

    static __device__ __forceinline__ void multiply(uint32_t stage, float (&c)[MT][NT][4]) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int row = warp / WN * (MT * 16) + lane % 16, output = warp % WN * (NT * 8) + lane % 8 + lane / 16 * 8;
#pragma unroll
        for (int k = 0; k < LINE / 32; ++k) {
            uint32_t a[MT][4], b[NT][2];
#pragma unroll
            for (int m = 0; m < MT; ++m) load_matrices(a[m], stage + swizzled(row + 16 * m, 2 * k + lane / 16));
#pragma unroll
            for (int n = 0; n < NT; n += 2) {
                // The last of an odd number reads a tile that is not its own again.
                const int from = NT % 2 && n + 1 == NT ? output - lane / 16 * 8 : output;
                uint32_t both[4];
                load_matrices(both, stage + BM * LINE + swizzled(from + 8 * n, 2 * k + lane / 8 % 2));
                b[n][0] = both[0], b[n][1] = both[1];
                if (n + 1 < NT) b[n + 1][0] = both[2], b[n + 1][1] = both[3];
            }
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int n = 0; n < NT; ++n) Numbers::multiply(c[m][n], a[m], b[n][0], b[n][1]);
        }
    }

    // The row of the weight that row `place` of a stage's weights is: of a gated one, each warp has gates, then ups.
    static __device__ __forceinline__ int weight_row(int place, int column, int outputs) {
        if constexpr (!GATED) return column + place;
        const int warp = place / (NT * 8), own = place % (NT * 8);
        return column + warp * (NT * 4) + own % (NT * 4) + own / (NT * 4) * outputs;
    }

    // Whether the output of that row exists.
    static __device__ __forceinline__ bool exists(int place, int column, int outputs) {
        if constexpr (!GATED) return column + place < outputs;
        return column + place / (NT * 8) * (NT * 4) + place % (NT * 4) < outputs;
    }

    __device__ __forceinline__ float result(int m, int n, int i) const {
        if constexpr (!GATED) return c[m][n][i];
        const float gate = rounded(c[m][n][i]), up = rounded(c[m][n + NT / 2][i]);
        return KIND == Kind::GEGLU ? gelu_times(gate, up) : silu_times(gate, up);
    }

    // Multiplies sums by the scales of their row, then of their output.
    __device__ __forceinline__ void scale(const Operands<Number, Result>& all, int row, int column) {
        constexpr int OWN = GATED ? NT / 2 : NT;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
        const int first_row = row + warp / WN * (MT * 16) + g, first = column + warp % WN * (OWN * 8) + 2 * t;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const int output = first + n % OWN * 8, from = output + n / OWN * all.outputs;
            float own[2] = {0.0f, 0.0f};
            if (output < all.outputs) own[0] = all.w_scales[from], own[1] = all.w_scales[from + 1];
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int my_row = first_row + 16 * m + i / 2 * 8;
                    const float of_row = my_row < all.rows ? all.x_scales[my_row] : 0.0f;
                    c[m][n][i] = __fmul_rn(__fmul_rn(c[m][n][i], of_row), own[i % 2]);
                }
        }
    }

    // added: to what is there.
    __device__ __forceinline__ void store(const Operands<Number, Result>& all, int row, int column, bool added) const {
        constexpr int OWN = GATED ? NT / 2 : NT;
        const int rows = all.rows, outputs = all.outputs, pitch = all.pitch;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
        const int first_row = row + warp / WN * (MT * 16) + g, first = column + warp % WN * (OWN * 8);
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int my_row = first_row + 16 * m + 8 * half;
                Result* target = all.y + static_cast<int64_t>(my_row) * pitch + first;
                if constexpr (!FLOATS) {
                    store_row<8 * OWN>(target, my_row < rows, outputs - first, t, [&](int n) {
                        return pack(result(m, n, 2 * half), result(m, n, 2 * half + 1));
                    });
                } else {
#pragma unroll
                    for (int n = 0; n < OWN; ++n) {
                        if (my_row >= rows || first + 8 * n >= outputs) continue;
                        float2* place = reinterpret_cast<float2*>(target + 8 * n + 2 * t);
                        float2 pair = make_float2(c[m][n][2 * half], c[m][n][2 * half + 1]);
                        if (added) {
                            const float2 before = *place;
                            pair = make_float2(__fadd_rn(before.x, pair.x), __fadd_rn(before.y, pair.y));
                        }
                        *place = pair;
                    }
                }
            }
    }

    // stages: the address of STAGES * STAGE bytes of shared memory, a multiple of 128
    __device__ __forceinline__ void compute(Operands<Number, Result> all, uint32_t stages) {
        const int rows = all.rows, outputs = all.outputs, inputs = all.inputs;
        const int row_tiles = (rows + BM - 1) / BM, column_tiles = (outputs + RESULTS - 1) / RESULTS;
        const int before = blockIdx.x / (GROUP * column_tiles) * GROUP, within = blockIdx.x % (GROUP * column_tiles);
        const int together = min(GROUP, row_tiles - before);
        const int row = (before + within % together) * BM, column = within / together * RESULTS;
        const int steps = (inputs + DEPTH - 1) / DEPTH;
        const int piece = threadIdx.x % 8, place = threadIdx.x / 8;  // that a thread copies, and STEP, 2 STEP ... below
        const Number *x_from[X_COPIES], *w_from[W_COPIES];
        bool x_there[X_COPIES], w_there[W_COPIES];
#pragma unroll
        for (int i = 0; i < X_COPIES; ++i) {
            const int own = row + place + i * STEP;
            x_there[i] = own < rows;
            x_from[i] = all.x + static_cast<int64_t>(min(own, rows - 1)) * inputs;
        }
#pragma unroll
        for (int i = 0; i < W_COPIES; ++i) {
            const int own = place + i * STEP;
            w_there[i] = own < BN && exists(own, column, outputs);
            w_from[i] = all.w + (w_there[i] ? static_cast<int64_t>(weight_row(own, column, outputs)) * inputs : 0);
        }
        const auto fetch_weights = [&](int step) {
            const int k = step * DEPTH + piece * PIECE;
#pragma unroll
            for (int i = 0; i < W_COPIES; ++i)
                if (W_COPIES * STEP == BN || place + i * STEP < BN)
                    copy_async(stages + step % STAGES * STAGE + BM * LINE + swizzled(place + i * STEP, piece),
                               w_from[i] + (k < inputs ? k : 0), w_there[i] && k < inputs);
        };
        const auto fetch_rows = [&](int step) {
            const int k = step * DEPTH + piece * PIECE;
#pragma unroll
            for (int i = 0; i < X_COPIES; ++i)
                if (X_COPIES * STEP == BM || place + i * STEP < BM)
                    copy_async(stages + step % STAGES * STAGE + swizzled(place + i * STEP, piece),
                               x_from[i] + (k < inputs ? k : 0), x_there[i] && k < inputs);
        };
        for (int step = 0; step < STAGES - 1; ++step)
            if (step < steps) fetch_weights(step);
        launch_next();
        wait_for_previous(all.x, all.y, all.x_scales);
        for (int step = 0; step < STAGES - 1; ++step) {
            if (step < steps) fetch_rows(step);
            commit_copies();
        }
        clear(c);
        for (int step = 0; step < steps; ++step) {
            wait_for_copies<STAGES - 2>();
            __syncthreads();
            if (step + STAGES - 1 < steps) {
                fetch_weights(step + STAGES - 1);
                fetch_rows(step + STAGES - 1);
            }
            commit_copies();
            if constexpr (Written<KIND>::SUMMED)
                if (step * DEPTH == all.first) {
                    store(all, row, column, Written<KIND>::ADDS);
                    clear(c);
                }
            multiply(stages + step % STAGES * STAGE);
        }
        if constexpr (Numbers::ALONE) scale(all, row, column);
        store(all, row, column, Written<KIND>::ADDS || (Written<KIND>::SUMMED && all.first < inputs));
    }
};
