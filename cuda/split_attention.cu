// Decode attention of too few sequences to fill the chip: as `decode_attention.cu`, to the same bits, with every segment
// in a block of its own.
//
// Arguments as there; counters (S, G * head tiles), zero before and after. The grid is (G * head tiles, S, segments
// of the longest context). A warp asks for AHEAD pages at once, in place of one after the other, and for those that
// hold no token of this step before it waits for the kernel ahead. The last block of a sequence and KV head to finish
// merges the segments, in order, from `partials` [S][H][segments][D] and `sums` [S][H][segments][2].
//
// Options: -DHEAD_DIM, 64 or 128.
#include "decode_page.cuh"

static constexpr int AHEAD = D == 64 ? 4 : 2;

template <int ROWS>
static __device__ __forceinline__ void decode_split(const __half* qkv, const __half* k_cache, const __half* v_cache,
                                                  const int* tables, int table_stride, const int* lengths,
                                                  const int* starts, const int* listed, __half* out, float* partials,
                                                  float* sums, unsigned* counters, int heads, int kv_heads,
                                                  int segment_pages, int max_segments, float scale) {
    __shared__ bool last;
    launch_next();
    // Tables and lengths are there before the step starts.
    const int sequence = sequence_of(listed, lengths, blockIdx.y);
    if (sequence < 0) return;
    const int group = heads / kv_heads, tiles = (group + ROWS - 1) / ROWS;
    const int kv_head = blockIdx.x / tiles, first_head = blockIdx.x % tiles * ROWS;
    const int head = kv_head * group + first_head, shared_heads = min(ROWS, group - first_head);
    const Cache cache{k_cache, v_cache, tables + static_cast<int64_t>(sequence) * table_stride,
                      kv_heads, kv_head, lengths[sequence]};
    const int pages = (cache.length + PAGE - 1) / PAGE;
    const int segments = (pages + segment_pages - 1) / segment_pages;
    const int segment = blockIdx.z;
    if (segment >= segments) return;
    const int first = segment * segment_pages, end = min(first + segment_pages, pages);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;

    Page tile[AHEAD];
    auto load = [&](int begin, int from, int to) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int page = begin + i * WARPS + warp;
            if (page < from || page >= to) continue;
            const int64_t offset = page_offset(cache, page);
            load_keys(tile[i], cache, offset, page, g, t);
            load_values(tile[i], cache, offset, page, g, t);
        }
    };
    load(first, first, min(end, pages - 1));  // the last page gets a token in this step
    wait_for_previous(qkv);
    const int64_t row = row_of(starts, sequence);
    uint32_t qa[2 * K_LOADS][4];
    load_queries<ROWS>(qa, qkv + (row * (heads + 2 * kv_heads) + head) * D, shared_heads, g, t);
    Running<ROWS> running;
    for (int begin = first; begin < end; begin += AHEAD * WARPS) {
        load(begin, begin == first ? pages - 1 : begin, end);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int page = begin + i * WARPS + warp;
            if (page >= end) continue;
            float s[2][4] = {};
            uint32_t pa[4] = {};
            running.score(s, qa, tile[i]);
            running.soften(pa, s, page * PAGE, cache.length, scale, t);
            running.mix(pa, tile[i]);
        }
    }
    const Segment<ROWS> mine = merge_warps(running);
    const bool own = Segment<ROWS>::row() < shared_heads;
    out += (row * heads + head) * D;
    Segment<ROWS> kept{negative_infinity(), 0.0f, {}};
    if (segments == 1) {
        merge_segment(kept, mine);
        if (own) store_result(kept, out);
        return;
    }
    const int64_t part = (static_cast<int64_t>(blockIdx.y) * heads + head) * max_segments;
    if (own) store_partial(mine, partials + part * D, sums + part * 2, segment, max_segments);
    __threadfence();
    __syncthreads();
    unsigned* counter = counters + blockIdx.y * gridDim.x + blockIdx.x;
    if (threadIdx.x == 0) last = atomicAdd(counter, 1u) == static_cast<unsigned>(segments - 1);
    __syncthreads();
    if (!last) return;
    __threadfence();
    if (threadIdx.x == 0) *counter = 0;
    if (!own) return;
    const int64_t place = part + static_cast<int64_t>(Segment<ROWS>::row()) * max_segments;
#pragma unroll 4
    for (int other = 0; other < segments; ++other) {
        Segment<ROWS> next;
        next.m = __ldcg(sums + (place + other) * 2), next.l = __ldcg(sums + (place + other) * 2 + 1);
#pragma unroll
        for (int i = 0; i < Segment<ROWS>::PART; ++i)
            next.o[i] = __ldcg(partials + (place + other) * D + Segment<ROWS>::column() + i);
        merge_segment(kept, next);
    }
    store_result(kept, out);
}

#define SPLIT_KERNEL(ROWS)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) split_attention_##ROWS(                                    \
        const __half* qkv, const __half* k_cache, const __half* v_cache, const int* tables, int table_stride,     \
        const int* lengths, const int* starts, const int* listed, __half* out, float* partials, float* sums,      \
        unsigned* counters, int heads, int kv_heads, int segment_pages, int max_segments, float scale) {          \
        decode_split<ROWS>(qkv, k_cache, v_cache, tables, table_stride, lengths, starts, listed, out, partials,     \
                         sums, counters, heads, kv_heads, segment_pages, max_segments, scale);                    \
    }

SPLIT_KERNEL(8)
SPLIT_KERNEL(16)
