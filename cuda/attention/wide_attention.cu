// Attention of drawn tokens and of chunks of prompts with rows too wide for the registers of a warp: heads of 512, and latent
// attention (MLA, absorbed), where pages hold one row of D numbers a token for all heads, which is its key, and whose first V are
// its value too.
//
//   queries  (T, H, D) elements; of heads of 512 the queries inside qkv (T, H + 2 G, D);  out (T, H, V)
//   caches   pages as `kv_cache.cuh` says, of latents one for both;  tables (S, stride): the pages of each sequence
//
// Work is tiles of ROWS queries by KEYS keys: `wide_tiles.cuh`.
//
// wide_decode_STAGES: grid (G * tiles of 32 heads, pieces); pieces (N, 4) as in `decode_attention.cu`, but that all results of a context
// which is cut meet as segments: (sequence, first | end << 16, base or -1, length). A segment's result begins anew, and is merged
// into those before it in order: here, if a block has the whole context, else by wide_merge from partials (segments, H, V) and
// sums (segments, H, 2), so the bits are those of one block. Bytes: of latents 2 D a token, for all heads, else 4 D a KV head. FLOPs:
// 2 (D + V) a head and key, of latents 19 for each byte with 20 heads, of which mma.sync has enough.
// wide_merge: grid (H, pieces), a thread has four elements of a head.
// wide_prefill_ROWS: grid (H / group, tiles); a tile has ROWS / group tokens and as many heads as `group`. Keys count from the
// sequence's first, so that a row's bits do not depend on how its prompt was cut. Compute-bound, like all prefill.
//
// With fewer rows and one stage a block takes 82 KB of shared memory for latents, for GPUs that give it no more than 99; 88 KB for
// heads of 512, whose queries go to registers before the first tile comes to where they were.
//
// Options: -DHEAD_DIM (D): 512; or of latents a multiple of 64, and -DVALUE_DIM (V): 512.
#include "attention/wide_tiles.cuh"

template <int ROWS, int STAGES>
static __device__ __forceinline__ void decode(const Element* queries, const Kept* keys, const Kept* values, const int* tables,
                                              int table_stride, const int4* pieces, Element* out, float* partials,
                                              float* sums_of_parts, int heads, int kv_heads, int segment_pages,
                                              float scale) {
    extern __shared__ __align__(128) unsigned char memory[];
    launch_next();
    const int4 words = pieces[blockIdx.y];  // there before the step starts, and so are tables
    const int sequence = words.x, first_segment = words.y & 0xffff, end_segment = words.y >> 16, base = words.z;
    if (sequence < 0 || words.w <= 0) return;
    const int segment_tiles = segment_pages * PAGE / KEYS;
    const int group = heads / kv_heads, head_tiles = (group + ROWS - 1) / ROWS;
    const int kv_head = blockIdx.x / head_tiles, head = blockIdx.x % head_tiles * ROWS;  // the latter of those of the KV head
    const Cache from{keys, values, tables + static_cast<int64_t>(sequence) * table_stride, kv_heads, kv_head,
                     min(words.w, end_segment * segment_pages * PAGE)};
    const Shared<ROWS, STAGES> shared(memory);
    const int first_head = kv_head * group + head, here = min(group - head, ROWS);
    const int64_t row = static_cast<int64_t>(sequence) * heads + first_head;
    const int64_t first_query = static_cast<int64_t>(sequence) * all_heads(heads, kv_heads) + first_head;
    wait_for_previous(queries, keys, values);
    shared.load_queries([&](int i) { return i < here ? queries + (first_query + i) * D : nullptr; });
    RowSums<ROWS> sums, kept_sums;
    Mixed<ROWS> mixed, kept;
    const int end = (from.end + KEYS - 1) / KEYS;
    attend<ROWS, STAGES>(
        shared, from, first_segment * segment_tiles, end, scale, sums, mixed, [&] { return from.end; },
        [&](int tile) {
            if ((tile + 1) % segment_tiles != 0 && tile + 1 != end) return;
            if (base >= 0) {
                const int64_t part = static_cast<int64_t>(base + tile / segment_tiles) * heads + first_head;
                mixed.each([&](int i, int column, float* pair) {
                    if (i < here)
                        *reinterpret_cast<float2*>(partials + (part + i) * V + column) = make_float2(pair[0], pair[1]);
                    pair[0] = pair[1] = 0.0f;
                });
                if (sums.is_first() && sums.row() < here)
                    *reinterpret_cast<float2*>(sums_of_parts + (part + sums.row()) * 2) = make_float2(sums.m, sums.l);
            } else {
                const float largest = fmaxf(kept_sums.m, sums.m);
                const float old_weight = weight_of(kept_sums.m, largest), new_weight = weight_of(sums.m, largest);
                kept_sums.l = merged(kept_sums.l, old_weight, sums.l, new_weight);
                kept_sums.m = largest;
                __syncthreads();  // `shrink` was read
                if (sums.is_first()) shared.shrink[sums.row()] = old_weight, shared.gain[sums.row()] = new_weight;
                __syncthreads();
#pragma unroll
                for (int part = 0; part < ROWS / 16; ++part)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int i = part * 16 + threadIdx.x % 32 / 4 + 8 * half;
                        const float old_one = shared.shrink[i], new_one = shared.gain[i];
#pragma unroll
                        for (int n = 0; n < OWN / 8; ++n)
#pragma unroll
                            for (int j = 2 * half; j < 2 * half + 2; ++j) {
                                kept.o[part][n][j] = merged(kept.o[part][n][j], old_one, mixed.o[part][n][j], new_one);
                                mixed.o[part][n][j] = 0.0f;
                            }
                    }
            }
            sums = RowSums<ROWS>();
        });
    if (base >= 0) return;
    __syncthreads();
    if (sums.is_first()) shared.gain[sums.row()] = __frcp_rn(kept_sums.l);
    __syncthreads();
    kept.each([&](int i, int column, const float* pair) {
        if (i >= here) return;
        const float inverse = shared.gain[i];
        *reinterpret_cast<Element2*>(out + (row + i) * V + column) =
            to_elements(__fmul_rn(pair[0], inverse), __fmul_rn(pair[1], inverse));
    });
}

