// Attention of sequences that decode: one query each, over the paged cache.
//
//   q        the queries inside qkv (T, (H + 2 G) D) half, rotated
//   caches   [pages, G, 16, D] half;  tables (S, stride): the pages of each sequence;  lengths (S,)
//   out      (T, H D) half
//
// starts: null where sequence s has row s of q and out; else (sequences + 1,), and it has row starts[s + 1] - 1.
// listed: null, or (S,) the sequences to compute, negative ones skipped. A length of 0 is skipped too.
//
// A block of 4 warps takes one sequence and one KV head with up to 16 (ROWS: 8) of the query heads that share it;
// the grid is (G * head tiles, S, splits). Bound by memory: 4 D bytes a key and KV head, each read once. A warp
// takes every fourth page. The tensor cores see S = Q K^T and O = P V as m16n8k16 with the query heads as rows, and
// both K and V go from memory into registers in 16-byte pieces, without shared memory: sums over D do not care for
// its order, so lane t of a group takes elements 8t .. 8t + 7 of a key's row, used as fragments of two steps, for
// queries and keys alike; and for V, lane g takes elements 8g .. 8g + 7 of four keys' rows, of which byte
// permutations make the pairs of keys that a fragment holds. The loads of the next page are issued before
// the present one is used up.
//
// The context is cut into segments of `segment_pages`. Within one, warps merge in order; then segments merge in
// order: within the block where there is one split, else by `decode_combine` from `partials` [S][H][segments][D]
// and `sums` [S][H][segments][2]. Both ways give the same bits: a result depends neither on the number of splits
// nor on the other sequences. Splits pay where S * G does not fill the chip.
//
// Options: -DHEAD_DIM, 64 or 128.
#include "attention.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "other head sizes: attention_any.cu");

static constexpr int D = HEAD_DIM;
static constexpr int WARPS = 4;
static constexpr int THREADS = WARPS * 32;
static constexpr int K_LOADS = D / 32;   // 16-byte pieces of a key's row a lane takes
static constexpr int V_LOADS = D / 64;
static constexpr int PITCH = D + 4;      // floats, of a row of results in shared memory

struct Page {
    Half8 k[2][K_LOADS];  // [tile of 8 keys][piece]
    Half8 v[4][V_LOADS];  // keys 2t, 2t+1, 2t+8, 2t+9
};

struct Cache {
    const __half* k;
    const __half* v;
    const int* table;
    int kv_heads;
    int kv_head;
    int length;
};

static __device__ __forceinline__ Half8 load_if(bool wanted, const __half* source) {
    if (wanted) return load_streaming(source);
    return Half8{{0, 0, 0, 0}};  // 0, not what lies in the page: 0 times NaN is NaN
}

static __device__ __forceinline__ int64_t page_offset(const Cache& cache, int page) {
    return (static_cast<int64_t>(cache.table[page]) * cache.kv_heads + cache.kv_head) * (PAGE * D);
}

static __device__ __forceinline__ void load_keys(Page& tile, const Cache& cache, int64_t offset, int page, int g,
                                                 int t) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int key = j * 8 + g;
#pragma unroll
        for (int i = 0; i < K_LOADS; ++i)
            tile.k[j][i] = load_if(page * PAGE + key < cache.length, cache.k + offset + key * D + i * 32 + t * 8);
    }
}

static __device__ __forceinline__ void load_values(Page& tile, const Cache& cache, int64_t offset, int page, int g,
                                                   int t) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int key = 2 * t + (j & 1) + (j >> 1) * 8;
#pragma unroll
        for (int i = 0; i < V_LOADS; ++i)
            tile.v[j][i] = load_if(page * PAGE + key < cache.length, cache.v + offset + key * D + i * 64 + g * 8);
    }
}

