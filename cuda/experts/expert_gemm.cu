// Products of experts with many rows over elements, on Hopper by wgmma: what `grouped.cu` computes, with its operands and its bits.
//
//   w         tensor map of W as elements, all rows of all experts, with boxes of 64 columns by 128 rows
//   elements  with -DFORMAT: room for these, (rows of W, K)
//   ready     with -DFORMAT: a counter of panels that were begun, then, for each expert and *unit*, how many became elements; zero
//             when the kernel begins (`place_tokens`)
//   tiles     whose last number is n + 65536 i: the i-th tile of n of its expert, all of 128 positions but the last
//
// A block has 128 positions, the left operand, by 256 rows of W, a *unit*: 128 of gate and as many of up, or 256 that follow each
// other. It goes through K by 64, STAGES copies ahead. Blocks stay, one a multiprocessor, and go through *items*, a tile and a unit:
// those of a unit one after the other, then those of the expert's next one, so that L2 has x and W. A warp copies rows of x
// (`gathered_rows.cuh`), and asks for bulk copies of W; GROUPS warpgroups multiply, 64 positions each: one that has none lets the
// other have the tensor cores.
//
// Packed weights become elements once, however many tiles their expert has: three other warps take panels of 8 rows, in the order in
// which items need them, and write their elements to memory, where bulk copies find them, mostly in L2. A unit is fetched when all
// of its panels are there. Nobody waits before it makes a panel, and panels go to who is free: whichever blocks run, they end.
//
// Bytes: W once for each tile, from L2; packed W once from memory, its elements once to memory; x once for each item.
#include "experts/gathered_rows.cuh"
#include "experts/grouped.cuh"

#include "common/store_row.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

static constexpr int ROWS = 128, COLUMNS = 256, DEPTH = 64, STAGES = 4, GROUPS = ROWS / 64;  // as in `experts/tiles.py`
static constexpr int X_BYTES = ROWS * DEPTH * 2, W_BYTES = COLUMNS * DEPTH * 2, STAGE = X_BYTES + W_BYTES;
static constexpr int BYTES = STAGES * STAGE + 1024;
static constexpr int COPIER = 4 * GROUPS, THREADS = 32 * (COPIER + 4);  // the warp that copies, and behind it those that make elements
static constexpr int OF_MULTIPLIERS = 200, OF_OTHERS = 104;             // registers
static_assert(BYTES <= 227 << 10 && GROUPS * OF_MULTIPLIERS + OF_OTHERS <= 504, "as a multiprocessor has them");

// A tile, and the unit of its expert.
struct Item {
    int4 tile;
    int unit;
};

// What there is to do, for a product with one or two rows of W for each output.
template <bool TWO>
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
    // Panels of a unit, for each of its sides.
    __device__ __forceinline__ int panels(int unit) const { return min(OUTPUTS, given.outputs - unit * OUTPUTS) / PANEL; }
};

#ifdef FORMAT

// Elements of a panel that begins at that row of W; all lanes of a warp call it.
static __device__ __forceinline__ void make_panel(const Operands& given, int64_t row, uint4* elements) {
    constexpr int AT_ONCE = 8;  // groups, whose numbers are asked for together
    const int lane = threadIdx.x % 32, t = lane % 4, groups = (given.inputs + 31) / 32, eights = given.inputs / 8;
    const int packets = (given.inputs + Packed::STEP - 1) / Packed::STEP;
    const unsigned char* panel = given.weights + row / PANEL * packets * Packed::PACKET;
    uint4* out = elements + (row + lane / 4) * eights + t;
    for (int first = 0; first < groups; first += AT_ONCE) {
        Element8 made[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i += 4) {
            if (first + i >= groups) break;
            const auto handed = Weights::hand(panel, first + i);
#pragma unroll
            for (int j = i; j < i + 4; ++j)
                if (first + j < groups) made[j] = Weights::group(panel, first + j, handed);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const uint32_t(&words)[4] = made[i].word;
            const uint4 eight = transposed(words[0], words[1], words[2], words[3], t);
            if (4 * (first + i) + t < eights) out[4 * (first + i)] = eight;
        }
    }
}

