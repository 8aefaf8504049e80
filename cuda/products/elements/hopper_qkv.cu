// Queries, keys and values on Hopper: their product, bias, rotation and cache write in one, by the main loop of
// `hopper_product.cuh`.
//
//   x  (T, K)      W  ((H + 2 G) D, K), elements: the rows of query, key and value heads
// Queries go to qkv (T, (H + 2 G) D), keys and values to their pages, as `qkv.cuh` says. Everything is computed and
// rounded as by `product_*` of `hopper_gemm.cu` and `qkv_rope_write` one after the other, to the same bits. No QK norm.
//
// A tile has BN / D heads. What belongs to a pair that is rotated is in one thread: columns c and c + D / 2 of a head, or
// 2 c and 2 c + 1. Every result is written once, in pieces of 16 bytes; where there are BUFFERS, queries by bulk copies
// (qkv_map: of qkv, with boxes of 64 rows by 128 bytes), keys and values, which belong to pages anywhere, not.
//
// Options: -DHEAD_DIM, 64 or 128; -DINTERLEAVED (0); -DKERNELS, a QKV_KERNEL for each tile, as `hopper_qkv.py` writes it.
// Kernels are named qkv_GROUPS_BN_STAGES_CLUSTER_BUFFERS.
#include "common/qkv.cuh"
#include "products/hopper_product.cuh"

static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "a tile has whole heads");

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Of the two rows that a thread has in a tile.
struct Rows {
    int table_row[2], cache_row[2];
};

// Brings what is read after the product close: nobody waits for it.
static __device__ __forceinline__ void touch(const void* source) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(source));
}

// Four words (8 columns each, of which a lane has two) of a row's head from column 32 part on, and the four of half a head
// further on, with which they are rotated: after rounding, bias and, but for values, rotation. `acc`: the head's columns.
static __device__ __forceinline__ void finish_part(uint32_t (&low)[4], uint32_t (&high)[4], const float* acc, int part,
                                                   int half, const float* bias, const float* angles, bool rotates,
                                                   int t) {
    float v[2][4][2];
#pragma unroll
    for (int side = 0; side < 2; ++side)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int j = side * (HEAD_DIM / 16) + 4 * part + i;
            const float2 added =
                bias != nullptr ? *reinterpret_cast<const float2*>(bias + 8 * j + 2 * t) : make_float2(0.0f, 0.0f);
            v[side][i][0] = rounded(acc[4 * j + 2 * half]) + added.x;
            v[side][i][1] = rounded(acc[4 * j + 2 * half + 1]) + added.y;
            if (INTERLEAVED && rotates) {
                const float2 angle = *reinterpret_cast<const float2*>(angles + 8 * j + 2 * t);
                rotate(v[side][i][0], v[side][i][1], angle.x, angle.y);
            }
        }
    if (!INTERLEAVED && rotates)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float4 two = *reinterpret_cast<const float4*>(angles + 2 * (8 * (4 * part + i) + 2 * t));
            rotate(v[0][i][0], v[1][i][0], two.x, two.y);
            rotate(v[0][i][1], v[1][i][1], two.z, two.w);
        }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        low[i] = pack(v[0][i][0], v[0][i][1]);
        high[i] = pack(v[1][i][0], v[1][i][1]);
    }
}

#ifdef KV_FP8
// Writes a head that four lanes have between them, lane t columns 8 j + 2 t, + 1 of each group j, to its page, unless cache_row is
// negative. All lanes of the warp call it.
static __device__ __forceinline__ void store_quantised(const Qkv& to, const uint32_t (&words)[HEAD_DIM / 8], int cache_row,
                                                       int head, int t) {
    float2 pairs[HEAD_DIM / 8];
    uint32_t largest = 0;
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; ++j) {
        pairs[j] = to_floats(*reinterpret_cast<const Element2*>(&words[j]));
        largest = max(largest, max(magnitude_bits(pairs[j].x), magnitude_bits(pairs[j].y)));
    }
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const Power power(largest);
    Kept* target = to.in_cache(max(cache_row, 0), head);
#pragma unroll
    for (int first = 0; first < HEAD_DIM / 8; first += 8) {
        uint32_t two[4];  // groups, the second in the high half
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 a = pairs[first + 2 * i], b = pairs[first + 2 * i + 1];
            two[i] = power.quantised(a.x, a.y) | power.quantised(b.x, b.y) << 16;
        }
        const uint4 all = transposed(two[0], two[1], two[2], two[3], t);
        if (cache_row >= 0)
            *reinterpret_cast<uint4*>(target + (first + 2 * t) * 8) =
                make_uint4(__byte_perm(all.x, all.y, 0x5410), __byte_perm(all.z, all.w, 0x5410),
                           __byte_perm(all.x, all.y, 0x7632), __byte_perm(all.z, all.w, 0x7632));
    }
    if (cache_row >= 0 && t == 0) *to.exponent_in_cache(cache_row, head) = static_cast<uint8_t>(power.exponent);
}
#endif

