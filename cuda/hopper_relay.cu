// Products of few rows with a long K on Hopper: y (rows, outputs) float += x W^T, x (rows, K) and W (outputs, K) half.
//
// A multiprocessor fetches 60 to 75 bytes a clock, too little for a tile of a long product, and sums have to go through
// K in order, 16 elements at a time, from one accumulator, as those of `hopper_product.cuh` do. So PARTS blocks of a
// cluster share a tile and pass its sum on: each fetches a part of K, all of them at the same time, and when a block
// has gone through its part it sends the accumulator to the next, which goes on from there. The last adds it to y. The
// bits are those of one block that does everything.
//
// A tile is BR rows (wgmma takes 64; what it makes of others is not kept) by BN columns. A cluster has DOWN tiles below
// each other, which have their weights from one copy to all of them, in turns. Its blocks count down, then parts.
// Kernels are named relay_BR_BN_BOXES_PARTS_DOWN_STAGES; the grid is a cluster for each DOWN tiles, columns first.
//
// A step is BOXES boxes of 64 elements of K, since a step costs the warps that multiply some 140 clocks beside its
// wgmmas, and those take 18 (BN 8) to 32 (BN 64) each, on an H200.
// `lead`: steps of the first block, which multiplies at the rate of its copies, while those of the others arrive
// meanwhile. The other parts are equal. At least one step each.
//
// FLOPs 2 rows outputs K; bytes from memory: W and x once; from L2: W for each DOWN tiles of rows, x for each tile of
// columns.
//
// Maps: boxes of 64 columns by BR rows of x, by BN rows of W. The kernel may start before the one ahead of it has
// ended: weights are fetched at once, x and y only after that. Dynamic shared memory: `Relay.shared` in the launcher.
#include "hopper.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

static constexpr int WIDTH = 64;     // elements of K in a box: the width of the swizzle
static constexpr int UNDER_WAY = 2;  // steps being multiplied while the next is looked for
static constexpr int EARLY = 2;      // steps of a first block whose weights are asked for before x: x waits behind more

// Stores four floats in a block of the cluster, whose barrier counts their 16 bytes (addresses: `address_in`).
static __device__ __forceinline__ void store_async(uint32_t target, uint32_t barrier, const float* four) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(target),
        "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3]), "r"(barrier)
        : "memory");
}

static __device__ __forceinline__ void load_shared(float* four, uint32_t address) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(four[0]), "=f"(four[1]), "=f"(four[2]), "=f"(four[3])
                 : "r"(address)
                 : "memory");
}

