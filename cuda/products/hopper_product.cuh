// The main loop of products with weights on Hopper: tiles of x W^T by wgmma and bulk tensor copies. Kernels give it what
// becomes of a tile (`hopper_gemm.cu`, `hopper_qkv.cu`).
//
//   x  (rows, K)      W  (outputs, K), elements
// both through tensor maps, with boxes of 64 columns by 64 GROUPS and BN / 2 rows.
//
// Sums are float and go through K in order, 16 elements at a time, from one accumulator: a row's bits hang on that row
// and the weights alone, not on the tile, and are those of cuBLASLt's algorithms without split-K. Where K is long and
// results few and added to something, there are two sums (`first_sum` in the launcher), the second of which is added last.
//
// A tile is 64 GROUPS rows by BN columns, from BN rows of W (SIDES 2: from BN / 2, and the BN / 2 that are `outputs`
// further down). One warp copies, 64 elements of K at a time, STAGES deep; GROUPS warpgroups multiply, 64 rows each.
// Blocks go through the tiles with stride gridDim.x, in groups of GROUP_ROWS tiles of rows, so that those running
// together share weights and rows in L2; copies run ahead into the next tile while the results of one are written. Two
// blocks of a CLUSTER take two tiles of rows and fetch half of W each, for both: less comes from L2.
//
// Results go to memory from registers, or (BUFFERS of a warpgroup: pieces of 64 rows by 128 bytes) by way of shared memory
// and bulk copies, which run while the next tile is multiplied: all blocks finish tiles at about the same time, and L2
// cannot take what they then have at the speed at which they have it.
// FLOPs 2 rows outputs K; bytes: W and x once from memory, if L2 holds a group.
//
// The kernel may start before the one ahead of it has ended: weights are fetched at once, x only after that.
#pragma once

#include "common/hopper.cuh"

static constexpr int DEPTH = 64;  // elements of K in a stage: the width of the swizzle
static constexpr int GROUP_ROWS = 16;
static constexpr int PIECE_BYTES = 64 * 128;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A warpgroup's results on their way through shared memory. All of its threads call these, `open` before the pieces are
// written, `send` after: there, one thread's `copy` asks for the bulk copies.
struct Outbox {
    uint32_t pieces;  // address
    int group;

    __device__ __forceinline__ uint32_t piece(int index) const { return pieces + index * PIECE_BYTES; }
    __device__ __forceinline__ void open() const {
        if (threadIdx.x % 128 == 0) wait_for_reads();
        group_sync(group);
    }
    template <typename Copy>
    __device__ __forceinline__ void send(Copy copy) const {
        publish_to_wgmma();  // to all that is not an ordinary access, bulk copies too
        group_sync(group);
        if (threadIdx.x % 128 == 0) {
            copy();
            commit_stores();
        }
    }
};

// Four words of elements of this thread's row in a piece, column groups `first` .. first + 3 of its eight, swizzled.
static __device__ __forceinline__ void put_elements(uint32_t piece, int half, int first, const uint32_t (&words)[4]) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + half * 8 + lane % 8;
    store_matrices(piece + row * 128 + ((first + lane / 8 ^ row & 7) << 4), words[0], words[1], words[2], words[3]);
}

// Two floats of this thread's row in a piece, in column group `group` of its four.
static __device__ __forceinline__ void put_floats(uint32_t piece, int half, int group, float x, float y) {
    const int lane = threadIdx.x % 32, t = lane % 4, row = threadIdx.x % 128 / 32 * 16 + half * 8 + lane / 4;
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(
                     piece + row * 128 + ((2 * group + t / 2 ^ row & 7) << 4) + t % 2 * 8),
                 "f"(x), "f"(y)
                 : "memory");
}

// finish(acc, row, column, ready, outbox): a warpgroup's result of the tile whose first column is `column`; this thread has
// acc[4 j + 2 half + e] = row `row` + 8 half, column 8 j + 2 t + e of the tile (`hopper.cuh`).
// prepare(row, column): called before the tile is multiplied, for what can be asked for ahead; its result is `ready`.
// SUMS 2: a first sum goes through `first` elements of K, a multiple of DEPTH, and keep(acc, row, column, outbox) takes
// it. Where that is all of K, finish has the only sum.
template <int GROUPS, int BN, int STAGES, int CLUSTER, int SIDES, int BUFFERS, int SUMS, typename Prepare, typename Keep,
          typename Finish>
