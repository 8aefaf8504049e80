// Products of few rows or a long K on Hopper: y (rows, outputs) float += x W^T, x (rows, K) and W (outputs, K) elements; or
// y = x W^T, from the same sums.
//
// A multiprocessor fetches 60 to 75 bytes a clock, too little for a tile of a long product, and there are too few tiles for
// all multiprocessors. So two blocks of a cluster share a tile (HALVES 2): one sums up the first `first` elements of K,
// one the others, each in order, 16 at a time, from one accumulator, as `hopper_product.cuh` does. Then each
// sends the other the sums of half the columns, and adds both to y for the columns that it has kept: the first
// sum, then the second. With HALVES 1, for a shorter K or many outputs, there is one sum.
//
// A tile is BR rows (wgmma takes 64; what it makes of others is not kept) by BN columns. A cluster has DOWN tiles below
// each other, which have their weights from one copy to all of them, in turns. Its blocks count down, then halves.
// Kernels are named residual_BR_BN_BOXES_HALVES_DOWN_STAGES, or addend_... where y is not read; the grid is a cluster for each DOWN tiles, columns first.
//
// A step is BOXES boxes of 64 elements of K, since a step costs the warps that multiply some 140 clocks beside its
// wgmmas, and those take 18 (BN 16) to 32 (BN 64) each, on an H200.
//
// FLOPs 2 rows outputs K; bytes from memory: W and x once; from L2: W for each DOWN tiles of rows, x for each tile of
// columns.
//
// Maps: boxes of 64 columns by BR rows of x, by BN rows of W. The kernel may start before the one ahead of it has
// ended: weights are fetched at once, x and y only after that. Dynamic shared memory: `SplitTile.shared` in the launcher.
//
// Option: -DKERNELS, a SPLIT_KERNEL for each tile, as `split.py` writes it.
#include "common/hopper.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

static constexpr int WIDTH = 64;     // elements of K in a box: the width of the swizzle
static constexpr int UNDER_WAY = 2;  // steps being multiplied while the next is looked for
static constexpr int EARLY = 2;      // steps whose weights are asked for before x: x waits behind more

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

static __device__ __forceinline__ void prefetch_line(const void* line) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

