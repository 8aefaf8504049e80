// Products of experts with packed weights, on Hopper: what `grouped.cu` computes, with its operands and its bits.
//
// By wgmma, or for few positions by mma.sync, which holds up the making of elements less.
//
// Weights are the left operand, made in registers (`packed_maker.cuh`): of a warp's two panels, of gate and of up or two that
// follow each other, a lane has row lane / 4 of each, and so gate and up of the same numbers. The right operand is a tile of N
// positions, whose rows lie anywhere.
//
// Blocks stay: as many as the multiprocessors hold go through *items*, a tile's positions with 64 GROUPS rows of W, those of a
// tile one after the other. So nothing is launched for tiles that there might be, and what the next item reads is on its way
// while one is multiplied. In a block one warp copies packets, a *chunk* of 256 elements of K at a time, to a ring of PACKETS
// stages; X_WARPS copy rows, one by one, to where the 128-byte swizzle wants them, BOXES times 64 elements of K a stage;
// GROUPS warpgroups make elements and multiply, 64 elements of K while those before are multiplied. Columns of positions that a
// tile lacks hold whatever the stage held: a product's columns do not meet, and theirs are not written.
//
// Bytes: W once for each tile of positions, x once for each item, both mostly from L2 where an expert has many positions.
#include "experts/gathered_rows.cuh"
#include "experts/grouped.cuh"

#include "products/packed/packed_maker.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// As in `experts/tiles.py`.
template <int N>
struct Tile {
    static constexpr int GROUPS = N == 128 ? 3 : N == 64 ? 2 : 1, BLOCKS = N == 128 ? 1 : N == 64 ? 2 : N == 16 ? 3 : 4;
    static constexpr int BOXES = N >= 64 ? 1 : 4, STAGES = N == 128 ? 5 : N == 64 ? 4 : 3;
    static constexpr int ROOM = (BLOCKS == 1 ? 224 : BLOCKS == 2 ? 110 : BLOCKS == 3 ? 74 : 55) << 10;

    static constexpr int WARPS = 4 * GROUPS, X_WARPS = N == 128 ? 2 : 1;
    static constexpr bool WGMMA = N >= 64;   // else mma.sync, which costs less beside few products
    static constexpr bool SHARES = N == 128;  // registers go from warps that copy to those that multiply
    static constexpr int COPYING = SHARES ? 128 : 64, THREADS = 32 * WARPS + COPYING;
    static constexpr int AT_FIRST = 65536 / BLOCKS / THREADS / 8 * 8, COPIERS = 56;
    static constexpr int MULTIPLIERS = (AT_FIRST * THREADS - COPIERS * COPYING) / (32 * WARPS) / 8 * 8;

    using Maker = PackedMaker<Packed, 2>;
#ifdef ELEMENT_BF16
    static constexpr int SCALES = Maker::SCALES;
#else
    static constexpr int SCALES = 2 * Maker::SCALES;  // in half they take half of what they have: the host gives one number for both
#endif
    static constexpr int IN_CHUNK = 256 / Packed::STEP;  // packets
    static constexpr int PANEL_BYTES = IN_CHUNK * Packed::PACKET, RAW = 2 * WARPS * PANEL_BYTES;
    static constexpr int BOX = N * 128, STAGE = BOXES * BOX;
    static constexpr int SCALES_AT = STAGES * STAGE, RAW_AT = SCALES_AT + WARPS * SCALES;
    static constexpr int FIT = (ROOM - 1024 - RAW_AT) / RAW, PACKETS = FIT < 4 ? FIT : 4;
    static_assert(FIT >= 2, "a chunk comes while one is multiplied");
    static constexpr int BYTES = RAW_AT + PACKETS * RAW + 1024;  // what alignment takes, too
};

// An item: a tile, and the first of a block's rows of W among the outputs of an expert.
struct Item {
    int4 tile;
    int output;
};