// What a warp makes, panel after panel; the next one is on its way to L2.
template <bool TWO>
static __device__ __forceinline__ void make_elements(const Work<TWO>& work, uint4* elements, unsigned* ready) {
    const Operands& given = work.given;
    constexpr int IN_UNIT = COLUMNS / PANEL;
    const int all = (TWO ? 2 : 1) * given.outputs / PANEL, lane = threadIdx.x % 32;  // panels of an expert
    const int bytes = (given.inputs + Packed::STEP - 1) / Packed::STEP * Packed::PACKET;
    int tile = 0, before = 0;  // the first of an expert's, and panels of the experts before
    unsigned* count = nullptr;
    const auto next = [&]() -> int64_t {  // the row of W at which it begins, and where it is counted; -1 if there is none
        const int panel = same_in_warp(lane == 0 ? static_cast<int>(atomicAdd(ready, 1u)) : 0);
        while (tile < work.total) {
            const int4 own = work.tiles[tile];
            if (panel < before + all) {
                const int unit = (panel - before) / IN_UNIT, of_side = work.panels(unit), within = (panel - before) % IN_UNIT;
                const int side = TWO && within >= of_side;
                count = ready + 1 + own.x * work.units + unit;
                return work.row({own, unit}, side) + (within - side * of_side) * PANEL;
            }
            before += all, tile += own.w & 0xffff;
        }
        return -1;
    };
    for (int64_t row = next(); row >= 0;) {
        unsigned* const own = count;
        const int64_t coming = next();
        if (coming >= 0)
            for (int at = lane * 128; at < bytes; at += 32 * 128) bring_to_l2(given.weights + coming / PANEL * bytes + at);
        make_panel(given, row, elements);
        publish_to_bulk_copies();
        __syncwarp();
        if (lane == 0) count_up(own);
        row = coming;
    }
}

#endif