// Arrives at a barrier of the cluster (`address_in`).
static __device__ __forceinline__ void arrive_remotely(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

static __device__ __forceinline__ void prefetch_line(const void* line) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

// True for one lane of a warp, and the compiler knows that it is one: it would else loop over lanes around each copy.
static __device__ __forceinline__ bool elected() {
    uint32_t chosen;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
    return chosen != 0;
}

// `weights`: 0, or W, whose lines are then asked for ahead of the copies, into L2.
template <int BR, int BN, int BOXES, int PARTS, int DOWN, int STAGES>
static __device__ __forceinline__ void relay(const TensorMap* x_map, const TensorMap* w_map, const __half* weights,
                                             float* y, int rows, int outputs, int inputs, int lead) {
    constexpr int CLUSTER = PARTS * DOWN;
    constexpr int X_BYTES = BR * WIDTH * 2, W_BYTES = BN * WIDTH * 2, DEPTH = BOXES * WIDTH;
    constexpr int STAGE = BOXES * (X_BYTES + W_BYTES), W_AT = BOXES * X_BYTES;
    constexpr int FOURS = BN / 8;  // that a thread has of the sums
    extern __shared__ unsigned char dynamic[];
    __shared__ uint64_t barriers[2 * STAGES + 1];
    const uint32_t base = (shared_address(dynamic) + 1023) & ~1023u;
    const uint32_t inbox = base + STAGES * STAGE;
    const uint32_t full = shared_address(barriers), empty = full + 8 * STAGES, received = empty + 8 * STAGES;
    // Both are the same in a whole warp, which the compiler sees when they are written so. Copies and wgmma take
    // uniform registers, and moving what they need there takes longer than a small wgmma.
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), rank = blockIdx.x % CLUSTER;
    const int lane = threadIdx.x % 32;

    const int down = rank % DOWN, part = rank / DOWN;
    const int group = blockIdx.x / CLUSTER, across = (outputs + BN - 1) / BN;
    const int column = group % across * BN, row = (group / across * DOWN + down) * BR;
    const int steps = (inputs + DEPTH - 1) / DEPTH;
    int begin = 0, count = steps;
    if (PARTS > 1) {
        constexpr int OTHERS = PARTS > 1 ? PARTS - 1 : 1;
        const auto end_of = [&](int p) { return lead + (steps - lead) * p / OTHERS; };
        if (part > 0) begin = end_of(part - 1);
        count = end_of(part) - begin;
    }
    const int ahead = min(STAGES, count);

    const auto load_w = [&](int step, int stage) {
        barrier_expect(full + 8 * stage, STAGE);
#pragma unroll
        for (int i = 0; i < BOXES; ++i) {
            const uint32_t target = base + stage * STAGE + W_AT + i * W_BYTES;
            const int depth = (begin + step) * DEPTH + i * WIDTH;
            if (DOWN == 1)
                load_box(target, w_map, full + 8 * stage, depth, column);
            else if ((step * BOXES + i) % DOWN == down)
                load_box_in(target, w_map, full + 8 * stage, depth, column, ((1 << DOWN) - 1) << (part * DOWN));
        }
    };
    const auto load_x = [&](int step, int stage) {
#pragma unroll
        for (int i = 0; i < BOXES; ++i) {
            const uint32_t target = base + stage * STAGE + i * X_BYTES;
            load_box(target, x_map, full + 8 * stage, (begin + step) * DEPTH + i * WIDTH, row);
        }
    };

    if (warp == 4) {
        for (int i = lane; i < 2 * STAGES; i += 32) barrier_init(full + 8 * i, i < STAGES ? 1 : DOWN);
        if (lane == 0) {
            barrier_init(received, 1);
            barrier_expect(received, 128 * FOURS * 16);
        }
        publish_barriers();
        __syncwarp();
    }
    if (CLUSTER > 1)
        cluster_arrive();  // not `cluster_sync`, which would wait for copies
    else
        __syncthreads();
    const int early = part == 0 ? min(EARLY, ahead) : ahead;
    if (warp == 4) {
        if (elected()) {
            prefetch_map(w_map);
            prefetch_map(x_map);
            if (DOWN == 1)  // nobody else has to be there
                for (int step = 0; step < early; ++step) load_w(step, step);
        }
        __syncwarp();
    } else if (weights != nullptr) {
        const int lines = min(DEPTH * count, inputs - begin * DEPTH) / 64, all = lines * min(BN, outputs - column);
        const __half* part_of_w = weights + static_cast<int64_t>(column) * inputs + begin * DEPTH;
        for (int i = threadIdx.x; i < all; i += 128)
            prefetch_line(part_of_w + static_cast<int64_t>(i / lines) * inputs + i % lines * 64);
    }
    if (CLUSTER > 1) cluster_wait();

    if (warp == 4) {
        if (elected()) {
            if (DOWN > 1)
                for (int step = 0; step < early; ++step) load_w(step, step);
            wait_for_previous();
            for (int step = 0; step < ahead; ++step) {
                if (step >= early) load_w(step, step);
                load_x(step, step);
            }
            int stage = 0, parity = 0;
            for (int step = ahead; step < count; ++step) {
                barrier_wait(empty + 8 * stage, parity);
                load_w(step, stage);
                load_x(step, stage);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            launch_next();
        }
        return;
    }

    // A stage that will be filled again is given back to all who fill it. They wait for that, so no block has ended
    // when something still comes for it.
    uint32_t give_back = empty;
    if (DOWN > 1 && threadIdx.x < DOWN) give_back = address_in(empty, part * DOWN + threadIdx.x);
    const int t = lane % 4, in_tile = warp * 16 + lane / 4;
    float2 old[FOURS][2];
    float* target = y + static_cast<int64_t>(row + in_tile) * outputs + column + 2 * t;
    const int64_t eight_rows = static_cast<int64_t>(8) * outputs;
    const auto kept = [&](int j, int half) {
        return in_tile + 8 * half < BR && row + in_tile + 8 * half < rows && column + 8 * j < outputs;
    };
    if (part == PARTS - 1) {
        wait_for_previous();
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < FOURS; ++j)
                if (kept(j, half)) old[j][half] = *reinterpret_cast<const float2*>(target + half * eight_rows + 8 * j);
    }

    float acc[BN / 2];
    if (PARTS > 1) {
        if (part > 0) {
            barrier_wait(full, 0);
            barrier_wait_for_cluster(received, 0);
        }
        // The first block reads what nobody looks at: as a branch, ptxas would make wgmmas wait for each other (C7515).
#pragma unroll
        for (int j = 0; j < FOURS; ++j) load_shared(&acc[4 * j], inbox + (j * 128 + threadIdx.x) * 16);
    }
    const uint64_t first = tile_descriptor(base);
    int stage = 0, parity = 0, done = 0;
    for (int step = 0; step < count; ++step) {
        barrier_wait(full + 8 * stage, parity);
        const uint64_t a = first + stage * (STAGE / 16), b = a + W_AT / 16;
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < BOXES; ++i)
#pragma unroll
            for (int k = 0; k < WIDTH / 16; ++k)
                wgmma(acc, a + i * (X_BYTES / 16) + 2 * k, b + i * (W_BYTES / 16) + 2 * k,
                      i + k > 0 || begin + step > 0);
        wgmma_commit();
        wgmma_wait<UNDER_WAY>();
        if (step >= UNDER_WAY) {
            if (step - UNDER_WAY + STAGES < count && threadIdx.x < DOWN) {
                if (DOWN > 1)
                    arrive_remotely(give_back + 8 * done);
                else
                    barrier_arrive(give_back + 8 * done);
            }
            if (++done == STAGES) done = 0;
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    wgmma_keep(acc);
    if (part < PARTS - 1) {
        const uint32_t there = address_in(inbox + threadIdx.x * 16, rank + DOWN);
        const uint32_t counter = address_in(received, rank + DOWN);
#pragma unroll
        for (int j = 0; j < FOURS; ++j) store_async(there + j * 128 * 16, counter, &acc[4 * j]);
        return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < FOURS; ++j)
            if (kept(j, half))
                *reinterpret_cast<float2*>(target + half * eight_rows + 8 * j) =
                    make_float2(old[j][half].x + acc[4 * j + 2 * half], old[j][half].y + acc[4 * j + 2 * half + 1]);
}

#define RELAY_KERNEL(BR, BN, BOXES, PARTS, DOWN, STAGES)                                                          \
    extern "C" __global__ void __launch_bounds__(160) __cluster_dims__((PARTS) * (DOWN), 1, 1)                    \
        relay_##BR##_##BN##_##BOXES##_##PARTS##_##DOWN##_##STAGES(                                                \
            const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const __half* weights,      \
            float* y, int rows, int outputs, int inputs, int lead) {                                              \
        relay<BR, BN, BOXES, PARTS, DOWN, STAGES>(&x, &w, weights, y, rows, outputs, inputs, lead);               \
    }
#else
#define RELAY_KERNEL(BR, BN, BOXES, PARTS, DOWN, STAGES)
#endif

RELAY_KERNEL(16, 16, 4, 2, 1, 13)
RELAY_KERNEL(32, 16, 4, 2, 1, 9)
RELAY_KERNEL(64, 16, 4, 2, 1, 5)
RELAY_KERNEL(64, 32, 2, 2, 1, 9)
RELAY_KERNEL(64, 32, 2, 1, 1, 9)
RELAY_KERNEL(64, 32, 2, 1, 2, 9)
RELAY_KERNEL(64, 64, 2, 1, 1, 7)