// finish(acc, tile, output, rows): acc[4 j + 2 p + e] is of panel p's row lane / 4, whose panel is `rows[p]` of W, and position
// 8 j + 2 (lane % 4) + e of the tile; `output`: this warp's first.
template <bool TWO, int N, typename Finish>
static __device__ __forceinline__ void multiply_all(const Operands& given, const int4* tiles, int total, Finish finish) {
    using Memory = Tile<N>;
    constexpr int STAGES = Memory::STAGES, PACKETS = Memory::PACKETS, BOXES = Memory::BOXES, WARPS = Memory::WARPS;
    constexpr int OUTPUTS = WARPS * PANEL * (TWO ? 1 : 2);  // of an item
    extern __shared__ __align__(16) unsigned char dynamic[];
    __shared__ uint64_t barriers[2 * (STAGES + PACKETS)];
    const uint32_t base = (shared_address(dynamic) + 1023) & ~1023u;
    unsigned char* const aligned = dynamic + (base - shared_address(dynamic));
    // BARRIER full: of a stage of x. Each lane of the X_WARPS warps that copy x arrives once for each filling, when its copies have
    // ended; it fills the stage again only when it has waited for `empty`, and the warps that multiply are not done with a stage
    // before they have waited for it: each waits for all phases, in order.
    // BARRIER empty: of a stage of x. By wgmma one thread of each group arrives once for each filling, when the group's products
    // with it have ended, by mma.sync one of each warp, when its have; the warps that copy x wait, for all phases, in order, and
    // fill only then. Whoever arrives has to wait for that filling before it can arrive again.
    const uint32_t full = shared_address(barriers), empty = full + 8 * STAGES;
    // BARRIER raw_full: of a stage of packets. One thread arrives, that expects the bytes which its warp copies, when `raw_empty`
    // let it; each warp that makes elements waits, for all phases, in order.
    // BARRIER raw_empty: of a stage of packets. Each warp that makes elements arrives once for each filling, after `__syncwarp`,
    // when elements of all that it read were multiplied; the warp that copies waits, for all phases, in order, and fills only then:
    // a warp has to wait for that before it can arrive again.
    const uint32_t raw_full = empty + 8 * STAGES, raw_empty = raw_full + 8 * PACKETS;
    const int warp = same_in_warp(threadIdx.x / 32), lane = threadIdx.x % 32;
    const int packets = (given.inputs + Packed::STEP - 1) / Packed::STEP, boxes = packets * Packed::STEP / 64;
    const int in_tile = (given.outputs + OUTPUTS - 1) / OUTPUTS, items = total * in_tile;
    const auto item_of = [&](int item) { return Item{tiles[item / in_tile], item % in_tile * OUTPUTS}; };
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + 8 * i, 32 * Memory::X_WARPS);
            barrier_init(empty + 8 * i, Memory::WGMMA ? Memory::GROUPS : WARPS);
        }
        for (int i = 0; i < PACKETS; ++i) {
            barrier_init(raw_full + 8 * i, 1);
            barrier_init(raw_empty + 8 * i, WARPS);
        }
        publish_barriers();
    }
    __syncthreads();
    // The panel of W that a warp's `side` has.
    const auto row_of = [&](const Item& own, int of_warp, int side) {
        const int begin = own.output + of_warp * PANEL * (TWO ? 1 : 2) + (TWO ? 0 : side * PANEL);
        return static_cast<int64_t>(own.tile.x) * given.stride + min(begin, given.outputs - PANEL) + (TWO ? side * given.side : 0);
    };

    if (warp >= WARPS) {
        if (Memory::SHARES) give_registers<Memory::COPIERS>();
        if (warp == WARPS) {  // copies packets, a lane those of a panel
            int stage = 0, parity = 1;
            for (int item = blockIdx.x; item < items; item += gridDim.x) {
                const Item own = item_of(item);
                const unsigned char* source =
                    given.weights + row_of(own, lane / 2 % WARPS, lane % 2) / PANEL * packets * Packed::PACKET;
                for (int packet = 0; packet < packets; packet += Memory::IN_CHUNK) {
                    const int bytes = min(packets - packet, Memory::IN_CHUNK) * Packed::PACKET;
                    barrier_wait(raw_empty + 8 * stage, parity);
                    if (lane == 0) barrier_expect(raw_full + 8 * stage, 2 * WARPS * bytes);
                    __syncwarp();
                    if (lane < 2 * WARPS)
                        load_bytes(base + Memory::RAW_AT + stage * Memory::RAW + lane * Memory::PANEL_BYTES,
                                   source + packet * Packed::PACKET, bytes, raw_full + 8 * stage);
                    if (++stage == PACKETS) stage = 0, parity ^= 1;
                }
            }
        } else if (warp <= WARPS + Memory::X_WARPS) {  // copies x: a lane 8 elements of K, of every ROWS-th position
            RowCopier<N, Memory::X_WARPS> copier(threadIdx.x - 32 * WARPS - 32);
            int stage = 0, parity = 1;
            for (int item = blockIdx.x; item < items; item += gridDim.x) {
                copier.take(given, item_of(item).tile);
#pragma unroll 1
                for (int box = 0; box < boxes; ++box) {
                    if (box % BOXES == 0) barrier_wait(empty + 8 * stage, parity);
                    copier.copy(given, base + stage * Memory::STAGE + box % BOXES * Memory::BOX, box);
                    if (box % BOXES == BOXES - 1 || box == boxes - 1) {
                        barrier_arrive_after_copies(full + 8 * stage);
                        if (++stage == STAGES) stage = 0, parity ^= 1;
                    }
                }
            }
        }
        return;
    }
    if (Memory::SHARES) take_registers<Memory::MULTIPLIERS>();
    const uint64_t start = tile_descriptor(base);
    const unsigned char* const own_packets = aligned + Memory::RAW_AT + warp * 2 * Memory::PANEL_BYTES;
    unsigned char* const scales = aligned + Memory::SCALES_AT + warp * Memory::SCALES;
    int stage = 0, parity = 0, before = 0, ring = 0, ring_parity = 0;  // ring: of packets
    uint32_t a[2][16];
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        float acc[N / 2];
        Item own = item_of(item);  // used when all is multiplied: till then it has come
        if (!Memory::WGMMA)
