// Products with FP8 weights on Hopper: y = x W^T, alone, with SwiGLU or GeGLU, or added to the residual stream.
//
//   x  (rows, K) E4M3, x_scales (rows,) float       W  (outputs, K) E4M3, w_scales (outputs,) float
// both through tensor maps, with boxes of 128 columns by BR and BN rows (BN / 2, where there are two boxes, see below).
//
//   product_*   y (rows, outputs), elements
//   swiglu_*    W holds F rows of gate, then F of up; y (rows, F), elements = silu(gate) * up, gate and up rounded to such
//               before, as `activate.cu` reads them
//   geglu_*     the same with gelu
//   residual_*  y (rows, outputs) float += x W^T
//   addend_*    y = x W^T, float
// Kernels are named KIND_BR_BN_BOXES_STAGES_CLUSTER_BUFFERS.
//
// The tensor core adds up products of E4M3 in registers of about 14 bits. So sums go through K 128 elements at a time, each
// from zero, by four wgmmas, and these are added up as floats, in order (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). A sum
// is then multiplied by the row's scale, then the output's. So a row's bits hang on that row and the weights alone, not on the
// tile; before scales they are those of cuBLASLt without fast accumulation (CUDA 13.0, H200).
//
// A tile is BR rows (wgmma takes 64 for each warpgroup; what it makes of others is not kept) by BN columns, from BN rows of W
// (with a gate from BN / 2, and the BN / 2 that are `outputs` further down). One warp copies, BOXES boxes of 128 elements of K
// in a step, STAGES steps deep; BR / 64 warpgroups multiply. With two of them, the copying warp has a warpgroup of its own,
// whose registers they take, since a thread has each sum twice: so far, and of 128 elements. The boxes of a step are multiplied
// in turns, 32 elements of each: a wgmma of few columns takes less time than its result takes to be there.
// Blocks go through the tiles as in `hopper_product.cuh`, in clusters of CLUSTER, and results of BUFFERS pieces a warpgroup
// leave as described there; other results leave from registers.
// FLOPs 2 rows outputs K; bytes: W and x once from memory, if L2 holds a group.
//
// The kernel may start before the one ahead of it has ended: weights are fetched at once, all else only after that.
//
// Option: -DKERNELS, an FP8_KERNEL for each tile, as `hopper_fp8.py` writes it.
#include "common/fp8.cuh"
#include "products/hopper_product.cuh"
#include "products/kinds.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

static constexpr int LINE = 128;  // elements of K in a box, and bytes: the width of the swizzle
// Of a thread, with two warpgroups that multiply:
static constexpr int COPYING_REGISTERS = 40, MULTIPLYING_REGISTERS = 232;

template <int BR_, int BN_, int BOXES_, int STAGES_, int CLUSTER_, int BUFFERS_>
struct Tile {
    static constexpr int BR = BR_, BN = BN_, BOXES = BOXES_, STAGES = STAGES_, CLUSTER = CLUSTER_, BUFFERS = BUFFERS_;
    static constexpr int GROUPS = (BR + 63) / 64, COPIES = 4 * GROUPS;  // the warp that copies
    static constexpr int THREADS = 128 * GROUPS + (GROUPS > 1 ? 128 : 32);
    static constexpr int X_BYTES = BR * LINE, W_BYTES = BN * LINE;  // of a box
    static constexpr int W_AT = BOXES * X_BYTES, STAGE = BOXES * (X_BYTES + W_BYTES), DEPTH = BOXES * LINE;
    // What a result needs is asked for ahead: registers suffice for it.
    static constexpr bool EARLY = GROUPS == 1 && BUFFERS == 0;
};

// Where a block's tiles are.
template <typename T>
struct Tiles {
    int rows, outputs, columns, rank, row_tiles, column_tiles, first, stride, count;