template <int GROUPS, int BN, int STAGES, int CLUSTER, int BUFFERS>
static __device__ __forceinline__ void qkv_product(const TensorMap* x_map, const TensorMap* w_map,
                                                   const TensorMap* qkv_map, const Qkv& to, int tokens, int width) {
    static_assert(BN % HEAD_DIM == 0, "a tile has whole heads");
    constexpr int HEADS = BN / HEAD_DIM, AT_ONCE = BUFFERS > 0 ? BUFFERS * 64 / HEAD_DIM : HEADS;  // heads in the outbox
    static_assert(HEADS % AT_ONCE == 0, "the outbox is filled so many times");
    const int all_heads = to.all_heads();
    auto prepare = [&](int row, int column) {
        Rows ready;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const bool exists = row + 8 * half < tokens;
            ready.table_row[half] = to.table_row(exists ? to.positions[row + 8 * half] : 0);
            ready.cache_row[half] = exists ? to.cache_rows[row + 8 * half] : -1;
        }
        const int part = threadIdx.x % 4 * (HEAD_DIM / 4);  // lanes share the row, and the bias of a head
#pragma unroll
        for (int half = 0; half < 2; ++half)
            touch(to.angles(ready.table_row[half]) + part);
        if (to.bias != nullptr)
#pragma unroll
            for (int i = 0; i < BN / HEAD_DIM; ++i)
                if (column / HEAD_DIM + i < all_heads) touch(to.bias + column + i * HEAD_DIM + part);
        return ready;
    };
    auto finish = [&](const float(&acc)[BN / 2], int row, int column, const Rows& ready, const Outbox& outbox) {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int begin = 0; begin < HEADS; begin += AT_ONCE) {
            if (BUFFERS > 0) outbox.open();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int token = row + 8 * half;
                const bool exists = token < tokens;
                const int cache_row = ready.cache_row[half];
                const float* angles = to.angles(ready.table_row[half]);
#pragma unroll
                for (int i = begin; i < begin + AT_ONCE; ++i) {
                    const int head = column / HEAD_DIM + i;
                    if (head >= all_heads) break;
                    const bool is_query = to.is_query(head), by_copy = BUFFERS > 0 && is_query;
                    Element* target = to.in_qkv(token, head);
#ifndef KV_FP8
                    if (!is_query) target = to.in_cache(max(cache_row, 0), head);
#endif
                    uint32_t kept[HEAD_DIM / 8];
                    auto put = [&](const uint32_t(&words)[4], int first) {  // from column group `first` of the head on
                        if (KEPT_AS_FP8 && !is_query) {
#pragma unroll
                            for (int j = 0; j < 4; ++j) kept[first + j] = words[j];
                            return;
                        }
                        const int place = (i - begin) * (HEAD_DIM / 8) + first;
                        if (by_copy)
                            put_elements(outbox.piece(place / 8), half, place % 8, words);
                        else
                            store_row<32>(target + 8 * first, exists && (is_query || cache_row >= 0), 32, t,
                                          [&](int j) { return words[j]; });
                    };
#pragma unroll
                    for (int part = 0; part < HEAD_DIM / 64; ++part) {
                        uint32_t low[4], high[4];
                        finish_part(low, high, acc + i * HEAD_DIM / 2, part, half,
                                    to.bias == nullptr ? nullptr : to.bias + head * HEAD_DIM, angles,
                                    !to.is_value(head), t);
                        put(low, 4 * part);
                        put(high, HEAD_DIM / 16 + 4 * part);
                    }
#ifdef KV_FP8
                    if (!is_query) store_quantised(to, kept, exists ? cache_row : -1, head, t);
#endif
                }
            }
            if (BUFFERS > 0) {
                const int top = row - threadIdx.x % 128 / 32 * 16 - threadIdx.x % 32 / 4;
                outbox.send([&] {
                    for (int i = 0; i < BUFFERS; ++i)
                        if (const int at = column + begin * HEAD_DIM + i * 64; at < to.heads * HEAD_DIM)
                            store_box(qkv_map, outbox.piece(i), at, top);
                });
            }
        }
    };
    const auto nothing = [](const auto&...) {};
    multiply<GROUPS, BN, STAGES, CLUSTER, 1, BUFFERS, 1>(x_map, w_map, tokens, all_heads * HEAD_DIM, width, width, prepare,
                                                         nothing, finish);
}

#define QKV_KERNEL(GROUPS, BN, STAGES, CLUSTER, BUFFERS)                                                           \
    extern "C" __global__ void __launch_bounds__(128 * GROUPS + 32) __cluster_dims__(CLUSTER, 1, 1)                \
        qkv_##GROUPS##_##BN##_##STAGES##_##CLUSTER##_##BUFFERS(                                                    \
            const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,                             \
            const __grid_constant__ TensorMap qkv_map, const float* bias, const int* positions,                   \
            const int* cache_rows, const float* table, int table_rows, Element* qkv, Kept* keys, Kept* values,       \
            int tokens, int heads, int kv_heads, int width) {                                                     \
        KERNEL_BEGINS();                                                                                          \
        const Qkv to{qkv, keys, values, bias, positions, cache_rows, table, table_rows, heads, kv_heads};         \
        qkv_product<GROUPS, BN, STAGES, CLUSTER, BUFFERS>(&x, &w, &qkv_map, to, tokens, width);                   \
    }
#else
#define QKV_KERNEL(GROUPS, BN, STAGES, CLUSTER, BUFFERS)
#endif

KERNELS  // of `hopper_qkv.py`
