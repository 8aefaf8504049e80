// Products of experts over whole operands, on Hopper by wgmma: with many rows over elements, what `grouped.cu` computes, with its
// operands and its bits; and with -DFP8 over E4M3, with any number of rows.
//
//   w      tensor map of W, elements or E4M3, all rows of all experts, with boxes of 128 bytes by half of a unit's rows
//   tiles  whose last number is n + 65536 i: the i-th tile of n of its expert, all but the last as large as a tile may be
//
// A block has the positions of a tile, the left operand, by COLUMNS rows of W, a *unit*: half of gate and as many of up, or all that
// follow each other. It goes through K by 128 bytes, STAGES copies ahead. Blocks stay, and go through *items*, a tile and a unit:
// those of a unit one after the other, then those of the expert's next one, so that L2 has x and W. The last four warps copy rows
// of x (`gathered_rows.cuh`), and one of them asks for bulk copies of W; GROUPS warpgroups multiply, 64 positions each: one that has
// none lets the other have the tensor cores.
//
// Sums of elements go through K in order, 16 at a time, from one accumulator; those of E4M3 as in `products/fp8/hopper_fp8.cu`: of
// 128 each from zero, which are added up as floats, in order.
//
// Bytes: W once for each tile, of an expert mostly from L2; x once for each item.
#include "experts/gathered_rows.cuh"
#include "experts/grouped.cuh"

#include "common/store_row.cuh"
#ifdef FP8
#include "common/fp8.cuh"
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

static constexpr int LINE = 128, DEPTH = LINE / sizeof(Input);  // bytes and numbers of a row in a box
static constexpr int COPY = 4;                                   // warps that copy x

// As in `experts/tiles.py`. OF_..: registers of threads that multiply, and of others.
template <int ROWS_>
struct Tile {
    static constexpr int ROWS = ROWS_, GROUPS = ROWS / 64;
#ifdef FP8
    static constexpr int COLUMNS = GROUPS == 1 ? 64 : 192, STAGES = GROUPS == 1 ? 6 : 5, BLOCKS = GROUPS == 1 ? 2 : 1;
    static constexpr int OF_MULTIPLIERS = 216, OF_OTHERS = 72;
#else
    static constexpr int COLUMNS = 256, STAGES = 4, BLOCKS = 1, OF_MULTIPLIERS = 200, OF_OTHERS = 104;
#endif
    static constexpr int X_BYTES = ROWS * LINE, W_BYTES = COLUMNS * LINE, STAGE = X_BYTES + W_BYTES;
    static constexpr int BYTES = STAGES * STAGE + 1024, COPIER = 4 * GROUPS, THREADS = 32 * (COPIER + COPY);
    static constexpr bool SHARES = GROUPS > 1;  // registers go from warps that copy to those that multiply
    static_assert(BYTES * BLOCKS <= 227 << 10 && 2 * OF_MULTIPLIERS + OF_OTHERS <= 504, "as a multiprocessor has them");
};

// A tile, and the unit of its expert.
struct Item {
    int4 tile;
    int unit;
};

// What there is to do, for a product with one or two rows of W for each output.
template <int COLUMNS, bool TWO>
struct Work {
    static constexpr int OUTPUTS = COLUMNS / (TWO ? 2 : 1);  // of a unit
    const Operands& given;
    const int4* tiles;
    int total, units;

    __device__ __forceinline__ Work(const Operands& given, const int4* tiles, int total)
        : given(given), tiles(tiles), total(total), units((given.outputs + OUTPUTS - 1) / OUTPUTS) {}

    __device__ __forceinline__ int items() const { return total * units; }
    __device__ __forceinline__ Item item(int index) const {
        const int any = index / units, packed = tiles[any].w;  // a tile of the same expert
        const int first = any - (packed >> 16), count = packed & 0xffff, within = index - first * units;
        return {tiles[first + within % count], within / count};
    }
    // The first row of W of a unit, of gate or of up, or of the first or the second half.
    __device__ __forceinline__ int row(const Item& own, int half) const {
        return own.tile.x * given.stride + own.unit * OUTPUTS + half * (TWO ? given.side : COLUMNS / 2);
    }
};

