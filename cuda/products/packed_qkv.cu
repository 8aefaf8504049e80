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
// Options: -DFORMAT; -DHEAD_DIM, 64 or 128; -DINTERLEAVED (0); -DKERNELS, a PACKED_QKV_KERNEL for each tile, as `packed_qkv.py`
// writes it. Kernels are named qkv_GROUPS_BN_BOXES_STAGES_PACKETS_CLUSTER_BLOCKS_RELAY.
#include "common/qkv.cuh"
#include "products/packed_product.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

static constexpr int HALF = HEAD_DIM / 2;

template <typename Loop>
static __device__ __forceinline__ void qkv_product(const TensorMap* x_map, const TensorMap* w_map, const Qkv& to, int tokens,
                                                   int width) {
    constexpr int BN = Loop::BN;
    const auto nothing = [](const auto&...) {};
    const auto finish = [&](const float(&acc)[BN / 2], const Place& place) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const int head = place.output / HEAD_DIM, within = place.output % HEAD_DIM;
        if (head >= to.all_heads()) return;
        const bool is_query = to.is_query(head), rotates = !to.is_value(head);
        float bias[2] = {};
        if (to.bias != nullptr)
#pragma unroll
            for (int side = 0; side < 2; ++side) bias[side] = to.bias[place.output + side * HALF];
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
    Loop::template run<2, 1, HALF>(x_map, w_map, tokens, to.all_heads() * HALF, width, width, nothing, finish);
}

#define PACKED_QKV_KERNEL(GROUPS, BN, BOXES, STAGES, PACKETS, CLUSTER, BLOCKS, RELAY)                               \
    extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1)                                                      \
        __launch_bounds__(PackedLoop<GROUPS, BN, BOXES, STAGES, PACKETS, CLUSTER, BLOCKS, RELAY>::THREADS, BLOCKS) \
            qkv_##GROUPS##_##BN##_##BOXES##_##STAGES##_##PACKETS##_##CLUSTER##_##BLOCKS##_##RELAY(                 \
                const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const float* bias,        \
                const int* positions, const int* cache_rows, const float* table, int table_rows, Element* qkv,      \
                Kept* keys, Kept* values, int tokens, int heads, int kv_heads, int width) {                         \
        const Qkv to{qkv, keys, values, bias, positions, cache_rows, table, table_rows, heads, kv_heads};           \
        qkv_product<PackedLoop<GROUPS, BN, BOXES, STAGES, PACKETS, CLUSTER, BLOCKS, RELAY>>(&x, &w, to, tokens,    \
                                                                                            width);                \
    }
#else
#define PACKED_QKV_KERNEL(...)
#endif

KERNELS  // of `packed_qkv.py`