// `weights`: 0, or W, whose lines are then asked for ahead of the copies, into L2.
template <bool ADDS, int BR, int BN, int BOXES, int HALVES, int DOWN, int STAGES>
static __device__ __forceinline__ void product(const TensorMap* x_map, const TensorMap* w_map, const Element* weights,
                                               float* y, int rows, int outputs, int inputs, int first) {
    constexpr int GROUPS = (BR + 63) / 64, CLUSTER = HALVES * DOWN, COPIES = 4 * GROUPS;  // the warp that copies
    constexpr int X_BYTES = BR * WIDTH * 2, W_BYTES = BN * WIDTH * 2, DEPTH = BOXES * WIDTH;
    constexpr int STAGE = BOXES * (X_BYTES + W_BYTES), W_AT = BOXES * X_BYTES;
    constexpr int FOURS = BN / 8, MINE = FOURS / HALVES;  // that a thread has of the sums, and adds to y
    extern __shared__ unsigned char dynamic[];
    __shared__ uint64_t barriers[2 * STAGES + 1];
    const uint32_t base = (shared_address(dynamic) + 1023) & ~1023u;
    const uint32_t inbox = base + STAGES * STAGE;
    // BARRIER full: of a stage. One thread arrives, that which copies, and expects what the blocks that share its weights send here. A
    // stage is filled again only when all of their groups have given it back, which they do after they have waited for it: so all
    // groups wait for all phases, one after the other.
    // BARRIER empty, give_back: of a stage. Each group of each block that shares the weights arrives once for each filling that another
    // will follow, when it has multiplied; the one thread that copies waits for all of these phases, one after the other. A box is one
    // block's to send to all. It sends the next when all groups have given the stage back to *it*; an arrival of the same moment may
    // still be on its way to another block, and one for the filling after it come there first. It then stands for the late one,
    // whose group has done with the stage, too. It cannot be two phases ahead, as then the sender would lack the late one's.
    // BARRIER received: has one phase. One thread arrives before the blocks of the cluster meet, and expects all bytes that the other half
    // stores here; all threads that multiply wait for it, and so no block ends before what is stored in it has come.
    const uint32_t full = shared_address(barriers), empty = full + 8 * STAGES, received = empty + 8 * STAGES;
    // Both are the same in a whole warp, which the compiler sees when they are written so. Copies and wgmma take
    // uniform registers, and moving what they need there takes longer than a small wgmma.
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), rank = blockIdx.x % CLUSTER;
    const int lane = threadIdx.x % 32;

    const int down = rank % DOWN, half = rank / DOWN;
    const int cluster = blockIdx.x / CLUSTER, across = (outputs + BN - 1) / BN;
    const int column = cluster % across * BN, row = (cluster / across * DOWN + down) * BR;
    const int begin = half ? first : 0, end = HALVES > 1 && half == 0 ? first : inputs;
    const int count = (end - begin + DEPTH - 1) / DEPTH, ahead = min(STAGES, count);

    // Boxes beyond this block's part of K are read beyond all of it, where there are zeros.
    const auto depth_of = [&](int step, int box) {
        const int depth = begin + step * DEPTH + box * WIDTH;
        return depth < end ? depth : inputs;
    };
    const auto load_w = [&](int step, int stage) {
        barrier_expect(full + 8 * stage, STAGE);
#pragma unroll
        for (int i = 0; i < BOXES; ++i) {
            const uint32_t target = base + stage * STAGE + W_AT + i * W_BYTES;
            if (DOWN == 1)
                load_box(target, w_map, full + 8 * stage, depth_of(step, i), column);
            else if ((step * BOXES + i) % DOWN == down)
                load_box_in(target, w_map, full + 8 * stage, depth_of(step, i), column,
                            ((1 << DOWN) - 1) << (half * DOWN));
        }
    };
    const auto load_x = [&](int step, int stage) {
#pragma unroll
        for (int i = 0; i < BOXES; ++i)
            load_box(base + stage * STAGE + i * X_BYTES, x_map, full + 8 * stage, depth_of(step, i), row);
    };

    if (warp == COPIES) {
        for (int i = lane; i < 2 * STAGES; i += 32) barrier_init(full + 8 * i, i < STAGES ? 1 : DOWN * GROUPS);
        if (lane == 0) {
            barrier_init(received, 1);
            barrier_expect(received, GROUPS * 128 * MINE * 16);
        }
        publish_barriers();
        __syncwarp();
    }
    if (CLUSTER > 1)
        cluster_arrive();  // not `cluster_sync`, which would wait for copies
    else
        __syncthreads();
    const int early = min(EARLY, ahead);
    if (warp == COPIES) {
        if (elected()) {
            prefetch_map(w_map);
            prefetch_map(x_map);
            if (DOWN == 1)  // nobody else has to be there
                for (int step = 0; step < early; ++step) load_w(step, step);
        }
        __syncwarp();
    } else if (weights != nullptr) {
        const int lines = (end - begin) / 64, all = lines * min(BN, outputs - column);
        const Element* part = weights + static_cast<int64_t>(column) * inputs + begin;
        for (int i = threadIdx.x; i < all; i += 128 * GROUPS)
            prefetch_line(part + static_cast<int64_t>(i / lines) * inputs + i % lines * 64);
    }
    if (CLUSTER > 1) cluster_wait();

    if (warp == COPIES) {
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
    const int group = warp / 4, in_group = threadIdx.x % 128;
    uint32_t give_back = empty;
    if (DOWN > 1 && in_group < DOWN) give_back = address_in(empty, half * DOWN + in_group);
    const int t = lane % 4, in_tile = warp * 16 + lane / 4, my_column = column + half * MINE * 8;
    float2 old[MINE][2];
    float* target = y + static_cast<int64_t>(row + in_tile) * outputs + my_column + 2 * t;
    const int64_t eight_rows = static_cast<int64_t>(8) * outputs;
    const auto kept = [&](int j, int eight) {
        return in_tile + 8 * eight < BR && row + in_tile + 8 * eight < rows && my_column + 8 * j < outputs;
    };
    wait_for_previous();
#pragma unroll
    for (int eight = 0; eight < 2; ++eight)
#pragma unroll
        for (int j = 0; j < MINE; ++j) {
            if (!ADDS) old[j][eight] = make_float2(0.0f, 0.0f);
            if (ADDS && kept(j, eight))
                old[j][eight] = *reinterpret_cast<const float2*>(target + eight * eight_rows + 8 * j);
        }

    float acc[BN / 2];
    const uint64_t start = tile_descriptor(base) + group * (64 * WIDTH * 2 / 16);
    int stage = 0, parity = 0, done = 0;
    for (int step = 0; step < count; ++step) {
        barrier_wait(full + 8 * stage, parity);
        const uint64_t a = start + stage * (STAGE / 16), b = tile_descriptor(base) + stage * (STAGE / 16) + W_AT / 16;
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < BOXES; ++i)
#pragma unroll
            for (int k = 0; k < WIDTH / 16; ++k)
                wgmma(acc, a + i * (X_BYTES / 16) + 2 * k, b + i * (W_BYTES / 16) + 2 * k, step + i + k > 0);
        wgmma_commit();
        wgmma_wait<UNDER_WAY>();
        if (step >= UNDER_WAY) {
            if (step - UNDER_WAY + STAGES < count && in_group < DOWN) {
                if (DOWN > 1)
                    barrier_arrive_there(give_back + 8 * done);
                else
                    barrier_arrive(give_back + 8 * done);
            }
            if (++done == STAGES) done = 0;
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    wgmma_keep(acc);
    const uint32_t place = inbox + (group * MINE * 128 + in_group) * 16;
    if (HALVES > 1) {
        const int other = rank ^ DOWN;
        const uint32_t there = address_in(place, other), counter = address_in(received, other);
#pragma unroll
        for (int j = 0; j < MINE; ++j) {
            float four[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) four[i] = half ? acc[4 * j + i] : acc[4 * (j + FOURS - MINE) + i];
            store_async(there + j * 128 * 16, counter, four);
        }
        barrier_wait_for_cluster(received, 0);
    }
#pragma unroll
    for (int j = 0; j < MINE; ++j) {
        float mine[4], theirs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) mine[i] = half ? acc[4 * (j + FOURS - MINE) + i] : acc[4 * j + i];
        if (HALVES > 1) load_shared(theirs, place + j * 128 * 16);
#pragma unroll
        for (int eight = 0; eight < 2; ++eight) {
            float2 sum = old[j][eight];
            const auto add = [&](const float(&four)[4]) { sum.x += four[2 * eight], sum.y += four[2 * eight + 1]; };
            if (HALVES > 1 && half) add(theirs);
            add(mine);
            if (HALVES > 1 && !half) add(theirs);
            if (kept(j, eight)) *reinterpret_cast<float2*>(target + eight * eight_rows + 8 * j) = sum;
        }
    }
}

#define SPLIT_KERNEL(NAME, ADDS, BR, BN, BOXES, HALVES, DOWN, STAGES)                                             \
    extern "C" __global__ void __launch_bounds__(((BR) + 63) / 64 * 128 + 32)                                     \
        __cluster_dims__((HALVES) * (DOWN), 1, 1) NAME##_##BR##_##BN##_##BOXES##_##HALVES##_##DOWN##_##STAGES(    \
            const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const Element* weights,      \
            float* y, int rows, int outputs, int inputs, int first) {                                             \
        KERNEL_BEGINS();                                                                                          \
        product<ADDS, BR, BN, BOXES, HALVES, DOWN, STAGES>(&x, &w, weights, y, rows, outputs, inputs, first);     \
    }
#else
#define SPLIT_KERNEL(NAME, ADDS, BR, BN, BOXES, HALVES, DOWN, STAGES)
#endif

KERNELS  // of `split.py`