    // columns: of results in a tile
    __device__ __forceinline__ Tiles(int rows, int outputs, int columns) : rows(rows), outputs(outputs), columns(columns) {
        rank = T::CLUSTER > 1 ? rank_in_cluster() : 0;
        row_tiles = (rows + T::BR * T::CLUSTER - 1) / (T::BR * T::CLUSTER);
        column_tiles = (outputs + columns - 1) / columns;
        first = blockIdx.x / T::CLUSTER, stride = gridDim.x / T::CLUSTER, count = row_tiles * column_tiles;
    }
    __device__ __forceinline__ void place(int tile, int& row, int& column) const {
        const int group = tile / (GROUP_ROWS * column_tiles), within = tile % (GROUP_ROWS * column_tiles);
        const int height = min(GROUP_ROWS, row_tiles - group * GROUP_ROWS);
        row = ((group * GROUP_ROWS + within % height) * T::CLUSTER + rank) * T::BR;
        column = within / height * columns;
    }
};

// What one thread copies. `apart`: rows of W from one half of a tile's to the other, where these are two boxes; 0: one.
template <typename T>
static __device__ __forceinline__ void copy_tiles(const TensorMap* x_map, const TensorMap* w_map, const Tiles<T>& tiles,
                                                  int steps, int apart, uint32_t base, uint32_t full, uint32_t empty) {
    const auto load_w = [&](int stage, int step, int column) {
        const uint32_t barrier = full + 8 * stage;
        barrier_expect(barrier, T::STAGE);
#pragma unroll
        for (int i = 0; i < T::BOXES; ++i) {
            const uint32_t target = base + stage * T::STAGE + T::W_AT + i * T::W_BYTES;
            const int depth = step * T::DEPTH + i * LINE;  // beyond K there are zeros
            if (T::CLUSTER > 1) {
                load_box_in(target + tiles.rank * (T::W_BYTES / 2), w_map, barrier, depth, column + tiles.rank * apart, 3);
            } else {
                load_box(target, w_map, barrier, depth, column);
                if (apart) load_box(target + T::W_BYTES / 2, w_map, barrier, depth, column + apart);
            }
        }
    };
    prefetch_map(w_map);
    prefetch_map(x_map);
    const int ahead = min(T::STAGES, steps);
    int row, column;
    if (tiles.first < tiles.count) {
        tiles.place(tiles.first, row, column);
        for (int step = 0; step < ahead; ++step) load_w(step, step, column);
    }
    wait_for_previous();
    int count = 0;
    for (int tile = tiles.first; tile < tiles.count; tile += tiles.stride) {
        tiles.place(tile, row, column);
        for (int step = 0; step < steps; ++step, ++count) {
            const int stage = count % T::STAGES;
            if (count >= T::STAGES) barrier_wait(empty + 8 * stage, (count / T::STAGES - 1) & 1);
            if (count >= ahead) load_w(stage, step, column);
#pragma unroll
            for (int i = 0; i < T::BOXES; ++i)
                load_box(base + stage * T::STAGE + i * T::X_BYTES, x_map, full + 8 * stage, step * T::DEPTH + i * LINE, row);
        }
    }
    launch_next();  // earlier, its blocks would be in the way
}

