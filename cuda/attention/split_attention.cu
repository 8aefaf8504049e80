// Decode attention of too few sequences to fill the chip: as `decode_attention.cu`, to the same bits, with the segments
// shared out among blocks.
//
// Arguments as there; counters (S, G * head tiles), zero before and after. The grid is (G * head tiles, S, Z), Z at most
// the segments of the longest context: block z takes segments z, z + Z, ... A warp asks for some pages at once, in place
// of one after the other, and for those that hold no token of this step before it waits for the kernel ahead; their scores
// do not wait for each other. The last block of a sequence and KV head to finish merges the segments, in order, from
// `partials` [S][segments][H][D] and `sums` [S][segments][H][2].
//
// On Hopper it may be launched in clusters along z, of a power of two of blocks. A sequence that has no more segments
// than that is merged in shared memory: its other blocks send theirs to the first, and end. Dynamic shared memory:
// a `Sent` for each block of the cluster but the first.
//
// Options: -DHEAD_DIM, a multiple of 16 from 64 to 128; -DWINDOW, -DSOFTCAP, -DSINKS.
#include <type_traits>

#include "attention/decode_results.cuh"
#include "common/hopper.cuh"

static_assert(D <= 128, "registers do not hold a page of larger heads: decode_attention.cu");

// Pages that a warp asks for at once: so many that registers hold them. Of larger heads in 16 rows two would be 300 registers, and
// what is spilled as much traffic as a page.
template <int ROWS>
static constexpr int PAGES_AHEAD = D == 64 ? 4 : ROWS == 8 ? 2 : 1;

// Blocks of the cluster, along z; 1 where there are no clusters.
static __device__ __forceinline__ int cluster_blocks() {
    uint32_t blocks = 1;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
#endif
    return static_cast<int>(blocks);
}

// A segment in the shared memory of a cluster's first block, in pairs (m, l), (o0, o1), ..., each thread's from the
// same thread of another block; the barrier there counts the bytes.
template <int ROWS>
struct Sent {
    static constexpr int PAIRS = 1 + Segment<ROWS>::PART / 2;
    static constexpr int BYTES = PAIRS * THREADS * 8;
    float2 pair[PAIRS][THREADS];

    __device__ __forceinline__ void send(const Segment<ROWS>& mine, uint32_t barrier) {
        const uint32_t target = address_in(shared_address(&pair[0][threadIdx.x]), 0);
        const uint32_t counter = address_in(barrier, 0);
        store_async(target, counter, mine.m, mine.l);
#pragma unroll
        for (int i = 1; i < PAIRS; ++i)
            store_async(target + i * THREADS * 8, counter, mine.o[2 * i - 2], mine.o[2 * i - 1]);
    }

    __device__ __forceinline__ Segment<ROWS> received() const {
        Segment<ROWS> other{pair[0][threadIdx.x].x, pair[0][threadIdx.x].y, {}};
#pragma unroll
        for (int i = 1; i < PAIRS; ++i)
            other.o[2 * i - 2] = pair[i][threadIdx.x].x, other.o[2 * i - 1] = pair[i][threadIdx.x].y;
        return other;
    }
};

