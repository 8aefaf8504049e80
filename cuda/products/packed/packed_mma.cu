// Products of many rows with packed weights on every GPU from sm_80 on: tiles by mma.sync, which make elements of weights as they
// multiply.
//
//   x  (rows, K) elements     W  (outputs, K) packed (common/packed.cuh), for -DFORMAT
//   y  (rows, outputs), rows `pitch` numbers apart: elements, float, or float that the product is added to
//
// Sums are float and go through K in order, 16 elements at a time, from one accumulator, as those of elements (`mma_gemm.cu`) and
// of few rows (`packed_rows.cu`) do: all have the same bits.
//
// A block of WN warps computes BM rows by BN outputs; a warp has all rows of NT panels of 8 outputs, so that a weight becomes an
// element once a block. Steps are 64 of K: x is copied STAGES - 1 steps ahead, rows of 128 bytes whose 16-byte pieces are
// swizzled. Weights are copied as they are, packets of DEPTH elements of K for each panel, in turn to two places; a lane makes
// chunk lane % 4 of a group of its panel's row lane / 4, which is what it holds of two products' operands.
//
// Bytes: W once for BM rows, where it does not fit L2; x once for what runs at once (blocks are numbered as in `mma_gemm.cu`).
#include "common/packed.cuh"
#include "common/store_row.cuh"

static constexpr int STEP = 64, LINE = 2 * STEP;                     // elements of K in a step, and their bytes
static constexpr int STAGES = 3;
static constexpr int DEPTH = Packed::STEP < 128 ? 128 : Packed::STEP;  // elements of K that weights are copied by
static constexpr int PACKETS = DEPTH / Packed::STEP, PANEL_BYTES = PACKETS * Packed::PACKET;
static constexpr int GROUP = 8;  // tiles of rows whose blocks run one after the other
static_assert(STAGES - 1 <= DEPTH / STEP, "weights come with a step that is waited for in time");

static __device__ __forceinline__ uint32_t swizzled(int row, int piece) { return row * LINE + (piece ^ row % 8) * 16; }

struct Elements {
    using Result = Element;
    static __device__ __forceinline__ void put(Result* place, float value) { *place = to_element(value); }
};
struct Floats {
    using Result = float;
    static __device__ __forceinline__ void put(Result* place, float value) { *place = value; }
};
struct Added {
    using Result = float;
    static __device__ __forceinline__ void put(Result* place, float value) { *place = __fadd_rn(*place, value); }
};

template <typename Store, int BM, int BN, int WN>
struct Tile {
    using Result = typename Store::Result;
    static constexpr int THREADS = 32 * WN, MT = BM / 16, NT = BN / WN / 8, PANELS = BN / 8;
    static constexpr int X_BYTES = BM * LINE, W_BYTES = PANELS * PANEL_BYTES, ROWS_OF_A_TURN = THREADS / 8;
    static constexpr int COPIES = BM / ROWS_OF_A_TURN;
    static_assert(COPIES * ROWS_OF_A_TURN == BM && NT * WN * 8 == BN, "threads and warps share a tile");

    float c[MT][NT][4];