// finish(sums, row, column, ready, outbox): a warpgroup's sums of the tile whose first column is `column`; this thread has
// sums[4 j + 2 half + e] = row `row` + 8 half, column 8 j + 2 t + e of the tile (`hopper.cuh`).
// prepare(row, column): called before the tile is multiplied, for what can be asked for ahead; its result is `ready`.
template <typename T, typename Prepare, typename Finish>
static __device__ __forceinline__ void multiply(const TensorMap* x_map, const TensorMap* w_map, const Tiles<T>& tiles,
                                                int inputs, int apart, Prepare prepare, Finish finish) {
    extern __shared__ unsigned char dynamic[];
    __shared__ uint64_t barriers[2 * T::STAGES];
    const uint32_t base = (shared_address(dynamic) + 1023) & ~1023u;
    // BARRIER full, barrier: of a stage. One thread arrives, that which copies, and expects what it and the cluster's other block send
    // here. It does so again, and the other sends again, only when `empty` said that all groups of both blocks have done with the
    // stage, and they are not before they have waited: so all groups wait for all phases, one after the other.
    // BARRIER empty: of a stage. Each group of each block of the cluster arrives once for each filling, when it has multiplied; the
    // one thread that copies waits, for all phases but that of the last fillings, one after the other. No group arrives a second time
    // in a phase: the next filling, a part of which is this block's to send, comes after it.
    const uint32_t full = shared_address(barriers), empty = full + 8 * T::STAGES;
    // The same in a whole warp, which the compiler sees when it is written so: wgmma takes uniform registers.
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
    const int steps = (inputs + T::DEPTH - 1) / T::DEPTH;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < T::STAGES; ++stage) {
            barrier_init(full + 8 * stage, 1);
            barrier_init(empty + 8 * stage, T::GROUPS * T::CLUSTER);
        }
        publish_barriers();
    }
    if (T::CLUSTER > 1)
        cluster_sync();
    else
        __syncthreads();

    if (warp >= T::COPIES) {
        if (T::GROUPS > 1) give_registers<COPYING_REGISTERS>();
        if (warp == T::COPIES && lane == 0) copy_tiles(x_map, w_map, tiles, steps, apart, base, full, empty);
        __syncwarp();
        if (T::CLUSTER > 1) cluster_sync();
        return;
    }
    if (T::GROUPS > 1) take_registers<MULTIPLYING_REGISTERS>();

    const int group = warp / 4, in_group = threadIdx.x % 128;
    const Outbox outbox{base + T::STAGES * T::STAGE + group * T::BUFFERS * PIECE_BYTES, group};
    const auto release = [&](int stage) {
        if (T::CLUSTER == 1 && in_group == 0) barrier_arrive(empty + 8 * stage);
        if (T::CLUSTER > 1 && in_group < T::CLUSTER) barrier_arrive_there(address_in(empty + 8 * stage, in_group));
    };
    const uint64_t x_start = tile_descriptor(base) + group * (64 * LINE / 16), w_start = tile_descriptor(base + T::W_AT);
    if (T::EARLY) wait_for_previous();
    int stage = 0, parity = 0;
    for (int tile = tiles.first; tile < tiles.count; tile += tiles.stride) {
        float sums[T::BN / 2], parts[T::BOXES][T::BN / 2];
        int row, column;
        tiles.place(tile, row, column);
        row += warp * 16 + lane / 4;
        const auto ready = prepare(row, column);
#pragma unroll
        for (float& sum : sums) sum = 0.0f;
        for (int step = 0; step < steps; ++step) {
            barrier_wait(full + 8 * stage, parity);
            const uint64_t x = x_start + stage * (T::STAGE / 16), w = w_start + stage * (T::STAGE / 16);
            wgmma_begin();
#pragma unroll
            for (int k = 0; k < LINE / 32; ++k)
#pragma unroll
                for (int i = 0; i < T::BOXES; ++i)
                    wgmma_fp8(parts[i], x + i * (T::X_BYTES / 16) + 2 * k, w + i * (T::W_BYTES / 16) + 2 * k, k > 0);
            wgmma_commit();
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < T::BOXES; ++i) wgmma_keep(parts[i]);
            release(stage);
#pragma unroll
            for (int i = 0; i < T::BOXES; ++i)
#pragma unroll
                for (int j = 0; j < T::BN / 2; ++j) sums[j] += parts[i][j];
            if (++stage == T::STAGES) stage = 0, parity ^= 1;
        }
        finish(sums, row, column, ready, outbox);
    }
    if (T::BUFFERS > 0 && in_group == 0) wait_for_reads();
    if (T::CLUSTER > 1) cluster_sync();  // no block ends while the other may write to its memory or barriers
}

// What becomes of the sums of a tile.
template <typename T, Kind KIND>
struct Results {
    using W = Written<KIND>;
    static constexpr int ALL = T::BN / 8, COUNT = W::GATED ? ALL / 2 : ALL;  // groups of 8 columns: of sums, of results