template <int ROWS>
static __device__ __forceinline__ void decode_split(const Element* qkv, const Kept* k_cache, const Kept* v_cache,
                                                  const int* tables, int table_stride, const int* lengths,
                                                  const int* starts, const int* listed, Element* out, float* partials,
                                                  float* sums, unsigned* counters, int heads, int kv_heads,
                                                  int segment_pages, int max_segments, const Scores& scores) {
    constexpr int AHEAD = PAGES_AHEAD<ROWS>, STEP = AHEAD * WARPS;  // pages that a warp and a block have in flight
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ uint64_t all_sent;
    launch_next();
    // Tables, lengths and starts are there before the step starts.
    const int sequence = listed != nullptr ? listed[blockIdx.y] : blockIdx.y;
    if (sequence < 0 || lengths[sequence] <= 0) return;
    const int length = lengths[sequence], pages = (length + PAGE - 1) / PAGE;
    const int seen = scores.first_seen(length);
    const int passed = WINDOWED ? seen / PAGE / segment_pages : 0;  // segments before the window: they do not count
    const int segments = (pages + segment_pages - 1) / segment_pages - passed;
    int segment = blockIdx.z;
    const int blocks = cluster_blocks(), rank = segment & (blocks - 1);
    if (segment - rank >= segments) return;  // all blocks of the cluster do
    Sent<ROWS>* inbox = reinterpret_cast<Sent<ROWS>*>(shared);
    // BARRIER barrier: has one phase. It counts the bytes that the cluster's other blocks store here, in the first block; one of its
    // threads arrives and expects them all, and all of its threads wait. Bytes may come before that: the arrival is still missing then.
    const uint32_t barrier = shared_address(&all_sent);
    if (blocks > 1) {
        if (rank == 0 && threadIdx.x == 0) {
            barrier_init(barrier, 1);
            publish_barriers();
        }
        cluster_arrive();
        if (segment >= segments) {
            cluster_wait();
            return;
        }
    }
    const int64_t row = row_of(starts, sequence);
    const int group = heads / kv_heads, tiles = (group + ROWS - 1) / ROWS;
    const int kv_head = blockIdx.x / tiles, first_head = blockIdx.x % tiles * ROWS;
    const int head = kv_head * group + first_head, shared_heads = min(ROWS, group - first_head);
    auto first_page = [&](int segment) {
        const int page = (passed + segment) * segment_pages;
        return WINDOWED ? page + max(seen / PAGE - page, 0) / STEP * STEP : page;
    };
    auto end_page = [&](int segment) { return min((passed + segment + 1) * segment_pages, pages); };
    int first = first_page(segment), end = end_page(segment);
    Cache cache{k_cache, v_cache, tables + static_cast<int64_t>(sequence) * table_stride,
                kv_heads, kv_head, min(length, end * PAGE), seen};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;

    // Pages that the token does not see are zeros and of weight 0, which leaves sums as they are: no branch keeps the
    // compiler from working on all pages at once.
    Page tile[AHEAD];
    // Where pages are. Of heads of 64 in 16 rows the table's numbers of pages: registers do not hold four offsets.
    constexpr bool BY_NUMBER = D == 64 && ROWS == 16;
    std::conditional_t<BY_NUMBER, int, int64_t> found[AHEAD];
    auto find = [&](int begin) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int page = begin + i * WARPS + warp;
            if constexpr (BY_NUMBER)
                found[i] = page < end ? cache.table[page] : 0;
            else
                found[i] = page < end ? page_offset(cache, page) : 0;
        }
    };
    auto offset = [&](int i) -> int64_t {
        if constexpr (BY_NUMBER) return part_of(found[i], kv_head, kv_heads, D);
        return found[i];
    };
    auto load = [&](bool newest) {  // the last page gets a token in this step
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int page = first + i * WARPS + warp;
            if ((page == pages - 1) != newest) continue;
            load_keys(tile[i], cache, offset(i), page, g, t);
            load_values(tile[i], cache, offset(i), page, g, t);
        }
    };
    find(first);
    if (blocks > 1) cluster_wait();  // the first block's barrier is there
    load(false);
    wait_for_previous(qkv);
    const Queries<ROWS> queries(qkv + (row * (heads + 2 * kv_heads) + head) * D, shared_heads, g, t);
    load(true);
    const bool own = Segment<ROWS>::row() < shared_heads;
    out += (row * heads + head) * D;
    Merged<ROWS> kept;
    const int64_t part = static_cast<int64_t>(blockIdx.y) * max_segments * heads + head;
    const Meeting meeting{partials + part * D, sums + part * 2, counters + blockIdx.y * gridDim.x + blockIdx.x, heads};
    int done = 0;
    while (true) {
        Running<ROWS> running;
        for (int begin = first; begin < end; begin += STEP) {
            const int next = begin + STEP;
            if (next < end) find(next);
            PageScores<ROWS> page_scores[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i)
                page_scores[i].multiply(queries, [&](int j, int piece) { return tile[i].k[j][piece]; });
#pragma unroll
            for (int i = 0; i < AHEAD; ++i)
                page_scores[i].finish(tile[i].of_keys, (begin + i * WARPS + warp) * PAGE, cache, scores, g);
            if (next < end) {
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) load_keys(tile[i], cache, offset(i), next + i * WARPS + warp, g, t);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                uint32_t weights[ROWS / 8][2];
                running.weigh(weights, page_scores[i]);
                running.mix(weights, tile[i].of_values, [&](int j, int piece) { return tile[i].v[j][piece]; });
            }
            if (next < end) {
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) load_values(tile[i], cache, offset(i), next + i * WARPS + warp, g, t);
            }
        }
        const Segment<ROWS> mine = merge_warps(running);
        if (segments <= blocks) {
            if (blocks > 1 && segment > 0) {
                inbox[segment - 1].send(mine, barrier);
                return;
            }
            kept.take(mine, ends_section(passed));
            if (blocks > 1 && segments > 1) {
                if (threadIdx.x == 0) barrier_expect(barrier, (segments - 1) * Sent<ROWS>::BYTES);
                barrier_wait_for_cluster(barrier, 0);
                for (int other = 1; other < segments; ++other)
                    kept.take(inbox[other - 1].received(), ends_section(passed + other));
            }
            kept.end_section();
            if (own) store_result(kept.all, scores, head, out);
            return;
        }
        if (own) meeting.leave(mine, segment);
        ++done;
        segment += gridDim.z;
        if (segment >= segments) break;
        first = first_page(segment), end = end_page(segment);
        cache.length = min(length, end * PAGE);
        __syncthreads();  // what `merge_warps` has in shared memory was read
        find(first);
        load(false);
        load(true);
    }
    if (!meeting.is_last(done, segments) || !own) return;
    meeting.take_all<ROWS>(0, segments, [&](const Segment<ROWS>& next, int i) { kept.take(next, ends_section(passed + i)); });
    kept.end_section();
    store_result(kept.all, scores, head, out);
}

#define SPLIT_KERNEL(ROWS)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) split_attention_##ROWS(                                    \
        const Element* qkv, const Kept* k_cache, const Kept* v_cache, const int* tables, int table_stride,     \
        const int* lengths, const int* starts, const int* listed, Element* out, float* partials, float* sums,      \
        unsigned* counters, int heads, int kv_heads, int segment_pages, int max_segments, float scale, float cap,   \
        int window, const float* sinks) {                                                                         \
        KERNEL_BEGINS();                                                                                          \
        decode_split<ROWS>(qkv, k_cache, v_cache, tables, table_stride, lengths, starts, listed, out, partials,     \
                         sums, counters, heads, kv_heads, segment_pages, max_segments,                            \
                         Scores{scale, cap, window, sinks});                                                      \
    }

SPLIT_KERNEL(8)
SPLIT_KERNEL(16)