template <int ROWS>
static __device__ __forceinline__ void decode(const __half* __restrict__ q, const Cache& cache, int shared_heads,
                                              int first_segment, int segment_step, int segment_pages,
                                              int max_segments, float scale, __half* __restrict__ out,
                                              float* __restrict__ partials, float* __restrict__ sums) {
    constexpr bool WIDE = ROWS > 8;
    __shared__ __align__(16) float block_o[WARPS][ROWS][PITCH];
    __shared__ float block_m[WARPS][ROWS], block_l[WARPS][ROWS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;

    // Queries as A fragments; rows past the heads are zero.
    uint32_t qa[2 * K_LOADS][4];
#pragma unroll
    for (int i = 0; i < K_LOADS; ++i) {
        const Half8 zero{{0, 0, 0, 0}};
        const Half8 low = g < shared_heads ? *reinterpret_cast<const Half8*>(q + g * D + i * 32 + t * 8) : zero;
        const Half8 high =
            WIDE && g + 8 < shared_heads ? *reinterpret_cast<const Half8*>(q + (g + 8) * D + i * 32 + t * 8) : zero;
        qa[2 * i][0] = low.word[0], qa[2 * i][1] = high.word[0];
        qa[2 * i][2] = low.word[1], qa[2 * i][3] = high.word[1];
        qa[2 * i + 1][0] = low.word[2], qa[2 * i + 1][1] = high.word[2];
        qa[2 * i + 1][2] = low.word[3], qa[2 * i + 1][3] = high.word[3];
    }

    const int pages = (cache.length + PAGE - 1) / PAGE;
    const int segments = (pages + segment_pages - 1) / segment_pages;
    // What a thread owns of the block's result: PART elements of one row.
    constexpr int PART = ROWS * D / THREADS;
    const int own_row = threadIdx.x * PART / D, own_column = threadIdx.x * PART % D;
    float kept_m = negative_infinity(), kept_l = 0.0f, kept[PART] = {};

    // The warp's next page: its number, or `pages` where there is none.
    auto next_page = [&](int page) {
        const int after = page + WARPS;
        if (after % segment_pages >= WARPS) return min(after, pages);  // within the segment
        return min(after + (segment_step - 1) * segment_pages, pages);
    };
    Page tile;
    int page = min(first_segment * segment_pages + warp, pages);
    if (page < pages) {
        const int64_t offset = page_offset(cache, page);
        load_keys(tile, cache, offset, page, g, t);
        load_values(tile, cache, offset, page, g, t);
    }
    for (int segment = first_segment; segment < segments; segment += segment_step) {
        const int segment_end = min((segment + 1) * segment_pages, pages);
        float m[2] = {negative_infinity(), negative_infinity()}, l[2] = {};
        float o[8 * V_LOADS][4] = {};
        while (page < segment_end) {
            const int next = next_page(page);
            const int64_t next_offset = next < pages ? page_offset(cache, next) : 0;
            float s[2][4] = {};
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int i = 0; i < K_LOADS; ++i) {
                    mma(s[j], qa[2 * i], tile.k[j][i].word[0], tile.k[j][i].word[1]);
                    mma(s[j], qa[2 * i + 1], tile.k[j][i].word[2], tile.k[j][i].word[3]);
                }
            if (next < pages) load_keys(tile, cache, next_offset, next, g, t);

            uint32_t pa[4] = {};
#pragma unroll
            for (int half = 0; half < (WIDE ? 2 : 1); ++half) {
                float largest = m[half];
#pragma unroll
                for (int j = 0; j < 2; ++j)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float& score = s[j][2 * half + i];
                        const bool visible = page * PAGE + j * 8 + 2 * t + i < cache.length;
                        score = visible ? score * scale : negative_infinity();
                        largest = fmaxf(largest, score);
                    }
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
                if (__any_sync(0xffffffffu, largest > m[half])) {
                    const float shrink = weight_of(m[half], largest);
                    l[half] *= shrink;
#pragma unroll
                    for (int i = 0; i < 8 * V_LOADS; ++i) {
                        o[i][2 * half] *= shrink;
                        o[i][2 * half + 1] *= shrink;
                    }
                    m[half] = largest;
                }
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    // A page has a visible key, so `largest` is a number.
                    const float p0 = exp2f(s[j][2 * half] - largest), p1 = exp2f(s[j][2 * half + 1] - largest);
                    l[half] += p0 + p1;
                    pa[2 * j + half] = pack(p0, p1);
                }
            }
#pragma unroll
            for (int i = 0; i < V_LOADS; ++i)
#pragma unroll
                for (int d = 0; d < 8; ++d) {
                    const int which = d & 1 ? 0x7632 : 0x5410;
                    const uint32_t b0 = __byte_perm(tile.v[0][i].word[d / 2], tile.v[1][i].word[d / 2], which);
                    const uint32_t b1 = __byte_perm(tile.v[2][i].word[d / 2], tile.v[3][i].word[d / 2], which);
                    mma(o[i * 8 + d], pa, b0, b1);
                }
            if (next < pages) load_values(tile, cache, next_offset, next, g, t);
            page = next;
        }

        // Warps to shared memory: lane t has elements 16t .. 16t + 15 of each 64 of its rows.
