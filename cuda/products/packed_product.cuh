// The main loop of products with quantised weights on Hopper: tiles as in `hopper_product.cuh`, W in the packed layout of
// `packed.cuh`.
//
//   x  (rows, K) elements, through a tensor map with boxes of 64 columns by `box_rows` rows
//   W  (outputs, K) packed: panels of 8 rows, packets of Packed::STEP elements of K each; a map of rows of 8-byte numbers, a
//      panel each, with boxes of a packet by BN / 8 / SIDES panels
//
// The weights are turned into elements in shared memory, to the bits of `dequantize.cu`, so sums are those of
// `hopper_product.cuh` over elements: float, through K in order, 16 elements at a time, from one accumulator (or two).
//
// A tile is BR rows by BN columns; wgmma takes 64 rows, what it makes of those that do not exist is not kept, and BR 16
// computes no more than 16. A step is BOXES times 64 elements of K. Four roles: one warp copies packets, to a ring of PACKETS
// stages, as soon as the kernel starts; one copies x, when the kernel ahead has ended; WARPS warps dequantise, a lane 32
// elements of a row at a time; warpgroups multiply, 64 rows each. Elements and x share a ring of STAGES. In a warp that
// dequantises, eight lanes have the rows of a panel, and write 16 bytes each to eight different banks of the swizzled tile.
// Where it has fewer tasks in a step than there are warps, teams of them take the steps in turns.
//
// FLOPs 2 rows outputs K; bytes from memory: W as it is in the file, x once; from L2: x for each tile of columns.
#pragma once

#include "common/packed.cuh"
#include "products/hopper_product.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <int BR_, int BN_, int BOXES, int STAGES, int PACKETS, int WARPS>
struct PackedLoop {
    static constexpr int BR = BR_, BN = BN_;
    static constexpr int GROUPS = (BR + 63) / 64, X_BYTES = BR * 128, W_BYTES = BN * 128;  // of a box
    static constexpr int STAGE = BOXES * (X_BYTES + W_BYTES);
    static constexpr int IN_RAW = BOXES * 64 > Packed::STEP ? BOXES * 64 / Packed::STEP : 1;  // packets of K in a raw stage
    static constexpr int PER_RAW = IN_RAW * Packed::STEP / (BOXES * 64);                      // steps in it
    static constexpr int PAIRS = BN / 16, TASKS = PAIRS * BOXES;  // of a warp in a step: two panels by 64 elements of K
    static constexpr int TEAM = TASKS < WARPS ? TASKS : WARPS, TEAMS = WARPS / TEAM;
    static constexpr int MINE = TASKS / TEAM, AT_ONCE = MINE < 2 ? MINE : 2;  // tasks of a warp
    static constexpr int USERS = TEAMS <= PER_RAW ? WARPS : TEAM;             // of a raw stage
    // Where warps that dequantise are as many as can be, registers go from them to those that multiply.
    static constexpr bool SHARES = GROUPS * BN > 128 && WARPS % 4 == 0;
    static constexpr int THREADS = 128 * GROUPS + 32 * WARPS + (SHARES ? 128 : 64);
    static constexpr int AT_FIRST = 65536 / THREADS / 8 * 8, COPIERS = 24, DEQUANTISERS = 64;
    static constexpr int MULTIPLIERS =
        (AT_FIRST * THREADS - COPIERS * 128 - DEQUANTISERS * 32 * WARPS) / (128 * GROUPS) / 8 * 8;
    // Of a wgmma: ptxas takes none with more results than a thread has registers at first.
    static constexpr int PARTS = SHARES && BN > 128 && WARPS > 4 ? 2 : 1;
    static_assert(TASKS % TEAM == 0 && WARPS % TEAM == 0, "all warps have as many tasks");
    static_assert(TEAMS <= PER_RAW ? PER_RAW % TEAMS == 0 : PER_RAW == 1, "teams take turns");