#pragma unroll
            for (int i = 0; i < N / 2; ++i) acc[i] = 0.0f;
        // How often who is done arrives: once, but computed of sums. An arrival does not wait for loads that are under way, and the
        // copy that it lets begin may overtake them; sums wait for all that they are made of.
        const auto once = [&] {
            uint32_t sums = 0;
#pragma unroll
            for (int i = 0; i < N / 2; i += 4) sums |= __float_as_uint(acc[i]);
            return 1 + (sums & static_cast<uint32_t>(given.inputs >> 31));  // which is 0, as the compiler does not know
        };
        const auto release = [&](int done) {
            if (Memory::WGMMA && threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * done);
            if (!Memory::WGMMA && lane == 0) barrier_arrive(empty + 8 * done, once());
        };
        const auto multiply_few = [&](const uint32_t(&made)[16], int box) {  // 64 elements of K, by mma.sync
            if (box % BOXES == 0) barrier_wait(full + 8 * stage, parity);
            const uint32_t own_row = base + stage * Memory::STAGE + box % BOXES * Memory::BOX + lane % 8 * 128;
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int j = 0; j < N / 8; ++j) {
                    uint32_t b[4];
                    load_matrices(b, own_row + j * 1024 + ((4 * half + lane / 8 ^ lane % 8) << 4));
#pragma unroll
                    for (int k = 0; k < 2; ++k)
                        mma(reinterpret_cast<float(&)[4]>(acc[4 * j]),
                            reinterpret_cast<const uint32_t(&)[4]>(made[8 * half + 4 * k]), b[2 * k], b[2 * k + 1]);
                }
        };
        const auto multiply = [&](const uint32_t(&made)[16], int box) {  // the same by wgmma
            if (box % BOXES == 0) {
                barrier_wait(full + 8 * stage, parity);
                publish_to_wgmma();  // what others have copied
            }
            const uint64_t b = further(start, stage * (Memory::STAGE / 16) + box % BOXES * (Memory::BOX / 16));
            wgmma_begin();
#pragma unroll
            for (int k = 0; k < 4; ++k)
                wgmma(acc, reinterpret_cast<const uint32_t(&)[4]>(made[4 * k]), further(b, 2 * k), box + k > 0);
            wgmma_commit();
        };
        const auto go_on = [&](int box) {  // behind the product before this box's, which has ended
            if (box % BOXES == 0 && box > 0) release(before);
            if (box % BOXES == BOXES - 1) {
                before = stage;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        };
        const auto release_packets = [&] {
            __syncwarp();
            if (lane == 0) barrier_arrive(raw_empty + 8 * ring, Memory::WGMMA ? 1 : once());
            if (++ring == PACKETS) ring = 0, ring_parity ^= 1;
        };
        int box = 0;
#pragma unroll 1
        for (; box + 4 <= boxes; box += 4) {
            barrier_wait(raw_full + 8 * ring, ring_parity);
            const typename Memory::Maker maker(own_packets + ring * Memory::RAW, scales, Memory::PANEL_BYTES, Packed::PACKET);
#pragma unroll
            for (int quarter = 0; quarter < 4; ++quarter) {
                maker.make(a[quarter % 2], quarter);
                if constexpr (Memory::WGMMA) {
                    multiply(a[quarter % 2], box + quarter);
                    // With one kind of wait in the loop ptxas puts every wgmma behind the one before it (C7514).
                    if (quarter < 3 || box + 4 < boxes)
                        wgmma_wait<1>();
                    else
                        wgmma_wait<0>();
                } else {
                    multiply_few(a[quarter % 2], box + quarter);
                }
                go_on(box + quarter);
            }
            release_packets();
        }
        if (box < boxes) {  // what no chunk has whole
            barrier_wait(raw_full + 8 * ring, ring_parity);
            const typename Memory::Maker maker(own_packets + ring * Memory::RAW, scales, Memory::PANEL_BYTES, Packed::PACKET);
#pragma unroll 1
            for (int quarter = 0; box + quarter < boxes; ++quarter) {
                maker.make(a[0], quarter);
                if constexpr (Memory::WGMMA) {
                    multiply(a[0], box + quarter);
                    wgmma_wait<0>();
                } else {
                    multiply_few(a[0], box + quarter);
                }
                go_on(box + quarter);
            }
            release_packets();
        }
        if constexpr (Memory::WGMMA) {
            wgmma_wait<0>();
            wgmma_keep(acc);
        }
        if (boxes % BOXES != 0) {  // the last stage is not full
            before = stage;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        release(before);
        own.tile.z = same_in_warp(own.tile.z);
        const int64_t rows[2] = {row_of(own, warp, 0), row_of(own, warp, 1)};
        finish(acc, own.tile, own.output + warp * PANEL * (TWO ? 1 : 2), rows);
    }
}