    // The products of a step with the packets at `weights`, from group `first` of them on.
    __device__ __forceinline__ void multiply(uint32_t x, const unsigned char* weights, int first) {
        constexpr int GROUPS = Packed::STEP / 32;
        const int lane = threadIdx.x % 32, panel = threadIdx.x / 32 * NT;
#pragma unroll
        for (int group = 0; group < STEP / 32; ++group) {
            Element8 b[NT];
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const unsigned char* packet =
                    weights + (panel + n) * PANEL_BYTES + (first + group) / GROUPS * Packed::PACKET;
                const int own = (first + group) % GROUPS;
                const auto scale = packed::scale_of<Packed>(packet, lane / 4, own);
                b[n] = Packed::eight(Packed::raw(packet, lane / 4, own * 4 + lane % 4), scale);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    uint32_t a[4];
                    load_matrices(a, x + swizzled(16 * m + lane % 16, 4 * group + 2 * half + lane / 16));
#pragma unroll
                    for (int n = 0; n < NT; ++n) mma(c[m][n], a, b[n].word[2 * half], b[n].word[2 * half + 1]);
                }
        }
    }

    __device__ __forceinline__ void store(Result* y, int row, int column, int rows, int outputs, int pitch) const {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first = column + threadIdx.x / 32 * (NT * 8);
        const bool whole = sizeof(Result) == sizeof(Element) && outputs % 8 == 0 && pitch % 8 == 0 &&
                           reinterpret_cast<uint64_t>(y) % 16 == 0;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int my_row = row + 16 * m + 8 * half + g;
                Result* target = y + static_cast<int64_t>(my_row) * pitch + first;
                if (whole) {
                    if constexpr (sizeof(Result) == sizeof(Element))
                        store_row<8 * NT>(target, my_row < rows, outputs - first, t, [&](int n) {
                            return pack(c[m][n][2 * half], c[m][n][2 * half + 1]);
                        });
                } else if (my_row < rows) {
#pragma unroll
                    for (int n = 0; n < NT; ++n)
#pragma unroll
                        for (int i = 0; i < 2; ++i)
                            if (const int at = 8 * n + 2 * t + i; first + at < outputs)
                                Store::put(target + at, c[m][n][2 * half + i]);
                }
            }
    }

    __device__ __forceinline__ void compute(const Element* x, const unsigned char* w, Result* y, int rows, int outputs, int inputs,
                                            int pitch) {
        extern __shared__ __align__(128) unsigned char shared[];
        const int row_tiles = (rows + BM - 1) / BM, column_tiles = (outputs + BN - 1) / BN;
        const int before = blockIdx.x / (GROUP * column_tiles) * GROUP, within = blockIdx.x % (GROUP * column_tiles);
        const int together = min(GROUP, row_tiles - before);
        const int row = (before + within % together) * BM, column = within / together * BN;
        const int steps = (inputs + STEP - 1) / STEP, packets = (inputs + Packed::STEP - 1) / Packed::STEP;
        const int panels = (outputs + packed::ROWS - 1) / packed::ROWS, first_panel = column / packed::ROWS;
        const uint32_t rows_at = shared_address(shared), weights_at = rows_at + STAGES * X_BYTES;
        const auto fetch_weights = [&](int turn) {
            const int there = min(PACKETS, packets - turn * PACKETS) * Packed::PACKET;  // bytes of each panel
            for (int copy = threadIdx.x; copy < W_BYTES / 16; copy += THREADS) {
                const int panel = copy * 16 / PANEL_BYTES, at = copy * 16 % PANEL_BYTES;
                const bool wanted = at < there && first_panel + panel < panels;
                const int64_t from = (static_cast<int64_t>(first_panel + panel) * packets + turn * PACKETS) * Packed::PACKET + at;
                copy_async(weights_at + turn % 2 * W_BYTES + copy * 16, w + (wanted ? from : 0), wanted);
            }
        };
        const int piece = threadIdx.x % 8, place = threadIdx.x / 8;
        const Element* own = x + static_cast<int64_t>(min(row + place, rows - 1)) * inputs;
        const auto fetch_rows = [&](int step) {
            const int k = step * STEP + piece * 8;
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                const bool wanted = row + place + i * ROWS_OF_A_TURN < rows && k < inputs;
                copy_async(rows_at + step % STAGES * X_BYTES + swizzled(place + i * ROWS_OF_A_TURN, piece),
                           wanted ? own + static_cast<int64_t>(i) * ROWS_OF_A_TURN * inputs + k : x, wanted);
            }
        };
        fetch_weights(0);
        launch_next();
        wait_for_previous(x, y);
#pragma unroll
        for (int step = 0; step < STAGES - 1; ++step) {
            if (step < steps) fetch_rows(step);
            commit_copies();
        }
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) c[m][n][i] = 0.0f;
        for (int step = 0; step < steps; ++step) {
            const int turn = step / (DEPTH / STEP), within_turn = step % (DEPTH / STEP);
            wait_for_copies<STAGES - 2>();
            __syncthreads();
            if (step + STAGES - 1 < steps) fetch_rows(step + STAGES - 1);
            if (within_turn == 0 && (turn + 1) * DEPTH < inputs) fetch_weights(turn + 1);
            commit_copies();
            multiply(rows_at + step % STAGES * X_BYTES, shared + STAGES * X_BYTES + turn % 2 * W_BYTES,
                     within_turn * (STEP / 32));
        }
        store(y, row, column, rows, outputs, pitch);
    }
};

#define PACKED_MMA(NAME, STORE, BM, BN, WN)                                                                               \
    extern "C" __global__ void __launch_bounds__(32 * WN)                                                                 \
        packed_mma_##NAME##_##BM##_##BN##_##WN(const Element* x, const unsigned char* w, STORE::Result* y, int rows,        \
                                              int outputs, int inputs, int pitch) {                                       \
        Tile<STORE, BM, BN, WN> tile;                                                                                     \
        tile.compute(x, w, y, rows, outputs, inputs, pitch);                                                              \
    }
#define PACKED_MMAS(BM, BN, WN) \
    PACKED_MMA(elements, Elements, BM, BN, WN) PACKED_MMA(floats, Floats, BM, BN, WN) PACKED_MMA(added, Added, BM, BN, WN)

KERNELS  // of `packed_mma.py`