    // Of a thread's two rows and its columns: which rows there are, scales, and (residual_*) what y holds.
    struct Ready {
        bool exists[2];
        float rows[2];
        float2 columns[ALL], old[W::ADDS && T::EARLY ? COUNT : 1][2];
    };

    const TensorMap* y_map;
    const float *x_scales, *w_scales;
    typename W::type* y;
    int rows, outputs;

    __device__ __forceinline__ typename W::type* place(int row, int column) const {
        return y + static_cast<int64_t>(row) * outputs + column;
    }

    __device__ __forceinline__ Ready load(int row, int column) const {
        const int t = threadIdx.x % 4, in_tile = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
        Ready ready;
#pragma unroll
        for (int j = 0; j < ALL; ++j) {
            const int up = j >= COUNT, at = column + 8 * (j - up * COUNT);
            ready.columns[j] = make_float2(0.0f, 0.0f);
            if (at < outputs) ready.columns[j] = *reinterpret_cast<const float2*>(w_scales + up * outputs + at + 2 * t);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            ready.exists[half] = in_tile + 8 * half < T::BR && row + 8 * half < rows;
            ready.rows[half] = ready.exists[half] ? x_scales[row + 8 * half] : 0.0f;
            if constexpr (W::ADDS && T::EARLY)
#pragma unroll
                for (int j = 0; j < COUNT; ++j)
                    if (ready.exists[half] && column + 8 * j < outputs)
                        ready.old[j][half] = *reinterpret_cast<const float2*>(place(row + 8 * half, column + 8 * j) + 2 * t);
        }
        return ready;
    }

    __device__ __forceinline__ void finish(float (&sums)[T::BN / 2], int row, int column, const Ready& ready,
                                           const Outbox& outbox) const {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int j = 0; j < ALL; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                sums[4 * j + 2 * half] = sums[4 * j + 2 * half] * ready.rows[half] * ready.columns[j].x;
                sums[4 * j + 2 * half + 1] = sums[4 * j + 2 * half + 1] * ready.rows[half] * ready.columns[j].y;
            }
        const int top = row - threadIdx.x % 128 / 32 * 16 - threadIdx.x % 32 / 4;
        if constexpr (W::FLOATS && T::BUFFERS > 0) {
            send_floats(sums, top, column, outbox);
        } else if constexpr (W::FLOATS) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int j = 0; j < COUNT; ++j) {
                    if (!ready.exists[half] || column + 8 * j >= outputs) continue;
                    float2* target = reinterpret_cast<float2*>(place(row + 8 * half, column + 8 * j) + 2 * t);
                    float2 value = make_float2(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
                    if constexpr (W::ADDS) {
                        float2 old;
                        if constexpr (T::EARLY)
                            old = ready.old[j][half];
                        else
                            old = *target;
                        value.x += old.x, value.y += old.y;
                    }
                    *target = value;
                }
        } else if constexpr (T::BUFFERS > 0) {
            send_elements(sums, top, column, outbox);
        } else {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                store_row<COUNT * 8>(place(row + 8 * half, column), ready.exists[half], outputs - column, t,
                                     [&](int j) { return word(sums, half, j); });
        }
    }

