// Queries, keys and values on Hopper with packed weights: their product, bias, rotation and cache write in one, by the main loop
// of `packed_product.cuh`.
//
//   x  (T, K) elements      W  ((H + 2 G) D, K) packed: the rows of query, key and value heads
// Queries go to qkv (T, (H + 2 G) D), keys and values to their pages, as `qkv.cuh` says, to the bits of `hopper_qkv.cu` over the
// dequantised weights.
//
// A tile has BN / 2 columns of the first half of a head and those half a head further on, so that what is rotated together is in
// one thread, and heads are shared by as many blocks as there should be.
//
// Options: -DFORMAT; -DHEAD_DIM, 64 or 128; -DINTERLEAVED (0); -DKERNELS, a PACKED_QKV_KERNEL for each tile, as `packed_qkv.py`
// writes it. Kernels are named qkv_BR_BN_BOXES_STAGES_PACKETS_WARPS.
#include "common/qkv.cuh"
#include "products/packed_product.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

static constexpr int HALF = HEAD_DIM / 2;

// Of the two rows that a thread has in a tile.
struct Rows {
    int table_row[2], cache_row[2];
};

template <typename Loop>
static __device__ __forceinline__ void qkv_product(const TensorMap* x_map, const TensorMap* w_map, const Qkv& to, int tokens,
                                                   int width, int box_rows) {
    constexpr int BN = Loop::BN, COLUMNS = BN / 2;
    static_assert(HALF % COLUMNS == 0, "a tile has parts of one head");
    const auto prepare = [&](int row, int) {
        Rows ready;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const bool exists = row + 8 * half < tokens;
            ready.table_row[half] = to.table_row(exists ? to.positions[row + 8 * half] : 0);
            ready.cache_row[half] = exists ? to.cache_rows[row + 8 * half] : -1;
        }
        return ready;
    };
    const auto finish = [&](const float(&acc)[BN / 2], int row, int column, const Rows& ready, const Outbox&) {
        const int head = column / HEAD_DIM, first = column % HEAD_DIM, t = threadIdx.x % 4;
        const bool is_query = to.is_query(head), rotates = !to.is_value(head);
        const float* bias = to.bias == nullptr ? nullptr : to.bias + column;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = row + 8 * half, cache_row = ready.cache_row[half];
            const float* angles = to.angles(ready.table_row[half]);
            uint32_t words[2][COLUMNS / 8];
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; ++j) {
                float v[2][2];
#pragma unroll
                for (int side = 0; side < 2; ++side) {
                    const int at = 8 * j + 2 * t + side * HALF;
                    const float2 added = bias != nullptr ? *reinterpret_cast<const float2*>(bias + at) : make_float2(0.0f, 0.0f);
                    v[side][0] = rounded(acc[side * BN / 4 + 4 * j + 2 * half]) + added.x;
                    v[side][1] = rounded(acc[side * BN / 4 + 4 * j + 2 * half + 1]) + added.y;
                    if (INTERLEAVED && rotates) {
                        const float2 angle = *reinterpret_cast<const float2*>(angles + first + at);
                        rotate(v[side][0], v[side][1], angle.x, angle.y);
                    }
                }
                if (!INTERLEAVED && rotates) {
                    const float4 two = *reinterpret_cast<const float4*>(angles + 2 * (first + 8 * j + 2 * t));
                    rotate(v[0][0], v[1][0], two.x, two.y);
                    rotate(v[0][1], v[1][1], two.z, two.w);
                }
#pragma unroll
                for (int side = 0; side < 2; ++side) words[side][j] = pack(v[side][0], v[side][1]);
            }
            Element* target = is_query ? to.in_qkv(token, head) : to.in_cache(max(cache_row, 0), head);
            const bool written = token < tokens && (is_query || cache_row >= 0);
#pragma unroll
            for (int side = 0; side < 2; ++side)
                store_row<COLUMNS>(target + first + side * HALF, written, COLUMNS, t, [&](int j) { return words[side][j]; });
        }
    };
    const auto nothing = [](const auto&...) {};
    Loop::template run<2, 0, 1, HALF>(x_map, w_map, tokens, to.all_heads() * HALF, width, width, box_rows, prepare, nothing,
                                      finish);
}

#define PACKED_QKV_KERNEL(BR, BN, BOXES, STAGES, PACKETS, WARPS)                                                   \
    extern "C" __global__ void __launch_bounds__(PackedLoop<BR, BN, BOXES, STAGES, PACKETS, WARPS>::THREADS, 1)    \
        qkv_##BR##_##BN##_##BOXES##_##STAGES##_##PACKETS##_##WARPS(                                               \
            const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const float* bias,           \
            const int* positions, const int* cache_rows, const float* table, int table_rows, Element* qkv,         \
            Kept* keys, Kept* values, int tokens,       int heads, int kv_heads, int width, int box_rows) {        \
        const Qkv to{qkv, keys, values, bias, positions, cache_rows, table, table_rows, heads, kv_heads};         \
        qkv_product<PackedLoop<BR, BN, BOXES, STAGES, PACKETS, WARPS>>(&x, &w, to, tokens, width, box_rows);       \
    }
#else
#define PACKED_QKV_KERNEL(BR, BN, BOXES, STAGES, PACKETS, WARPS)
#endif

KERNELS  // of `packed_qkv.py`
