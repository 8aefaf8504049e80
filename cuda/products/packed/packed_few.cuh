// The main loop of products of few rows with quantised weights on Hopper: y^T = W x^T by mma.sync, W in the packed layout of
// `packed.cuh`, turned into elements in registers.
//
//   x  (rows, K) elements, up to 8 TILES rows        W  (outputs, K) packed, K a multiple of 32
//
// A warp has one panel of W, 8 outputs, or two, and all rows; it goes through K by itself. Weights are the left operand of mma,
// of which a lane holds what packets have together: there are no exchanges, and one panel leaves half of the operand unused.
// Elements have the bits of `dequantize.cu`, sums go through K in order, 16 elements at a time, from one accumulator: so results
// are those of other products. What bounds few rows of a large matrix is memory, then the making of elements; of a small one,
// K / 16 products that wait for each other.
//
// A warp's packets come by bulk copies to a ring of its own, a *chunk* of 256 elements of K to a stage, as soon as the kernel
// starts. All warps of a block share x, which is in shared memory whole; or two windows of it at a time, and then warps wait
// for each other at a window's end.
//
// FLOPs 2 rows outputs K; bytes from memory: W as it is in the file; from L2: x for each block.
#pragma once

#include "common/hopper.cuh"
#include "common/packed.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// What a block keeps in shared memory, as `packed_few.py` says, too.
struct FewMemory {
    int window;  // inputs of x that are there together, a multiple of 256
    int stages;  // chunks of packets in a warp's ring
};

template <int PANELS, int TILES>
struct PackedFew {
    static constexpr int CHUNK = 256, GROUPS = CHUNK / 32, PACKETS = CHUNK / Packed::STEP;
    static constexpr int BYTES = PACKETS * Packed::PACKET, STAGE = PANELS * BYTES;  // of a panel's chunk, of all panels'
    static constexpr bool HANDED = Packed::STEP == CHUNK;
    static constexpr int SCALES = HANDED ? PANELS * GROUPS * 8 * sizeof(typename Packed::Handed) : 0;  // of a chunk
    static constexpr int ZEROS = CHUNK * sizeof(Element);

