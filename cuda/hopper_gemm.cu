// Products with weights on Hopper: y = x W^T, alone or with SwiGLU, by wgmma and bulk tensor copies.
//
//   x  half (rows, K)      W  half (outputs, K)      y  half
// x and W come through tensor maps with boxes of 64 columns by 64 GROUPS and BN / 2 rows.
//   product_*   y (rows, outputs)
//   swiglu_*    W holds F rows of gate, then F of up; y (rows, F) = silu(gate) * up, gate and up rounded to half
//               before, as `swiglu.cu` reads them
//
// Sums are float and go through K in order, 16 elements at a time, from one accumulator: a row's bits hang on that row
// and the weights alone, not on the tile, and are those of cuBLASLt's algorithms without split-K.
//
// A tile is 64 GROUPS rows by BN columns of W (swiglu: BN / 2 of gate and their BN / 2 of up). One warp copies, 64
// elements of K at a time, STAGES deep; GROUPS warpgroups multiply, 64 rows each. Blocks go through the tiles with
// stride gridDim.x, in groups of GROUP_ROWS tiles of rows, so that those running together share weights and rows in
// L2; copies run ahead into the next tile while the results of one are written. Two blocks of a CLUSTER take two tiles
// of rows and fetch half of W each, for both: less comes from L2. FLOPs 2 rows outputs K; bytes: W, x
// and y once from memory, if L2 holds a group.
//
// The kernel may start before the one ahead of it has ended: weights are fetched at once, x only after that.
#include "hopper.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

static constexpr int DEPTH = 64;  // elements of K in a stage: the width of the swizzle
static constexpr int GROUP_ROWS = 16;

enum class Kind { PLAIN, SWIGLU };

static __device__ __forceinline__ float rounded(float value) { return __half2float(__float2half_rn(value)); }

// Four words a lane, word i of which belongs to column group i: afterwards lane t of each four has group t whole.
static __device__ __forceinline__ uint4 transposed(uint32_t a, uint32_t b, uint32_t c, uint32_t d, int t) {
    const bool odd = t & 1, high = t & 2;
    uint32_t give = odd ? a : b, keep = odd ? b : a;
    uint32_t got = __shfl_xor_sync(0xffffffffu, give, 1);
    const uint32_t p0 = odd ? got : keep, p1 = odd ? keep : got;
    give = odd ? c : d, keep = odd ? d : c;
    got = __shfl_xor_sync(0xffffffffu, give, 1);
    const uint32_t q0 = odd ? got : keep, q1 = odd ? keep : got;
    const uint32_t r0 = __shfl_xor_sync(0xffffffffu, high ? p0 : q0, 2);
    const uint32_t r1 = __shfl_xor_sync(0xffffffffu, high ? p1 : q1, 2);
    return high ? make_uint4(r0, r1, q0, q1) : make_uint4(p0, p1, r0, r1);
}