// Writes what a thread has of a tile: acc[4 j + 2 half + e] is of position 64 group + 16 warp + lane / 4 + 8 half, column
// 8 j + 2 (lane % 4) + e of the unit.
template <Result RESULT, int COLUMNS>
static __device__ __forceinline__ void finish(float (&acc)[COLUMNS / 2], const Work<COLUMNS, RESULT == Result::TWO>& work,
                                              const Item& own, typename Stored<RESULT>::type* y) {
    constexpr bool TWO = RESULT == Result::TWO;
    constexpr int OUTPUTS = COLUMNS / (TWO ? 2 : 1);
    const Operands& given = work.given;
    const int t = threadIdx.x % 4, outputs = given.outputs, first = own.unit * OUTPUTS, limit = outputs - first;
    const int64_t rows[2] = {work.row(own, 0) + 2 * t, work.row(own, TWO) + 2 * t};
    const int expert = own.tile.x, within = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const int64_t place = static_cast<int64_t>(own.tile.y + within) * outputs + first;
    int sources[2] = {0, 0};  // of x, whose rows have scales
#ifdef FP8
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int position = own.tile.y + min(within + 8 * half, own.tile.z - 1);
        sources[half] = given.sources == nullptr ? position : given.sources[position];
    }
#endif
#pragma unroll
    for (int j = 0; j < OUTPUTS / 8; ++j) {
        if (8 * j >= limit) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float ups[2] = {1.0f, 1.0f};
            if (RESULT == Result::ONE && given.other != nullptr && within + 8 * half < own.tile.z) {
                const int64_t at = place + half * 8 * outputs + 8 * j + 2 * t;
                ups[0] = given.other[at], ups[1] = given.other[at + 1];
            }
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& value = acc[4 * j + 2 * half + e];
                value = finished(value, given, sources[half], rows[0] + 8 * j + e, given.first_scales, expert);
                if (TWO)
                    ups[e] = finished(acc[(4 * j + 2 * half + e + COLUMNS / 4) % (COLUMNS / 2)], given, sources[half],
                                      rows[1] + 8 * j + e, given.second_scales, expert);
                if (RESULT != Result::FLOATS) value = activated(given.activation, value, ups[e]);
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const bool exists = within + 8 * half < own.tile.z;
        typename Stored<RESULT>::type* const target = y + place + half * 8 * outputs;
        if constexpr (RESULT != Result::FLOATS) {
            store_row<OUTPUTS>(target, exists, limit, t,
                               [&](int j) { return pack(acc[4 * j + 2 * half], acc[4 * j + 2 * half + 1]); });
        } else if (exists) {
#pragma unroll
            for (int j = 0; j < OUTPUTS / 8; ++j)
                if (8 * j < limit)
                    *reinterpret_cast<float2*>(target + 8 * j + 2 * t) =
                        make_float2(acc[4 * j + 2 * half], acc[4 * j + 2 * half + 1]);
        }
    }
}