    // A warp's items: tasks, or with two SUMS the sums of a task, one behind the other. finish(acc, task): acc[t][e] is of
    // output lane / 4 of the first panel and row 8 t + 2 (lane % 4) + e, acc[t][2 + e] of the second panel.
    // panels(task): a task's first panel; the second is `to_high` further on. With two SUMS, the first goes through `first`
    // inputs, a multiple of 32, all of x is there, and every warp has one item; finish(acc, others, task) has both.
    template <int SUMS, typename Panels, typename Finish>
    static __device__ __forceinline__ void run(const Element* x, const unsigned char* weights, int rows, int inputs, int first,
                                               int tasks, int to_high, FewMemory memory, Panels panels, Finish finish) {
        extern __shared__ __align__(128) unsigned char dynamic[];
        const int warps = blockDim.x / 32, warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
        const int lane = threadIdx.x % 32, row = lane / 4, t = lane % 4;
        const int windows = (inputs + memory.window - 1) / memory.window, buffers = min(windows, 2);
        const int pitch = memory.window * static_cast<int>(sizeof(Element)) + 16;  // ldmatrix meets no conflict
        const int x_bytes = rows * pitch, packets = (inputs + Packed::STEP - 1) / Packed::STEP;
        unsigned char* const own = dynamic + ZEROS + buffers * x_bytes + warp * (memory.stages * STAGE + 2 * SCALES);
        unsigned char* const scales = own + memory.stages * STAGE;
        const uint32_t barriers = shared_address(dynamic) + ZEROS + buffers * x_bytes +
                                  warps * (memory.stages * STAGE + 2 * SCALES);
        // BARRIER x_full, barrier: two, for the windows of x that are even and odd. One lane of warp 0 arrives, and expects a window's
        // bytes; all threads wait for each window. It does so for the next window but one, which has the same barrier, after a
        // `__syncthreads` that all reach when they have waited for this one: so no phase is over before all have seen the one before.
        // BARRIER full, barrier: of a stage of packets, which is one warp's alone, as its barrier is. A lane of the warp arrives when it
        // asks for a chunk, all of them wait for it. It asks for a stage again when the warp has waited for the chunk that was in
        // it, and is through (`__syncwarp`): so the lanes wait for all phases, one after the other.
        const uint32_t x_full = barriers, full = barriers + 16 + warp * memory.stages * 8;
        const int items = SUMS * tasks, stride = gridDim.x * warps;
        const int64_t panel_bytes = static_cast<int64_t>(packets) * Packed::PACKET;

        const auto begin_of = [&](int item) { return SUMS > 1 && item % 2 == 1 ? first : 0; };
        const auto end_of = [&](int item) { return SUMS > 1 && item % 2 == 0 ? first : inputs; };

        // Asks for the chunks of all items, one after the other.
        int asked_item = blockIdx.x * warps + warp - stride, asked_chunk = 0, asked_end = 0, asked_stage = 0;
        const unsigned char* asked = weights;
        const auto ask = [&] {
            if (asked_chunk * CHUNK >= asked_end) {
                if ((asked_item += stride) >= items) {
                    asked_item -= stride;
                    return;
                }
                asked_chunk = begin_of(asked_item) / CHUNK, asked_end = end_of(asked_item);
                asked = weights + panels(asked_item / SUMS) * panel_bytes + asked_chunk * BYTES;
            }
            if (elected()) {
                const int bytes = min(PACKETS, packets - asked_chunk * PACKETS) * Packed::PACKET;
                const uint32_t target = shared_address(own) + asked_stage * STAGE, barrier = full + 8 * asked_stage;
                barrier_expect(barrier, PANELS * bytes);
#pragma unroll
                for (int p = 0; p < PANELS; ++p) load_bytes(target + p * BYTES, asked + p * to_high * panel_bytes, bytes, barrier);
            }
            if (++asked_stage == memory.stages) asked_stage = 0;
            asked += BYTES;
            ++asked_chunk;
        };
        if (lane == 0)
            for (int i = 0; i < memory.stages; ++i) barrier_init(full + 8 * i, 1);
        if (threadIdx.x == 0) {
            barrier_init(x_full, 1);
            barrier_init(x_full + 8, 1);
        }
        publish_barriers();
        __syncwarp();
        for (int i = 0; i < memory.stages; ++i) ask();
        if (threadIdx.x < ZEROS / 16) store_zeros(shared_address(dynamic) + threadIdx.x * 16);
        wait_for_previous(x);
        launch_next();
        const int rounds = (items + stride - 1) / stride;
        const auto ask_x = [&](int turn) {  // for a window, of `turn` windows in all rounds
            if (warp == 0 && turn < rounds * windows && elected()) {
                const int from = turn % windows * memory.window;
                const int bytes = min(memory.window, inputs - from) * static_cast<int>(sizeof(Element));
                const uint32_t barrier = x_full + turn % 2 * 8;
                barrier_expect(barrier, rows * bytes);
                for (int i = 0; i < rows; ++i)
                    load_bytes(shared_address(dynamic) + ZEROS + turn % 2 * x_bytes + i * pitch,
                               x + static_cast<int64_t>(i) * inputs + from, bytes, barrier);
            }
        };
        ask_x(0);
        if (windows > 1) ask_x(1);
        __syncthreads();  // barriers and zeros are there

        // Where ldmatrix finds a lane's row of x: rows that there are not are zeros, which stay where they are.
        uint32_t x_at[TILES], x_moves[TILES];
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const bool there = 8 * i + lane % 8 < rows;
            x_moves[i] = there ? 0xffffffffu : 0;
            x_at[i] = shared_address(dynamic) + lane / 8 * 16 + (there ? ZEROS + (8 * i + lane % 8) * pitch : 0);
        }

        int stage = 0, parity = 0, kept = 0;
        const auto hand = [&](int from, int to) {  // computes the scales of a chunk that has come
            if constexpr (HANDED) {
                constexpr int EACH = PANELS * GROUPS / 4;  // of each lane of a row
                const int panel = PANELS == 2 ? t / 2 : 0, begin = PANELS == 2 ? t % 2 * EACH : t * EACH;
                auto* out = reinterpret_cast<typename Packed::Handed*>(scales + to * SCALES) + begin * PANELS * 8 + panel * 8 + row;
                typename Packed::Handed made[EACH];
                Packed::hand(made, own + from * STAGE + panel * BYTES, row, begin);
#pragma unroll
                for (int i = 0; i < EACH; ++i) out[i * PANELS * 8] = made[i];
            }
        };
        float acc[TILES][4];
        // Elements of a group of the chunk in stage `from`, whose computed scales are in half `scaled` of those.
        const auto make = [&](Element8 (&made)[PANELS], int group, int from, int scaled) {
            constexpr int IN_PACKET = Packed::STEP / 32;
#pragma unroll
            for (int p = 0; p < PANELS; ++p) {
                const unsigned char* packet = own + from * STAGE + p * BYTES + group / IN_PACKET * Packed::PACKET;
                const auto* handed = reinterpret_cast<const typename Packed::Handed*>(scales + scaled * SCALES) + p * 8 + row;
                const auto scale = Packed::scale(packet, row, group % IN_PACKET,
                                                 HANDED ? handed[group * PANELS * 8] : typename Packed::Handed());
                made[p] = Packed::eight(Packed::raw(packet, row, group % IN_PACKET * 4 + t), scale);
            }
        };
        const auto multiply = [&](const Element8 (&made)[PANELS], const uint32_t (&b)[TILES][4], int half) {
            const int low = 2 * half, high = 2 * half + 1;
            const uint32_t a[4] = {made[0].word[low], PANELS == 2 ? made[PANELS - 1].word[low] : packed::anything(),
                                   made[0].word[high], PANELS == 2 ? made[PANELS - 1].word[high] : packed::anything()};
#pragma unroll
            for (int i = 0; i < TILES; ++i) mma(acc[i], a, b[i][2 * half], b[i][2 * half + 1]);
        };