static __device__ __forceinline__ void multiply(const TensorMap* x_map, const TensorMap* w_map, int rows, int outputs,
                                                int inputs, int first, Prepare prepare, Keep keep, Finish finish) {
    constexpr int BM = 64 * GROUPS;
    constexpr int X_BYTES = BM * DEPTH * 2, W_BYTES = BN * DEPTH * 2;
    constexpr int COLUMNS = BN / SIDES;  // of the result in a tile
    extern __shared__ unsigned char dynamic[];
    __shared__ uint64_t barriers[2 * STAGES];
    const uint32_t base = (shared_address(dynamic) + 1023) & ~1023u;
    // BARRIER full: of a stage. One thread arrives, that which copies, and expects what it and the cluster's other block send here.
    // It does so again, and the other sends again, only when `empty` said that all groups of both blocks have done with the stage,
    // and they are not before they have waited: so all groups wait for all phases, one after the other.
    // BARRIER empty: of a stage. Each group of each block of the cluster arrives once for each filling, when it has multiplied; the
    // one thread that copies waits, for all phases but that of the last fillings, one after the other. No group arrives a second time
    // in a phase: the next filling, a part of which is this block's to send, comes after it.
    const uint32_t full = shared_address(barriers), empty = full + 8 * STAGES;
    auto x_tile = [&](int stage) { return base + stage * (X_BYTES + W_BYTES); };
    auto w_tile = [&](int stage) { return base + stage * (X_BYTES + W_BYTES) + X_BYTES; };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr int HEIGHT = BM * CLUSTER;  // rows that a cluster computes at once
    const int rank = CLUSTER > 1 ? rank_in_cluster() : 0;
    const int row_tiles = (rows + HEIGHT - 1) / HEIGHT, column_tiles = (outputs + COLUMNS - 1) / COLUMNS;
    const int tiles = row_tiles * column_tiles, steps = (inputs + DEPTH - 1) / DEPTH;
    const int first_tile = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
    auto place = [&](int tile, int& row, int& column) {
        const int group = tile / (GROUP_ROWS * column_tiles), within = tile % (GROUP_ROWS * column_tiles);
        const int height = min(GROUP_ROWS, row_tiles - group * GROUP_ROWS);
        row = (group * GROUP_ROWS + within % height) * HEIGHT + rank * BM;
        column = within / height * COLUMNS;
    };

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + 8 * stage, 1);
            barrier_init(empty + 8 * stage, GROUPS * CLUSTER);
        }
        publish_barriers();
    }
    if (CLUSTER > 1)
        cluster_sync();
    else
        __syncthreads();

    if (warp == 4 * GROUPS && lane == 0) {
        prefetch_map(w_map);
        prefetch_map(x_map);
        auto load_w = [&](int stage, int step, int column) {
            barrier_expect(full + 8 * stage, X_BYTES + W_BYTES);
            const int upper = SIDES == 2 ? outputs + column : column + BN / 2;
            const int depth = step * DEPTH;
            if (CLUSTER > 1) {
                load_box_in(w_tile(stage) + rank * (W_BYTES / 2), w_map, full + 8 * stage, depth,
                            rank ? upper : column, 3);
            } else {
                load_box(w_tile(stage), w_map, full + 8 * stage, depth, column);
                load_box(w_tile(stage) + W_BYTES / 2, w_map, full + 8 * stage, depth, upper);
            }
        };
        int row, column;
        if (first_tile < tiles) {
            place(first_tile, row, column);
            for (int step = 0; step < min(STAGES, steps); ++step) load_w(step, step, column);
        }
        wait_for_previous();
        int count = 0;
        for (int tile = first_tile; tile < tiles; tile += stride) {
            place(tile, row, column);
            for (int step = 0; step < steps; ++step, ++count) {
                const int stage = count % STAGES;
                if (count >= STAGES) barrier_wait(empty + 8 * stage, (count / STAGES - 1) & 1);
                if (count >= min(STAGES, steps)) load_w(stage, step, column);
                load_box(x_tile(stage), x_map, full + 8 * stage, step * DEPTH, row);
            }
        }
        launch_next();  // earlier, its blocks would be in the way
    }
    if (warp == 4 * GROUPS) {
        __syncwarp();
        if (CLUSTER > 1) cluster_sync();
        return;
    }

    const int group = warp / 4, g = lane / 4;
    const Outbox outbox{x_tile(STAGES) + group * BUFFERS * PIECE_BYTES, group};
    auto release = [&](int stage) {
        if (CLUSTER == 1 && threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * stage);
        if (CLUSTER > 1 && threadIdx.x % 128 < CLUSTER)
            barrier_arrive_there(address_in(empty + 8 * stage, threadIdx.x % 128));
    };
    int count = 0;
    for (int tile = first_tile; tile < tiles; tile += stride) {
        float acc[BN / 2];
        int row, column;
        place(tile, row, column);
        row += group * 64 + warp % 4 * 16 + g;
        const auto ready = prepare(row, column);
        const auto sum = [&](int begin, int end) {
            for (int step = begin; step < end; ++step, ++count) {
                const int stage = count % STAGES;
                barrier_wait(full + 8 * stage, count / STAGES & 1);
                const uint64_t a = tile_descriptor(x_tile(stage) + group * 64 * DEPTH * 2);
                const uint64_t b = tile_descriptor(w_tile(stage));
                wgmma_begin();
#pragma unroll
                for (int k = 0; k < DEPTH / 16; ++k) wgmma(acc, a + 2 * k, b + 2 * k, step - begin + k > 0);
                wgmma_commit();
                wgmma_wait<1>();
                if (step > begin) release((count - 1) % STAGES);
            }
            wgmma_wait<0>();
            wgmma_keep(acc);
            release((count - 1) % STAGES);
        };
        int begin = 0;
        if (SUMS > 1 && first < inputs) {
            begin = first / DEPTH;
            sum(0, begin);
            keep(acc, row, column, outbox);
        }
        sum(begin, steps);
        finish(acc, row, column, ready, outbox);
    }
    if (BUFFERS > 0 && threadIdx.x % 128 == 0) wait_for_reads();
    if (CLUSTER > 1) cluster_sync();  // no block ends while the other may write to its memory or barriers
}

#endif