private:
    // Two elements of a result.
    static __device__ __forceinline__ uint32_t word(const float (&sums)[T::BN / 2], int half, int j) {
        float pair[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            pair[e] = sums[4 * j + 2 * half + e];
            if constexpr (W::GATED) {
                const float gate = rounded(pair[e]), up = rounded(sums[4 * (COUNT + j) + 2 * half + e]);
                pair[e] = KIND == Kind::GEGLU ? gelu_times(gate, up) : silu_times(gate, up);
            }
        }
        return pack(pair[0], pair[1]);
    }

    __device__ __forceinline__ void send_elements(const float (&sums)[T::BN / 2], int top, int column,
                                                  const Outbox& outbox) const {
        static_assert(T::BUFFERS == 0 || W::FLOATS || T::BUFFERS * 8 == COUNT, "a tile's results fill the outbox");
        outbox.open();
#pragma unroll
        for (int i = 0; i < T::BUFFERS * 4; ++i) {
            const int half = i % 2, from = i / 2 * 4;
            const uint32_t words[4] = {word(sums, half, from), word(sums, half, from + 1), word(sums, half, from + 2),
                                       word(sums, half, from + 3)};
            put_elements(outbox.piece(from / 8), half, from % 8, words);
        }
        outbox.send([&] {
            for (int i = 0; i < T::BUFFERS; ++i)
                if (const int at = column + i * 64; at < outputs) store_box(y_map, outbox.piece(i), at, top);
        });
    }

    // So many pieces at a time.
    __device__ __forceinline__ void send_floats(const float (&sums)[T::BN / 2], int top, int column,
                                                const Outbox& outbox) const {
        constexpr int PIECES = T::BN / 32;
        static_assert(T::BUFFERS == 0 || !W::FLOATS || PIECES % T::BUFFERS == 0, "the outbox is filled so many times");
#pragma unroll
        for (int first = 0; first < PIECES; first += T::BUFFERS) {
            outbox.open();
#pragma unroll
            for (int i = 0; i < T::BUFFERS * 8; ++i) {
                const int j = first * 4 + i / 2, half = i % 2;
                put_floats(outbox.piece(i / 8), half, j % 4, sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
            }
            outbox.send([&] {
                for (int i = 0; i < T::BUFFERS; ++i)
                    if (const int at = column + (first + i) * 32; at < outputs) {
                        if (W::ADDS)
                            add_box(y_map, outbox.piece(i), at, top);
                        else
                            store_box(y_map, outbox.piece(i), at, top);
                    }
            });
        }
    }
};

template <typename T, Kind KIND>
static __device__ __forceinline__ void product(const TensorMap* x_map, const TensorMap* w_map,
                                               const Results<T, KIND>& results, int inputs) {
    constexpr bool GATED = Written<KIND>::GATED;
    const Tiles<T> tiles(results.rows, results.outputs, GATED ? T::BN / 2 : T::BN);
    const int apart = GATED ? results.outputs : T::CLUSTER > 1 ? T::BN / 2 : 0;
    const auto prepare = [&](int row, int column) {
        if constexpr (T::EARLY)
            return results.load(row, column);
        else
            return 0;
    };
    const auto finish = [&](float(&sums)[T::BN / 2], int row, int column, const auto& ready, const Outbox& outbox) {
        if constexpr (T::EARLY)
            results.finish(sums, row, column, ready, outbox);
        else
            results.finish(sums, row, column, results.load(row, column), outbox);
    };
    multiply<T>(x_map, w_map, tiles, inputs, apart, prepare, finish);
}

#define FP8_KERNEL(NAME, WHICH, BR, BN, BOXES, STAGES, CLUSTER, BUFFERS)                                          \
    extern "C" __global__ void __launch_bounds__(Tile<BR, BN, BOXES, STAGES, CLUSTER, BUFFERS>::THREADS, 1)       \
        __cluster_dims__(CLUSTER, 1, 1) NAME##_##BR##_##BN##_##BOXES##_##STAGES##_##CLUSTER##_##BUFFERS(          \
            const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,                             \
            const __grid_constant__ TensorMap y_map, const float* x_scales, const float* w_scales,                \
            Written<Kind::WHICH>::type* y, int rows, int outputs, int inputs) {                                   \
        KERNEL_BEGINS();                                                                                          \
        product<Tile<BR, BN, BOXES, STAGES, CLUSTER, BUFFERS>, Kind::WHICH>(                                      \
            &x, &w, {&y_map, x_scales, w_scales, y, rows, outputs}, inputs);                                      \
    }
#else
#define FP8_KERNEL(NAME, WHICH, BR, BN, BOXES, STAGES, CLUSTER, BUFFERS)
#endif

KERNELS  // of `hopper_fp8.py`