        // Products wait for each other, so while one runs, elements for the next but one are made.
        Element8 made[2][PANELS];
        bool ahead = false;  // made[0] is of the chunk that is next
        if (HANDED && blockIdx.x * warps + warp < items) {
            barrier_wait(full, 0);
            hand(0, 0);
            __syncwarp();
        }
        int item = blockIdx.x * warps + warp, turn = 0;
        for (int round = 0; round < rounds; ++round, item += stride) {
#pragma unroll
            for (int i = 0; i < TILES; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[i][e] = 0.0f;
            const int begin = begin_of(item), end = end_of(item);
#pragma unroll 1
            for (int window = 0; window < windows; ++window, ++turn) {
                if (windows > 1 || turn == 0) barrier_wait(x_full + turn % 2 * 8, turn / 2 % 2);
                if (item < items) {
                    const int from = window * memory.window, until = min(from + memory.window, end);
                    const uint32_t x_window = turn % 2 * (windows > 1) * x_bytes;
#pragma unroll 1
                    for (int chunk = max(from, begin) / CHUNK; chunk * CHUNK < until; ++chunk) {
                        const int next_stage = stage + 1 == memory.stages ? 0 : stage + 1;
                        const int next_parity = parity ^ (next_stage == 0);
                        const bool same = (chunk + 1) * CHUNK < end, more = same || item + stride < items;
                        if (!HANDED && !ahead) barrier_wait(full + 8 * stage, parity);
                        const auto prepare = [&] {  // the next chunk
                            if (more) {
                                barrier_wait(full + 8 * next_stage, next_parity);
                                hand(next_stage, kept ^ 1);
                                if (HANDED) __syncwarp();
                            }
                        };
                        uint32_t at[TILES];
#pragma unroll
                        for (int i = 0; i < TILES; ++i)
                            at[i] = x_at[i] + ((x_window + (chunk * CHUNK - from) * sizeof(Element)) & x_moves[i]);
                        const int low = max(begin - chunk * CHUNK, 0) / 32, high = (end - chunk * CHUNK) / 32;
                        if (low == 0 && high >= GROUPS) {
                            if (!ahead) make(made[0], 0, stage, kept);
                            ahead = same ? (chunk + 2) * CHUNK <= end : more && SUMS == 1 && inputs >= CHUNK;
                            uint32_t b[TILES][4];
                            const auto load = [&](int group) {
#pragma unroll
                                for (int i = 0; i < TILES; ++i) load_matrices(b[i], at[i] + group * 64);
                            };
#pragma unroll
                            for (int group = 0; group < GROUPS / 2; ++group) {
                                load(group);
                                multiply(made[group % 2], b, 0);
                                make(made[(group + 1) % 2], group + 1, stage, kept);
                                multiply(made[group % 2], b, 1);
                            }
                            prepare();
#pragma unroll
                            for (int group = GROUPS / 2; group < GROUPS - 1; ++group) {
                                load(group);
                                multiply(made[group % 2], b, 0);
                                make(made[(group + 1) % 2], group + 1, stage, kept);
                                multiply(made[group % 2], b, 1);
                            }
                            load(GROUPS - 1);
                            multiply(made[1], b, 0);
                            if (ahead) make(made[0], 0, next_stage, kept ^ 1);
                            multiply(made[1], b, 1);
                        } else {
                            if (HANDED) prepare();
#pragma unroll 1
                            for (int group = low; group < min(high, GROUPS); ++group) {
                                uint32_t b[TILES][4];
#pragma unroll
                                for (int i = 0; i < TILES; ++i) load_matrices(b[i], at[i] + group * 64);
                                make(made[1], group, stage, kept);
                                multiply(made[1], b, 0);
                                multiply(made[1], b, 1);
                            }
                            ahead = false;
                        }
                        __syncwarp();
                        ask();
                        stage = next_stage, parity = next_parity, kept ^= 1;
                    }
                }
                if (windows > 1) {
                    __syncthreads();
                    ask_x(turn + 2);
                }
            }
            if constexpr (SUMS > 1) {
                const float* others = reinterpret_cast<const float*>(own + memory.stages * STAGE + 2 * SCALES) + lane;
                if (item < items && item % 2 == 1)
#pragma unroll
                    for (int i = 0; i < 4 * TILES; ++i) reinterpret_cast<float*>(own)[i * 32 + lane] = acc[i / 4][i % 4];
                __syncthreads();
                if (item < items && item % 2 == 0) {
                    float second[TILES][4];
#pragma unroll
                    for (int i = 0; i < 4 * TILES; ++i) second[i / 4][i % 4] = others[i * 32];
                    finish(acc, second, item / 2);
                }
            } else {
                if (item < items) finish(acc, acc, item);
            }
        }
    }
};

#endif