#pragma unroll
        for (int half = 0; half < (WIDE ? 2 : 1); ++half) {
            l[half] += __shfl_xor_sync(0xffffffffu, l[half], 1);
            l[half] += __shfl_xor_sync(0xffffffffu, l[half], 2);
            const int row = g + 8 * half;
            if (t == 0) block_m[warp][row] = m[half], block_l[warp][row] = l[half];
#pragma unroll
            for (int i = 0; i < V_LOADS; ++i)
#pragma unroll
                for (int part = 0; part < 2; ++part)  // column 2t, column 2t + 1 of the fragments
#pragma unroll
                    for (int d = 0; d < 8; d += 4)
                        *reinterpret_cast<float4*>(&block_o[warp][row][i * 64 + t * 16 + part * 8 + d]) =
                            make_float4(o[i * 8 + d][2 * half + part], o[i * 8 + d + 1][2 * half + part],
                                        o[i * 8 + d + 2][2 * half + part], o[i * 8 + d + 3][2 * half + part]);
        }
        __syncthreads();
        float segment_m = negative_infinity(), segment_l = 0.0f, segment_o[PART] = {};
#pragma unroll
        for (int w = 0; w < WARPS; ++w) segment_m = fmaxf(segment_m, block_m[w][own_row]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float weight = weight_of(block_m[w][own_row], segment_m);
            segment_l = merged(segment_l, 1.0f, block_l[w][own_row], weight);
#pragma unroll
            for (int i = 0; i < PART; ++i)
                segment_o[i] = merged(segment_o[i], 1.0f, block_o[w][own_row][own_column + i], weight);
        }
        __syncthreads();
        if (partials != nullptr) {
            if (own_row < shared_heads) {
                const int64_t place = static_cast<int64_t>(own_row) * max_segments + segment;
#pragma unroll
                for (int i = 0; i < PART; ++i) partials[place * D + own_column + i] = segment_o[i];
                if (own_column == 0) sums[place * 2] = segment_m, sums[place * 2 + 1] = segment_l;
            }
        } else {
            const float largest = fmaxf(kept_m, segment_m);
            const float old_weight = weight_of(kept_m, largest), new_weight = weight_of(segment_m, largest);
            kept_l = merged(kept_l, old_weight, segment_l, new_weight);
#pragma unroll
            for (int i = 0; i < PART; ++i) kept[i] = merged(kept[i], old_weight, segment_o[i], new_weight);
            kept_m = largest;
        }
    }
    if (partials == nullptr && own_row < shared_heads) {
        const float inverse = __frcp_rn(kept_l);
        __half2* target = reinterpret_cast<__half2*>(out + own_row * D + own_column);
#pragma unroll
        for (int i = 0; i < PART; i += 2)
            target[i / 2] = __floats2half2_rn(__fmul_rn(kept[i], inverse), __fmul_rn(kept[i + 1], inverse));
    }
}