// Writes what a thread has of a tile: acc[4 j + 2 half + e] is of position 64 group + 16 warp + lane / 4 + 8 half, column
// 8 j + 2 (lane % 4) + e of the unit.
template <Result RESULT>
static __device__ __forceinline__ void finish(float (&acc)[COLUMNS / 2], const Work<RESULT == Result::TWO>& work, const Item& own,
                                              typename Stored<RESULT>::type* y) {
    constexpr bool TWO = RESULT == Result::TWO;
    constexpr int OUTPUTS = Work<TWO>::OUTPUTS;
    const Operands& given = work.given;
    const int t = threadIdx.x % 4, outputs = given.outputs, first = own.unit * OUTPUTS, limit = outputs - first;
    const int64_t rows[2] = {work.row(own, 0) + 2 * t, work.row(own, TWO) + 2 * t};
    const int expert = own.tile.x, within = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const int64_t place = static_cast<int64_t>(own.tile.y + within) * outputs + first;
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
                value = finished(value, given, 0, rows[0] + 8 * j + e, given.first_scales, expert);
                if (TWO)
                    ups[e] = finished(acc[(4 * j + 2 * half + e + COLUMNS / 4) % (COLUMNS / 2)], given, 0, rows[1] + 8 * j + e,
                                      given.second_scales, expert);
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

template <Result RESULT>
static __device__ __forceinline__ void product(const TensorMap* map, const Operands& given, const int4* tiles, int total,
                                               uint4* elements, unsigned* ready, typename Stored<RESULT>::type* y) {
    constexpr bool TWO = RESULT == Result::TWO;
    extern __shared__ __align__(16) unsigned char dynamic[];
    __shared__ uint64_t barriers[2 * STAGES];
    const uint32_t base = (shared_address(dynamic) + 1023) & ~1023u;
    // BARRIER full, barrier: of a stage. Each lane of the warp that copies arrives once for each filling, when its copies have ended,
    // and one of them once more, which expects the bytes of W. They fill the stage again only when they have waited for `empty`, and a
    // group is not done with a stage before it has waited for it: each waits for all phases, in order.
    // BARRIER empty: of a stage. One thread of each group arrives once for each filling, when the group's products with it have ended,
    // or, if it has none, when it is there; the warp that fills waits, for all phases, in order, and fills only then. So a group has
    // to wait for the next filling before it arrives again.
    const uint32_t full = shared_address(barriers), empty = full + 8 * STAGES;
    const int warp = same_in_warp(threadIdx.x / 32), lane = threadIdx.x % 32, steps = (given.inputs + DEPTH - 1) / DEPTH;
    const Work<TWO> work(given, tiles, total);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + 8 * i, 32 + 1);
            barrier_init(empty + 8 * i, GROUPS);
        }
        publish_barriers();
    }
    __syncthreads();
    int stage = 0, parity = 0;
    const auto advance = [&] {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    };

    if (warp >= COPIER) {
        give_registers<OF_OTHERS>();
#ifdef FORMAT
        if (warp > COPIER) make_elements(work, elements, ready);
#endif
        if (warp == COPIER) {
            prefetch_map(map);
            RowCopier<ROWS, 1> copier(lane);
            for (int index = blockIdx.x; index < work.items(); index += gridDim.x) {
                const Item own = work.item(index);
                copier.take(given, own.tile);
#ifdef FORMAT
                if (lane == 0)
                    wait_for_count(ready + 1 + own.tile.x * work.units + own.unit, (TWO ? 2 : 1) * work.panels(own.unit));
                __syncwarp();
#endif
#pragma unroll 1
                for (int step = 0; step < steps; ++step, advance()) {
                    const uint32_t target = base + stage * STAGE, barrier = full + 8 * stage;
                    barrier_wait(empty + 8 * stage, parity ^ 1);
                    if (lane == 0) {
                        barrier_expect(barrier, W_BYTES);
                        load_box(target + X_BYTES, map, barrier, step * DEPTH, work.row(own, 0));
                        load_box(target + X_BYTES + W_BYTES / 2, map, barrier, step * DEPTH, work.row(own, 1));
                    }
                    __syncwarp();
                    copier.copy(given, target, step);
                    barrier_arrive_after_copies(barrier);
                }
            }
        }
        return;
    }
    take_registers<OF_MULTIPLIERS>();
    const int group = warp / 4;
    const auto release = [&](int done) {
        if (threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * done);
    };
    const uint64_t left = tile_descriptor(base + group * (X_BYTES / GROUPS)), right = tile_descriptor(base + X_BYTES);
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
        float acc[COLUMNS / 2];
        int before = 0;
        for (int step = 0; step < steps; ++step, advance()) {
            barrier_wait(full + 8 * stage, parity);
            publish_to_wgmma();  // rows that others have copied
            const uint64_t a = further(left, stage * (STAGE / 16)), b = further(right, stage * (STAGE / 16));
            wgmma_begin();
#pragma unroll
            for (int k = 0; k < DEPTH / 16; ++k) wgmma(acc, further(a, 2 * k), further(b, 2 * k), step + k > 0);
            wgmma_commit();
            wgmma_wait<1>();
            if (step > 0) release(before);
            before = stage;
        }
        wgmma_wait<0>();
        wgmma_keep(acc);
        release(before);
        finish<RESULT>(acc, work, own, y);
    }
}

#define PRODUCT(NAME, RESULT)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) gemm_##NAME(                                                     \
        const __grid_constant__ TensorMap w, const Input* x, const int* sources, const int4* tiles, const int* total,         \
        const unsigned char* weights, const float* bias, const float* first_scales, const float* second_scales,               \
        const float* other, Stored<RESULT>::type* y, int outputs, int inputs, int stride, int side, int activation,           \
        uint4* elements, unsigned* ready) {                                                                                   \
        KERNEL_BEGINS();                                                                                                      \
        launch_next();                                                                                                        \
        wait_for_previous(x, sources, tiles, total, other, y, elements, ready);                                               \
        product<RESULT>(&w, {x, nullptr, sources, weights, nullptr, bias, first_scales, second_scales, other, outputs, inputs, \
                             stride, side, activation},                                                                       \
                        tiles, *total, elements, ready, y);                                                                   \
    }

PRODUCT(floats, Result::FLOATS)
PRODUCT(one, Result::ONE)
PRODUCT(two, Result::TWO)

#endif