extern "C" __global__ void __launch_bounds__(V / 4)
    wide_merge(const int4* __restrict__ pieces, const float* __restrict__ partials,
                 const float* __restrict__ sums_of_parts, Element* __restrict__ out, int heads, int segment_pages) {
    constexpr int AT_ONCE = 8;  // loads under way
    launch_next();
    const int4 words = pieces[blockIdx.y];
    wait_for_previous(partials, sums_of_parts);  // also where no context is cut: what follows waits for this kernel alone
    if (words.x < 0 || words.z < 0 || (words.y & 0xffff) != 0) return;  // the first piece of a context stands for it
    const int segments = (words.w + segment_pages * PAGE - 1) / (segment_pages * PAGE);
    const int64_t first = static_cast<int64_t>(words.z) * heads + blockIdx.x;
    float m = NO_SCORE, l = 0.0f, o[4] = {};
    for (int begin = 0; begin < segments; begin += AT_ONCE) {
        float4 part[AT_ONCE];
        float2 sum[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (begin + i >= segments) break;
            const int64_t place = first + static_cast<int64_t>(begin + i) * heads;
            part[i] = __ldcg(reinterpret_cast<const float4*>(partials + place * V) + threadIdx.x);
            sum[i] = __ldcg(reinterpret_cast<const float2*>(sums_of_parts) + place);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (begin + i >= segments) break;
            const float largest = fmaxf(m, sum[i].x);
            const float old_weight = weight_of(m, largest), new_weight = weight_of(sum[i].x, largest);
            l = merged(l, old_weight, sum[i].y, new_weight);
            o[0] = merged(o[0], old_weight, part[i].x, new_weight), o[1] = merged(o[1], old_weight, part[i].y, new_weight);
            o[2] = merged(o[2], old_weight, part[i].z, new_weight), o[3] = merged(o[3], old_weight, part[i].w, new_weight);
            m = largest;
        }
    }
    const float inverse = __frcp_rn(l);
    Element* target = out + (static_cast<int64_t>(words.x) * heads + blockIdx.x) * V + threadIdx.x * 4;
    *reinterpret_cast<uint2*>(target) = make_uint2(pack(__fmul_rn(o[0], inverse), __fmul_rn(o[1], inverse)),
                                                   pack(__fmul_rn(o[2], inverse), __fmul_rn(o[3], inverse)));
}