// The row of q and out that is sequence s's, and the sequence that block y computes; -1: none.
static __device__ __forceinline__ int sequence_of(const int* __restrict__ listed, const int* __restrict__ lengths,
                                                  int place) {
    const int sequence = listed != nullptr ? listed[place] : place;
    return sequence >= 0 && lengths[sequence] > 0 ? sequence : -1;
}

static __device__ __forceinline__ int64_t row_of(const int* __restrict__ starts, int sequence) {
    return starts != nullptr ? starts[sequence + 1] - 1 : sequence;
}

#define DECODE_KERNEL(ROWS)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                         \
        decode_attention_##ROWS(const __half* qkv, const __half* k_cache, const __half* v_cache,                  \
                                const int* tables, int table_stride, const int* lengths, const int* starts,       \
                                const int* listed, __half* out, float* partials, float* sums, int heads,          \
                                int kv_heads, int segment_pages, int max_segments, float scale) {                 \
        const int sequence = sequence_of(listed, lengths, blockIdx.y);                                            \
        if (sequence < 0) return;                                                                                 \
        const int group = heads / kv_heads, tiles = (group + ROWS - 1) / ROWS;                                    \
        const int kv_head = blockIdx.x / tiles, first = (blockIdx.x % tiles) * ROWS;                              \
        const int head = kv_head * group + first;                                                                 \
        const Cache cache{k_cache, v_cache, tables + static_cast<int64_t>(sequence) * table_stride,               \
                          kv_heads, kv_head, lengths[sequence]};                                                  \
        const int64_t row = row_of(starts, sequence);                                                             \
        const int64_t part = (static_cast<int64_t>(blockIdx.y) * heads + head) * max_segments;                    \
        decode<ROWS>(qkv + (row * (heads + 2 * kv_heads) + head) * D, cache, min(ROWS, group - first),            \
                     blockIdx.z, gridDim.z, segment_pages, max_segments, scale,                                   \
                     out + (row * heads + head) * D, partials == nullptr ? nullptr : partials + part * D,         \
                     sums + part * 2);                                                                            \
    }

DECODE_KERNEL(8)
DECODE_KERNEL(16)

// Merges the segments of each sequence and head; grid (H, S), a thread per element of a head.
extern "C" __global__ void __launch_bounds__(D)
    decode_combine(const float* __restrict__ partials, const float* __restrict__ sums,
                   const int* __restrict__ lengths, const int* __restrict__ starts, const int* __restrict__ listed,
                   __half* __restrict__ out, int heads, int segment_pages, int max_segments) {
    const int sequence = sequence_of(listed, lengths, blockIdx.y);
    if (sequence < 0) return;
    const int64_t part = (static_cast<int64_t>(blockIdx.y) * heads + blockIdx.x) * max_segments;
    const int segments = (lengths[sequence] + PAGE * segment_pages - 1) / (PAGE * segment_pages);
    float kept_m = negative_infinity(), kept_l = 0.0f, kept = 0.0f;
#pragma unroll 4
    for (int segment = 0; segment < segments; ++segment) {
        const float m = sums[(part + segment) * 2], l = sums[(part + segment) * 2 + 1];
        const float o = partials[(part + segment) * D + threadIdx.x];
        const float largest = fmaxf(kept_m, m);
        const float old_weight = weight_of(kept_m, largest), new_weight = weight_of(m, largest);
        kept_l = merged(kept_l, old_weight, l, new_weight);
        kept = merged(kept, old_weight, o, new_weight);
        kept_m = largest;
    }
    out[(row_of(starts, sequence) * heads + blockIdx.x) * D + threadIdx.x] =
        __float2half_rn(__fmul_rn(kept, __frcp_rn(kept_l)));
}
