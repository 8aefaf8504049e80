// The main loop of products with quantised weights on Hopper: y^T = W x^T by wgmma, W in the packed layout of `packed.cuh`,
// turned into elements in registers.
//
//   x  (rows, K) elements, through a tensor map with boxes of 64 columns by BN / CLUSTER rows
//   W  (outputs, K) packed: panels of 8 rows, packets of Packed::STEP elements of K each; a map of rows of 8-byte numbers, a
//      panel each, with boxes of a packet by the panels of a tile's side
//
// Weights are the left operand of wgmma, which may be in registers, so rows of a tile are outputs, and its columns rows of x:
// BN of them, of which no result is kept where they do not exist. A warp has two panels, a warpgroup 64 outputs. What a lane
// holds of the operand, packets have together: there are no exchanges.
//
// Elements have the bits of `dequantize.cu`, sums go through K in order, 16 elements at a time, from one accumulator (or two):
// so results are those of `hopper_product.cuh` over elements.
//
// Roles: one warp copies packets, a *chunk* of 256 elements of K at a time, to a ring of PACKETS stages, as soon as the kernel
// starts; one copies x to a ring of STAGES, BOXES times 64 elements of K each, when the kernel ahead has ended. GROUPS
// warpgroups make elements and multiply, each its own 64 outputs, a quarter of a chunk while the one before it is multiplied.
// That needs several tiles for each multiprocessor. Where there are fewer, a tile's time is what one warpgroup takes: there
// the GROUPS are a RELAY. They have a tile together and take turns at TURN chunks of it; each makes all elements of its chunks,
// then takes the sums from the one before it, multiplies, and hands them on, so that they go through K in order. With one
// panel for a warp and nothing in half of the operand, a tile has 32 outputs, and twice as many multiprocessors have one.
// The blocks of a CLUSTER have tiles of outputs side by side, and fetch a part of x each, for all.
//
// FLOPs 2 rows outputs K; bytes from memory: W as it is in the file, x once; from L2: x for each cluster's tile.
#pragma once

#include "common/hopper.cuh"
#include "common/packed.cuh"
#include "products/packed/packed_maker.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// What a lane has of a tile: column j of its results is row `row` + 8 (j / 2) + j % 2 of x; its outputs are `output` and, of
// the second panel, `output` + `next`.
struct Place {
    int row, output, next;
};

template <int VALUE>
struct Number {
    static constexpr int value = VALUE;
};

// RELAY: panels of a warp, 1 or 2, that takes turns of TURN chunks; 0: there are none.
template <typename Packed, int GROUPS, int BN_, int BOXES, int STAGES, int PACKETS, int CLUSTER, int BLOCKS, int RELAY,
          int TURN>
struct PackedLoop {
    static constexpr int BN = BN_, TILE_WARPS = RELAY ? 4 : 4 * GROUPS;  // warps that share the outputs of a tile
    static constexpr int PANELS = RELAY == 1 ? 1 : 2;                    // of a warp
    static constexpr int X_BYTES = BN * 128, STAGE = BOXES * X_BYTES;    // X_BYTES: of a box
    static constexpr int IN_RAW = 256 / Packed::STEP;                    // packets of K in a chunk
    static constexpr int SUMS_BYTES = RELAY * BN * 128;                  // of a warpgroup's results, handed on
    using Maker = PackedMaker<Packed, PANELS>;
    static constexpr int SCALES = Maker::SCALES;  // bytes that a warp keeps
    // Registers go from warps that copy to those that multiply.
    static constexpr bool SHARES = BN >= 128 || RELAY || GROUPS > 4;
    static constexpr int THREADS = 128 * GROUPS + (SHARES ? 128 : 64), COPIERS = 32;
    static constexpr int AT_FIRST = 65536 / BLOCKS / THREADS / 8 * 8;
    static constexpr int LEFT = (AT_FIRST * THREADS - COPIERS * 128) / (128 * GROUPS) / 8 * 8;
    static constexpr int MULTIPLIERS = LEFT < 240 ? LEFT : 240;
    // Quarters of a chunk that a lane has as elements: the next is made while one is multiplied, if there are registers for it.
    static constexpr int QUARTERS = RELAY ? 4 * TURN : GROUPS > 4 ? 1 : 2;
    static_assert(BOXES == 1 || BOXES == 2 || RELAY && BOXES == 4, "sums may begin in the middle of a chunk");
    static_assert(!RELAY || GROUPS > 1, "whoever hands sums on and whoever takes them are two");
    static_assert(!RELAY || STAGES >= 4 / BOXES * GROUPS * TURN, "stages for a round of turns");
    static_assert(!RELAY || PACKETS % (GROUPS * TURN) == 0 && STAGES % (4 / BOXES) == 0, "whole rounds of turns, whole chunks");

