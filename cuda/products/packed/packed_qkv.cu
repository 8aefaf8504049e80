// Queries, keys and values on Hopper with packed weights: their product, bias, rotation and cache write in one, by the main loop
// of `packed_product.cuh`.
//
//   x  (T, K) elements      W  ((H + 2 G) D, K) packed: the rows of query, key and value heads
// Queries go to qkv (T, (H + 2 G) D), keys and values to their pages, as `qkv.cuh` says, to the bits of `hopper_qkv.cu` over the
// dequantised weights.
//
// A warp has 8 outputs of the first half of a head and those half a head further on, so that what is rotated together is in one
// lane; or, where neighbours are rotated together, in lanes side by side.
//
// The last heads may be in a second format: the last blocks compute them.
//
// Options: -DFORMAT, and -DLAST_FORMAT if there is a second one; -DHEAD_DIM, 64 or 128; -DINTERLEAVED (0); -DKERNELS, a
// PACKED_QKV_KERNEL for each tile, as `packed_qkv.py` writes it. Kernels are named
// qkv_GROUPS_BN_BOXES_STAGES_PACKETS_CLUSTER_BLOCKS_RELAY_TURN_STAGES_PACKETS, the last two of the second format.
#include "common/qkv.cuh"
#include "products/packed/packed_product.cuh"
#include <type_traits>

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#ifdef LAST_FORMAT
using Last = packed::LAST_FORMAT;
#else
using Last = Packed;
#endif

static constexpr int HALF = HEAD_DIM / 2;

// Of so many heads, from `first_head` on.
template <typename Loop>
static __device__ __forceinline__ void qkv_product(const TensorMap* x_map, const TensorMap* w_map, const Qkv& to, int tokens,
                                                   int width, int first_head, int heads, int block, int blocks) {
    constexpr int BN = Loop::BN;
    const auto nothing = [](const auto&...) {};
    const auto finish = [&](const float(&acc)[BN / 2], const Place& place) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const int head = first_head + place.output / HEAD_DIM, within = place.output % HEAD_DIM;
        if (head >= first_head + heads) return;
        const bool is_query = to.is_query(head), rotates = !to.is_value(head);
        float bias[2] = {};
        if (to.bias != nullptr)
#pragma unroll
            for (int side = 0; side < 2; ++side) bias[side] = to.bias[head * HEAD_DIM + within + side * HALF];
#pragma unroll
        for (int j = 0; j < BN / 8; ++j) {
            float v[2][2];  // of a side, of a token
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int token = place.row + 8 * j + e;
#pragma unroll
                for (int side = 0; side < 2; ++side) v[side][e] = rounded(acc[4 * j + 2 * side + e]) + bias[side];
                if (!rotates) continue;
                const float* angles = to.angles(to.table_row(token < tokens ? to.positions[token] : 0));
                if (!INTERLEAVED) {
                    const float2 angle = *reinterpret_cast<const float2*>(angles + 2 * within);
                    rotate(v[0][e], v[1][e], angle.x, angle.y);
                } else {
#pragma unroll
                    for (int side = 0; side < 2; ++side) {
                        const int first = (within + side * HALF) & ~1;
                        const float2 angle = *reinterpret_cast<const float2*>(angles + first);
                        const float other = __shfl_xor_sync(0xffffffffu, v[side][e], 4);
                        float x = g % 2 ? other : v[side][e], y = g % 2 ? v[side][e] : other;
                        rotate(x, y, angle.x, angle.y);
                        v[side][e] = g % 2 ? y : x;
                    }
                }
            }
            const int token = place.row - 2 * t + 8 * j + g;
            const int cache_row = token < tokens ? to.cache_rows[token] : -1;
            const uint32_t words[2] = {turned(pack(v[0][0], v[0][1])), turned(pack(v[1][0], v[1][1]))};
            if (token >= tokens || (!is_query && cache_row < 0)) continue;
            Element* target = (is_query ? to.in_qkv(token, head) : to.in_cache(cache_row, head)) + within - g + 2 * t;
            *reinterpret_cast<uint32_t*>(target) = words[0];
            *reinterpret_cast<uint32_t*>(target + HALF) = words[1];
        }
    };
    Loop::template run<2, 1, HALF>(x_map, w_map, tokens, heads * HALF, width, width, block, blocks, nothing, finish);
}

template <typename First, typename Second>
static __device__ __forceinline__ void qkv_products(const TensorMap* x_map, const TensorMap* w_map, const TensorMap* last_map,
                                                    const Qkv& to, int tokens, int width, int last_heads, int last_blocks) {
    const int block = blockIdx.x, first_blocks = gridDim.x - last_blocks, first_heads = to.all_heads() - last_heads;
    if (std::is_same<First, Second>::value || block < first_blocks)
        qkv_product<First>(x_map, w_map, to, tokens, width, 0, first_heads, block, first_blocks);
    else
        qkv_product<Second>(x_map, last_map, to, tokens, width, first_heads, last_heads, block - first_blocks, last_blocks);
}

#define PACKED_QKV_KERNEL(GROUPS, BN, BOXES, STAGES, PACKETS, CLUSTER, BLOCKS, RELAY, TURN, LAST_STAGES, LAST_PACKETS)        \
    extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1)                                                                \
        __launch_bounds__(PackedLoop<Packed, GROUPS, BN, BOXES, STAGES, PACKETS, CLUSTER, BLOCKS, RELAY, TURN>::THREADS,      \
                          BLOCKS)                                                                                             \
            qkv_##GROUPS##_##BN##_##BOXES##_##STAGES##_##PACKETS##_##CLUSTER##_##BLOCKS##_##RELAY##_##TURN##                  \
            _##LAST_STAGES##_##LAST_PACKETS(                                                                                  \
                const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,                                     \
                const __grid_constant__ TensorMap last_w, const float* bias, const int* positions, const int* cache_rows,     \
                const float* table, int table_rows, Element* qkv, Kept* keys, Kept* values, int tokens, int heads,            \
                int kv_heads, int width, int last_heads, int last_blocks) {                                                   \
        KERNEL_BEGINS();                                                                                                      \
        const Qkv to{qkv, keys, values, bias, positions, cache_rows, table, table_rows, heads, kv_heads};                     \
        using First = PackedLoop<Packed, GROUPS, BN, BOXES, STAGES, PACKETS, CLUSTER, BLOCKS, RELAY, TURN>;                   \
        using Second = PackedLoop<Last, GROUPS, BN, BOXES, LAST_STAGES, LAST_PACKETS, CLUSTER, BLOCKS, RELAY, TURN>;          \
        qkv_products<First, Second>(&x, &w, &last_w, to, tokens, width, last_heads, last_blocks);                             \
    }
#else
#define PACKED_QKV_KERNEL(...)
#endif

KERNELS  // of `packed_qkv.py`