template <int GROUPS, int BN, int STAGES, int CLUSTER, Kind KIND>
static __device__ __forceinline__ void multiply(const TensorMap* x_map, const TensorMap* w_map, __half* __restrict__ y,
                                                int rows, int outputs, int inputs) {
    constexpr int BM = 64 * GROUPS;
    constexpr int X_BYTES = BM * DEPTH * 2, W_BYTES = BN * DEPTH * 2;
    constexpr int COLUMNS = KIND == Kind::SWIGLU ? BN / 2 : BN;  // of y in a tile
    extern __shared__ unsigned char dynamic[];
    __shared__ uint64_t barriers[2 * STAGES];
    const uint32_t base = (shared_address(dynamic) + 1023) & ~1023u;
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
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (CLUSTER > 1)
        cluster_sync();
    else
        __syncthreads();
    launch_next();

    if (warp == 4 * GROUPS && lane == 0) {
        auto load_w = [&](int stage, int step, int column) {
            barrier_expect(full + 8 * stage, X_BYTES + W_BYTES);
            const int upper = KIND == Kind::SWIGLU ? outputs + column : column + BN / 2;
            if (CLUSTER > 1) {
                load_box_in_both(w_tile(stage) + rank * (W_BYTES / 2), w_map, full + 8 * stage, step * DEPTH,
                                 rank ? upper : column);
            } else {
                load_box(w_tile(stage), w_map, full + 8 * stage, step * DEPTH, column);
                load_box(w_tile(stage) + W_BYTES / 2, w_map, full + 8 * stage, step * DEPTH, upper);
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
    }
    if (warp == 4 * GROUPS) {
        __syncwarp();
        if (CLUSTER > 1) cluster_sync();
        return;
    }

    const int group = warp / 4, g = lane / 4, t = lane % 4;
    auto release = [&](int stage) {
        if (CLUSTER == 1 && threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * stage);
        if (CLUSTER > 1 && threadIdx.x % 128 < CLUSTER) barrier_arrive_at(empty + 8 * stage, threadIdx.x % 128);
    };
    int count = 0;
    for (int tile = first_tile; tile < tiles; tile += stride) {
        float acc[BN / 2];
        for (int step = 0; step < steps; ++step, ++count) {
            const int stage = count % STAGES;
            barrier_wait(full + 8 * stage, count / STAGES & 1);
            const uint64_t a = tile_descriptor(x_tile(stage) + group * 64 * DEPTH * 2);
            const uint64_t b = tile_descriptor(w_tile(stage));
            wgmma_begin();
#pragma unroll
            for (int k = 0; k < DEPTH / 16; ++k) wgmma(acc, a + 2 * k, b + 2 * k, step + k > 0);
            wgmma_commit();
            wgmma_wait<1>();
            if (step > 0) release((count - 1) % STAGES);
        }
        wgmma_wait<0>();
        wgmma_keep(acc);
        release((count - 1) % STAGES);

        int row, column;
        place(tile, row, column);
        row += group * 64 + warp % 4 * 16 + g;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int my_row = row + 8 * half;
            const bool exists = my_row < rows;
            __half* target = y + static_cast<int64_t>(my_row) * outputs + column + t * 8;
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; j += 4) {
                uint32_t word[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (j + i >= COLUMNS / 8) {
                        word[i] = 0;
                        continue;
                    }
                    float pair[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        pair[e] = acc[4 * (j + i) + 2 * half + e];
                        if constexpr (KIND == Kind::SWIGLU) {
                            const float up = acc[BN / 4 + 4 * (j + i) + 2 * half + e];
                            pair[e] = silu_times(rounded(pair[e]), rounded(up));
                        }
                    }
                    word[i] = pack(pair[0], pair[1]);
                }
                const uint4 eight = transposed(word[0], word[1], word[2], word[3], t);
                if (exists && j + t < COLUMNS / 8 && column + (j + t) * 8 < outputs)
                    *reinterpret_cast<uint4*>(target + j * 8) = eight;
            }
        }
    }
    if (CLUSTER > 1) cluster_sync();  // no block ends while the other may write to its memory or barriers
}

#define GEMM_KERNEL(NAME, KIND, GROUPS, BN, STAGES, CLUSTER)                                                      \
    extern "C" __global__ void __launch_bounds__(128 * GROUPS + 32) __cluster_dims__(CLUSTER, 1, 1)                \
        NAME##_##GROUPS##_##BN##_##STAGES##_##CLUSTER(const __grid_constant__ TensorMap x,                         \
                                                      const __grid_constant__ TensorMap w, __half* y, int rows,   \
                                                      int outputs, int inputs) {                                  \
        multiply<GROUPS, BN, STAGES, CLUSTER, Kind::KIND>(&x, &w, y, rows, outputs, inputs);                       \
    }
#else
#define GEMM_KERNEL(NAME, KIND, GROUPS, BN, STAGES, CLUSTER)
#endif

GEMM_KERNEL(product, PLAIN, 1, 64, 6, 1)
GEMM_KERNEL(product, PLAIN, 1, 32, 8, 1)
GEMM_KERNEL(swiglu, SWIGLU, 2, 256, 4, 2)
GEMM_KERNEL(swiglu, SWIGLU, 2, 256, 4, 1)
GEMM_KERNEL(swiglu, SWIGLU, 2, 160, 5, 1)
GEMM_KERNEL(swiglu, SWIGLU, 1, 160, 4, 1)
GEMM_KERNEL(swiglu, SWIGLU, 1, 128, 4, 1)
GEMM_KERNEL(swiglu, SWIGLU, 1, 64, 6, 1)
