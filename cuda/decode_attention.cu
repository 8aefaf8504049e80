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
// the grid is (G * head tiles, S). Bound by memory: 4 D bytes a key and KV head, each read once. A warp
// takes every fourth page (`decode_page.cuh`) and has AHEAD pages in registers or on their way: the loads of the one after
// those are issued before the present one is used up, those of the first before the block waits for the kernel ahead.
// More are ahead where few blocks share a multiprocessor. Tables, lengths and starts are there before the step starts.
//
// The context is cut into segments of `segment_pages`. Within one, warps merge in order; then segments merge in order.
// `split_attention.cu` does the same with a block for each segment, to the same bits: a result depends neither on which
// of the two computed it nor on the other sequences.
//
// Options: -DHEAD_DIM, 64 or 128.
#include "decode_page.cuh"

template <int ROWS, int AHEAD>
static __device__ __forceinline__ void decode(const __half* q, const Cache& cache, int shared_heads, int segment_pages,
                                              float scale, __half* out) {
    static_assert(4 % AHEAD == 0, "a warp has a multiple of 4 pages of a whole segment");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    const int pages = (cache.length + PAGE - 1) / PAGE;
    const int segments = (pages + segment_pages - 1) / segment_pages;
    Segment<ROWS> kept{negative_infinity(), 0.0f, {}};

    Page tile[AHEAD];
    auto load = [&](int i, bool newest) {
        const int page = warp + i * WARPS;
        if (page >= pages || (page == pages - 1) != newest) return;
        const int64_t offset = page_offset(cache, page);
        load_keys(tile[i], cache, offset, page, g, t);
        load_values(tile[i], cache, offset, page, g, t);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) load(i, false);
    wait_for_previous(q);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) load(i, true);  // it gets a token in this step
    uint32_t qa[2 * K_LOADS][4];
    load_queries<ROWS>(qa, q, shared_heads, g, t);
    for (int segment = 0; segment < segments; ++segment) {
        const int segment_end = min((segment + 1) * segment_pages, pages);
        Running<ROWS> running;
        for (int first = segment * segment_pages + warp; first < segment_end; first += AHEAD * WARPS) {
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int page = first + i * WARPS, next = page + AHEAD * WARPS;
                if (page >= segment_end) break;
                const int64_t next_offset = next < pages ? page_offset(cache, next) : 0;
                float s[2][4] = {};
                running.score(s, qa, tile[i]);
                if (next < pages) load_keys(tile[i], cache, next_offset, next, g, t);
                float largest[2] = {running.m[0], running.m[1]};
                running.hide(largest, s, page * PAGE, cache.length, scale, t);
#pragma unroll
                for (int half = 0; half < Running<ROWS>::HALVES; ++half)
                    if (__any_sync(0xffffffffu, largest[half] > running.m[half])) running.rescale(half, largest[half]);
                uint32_t pa[4] = {};
                running.weigh(pa, s);
                running.mix(pa, tile[i]);
                if (next < pages) load_values(tile[i], cache, next_offset, next, g, t);
            }
        }
        merge_segment(kept, merge_warps(running));
        __syncthreads();
    }
    if (Segment<ROWS>::row() < shared_heads) store_result(kept, out);
}

#define DECODE_KERNEL(ROWS, AHEAD)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                         \
        decode_attention_##ROWS##_##AHEAD(                                                                        \
            const __half* qkv, const __half* k_cache, const __half* v_cache, const int* tables, int table_stride, \
            const int* lengths, const int* starts, const int* listed, __half* out, int heads, int kv_heads,       \
            int segment_pages, float scale) {                                                                     \
        launch_next();                                                                                            \
        const int sequence = sequence_of(listed, lengths, blockIdx.y);                                            \
        if (sequence < 0) return;                                                                                 \
        const int group = heads / kv_heads, tiles = (group + ROWS - 1) / ROWS;                                    \
        const int kv_head = blockIdx.x / tiles, first = (blockIdx.x % tiles) * ROWS;                              \
        const int head = kv_head * group + first;                                                                 \
        const Cache cache{k_cache, v_cache, tables + static_cast<int64_t>(sequence) * table_stride,               \
                          kv_heads, kv_head, lengths[sequence]};                                                  \
        const int64_t row = row_of(starts, sequence);                                                             \
        decode<ROWS, AHEAD>(qkv + (row * (heads + 2 * kv_heads) + head) * D, cache, min(ROWS, group - first),            \
                     segment_pages, scale, out + (row * heads + head) * D);                                       \
    }

DECODE_KERNEL(8, 1)
DECODE_KERNEL(16, 1)
#if HEAD_DIM == 64
DECODE_KERNEL(8, 2)
DECODE_KERNEL(16, 2)
#endif