template <int ROWS, int STAGES>
static __device__ __forceinline__ void prefill(const Element* queries, const Kept* keys, const Kept* values, const int* tables,
                                               int table_stride, const int* lengths, const int* starts, const int* tiles,
                                               Element* out, int heads, int kv_heads, int group, float scale) {
    extern __shared__ __align__(128) unsigned char memory[];
    launch_next();
    wait_for_previous(queries, keys, values);
    const int sequence = tiles[2 * blockIdx.y];
    if (sequence < 0) return;
    const int start = starts[sequence], chunk_tokens = starts[sequence + 1] - start;
    const int length = lengths[sequence], tile_tokens = ROWS / group;
    const int first_token = tiles[2 * blockIdx.y + 1] * tile_tokens;
    const int tokens = min(tile_tokens, chunk_tokens - first_token);
    if (tokens <= 0 || length <= 0) return;
    const int first_visible = length - chunk_tokens + first_token + 1;  // keys that the tile's first token sees
    const int first_head = blockIdx.x * group;  // and those after it have the same KV head
    const Cache from{keys, values, tables + static_cast<int64_t>(sequence) * table_stride, kv_heads,
                     first_head / (heads / kv_heads), first_visible + tokens - 1};
    const Shared<ROWS, STAGES> shared(memory);
    auto row_of = [&](int i, int heads) {
        return static_cast<int64_t>(start + first_token + i / group) * heads + first_head + i % group;
    };
    shared.load_queries([&](int i) {
        return i < tokens * group ? queries + row_of(i, all_heads(heads, kv_heads)) * D : nullptr;
    });
    RowSums<ROWS> sums;
    Mixed<ROWS> mixed;
    const int own = sums.row() / group;
    const int seen = own < tokens ? first_visible + own : 0;
    attend<ROWS, STAGES>(
        shared, from, 0, (from.end + KEYS - 1) / KEYS, scale, sums, mixed, [&] { return seen; }, [](int) {});
    if (sums.is_first()) shared.gain[sums.row()] = __frcp_rn(sums.l);
    __syncthreads();
    mixed.each([&](int i, int column, const float* pair) {
        if (i >= tokens * group) return;
        const float inverse = shared.gain[i];
        *reinterpret_cast<Element2*>(out + row_of(i, heads) * V + column) =
            to_elements(__fmul_rn(pair[0], inverse), __fmul_rn(pair[1], inverse));
    });
}

#define DECODE_KERNEL(STAGES)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) wide_decode_##STAGES(                                  \
        const Element* __restrict__ queries, const Kept* __restrict__ keys, const Kept* __restrict__ values,        \
        const int* __restrict__ tables, int table_stride, const int4* __restrict__ pieces, Element* __restrict__ out, \
        float* __restrict__ partials, float* __restrict__ sums_of_parts, int heads, int kv_heads, int segment_pages, \
        float scale) {                                                                                              \
        decode<32, STAGES>(queries, keys, values, tables, table_stride, pieces, out, partials, sums_of_parts, heads, \
                           kv_heads, segment_pages, scale);                                                         \
    }

#define PREFILL_KERNEL(ROWS, STAGES)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) wide_prefill_##ROWS(                                   \
        const Element* __restrict__ queries, const Kept* __restrict__ keys, const Kept* __restrict__ values,        \
        const int* __restrict__ tables, int table_stride, const int* __restrict__ lengths,                          \
        const int* __restrict__ starts, const int* __restrict__ tiles, Element* __restrict__ out, int heads,        \
        int kv_heads, int group, float scale) {                                                                     \
        prefill<ROWS, STAGES>(queries, keys, values, tables, table_stride, lengths, starts, tiles, out, heads,      \
                              kv_heads, group, scale);                                                              \
    }

#ifdef VALUE_DIM
DECODE_KERNEL(3)
DECODE_KERNEL(1)
PREFILL_KERNEL(64, 2)
PREFILL_KERNEL(32, 1)
#else
DECODE_KERNEL(2)
DECODE_KERNEL(1)
PREFILL_KERNEL(64, 2)
PREFILL_KERNEL(32, 1)
#endif