template <Result RESULT, int N>
static __device__ __forceinline__ void product(const Operands& given, const int4* tiles, const int* total,
                                               typename Stored<RESULT>::type* y) {
    constexpr bool TWO = RESULT == Result::TWO;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, outputs = given.outputs;
    const float* scales[2] = {given.first_scales, TWO ? given.second_scales : given.first_scales};
    const auto finish = [&](const float(&acc)[N / 2], const int4& tile, int output, const int64_t(&rows)[2]) {
        const int begins[2] = {output, TWO ? output : output + PANEL};
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            if (8 * j >= tile.z) break;
            float values[2][2];
#pragma unroll
            for (int e = 0; e < 2; ++e)
#pragma unroll
                for (int p = 0; p < 2; ++p)
                    values[p][e] = finished(acc[4 * j + 2 * p + e], given, 0, rows[p] + g, scales[p], tile.x);
            if constexpr (RESULT == Result::FLOATS) {
#pragma unroll
                for (int e = 0; e < 2; ++e)
#pragma unroll
                    for (int p = 0; p < 2; ++p)
                        if (const int within = 8 * j + 2 * t + e; within < tile.z && begins[p] < outputs)
                            y[static_cast<int64_t>(tile.y + within) * outputs + begins[p] + g] = values[p][e];
            } else {
                const int within = 8 * j + g;  // of what this lane writes: two neighbours of a position
                const int64_t place = static_cast<int64_t>(tile.y + within) * outputs;
#pragma unroll
                for (int p = 0; p < (TWO ? 1 : 2); ++p) {
                    float ups[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int own = 8 * j + 2 * t + e;
                        ups[e] = TWO ? values[1][e] : 1.0f;
                        if (!TWO && given.other != nullptr && own < tile.z && begins[p] < outputs)
                            ups[e] = given.other[static_cast<int64_t>(tile.y + own) * outputs + begins[p] + g];
                    }
                    const uint32_t word = transposed(pack(activated(given.activation, values[p][0], ups[0]),
                                                          activated(given.activation, values[p][1], ups[1])));
                    if (within < tile.z && begins[p] < outputs)
                        *reinterpret_cast<uint32_t*>(y + place + begins[p] + 2 * t) = word;
                }
            }
        }
    };
    multiply_all<TWO, N>(given, tiles, same_in_warp(*total), finish);
}

#define PRODUCT(NAME, RESULT, N)                                                                                              \
    extern "C" __global__ void __launch_bounds__(Tile<N>::THREADS, Tile<N>::BLOCKS) packed_##NAME##_##N(                      \
        const Input* x, const float* x_scales, const int* sources, const int4* tiles, const int* total,                       \
        const unsigned char* weights, const float* w_scales, const float* bias, const float* first_scales,                    \
        const float* second_scales, const float* other, Stored<RESULT>::type* y, int outputs, int inputs, int stride,         \
        int side, int activation) {                                                                                           \
        KERNEL_BEGINS();                                                                                                      \
        launch_next();                                                                                                        \
        wait_for_previous(x, sources, tiles, total, other, y);                                                                \
        product<RESULT, N>({x, x_scales, sources, weights, w_scales, bias, first_scales, second_scales, other, outputs,       \
                            inputs, stride, side, activation},                                                                \
                           tiles, total, y);                                                                                  \
    }
#define PRODUCTS(NAME, RESULT) \
    PRODUCT(NAME, RESULT, 8) PRODUCT(NAME, RESULT, 16) PRODUCT(NAME, RESULT, 64) PRODUCT(NAME, RESULT, 128)

PRODUCTS(floats, Result::FLOATS)
PRODUCTS(one, Result::ONE)
PRODUCTS(two, Result::TWO)

#endif