    // `prepare`, `keep`, `finish` as in `hopper_product.cuh`. SIDES 2: BN / 2 columns and those `outputs` further on, or in
    // runs of 2 FOLD columns, of which the first half is counted, FOLD further on.
    template <int SIDES, int BUFFERS, int SUMS, int FOLD = 0, typename Prepare, typename Keep, typename Finish>
    static __device__ __forceinline__ void run(const TensorMap* x_map, const TensorMap* w_map, int rows, int outputs,
                                               int inputs, int first, int box_rows, Prepare prepare, Keep keep,
                                               Finish finish) {
        constexpr int COLUMNS = BN / SIDES;
        constexpr int SIDE_PANELS = BN / 8 / SIDES, SIDE = (SIDE_PANELS * Packed::PACKET + 127) / 128 * 128;
        constexpr int PACKET_SET = SIDES * SIDE, RAW = IN_RAW * PACKET_SET;
        extern __shared__ unsigned char dynamic[];
        __shared__ uint64_t barriers[2 * STAGES + 2 * PACKETS];
        const uint32_t base = (shared_address(dynamic) + 1023) & ~1023u;
        unsigned char* const aligned = dynamic + (base - shared_address(dynamic));
        constexpr int OUTBOX = STAGES * STAGE, RAW_AT = OUTBOX + GROUPS * BUFFERS * PIECE_BYTES;
        const uint32_t full = shared_address(barriers), empty = full + 8 * STAGES;
        const uint32_t raw_full = empty + 8 * STAGES, raw_empty = raw_full + 8 * PACKETS;
        const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
        const int row_tiles = (rows + BR - 1) / BR, column_tiles = (outputs + COLUMNS - 1) / COLUMNS;
        const int tiles = row_tiles * column_tiles;
        const int steps = (inputs + BOXES * 64 - 1) / (BOXES * 64), raw_steps = (steps + PER_RAW - 1) / PER_RAW;
        auto place = [&](int tile, int& row, int& column) {
            const int group = tile / (GROUP_ROWS * column_tiles), within = tile % (GROUP_ROWS * column_tiles);
            const int height = min(GROUP_ROWS, row_tiles - group * GROUP_ROWS);
            row = (group * GROUP_ROWS + within % height) * BR;
            column = within / height * COLUMNS;
            if (FOLD > 0) column += column / max(FOLD, 1) * FOLD;
        };
        const int side_rows = FOLD > 0 ? FOLD : outputs;  // of W, from one side to the other

        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; ++i) {
                barrier_init(full + 8 * i, TEAM + 1);
                barrier_init(empty + 8 * i, GROUPS);
            }
            for (int i = 0; i < PACKETS; ++i) {
                barrier_init(raw_full + 8 * i, 1);
                barrier_init(raw_empty + 8 * i, USERS);
            }
            publish_barriers();
        }
        __syncthreads();

        if (warp >= 4 * GROUPS + WARPS) {
            if (SHARES) give_registers<COPIERS>();
            if (warp == 4 * GROUPS + WARPS) {  // copies packets
                if (elected()) {
                    prefetch_map(w_map);
                    int stage = 0, parity = 1, row, column;
                    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
                        place(tile, row, column);
                        for (int raw = 0; raw < raw_steps; ++raw) {
                            barrier_wait(raw_empty + 8 * stage, parity);
                            barrier_expect(raw_full + 8 * stage, RAW / SIDE * SIDE_PANELS * Packed::PACKET);
#pragma unroll
                            for (int i = 0; i < IN_RAW; ++i)
#pragma unroll
                                for (int side = 0; side < SIDES; ++side)
                                    load_box(base + RAW_AT + stage * RAW + i * PACKET_SET + side * SIDE, w_map,
                                             raw_full + 8 * stage, (raw * IN_RAW + i) * (Packed::PACKET / 8),
                                             (column + side * side_rows) / 8);
                            if (++stage == PACKETS) stage = 0, parity ^= 1;
                        }
                    }
                }
            } else if (warp == 4 * GROUPS + WARPS + 1) {  // copies x
                if (elected()) {
                    prefetch_map(x_map);
                    wait_for_previous();
                    int stage = 0, parity = 1, row, column;
                    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
                        place(tile, row, column);
                        for (int step = 0; step < steps; ++step) {
                            barrier_wait(empty + 8 * stage, parity);
                            barrier_expect(full + 8 * stage, BOXES * box_rows * 128);
#pragma unroll
                            for (int i = 0; i < BOXES; ++i)
                                load_box(base + stage * STAGE + i * X_BYTES, x_map, full + 8 * stage,
                                         (step * BOXES + i) * 64, row);
                            if (++stage == STAGES) stage = 0, parity ^= 1;
                        }
                    }
                    launch_next();
                }
            }
        } else if (warp >= 4 * GROUPS) {  // dequantises
            if (SHARES) give_registers<DEQUANTISERS>();
            const int mine = (warp - 4 * GROUPS) % TEAM, team = (warp - 4 * GROUPS) / TEAM;
            const int row = lane % 8, turn = lane / 8, group = turn % 2, panel = turn / 2;
            int raw_stage = 0, raw_parity = 0, stage = 0, parity = 1, next = 0;  // team of the next step
            for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x)
                for (int raw = 0; raw < raw_steps; ++raw) {
                    bool used = false;
                    // Teams that skip this stage wait, too: a barrier tells no more than one phase from the next.
                    barrier_wait(raw_full + 8 * raw_stage, raw_parity);
#pragma unroll 1
                    for (int part = 0; part < PER_RAW; ++part) {
                        if (next == team) {
                            used = true;
                            const unsigned char* source = aligned + RAW_AT + raw_stage * RAW;
                            unsigned char* elements = aligned + stage * STAGE + BOXES * X_BYTES;
#pragma unroll
                            for (int begin = 0; begin < MINE; begin += AT_ONCE) {
                                // All is read before anything is written, which the compiler would not dare.
                                Element8 out[AT_ONCE][4];
#pragma unroll
                                for (int i = 0; i < AT_ONCE; ++i) {
                                    if (begin + i >= MINE) break;
                                    const int task = mine + (begin + i) * TEAM, p = 2 * (task % PAIRS) + panel;
                                    const int depth = part * BOXES * 64 + task / PAIRS * 64;  // in the raw stage
                                    const int within = depth % Packed::STEP;
                                    const unsigned char* packet = source + depth / Packed::STEP * PACKET_SET +
                                                                  p / SIDE_PANELS * SIDE + p % SIDE_PANELS * Packed::PACKET;
                                    const auto scale = Packed::scale(packet, row, within / 32 + group);
#pragma unroll
                                    for (int j = 0; j < 4; ++j)
                                        out[i][j] = Packed::eight(packet, row, within / 8 + group * 4 + (j + turn) % 4, scale);
                                }
                                if (begin == 0) barrier_wait(empty + 8 * stage, parity);
#pragma unroll
                                for (int i = 0; i < AT_ONCE; ++i) {
                                    if (begin + i >= MINE) break;
                                    const int task = mine + (begin + i) * TEAM, p = 2 * (task % PAIRS) + panel;
                                    unsigned char* target = elements + task / PAIRS * W_BYTES + (p * 8 + row) * 128;
#pragma unroll
                                    for (int j = 0; j < 4; ++j)
                                        *reinterpret_cast<Element8*>(target + ((group * 4 + (j + turn) % 4 ^ row) << 4)) =
                                            out[i][j];
                                }
                            }
                            publish_to_wgmma();
                            __syncwarp();
                            if (lane == 0) barrier_arrive(full + 8 * stage);
                        }
                        if (++next == TEAMS) next = 0;
                        if (++stage == STAGES) stage = 0, parity ^= 1;
                    }
                    if (used && lane == 0) barrier_arrive(raw_empty + 8 * raw_stage);
                    if (++raw_stage == PACKETS) raw_stage = 0, raw_parity ^= 1;
                }
        } else {
            if (SHARES) take_registers<(MULTIPLIERS > 240 ? 240 : MULTIPLIERS)>();
            const int group = warp / 4;
            const Outbox outbox{base + OUTBOX + group * BUFFERS * PIECE_BYTES, group};
            const uint64_t start = tile_descriptor(base);
            int stage = 0, parity = 0, before = 0;
            for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
                float acc[BN / 2];
                int row, column;
                place(tile, row, column);
                row += group * 64 + warp % 4 * 16 + lane / 4;
                const auto ready = prepare(row, column);
                const auto sum = [&](int begin, int end) {
                    int step = begin;
#pragma unroll 1
                    do {
                        barrier_wait(full + 8 * stage, parity);
                        const uint64_t a = start + stage * (STAGE / 16) + group * (64 * 128 / 16);
                        const uint64_t b = start + stage * (STAGE / 16) + BOXES * X_BYTES / 16;
                        wgmma_begin();
#pragma unroll
                        for (int i = 0; i < BOXES; ++i)
#pragma unroll
                            for (int k = 0; k < 4; ++k)
#pragma unroll
                                for (int part = 0; part < PARTS; ++part)
                                    wgmma(reinterpret_cast<float(&)[BN / 2 / PARTS]>(acc[part * BN / 2 / PARTS]),
                                          a + i * (X_BYTES / 16) + 2 * k,
                                          b + (i * W_BYTES + part * W_BYTES / PARTS) / 16 + 2 * k, step - begin + i + k > 0);
                        wgmma_commit();
                        // With one kind of wait in the loop ptxas puts every wgmma behind the one before it (C7514).
                        if (step + 1 < end)
                            wgmma_wait<1>();
                        else
                            wgmma_wait<0>();
                        if (step > begin && threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * before);
                        before = stage;
                        if (++stage == STAGES) stage = 0, parity ^= 1;
                    } while (++step < end);
                    wgmma_wait<0>();
                    wgmma_keep(acc);
                    if (threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * before);
                };
                int begin = 0;
                if (SUMS > 1 && first < inputs) {
                    begin = first / (BOXES * 64);
                    sum(0, begin);
                    keep(acc, row, column, outbox);
                }
                sum(begin, steps);
                finish(acc, row, column, ready, outbox);
            }
            if (BUFFERS > 0 && threadIdx.x % 128 == 0) wait_for_reads();
        }
    }
};

#endif