    // Sums on their way through shared memory, a thread's to the same thread of another warpgroup.
    static constexpr int HELD = 2 * PANELS, WORDS = BN / 8 * HELD < 4 ? 2 : 4;  // sums of 8 rows; that go together
    static __device__ constexpr int sum_at(int i) { return i / HELD * 4 + i % HELD; }  // its place in acc
    static __device__ __forceinline__ void put_sums(uint32_t place, const float (&acc)[BN / 2]) {
#pragma unroll
        for (int i = 0; i < BN / 8 * HELD; i += WORDS) {
            float words[WORDS];
#pragma unroll
            for (int word = 0; word < WORDS; ++word) words[word] = acc[sum_at(i + word)];
            put_floats_at(place + threadIdx.x % 128 * (4 * WORDS) + i * 512, words);
        }
    }
    static __device__ __forceinline__ void take_sums(float (&acc)[BN / 2], uint32_t place) {
#pragma unroll
        for (int i = 0; i < BN / 8 * HELD; i += WORDS) {
            float words[WORDS];
            take_floats_at(words, place + threadIdx.x % 128 * (4 * WORDS) + i * 512);
#pragma unroll
            for (int word = 0; word < WORDS; ++word) acc[sum_at(i + word)] = words[word];
        }
    }

    // finish(acc, place): acc[4 j + e] is of the first output and row j's 8 j + e, acc[4 j + 2 + e] of the second.
    // SIDES 2: the second panel of a warp is `outputs` further on, or in runs of 2 FOLD columns, of which the first half is
    // counted, FOLD further on. SUMS 2, no RELAY: a first sum goes through `first` elements of K, a multiple of 128,
    // and keep(acc, place) takes it; where that is all of K, finish has the only sum. This is one of so many blocks.
    template <int SIDES, int SUMS, int FOLD = 0, typename Keep, typename Finish>
    static __device__ __forceinline__ void run(const TensorMap* x_map, const TensorMap* w_map, int rows, int outputs,
                                               int inputs, int first, int block, int blocks, Keep keep, Finish finish) {
        static_assert(PANELS >= SIDES, "a panel of each side");
        constexpr int COLUMNS = TILE_WARPS * 8 * PANELS / SIDES, SIDE_PANELS = COLUMNS / 8;
        constexpr int SIDE = (SIDE_PANELS * Packed::PACKET + 127) / 128 * 128, PACKET_SET = SIDES * SIDE;
        constexpr int RAW = IN_RAW * PACKET_SET, SUMS_AT = STAGES * STAGE, RAW_AT = SUMS_AT + SUMS_BYTES;
        constexpr int SCALES_AT = RAW_AT + PACKETS * RAW;
        // Whether sums may begin or end in the middle of a chunk.
        constexpr bool RAGGED = !RELAY && (Packed::STEP == 64 || SUMS > 1);
        extern __shared__ unsigned char dynamic[];
        __shared__ uint64_t barriers[2 * (STAGES + PACKETS)];
        const uint32_t base = (shared_address(dynamic) + 1023) & ~1023u;
        unsigned char* const aligned = dynamic + (base - shared_address(dynamic));
        const unsigned char* const raw_stages = aligned + RAW_AT;
        // BARRIER full: of a stage of x. One thread of the block arrives, that which copies x, and expects the bytes of all blocks
        // of the cluster; it does so again only when `empty` said that all groups have done with the stage, and they are not before
        // they have waited. Other blocks send for no phase but that: they, too, have waited for all groups. Where there is no
        // relay, each group waits for all phases, one after the other. In a relay it does not: the phase before the one that a turn
        // waits for was waited for in another turn, a round of turns or more earlier, since there are stages for a round. That
        // turn came no later in the row than the one that this group had last, so it has handed on, and had waited before it did.
        // BARRIER empty: of a stage of x. Who copies waits for it, for all phases, one after the other; each group of each block of
        // the cluster (in a relay, the one whose turn it was) arrives once for each filling, when it has multiplied. It cannot do so
        // a second time in a phase, because the next filling comes from all blocks' copiers, after their own phase is over: if
        // arrivals for one filling are still on their way to another block then, all groups have done with it all the same.
        const uint32_t full = shared_address(barriers), empty = full + 8 * STAGES;
        // BARRIER raw_full: of a stage of packets. One thread arrives, that which copies packets, when `raw_empty` let it; each warp
        // that makes elements of them waits, for all phases, one after the other. In a relay a stage is always the same group's
        // (PACKETS is a multiple of GROUPS TURN), so that is so there, too.
        // BARRIER raw_empty: of a stage of packets. Each of the TILE_WARPS warps that read it arrives once for each filling, after
        // `__syncwarp`, when what it read is in registers: elements of it were multiplied, or the arrival depends on them; the one thread that copies waits, for all phases, one after the other, and fills only then: a warp has to wait
        // for that before it can arrive again.
        const uint32_t raw_full = empty + 8 * STAGES, raw_empty = raw_full + 8 * PACKETS;
        const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
        const int rank = CLUSTER > 1 ? rank_in_cluster() : 0;
        const int row_tiles = (rows + BN - 1) / BN, column_tiles = (outputs + COLUMNS * CLUSTER - 1) / (COLUMNS * CLUSTER);
        const int tiles = row_tiles * column_tiles, chunks = (inputs + 256 * TURN - 1) / (256 * TURN) * TURN;
        const int halves = RELAY ? 2 * chunks : (inputs + 127) / 128;
        const int first_tile = block / CLUSTER, stride = blocks / CLUSTER;
        auto place = [&](int tile, int& row, int& column) {  // tiles of one weight follow each other
            row = tile % row_tiles * BN;
            column = (tile / row_tiles * CLUSTER + rank) * COLUMNS;
            if (FOLD > 0) column += column / max(FOLD, 1) * FOLD;
        };
        const int side_rows = FOLD > 0 ? FOLD : outputs;  // of W, from one side to the other
        constexpr int TO_HIGH = SIDES == 1 ? Packed::PACKET : SIDE, LOWS = PANELS / SIDES;  // panels between first ones

        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; ++i) {
                barrier_init(full + 8 * i, 1);
                barrier_init(empty + 8 * i, (RELAY ? 1 : GROUPS) * CLUSTER);
            }
            for (int i = 0; i < PACKETS; ++i) {
                barrier_init(raw_full + 8 * i, 1);
                barrier_init(raw_empty + 8 * i, TILE_WARPS);
            }
            publish_barriers();
        }
        if (CLUSTER > 1)
            cluster_sync();
        else
            __syncthreads();

        if (warp >= 4 * GROUPS) {
            if (SHARES) give_registers<COPIERS>();
            if (warp == 4 * GROUPS && elected()) {  // copies packets
                prefetch_map(w_map);
                int stage = 0, parity = 1, row, column;
                for (int tile = first_tile; tile < tiles; tile += stride) {
                    place(tile, row, column);
                    for (int chunk = 0; chunk < chunks; ++chunk) {
                        barrier_wait(raw_empty + 8 * stage, parity);
                        barrier_expect(raw_full + 8 * stage, IN_RAW * SIDES * SIDE_PANELS * Packed::PACKET);
#pragma unroll
                        for (int i = 0; i < IN_RAW; ++i)
#pragma unroll
                            for (int side = 0; side < SIDES; ++side)
                                load_box(base + RAW_AT + stage * RAW + i * PACKET_SET + side * SIDE, w_map,
                                         raw_full + 8 * stage, (chunk * IN_RAW + i) * (Packed::PACKET / 8),
                                         (column + side * side_rows) / 8);
                        if (++stage == PACKETS) stage = 0, parity ^= 1;
                    }
                }
            } else if (warp == 4 * GROUPS + 1 && elected()) {  // copies x
                prefetch_map(x_map);
                wait_for_previous();
                int stage = 0, parity = 1, row, column;
                for (int tile = first_tile; tile < tiles; tile += stride) {
                    place(tile, row, column);
                    for (int box = 0; box < 2 * halves; box += BOXES) {
                        barrier_wait(empty + 8 * stage, parity);
                        barrier_expect(full + 8 * stage, STAGE);
#pragma unroll
                        for (int i = 0; i < BOXES; ++i) {
                            const uint32_t target = base + stage * STAGE + i * X_BYTES;
                            if (CLUSTER > 1)
                                load_box_in(target + rank * (X_BYTES / CLUSTER), x_map, full + 8 * stage, (box + i) * 64,
                                            row + rank * (BN / CLUSTER), (1 << CLUSTER) - 1);
                            else
                                load_box(target, x_map, full + 8 * stage, (box + i) * 64, row);
                        }
                        if (++stage == STAGES) stage = 0, parity ^= 1;
                    }
                }
                launch_next();
            }
            __syncwarp();
        } else {
            if (SHARES) take_registers<MULTIPLIERS>();
            const uint64_t start = tile_descriptor(base);
            unsigned char* const scales = aligned + SCALES_AT + warp * SCALES;
            const int tile_warp = warp % TILE_WARPS;
            const auto release = [&](int stage) {
                if (CLUSTER == 1 && threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * stage);
                if (CLUSTER > 1 && threadIdx.x % 128 < CLUSTER)
                    barrier_arrive_there(address_in(empty + 8 * stage, threadIdx.x % 128));
            };
            int stage = 0, parity = 0, before = 0, ring = 0, ring_parity = 0;  // ring: of packets
            int turn = 0;
            uint32_t a[QUARTERS][16];
            for (int tile = first_tile; tile < tiles; tile += stride) {
                float acc[BN / 2];
                int row, column;
                place(tile, row, column);
                const Place own{row + 2 * (lane % 4), column + tile_warp * (8 * LOWS) + lane / 4,
                                SIDES == 1 ? 8 : side_rows};
                const auto maker = [&] {
                    return Maker(raw_stages + ring * RAW + tile_warp * LOWS * Packed::PACKET, scales, TO_HIGH, PACKET_SET);
                };
                const auto release_packets = [&] {
                    __syncwarp();
                    if (lane == 0) barrier_arrive(raw_empty + 8 * ring);
                };
                const auto next_chunk = [&] {
                    if (++ring == PACKETS) ring = 0, ring_parity ^= 1;
                };
                if constexpr (RELAY) {
                    // BARRIER own_turn, next_turn: one for each group. Turns are in a row, through all tiles, and groups have them one
                    // after the other. Each turn but the first of all waits at its group's barrier; each but the last arrives at the
                    // next one's. So two groups come to a barrier and no third: its own, and the one before it. That one arrives a
                    // second time in its next turn, which comes after this group's in the row, so a phase has one arrival of each.
                    // It says that sums have been put, or at a tile's end, where there are none, that they have been taken.
                    const int group = warp / 4, own_turn = 1 + group, next_turn = 1 + (group + 1 < GROUPS ? group + 1 : 0);
#pragma unroll 1
                    for (int chunk = 0; chunk < chunks; chunk += TURN) {
                        constexpr int IN_CHUNK = 4 / BOXES;  // stages of x
                        if (turn == group) {
#pragma unroll
                            for (int i = 0; i < TURN; ++i) {
                                barrier_wait(raw_full + 8 * (ring + i), ring_parity);
                                const unsigned char* own_packets = raw_stages + (ring + i) * RAW + tile_warp * LOWS * Packed::PACKET;
                                const Maker mine(own_packets, scales, TO_HIGH, PACKET_SET);
#pragma unroll
                                for (int quarter = 0; quarter < 4; ++quarter) mine.make(a[4 * i + quarter], quarter);
                                // An arrival does not wait for loads that are under way, and the copy that it lets begin may
                                // overtake them. So how often a lane arrives, once, is computed of all that was loaded: of the first
                                // and the last pair of each eight elements, which have the same loads.
                                uint32_t loaded = 0;
#pragma unroll
                                for (int quarter = 0; quarter < 4; ++quarter)
#pragma unroll
                                    for (int eight = 0; eight < 16; eight += 8)
#pragma unroll
                                        for (int panel = 0; panel < PANELS; ++panel)
                                            loaded |= a[4 * i + quarter][eight + panel] | a[4 * i + quarter][eight + 6 + panel];
                                const uint32_t none = inputs >> 31;  // 0, which the compiler does not know
                                __syncwarp();
                                if (lane == 0) barrier_arrive(raw_empty + 8 * (ring + i), 1 + (loaded & none));
                            }
                            // What follows all turns wait for: so all else is waited for first.
                            int first_stage[TURN], first_parity[TURN];
                            first_stage[0] = stage, first_parity[0] = parity;
#pragma unroll
                            for (int i = 1; i < TURN; ++i) {
                                first_stage[i] = first_stage[i - 1] + IN_CHUNK, first_parity[i] = first_parity[i - 1];
                                if (first_stage[i] == STAGES) first_stage[i] = 0, first_parity[i] ^= 1;
                            }
#pragma unroll
                            for (int i = 0; i < TURN; ++i)
#pragma unroll
                                for (int j = 0; j < IN_CHUNK; ++j) barrier_wait(full + 8 * (first_stage[i] + j), first_parity[i]);
                            if (chunk == 0 && tile == first_tile + stride) late_turn();
                            if (chunk > 0 || tile > first_tile) named_wait(own_turn, 256);
                            if (chunk > 0) take_sums(acc, base + SUMS_AT);
                            wgmma_begin();
#pragma unroll
                            for (int i = 0; i < TURN; ++i) {
#pragma unroll
                                for (int box = 0; box < 4; box += BOXES) {
                                    const uint64_t b = further(start, (first_stage[i] + box / BOXES) * (STAGE / 16));
#pragma unroll
                                    for (int k = 0; k < 4 * BOXES; ++k)
                                        wgmma(acc, reinterpret_cast<const uint32_t(&)[4]>(a[4 * i + box + k / 4][k % 4 * 4]),
                                              further(b, k / 4 * (X_BYTES / 16) + k % 4 * 2), chunk > 0 || i + box + k > 0);
                                }
                            }
                            wgmma_commit();
                            const bool last = chunk + TURN >= chunks;
                            if (last && tile + stride < tiles) named_arrive(next_turn, 256);
                            wgmma_wait<0>();
                            wgmma_keep(acc);
                            if (!last) {
                                put_sums(base + SUMS_AT, acc);
                                named_arrive(next_turn, 256);
                            }
#pragma unroll
                            for (int i = 0; i < TURN; ++i)
#pragma unroll
                                for (int j = 0; j < IN_CHUNK; ++j) release(first_stage[i] + j);
                            if (last) finish(acc, own);
                        }
#pragma unroll
                        for (int i = 0; i < TURN; ++i) {
                            stage += IN_CHUNK;
                            if (stage == STAGES) stage = 0, parity ^= 1;
                        }
                        if (++turn == GROUPS) turn = 0;
                        ring += TURN;
                        if (ring == PACKETS) ring = 0, ring_parity ^= 1;
                    }
                    continue;
                }
                bool more = false;
                // Some quarters of a chunk; `on`: others follow at once.
                const auto multiply = [&](auto begin, auto end, bool on) {
                    constexpr int BEGIN = decltype(begin)::value, END = decltype(end)::value;
                    if (BEGIN == 0) barrier_wait(raw_full + 8 * ring, ring_parity);
                    const Maker mine = maker();
#pragma unroll
                    for (int quarter = BEGIN; quarter < END; ++quarter) {
                        mine.make(a[quarter % QUARTERS], quarter);
                        if (BOXES == 1 || quarter % 2 == 0) barrier_wait(full + 8 * stage, parity);
                        const uint64_t b = start + stage * (STAGE / 16) + (BOXES == 2 ? quarter % 2 * (X_BYTES / 16) : 0);
                        wgmma_begin();
#pragma unroll
                        for (int k = 0; k < 4; ++k)
                            wgmma(acc, reinterpret_cast<const uint32_t(&)[4]>(a[quarter % QUARTERS][4 * k]), b + 2 * k,
                                  more || quarter > BEGIN || k > 0);
                        wgmma_commit();
                        // With one kind of wait in the loop ptxas puts every wgmma behind the one before it (C7514).
                        if (QUARTERS > 1 && (quarter < END - 1 || on))
                            wgmma_wait<1>();
                        else
                            wgmma_wait<0>();
                        if ((BOXES == 1 || quarter % 2 == 0) && (more || quarter > BEGIN)) release(before);
                        if (BOXES == 1 || quarter % 2 == 1) {
                            before = stage;
                            if (++stage == STAGES) stage = 0, parity ^= 1;
                        }
                    }
                    more = true;
                };
                const auto sum = [&](int begin, int end) {  // of halves of chunks
                    more = false;
                    if (RAGGED && begin % 2 == 1) {
                        multiply(Number<2>(), Number<4>(), false);
                        release_packets();
                        next_chunk();
                        ++begin;
                    }
#pragma unroll 1
                    for (; begin + 1 < end; begin += 2) {
                        multiply(Number<0>(), Number<4>(), begin + 2 < end);
                        release_packets();
                        next_chunk();
                    }
                    if (RAGGED && begin < end) {
                        multiply(Number<0>(), Number<2>(), false);
                        if (end == halves) {
                            release_packets();
                            next_chunk();
                        }
                    }
                    wgmma_wait<0>();
                    wgmma_keep(acc);
                    release(before);
                };
                int begin = 0;
                if (SUMS > 1 && first < inputs) {
                    begin = first / 128;
                    sum(0, begin);
                    keep(acc, own);
                }
                sum(begin, halves);
                finish(acc, own);
            }
        }
        if (CLUSTER > 1) cluster_sync();  // no block ends while another may write to its memory or barriers
    }
};

#endif