template <Result RESULT, typename T>
static __device__ __forceinline__ void product(const TensorMap* map, const Operands& given, const int4* tiles, int total,
                                               typename Stored<RESULT>::type* y) {
    constexpr bool TWO = RESULT == Result::TWO;
    constexpr int STAGES = T::STAGES, STAGE = T::STAGE, X_BYTES = T::X_BYTES, W_BYTES = T::W_BYTES, COPIER = T::COPIER;
    extern __shared__ __align__(16) unsigned char dynamic[];
    __shared__ uint64_t barriers[2 * STAGES];
    const uint32_t base = (shared_address(dynamic) + 1023) & ~1023u;
    // BARRIER full, barrier: of a stage. Each lane of the warps that copy arrives once for each filling, when its copies have ended,
    // and one of them once more, which expects the bytes of W. They fill the stage again only when they have waited for `empty`, and a
    // group is not done with a stage before it has waited for it: each waits for all phases, in order.
    // BARRIER empty: of a stage. One thread of each group arrives once for each filling, when the group's products with it have ended,
    // or, if it has none, when it is there; the warps that fill wait, for all phases, in order, and fill only then. So a group has
    // to wait for the next filling, a part of which is each of theirs, before it arrives again.
    const uint32_t full = shared_address(barriers), empty = full + 8 * STAGES;
    const int warp = same_in_warp(threadIdx.x / 32), steps = (given.inputs + DEPTH - 1) / DEPTH;
    const Work<T::COLUMNS, TWO> work(given, tiles, total);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + 8 * i, 32 * COPY + 1);
            barrier_init(empty + 8 * i, T::GROUPS);
        }
        publish_barriers();
    }
    __syncthreads();
    int stage = 0, parity = 0;
    const auto advance = [&] {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    };

    if (warp >= COPIER) {
        if (T::SHARES) give_registers<T::OF_OTHERS>();
        const bool fetches = threadIdx.x == 32 * COPIER;
        if (fetches) prefetch_map(map);
        RowCopier<T::ROWS, COPY> copier(threadIdx.x - 32 * COPIER);
        for (int index = blockIdx.x; index < work.items(); index += gridDim.x) {
            const Item own = work.item(index);
            copier.take(given, own.tile);
#pragma unroll 1
            for (int step = 0; step < steps; ++step, advance()) {
                const uint32_t target = base + stage * STAGE, barrier = full + 8 * stage;
                barrier_wait(empty + 8 * stage, parity ^ 1);
                if (fetches) {
                    barrier_expect(barrier, W_BYTES);
                    load_box(target + X_BYTES, map, barrier, step * DEPTH, work.row(own, 0));
                    load_box(target + X_BYTES + W_BYTES / 2, map, barrier, step * DEPTH, work.row(own, 1));
                }
                __syncwarp();
                copier.copy(given, target, step);
                barrier_arrive_after_copies(barrier);
            }
        }
        return;
    }
    if (T::SHARES) take_registers<T::OF_MULTIPLIERS>();
    const int group = warp / 4;
    const auto release = [&](int done) {
        if (threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * done);
    };
    const uint64_t left = tile_descriptor(base + group * (X_BYTES / T::GROUPS)), right = tile_descriptor(base + X_BYTES);
    for (int index = blockIdx.x; index < work.items(); index += gridDim.x) {
        Item own = work.item(index);
        own.tile.z = same_in_warp(own.tile.z);
        if (64 * group >= own.tile.z) {
            for (int step = 0; step < steps; ++step, advance()) {
                barrier_wait(full + 8 * stage, parity);
                release(stage);
            }
            continue;
        }
        float acc[T::COLUMNS / 2];
#ifdef FP8
        float part[T::COLUMNS / 2];
#pragma unroll
        for (float& sum : acc) sum = 0.0f;
#endif
        [[maybe_unused]] int before = 0;
        for (int step = 0; step < steps; ++step, advance()) {
            barrier_wait(full + 8 * stage, parity);
            publish_to_wgmma();  // rows that others have copied
            const uint64_t a = further(left, stage * (STAGE / 16)), b = further(right, stage * (STAGE / 16));
            wgmma_begin();
#ifdef FP8
#pragma unroll
            for (int k = 0; k < LINE / 32; ++k) wgmma_fp8(part, further(a, 2 * k), further(b, 2 * k), k > 0);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_keep(part);
            release(stage);
#pragma unroll
            for (int i = 0; i < T::COLUMNS / 2; ++i) acc[i] += part[i];
#else
#pragma unroll
            for (int k = 0; k < LINE / 32; ++k) wgmma(acc, further(a, 2 * k), further(b, 2 * k), step + k > 0);
            wgmma_commit();
            wgmma_wait<1>();
            if (step > 0) release(before);
            before = stage;
#endif
        }
#ifndef FP8
        wgmma_wait<0>();
        wgmma_keep(acc);
        release(before);
#endif
        finish<RESULT, T::COLUMNS>(acc, work, own, y);
    }
}

#define PRODUCT(NAME, RESULT, ROWS)                                                                                           \
    extern "C" __global__ void __launch_bounds__(Tile<ROWS>::THREADS, Tile<ROWS>::BLOCKS) gemm_##NAME##_##ROWS(               \
        const __grid_constant__ TensorMap w, const Input* x, const float* x_scales, const int* sources, const int4* tiles,    \
        const int* total, const unsigned char* weights, const float* w_scales, const float* bias, const float* first_scales,  \
        const float* second_scales, const float* other, Stored<RESULT>::type* y, int outputs, int inputs, int stride,         \
        int side, int activation) {                                                                                           \
        KERNEL_BEGINS();                                                                                                      \
        launch_next();                                                                                                        \
        wait_for_previous(x, x_scales, sources, tiles, total, other, y);                                                      \
        product<RESULT, Tile<ROWS>>(&w,                                                                                       \
                                    {x, x_scales, sources, weights, w_scales, bias, first_scales, second_scales, other,       \
                                     outputs, inputs, stride, side, activation},                                              \
                                    tiles, *total, y);                                                                        \
    }
#ifdef FP8
#define PRODUCTS(NAME, RESULT) PRODUCT(NAME, RESULT, 64) PRODUCT(NAME, RESULT, 128)
#else
#define PRODUCTS(NAME, RESULT) PRODUCT(NAME, RESULT, 128)
#endif

PRODUCTS(floats, Result::FLOATS)
PRODUCTS(one, Result::ONE)
PRODUCTS(two, Result::TWO)

#endif
