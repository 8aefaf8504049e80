// Attention of sequences that decode: one query each, over the paged cache.
//
//   q        the queries inside qkv (T, (H + 2 G) D) elements, rotated
//   caches   as `kv_cache.cuh` says;  tables (S, stride): the pages of each sequence
//   out      (T, H D) elements
//
// starts: null where sequence s has row s of q and out; else (sequences + 1,), and it has row starts[s + 1] - 1.
// pieces   (N, 4) what blocks compute, longest first (`decode_pieces` in the launcher): of a sequence (-1: nothing) the
//          segments `first` to `end` - 1, as first | end << 16; -1 where that is the whole context, else base * 2, or
//          base * 2 + 1 if the context is cut into whole sections: base is the row of partials and sums of its first segment,
//          or section, and its counter; the tokens of its context
// partials, sums  (segments, H, D), (segments, H, 2) float;  counters (segments, G * head tiles), zero before and after
//
// A block of 4 warps takes a piece and one KV head with up to 16 (ROWS: 8) of the query heads that share it; the grid is
// (G * head tiles, N). Bound by memory: 4 D bytes a key and KV head (of E4M3 2 D + 2), each read once. A warp takes every fourth page
// (`decode_page.cuh`). Pages come by cp.async to a ring of AHEAD places in shared memory, of each warp its own, those of
// the first round before the block waits for the kernel ahead: what is on its way needs neither registers nor L1. Pieces,
// tables and starts are there before the step starts.
//
// The context is cut into segments of `segment_pages`, and SECTION of them are a section. Within a segment, warps merge in order;
// then a section's segments merge in order, and then sections: in the block that has all, or in that of a sequence's blocks that
// ends last. `split_attention.cu` does the same, to the same bits: a result depends neither on which of the two computed it, nor
// on how it was cut, nor on the other sequences.
//
// With a window, pages, segments, sections and pieces wholly before it are passed over; the others are those that they were.
//
// Heads over 128 leave no registers for the values of a page: they come from shared memory piece by piece.
//
// Options: -DHEAD_DIM, a multiple of 16 from 64 to 256; -DWINDOW, -DSOFTCAP, -DSINKS, -DKV_FP8. Dynamic shared memory: 4 warps of AHEAD
// pages, and of their exponents.
#include "attention/decode_results.cuh"

static constexpr bool LARGE = D > 128;               // registers do not hold values
static constexpr int IN_CHUNK = 16 / sizeof(Kept);   // numbers
static constexpr int CHUNKS = D / IN_CHUNK;          // 16-byte pieces of a key's row
static constexpr bool EVEN = 32 % CHUNKS == 0;       // a warp copies whole rows at once

// A row in shared memory. Of bytes, two may share what all banks give at once, 128 bytes; none begins in the middle of it.
static constexpr int ROW_BYTES = !KEPT_AS_FP8 ? 2 * WIDTH : WIDTH == 192 ? 256 : WIDTH;
static constexpr int HALF_BYTES = PAGE * ROW_BYTES;  // keys, or values, of a page
static constexpr int PAGE_BYTES = 2 * HALF_BYTES;
static constexpr int EXPONENT_BYTES = 2 * EXPONENTS;  // of a page, behind the pages of all warps

// Byte offset of a chunk of a row. The order within each 128 bytes is such that lanes which read at once reach all banks: eight with
// 16 bytes each, of two rows of keys or of four rows of values; of E4M3 16 with 8 bytes each, of four rows. Rows that are 8 apart
// have the same order, and rows 2 n and 2 n + 1 differ as NEIGHBOUR says.
static __device__ __forceinline__ int turn_of(int row) {
    if constexpr (!KEPT_AS_FP8) return (row & 6) ^ (row & 1) << 2;
    if constexpr (ROW_BYTES == 64) return row & 6;
    return (row & 3) * 2 ^ (row & 4) / 2;
}
static constexpr int NEIGHBOUR = KEPT_AS_FP8 && ROW_BYTES > 64 ? 32 : 64;   // exclusive or ...
static constexpr int NEXT_ROW = KEPT_AS_FP8 && ROW_BYTES == 64 ? 0 : ROW_BYTES;  // ... and what is added

static __device__ __forceinline__ uint32_t place(int row, int chunk) {
    return static_cast<uint32_t>(((row * (ROW_BYTES / 16) + chunk) ^ turn_of(row)) * 16);
}
// The same of a piece of 8 numbers.
static __device__ __forceinline__ uint32_t piece_place(int row, int piece) {
    return place(row, piece * 8 / IN_CHUNK) + piece * 8 % IN_CHUNK * static_cast<int>(sizeof(Kept));
}

// Of a value that is the same for all pages: kept in a register, where the compiler would compute it anew for each.
template <typename Value>
static __device__ __forceinline__ void keep(Value& value) {
    if constexpr (sizeof(Value) == 8)
        asm volatile("" : "+l"(value));
    else
        asm volatile("" : "+r"(value));
}

// Where a lane's pieces of a page are: all are one of these and a constant.
struct Places {
    const Kept *keys, *values, *exponents;  // what it copies of the first page: of row lane / CHUNKS
    uint32_t page_numbers;
    uint32_t copied;  // row lane / CHUNKS
    uint32_t key;     // row g, piece t
    uint32_t value;   // row 2 t, piece g
    uint32_t key_exponents, value_exponents, key_order;  // of E4M3: the words that the lane takes, `order_of_keys`
    uint64_t policy;  // of copies, in L2, which has the residual stream and weights to keep

    __device__ __forceinline__ Places(int lane, const Cache& cache)
        : keys(cache.k + part_of(0, cache.kv_head, cache.kv_heads, D) + lane * IN_CHUNK),
          values(cache.v + part_of(0, cache.kv_head, cache.kv_heads, D) + lane * IN_CHUNK),
          exponents((lane ? cache.v : cache.k) + part_of(0, cache.kv_head, cache.kv_heads, D) + PAGE * D),
          page_numbers(static_cast<uint32_t>(part_of(1, 0, cache.kv_heads, D))),
          copied(place(lane / CHUNKS, lane % CHUNKS)),
          key(piece_place(lane / 4, lane % 4)),
          value(piece_place(lane % 4 * 2, lane / 4)),
          key_exponents(lane / 8 * 4),
          value_exponents(EXPONENTS + lane % 4 * 4),
          policy(read_once()) {
        keep(keys), keep(values), keep(page_numbers), keep(copied), keep(key), keep(value);
#ifdef KV_FP8
        key_order = order_of_keys(lane / 4);
        keep(exponents), keep(key_exponents), keep(value_exponents), keep(key_order);
#endif
    }

    // Starts copying a page, and its exponents to a place of their own; what the token does not see becomes zeros: 0 times NaN is
    // NaN.
    __device__ __forceinline__ void fetch(uint32_t target, uint32_t exponents_target, const Cache& cache, int entry,
                                          int page) const {
        const int lane = threadIdx.x % 32;
        const uint64_t offset = static_cast<uint64_t>(static_cast<uint32_t>(entry)) * page_numbers;
        const Kept *from_keys = keys + offset, *from_values = values + offset;
        if (KEPT_AS_FP8 && lane < 2)
            copy_async(exponents_target + lane * EXPONENTS, exponents + offset, true, policy);
        if constexpr (!EVEN) {
            const int left = cache.length - page * PAGE, hidden = cache.seen - page * PAGE;
#pragma unroll
            for (int i = 0; i < (PAGE * CHUNKS + 31) / 32; ++i) {
                const int row = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
                if (PAGE * CHUNKS % 32 != 0 && row >= PAGE) break;
                const bool wanted = is_seen(row, left, hidden);
                copy_async(target + place(row, chunk), from_keys + i * 32 * IN_CHUNK, wanted, policy);
                copy_async(target + place(row, chunk) + HALF_BYTES, from_values + i * 32 * IN_CHUNK, wanted, policy);
            }
            return;
        }
        constexpr int AT_ONCE = EVEN ? 32 / CHUNKS : PAGE;  // rows
        const int left = cache.length - page * PAGE - lane / CHUNKS, hidden = cache.seen - page * PAGE - lane / CHUNKS;
#pragma unroll
        for (int row = 0; row < PAGE; row += AT_ONCE) {
            const uint32_t at = target + (copied ^ turn_of(row) * 16) + row * ROW_BYTES;
            const bool wanted = is_seen(row, left, hidden);
            copy_async(at, from_keys + row * D, wanted, policy);
            copy_async(at + HALF_BYTES, from_values + row * D, wanted, policy);
        }
    }

    // As `Running` wants them.
    __device__ __forceinline__ Kept8 key_piece(uint32_t source, int j, int i) const {
        if (!has_piece(i * 32 + 32, i * 32 + threadIdx.x % 4 * 8)) return NO_PIECE;  // nobody wrote there
        const int along = i * 32 * static_cast<int>(sizeof(Kept));
        return load_piece(source + (key ^ along % 128) + j * 8 * ROW_BYTES + along / 128 * 128);
    }
    __device__ __forceinline__ Kept8 value_piece(uint32_t source, int j, int i) const {
        const int along = i * 64 * static_cast<int>(sizeof(Kept));
        return load_piece(source + HALF_BYTES + (value ^ j % 2 * NEIGHBOUR ^ along % 128) + j % 2 * NEXT_ROW +
                          j / 2 * 8 * ROW_BYTES + along / 128 * 128);
    }
    static __device__ __forceinline__ Kept8 load_piece(uint32_t address) {
#ifdef KV_FP8
        return load_shared_8(address);
#else
        return load_shared(address);
#endif
    }

    __device__ __forceinline__ void take_exponents(Page& tile, uint32_t source, const Cache& cache, int page, int t) const {
#ifdef KV_FP8
        tile.of_keys = key_powers(load_shared_4(source + key_exponents), key_order);
        tile.of_values = seen_exponents(load_shared_4(source + value_exponents), cache, page * PAGE, t);
#endif
    }

    __device__ __forceinline__ void take_values(Page& tile, uint32_t source) const {
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < V_LOADS; ++i) tile.v[j][i] = value_piece(source, j, i);
    }
};

#ifndef KV_BLOCKS
// Blocks of heads of 64 for whose rings and results a multiprocessor has shared memory: of 100 KiB (RTX 30, 40, 50, L4, L40S) two
// at most, of 164 (A100) three. Sparing registers for more made an RTX 50 spill sums in the loop over pages.
#if defined(KV_FP8) || !defined(__CUDA_ARCH__)
static constexpr int MOST_BLOCKS = 4;
#elif __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
static constexpr int MOST_BLOCKS = 2;
#elif __CUDA_ARCH__ < 900
static constexpr int MOST_BLOCKS = 3;
#else
static constexpr int MOST_BLOCKS = 4;
#endif
// Blocks that a multiprocessor shall have registers for.
static constexpr int blocks_for(int rows) { return D == 64 ? MOST_BLOCKS : LARGE || rows == 16 ? 2 : 3; }
#else
static constexpr int blocks_for(int) { return KV_BLOCKS; }
#endif

// The segments `first` to `end` - 1 of a context; `base`: -1 if these are all, else where they meet the others.
struct Piece {
    int sequence, first, end, base;
    bool by_sections;  // pieces are whole sections, and only these meet

    // Results that segments up to `end` leave for each other.
    __device__ __forceinline__ int left_by(int end) const { return by_sections ? (end + SECTION - 1) / SECTION : end; }
};

template <int ROWS, int AHEAD>
static __device__ __forceinline__ void decode(const Element* q, const Cache& cache, const Piece& piece,
                                              const Meeting& meeting, int shared_heads, int segment_pages,
                                              const Scores& scores, int head, Element* out) {
    constexpr bool EVEN_RING = (AHEAD & (AHEAD - 1)) == 0;  // places follow each other by a mask, else by a counter
    extern __shared__ __align__(128) unsigned char rings[];  // 16 bytes further on, copies of rows take 14% longer
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    const int pages = (cache.length + PAGE - 1) / PAGE;
    const int end = min(piece.end * segment_pages, pages);
    int segment = piece.first, first = segment * segment_pages + warp;
    if constexpr (WINDOWED) {
        const int page = cache.seen / PAGE;
        segment = max(segment, page / segment_pages);
        first = max(first, page + ((warp - page) & (WARPS - 1)));  // a warp's pages are always the same
    }
    const uint32_t ring = shared_address(rings) + warp * AHEAD * PAGE_BYTES;
    const uint32_t exponents = shared_address(rings) + WARPS * AHEAD * PAGE_BYTES + warp * AHEAD * EXPONENT_BYTES;
    const Places places(lane, cache);
    const bool own = Segment<ROWS>::row() < shared_heads;
    Merged<ROWS> kept;

    auto start = [&](bool newest) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int page = first + i * WARPS;
            if (page < end && (page == pages - 1) == newest)
                places.fetch(ring + i * PAGE_BYTES, exponents + i * EXPONENT_BYTES, cache, cache.table[page], page);
            if (!newest) commit_copies();
        }
    };
    start(false);
    wait_for_previous(q);
    start(true);  // it gets a token in this step
    commit_copies();
    const bool all_asked_for = first + AHEAD * WARPS >= end;
    const Queries<ROWS> queries(q, shared_heads, g, t);
    int turn = 0, page = first;  // `turn` of another ring is its place
    const int* entries = cache.table + first + AHEAD * WARPS;
    asm volatile("" : "+l"(entries));  // else it is computed anew for each page, which others then wait for
    int entry = page + AHEAD * WARPS < end ? __ldg(entries) : 0;  // of the page to ask for next
    for (; segment * segment_pages < end; ++segment) {
        const int segment_end = min((segment + 1) * segment_pages, end);
        Running<ROWS> running;
        for (; page < segment_end; page += WARPS, turn = EVEN_RING || turn + 1 < AHEAD ? turn + 1 : 0) {
            if (all_asked_for)
                wait_for_copies<0>();
            else
                wait_for_copies<AHEAD - 1>();
            __syncwarp();  // the other lanes' copies are here too
            const int taken = EVEN_RING ? turn & (AHEAD - 1) : turn;
            const uint32_t slot = ring + taken * PAGE_BYTES;
            const uint32_t slot_exponents = exponents + taken * EXPONENT_BYTES;
            Page tile;
            places.take_exponents(tile, slot_exponents, cache, page, t);
            PageScores<ROWS> page_scores;
            auto fetch_next = [&] {  // in place of this page, which is in registers or done with
                __syncwarp();
                const int next = page + AHEAD * WARPS;
                if (next < end) places.fetch(slot, slot_exponents, cache, entry, next);
                commit_copies();
                entries += WARPS;
                if (next + WARPS < end) entry = __ldg(entries);
            };
            page_scores.multiply(queries, [&](int j, int i) { return places.key_piece(slot, j, i); });
            if constexpr (!LARGE) {
                places.take_values(tile, slot);
                fetch_next();
            }
            page_scores.finish(tile.of_keys, page * PAGE, cache, scores, g);
            uint32_t weights[ROWS / 8][2];
            running.weigh(weights, page_scores);
            if constexpr (LARGE) {
                running.mix(weights, tile.of_values, [&](int j, int i) { return places.value_piece(slot, j, i); });
                fetch_next();
            } else {
                running.mix(weights, tile.of_values, [&](int j, int i) { return tile.v[j][i]; });
            }
        }
        const Segment<ROWS> mine = merge_warps(running);
        __syncthreads();
        const bool ended = ends_section(segment) || segment_end == end;
        if (piece.base < 0) {
            kept.take(mine, ended);
        } else if (!piece.by_sections) {
            if (own) meeting.leave(mine, segment);
        } else {
            merge_next(kept.section, mine);
            if (!ended) continue;
            if (own) meeting.leave(kept.section, segment / SECTION);
            kept.section = Segment<ROWS>();
        }
    }
    if (piece.base >= 0) {
        const int passed = WINDOWED ? cache.seen / PAGE / segment_pages : 0;  // segments before the window: they do not count
        const int skipped = piece.by_sections ? passed / SECTION : passed;
        const int all = piece.left_by((pages + segment_pages - 1) / segment_pages);
        if (!meeting.is_last(piece.left_by(piece.end) - max(piece.left_by(piece.first), skipped), all - skipped)) return;
        if (!own) return;
        meeting.take_all<ROWS>(skipped, all, [&](const Segment<ROWS>& next, int i) {
            kept.take(next, piece.by_sections || ends_section(i));
        });
        kept.end_section();
    }
    if (own) store_result(kept.all, scores, head, out);
}

#define DECODE_KERNEL(ROWS, AHEAD)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks_for(ROWS))                                           \
        decode_attention_##ROWS##_##AHEAD(                                                                        \
            const Element* qkv, const Kept* k_cache, const Kept* v_cache, const int* tables, int table_stride,    \
            const int* starts, const int4* pieces, Element* out, float* partials, float* sums, unsigned* counters, \
            int heads, int kv_heads, int segment_pages, float scale, float cap, int window, const float* sinks) { \
        launch_next();                                                                                            \
        const int4 words = pieces[blockIdx.y];                                                                    \
        const Piece piece{words.x, words.y & 0xffff, words.y >> 16, words.z >> 1, words.z > 0 && words.z % 2 == 1};   \
        if (piece.sequence < 0) return;                                                                           \
        const Scores scores{scale, cap, window, sinks};                                                           \
        const int group = heads / kv_heads, tiles = (group + ROWS - 1) / ROWS;                                    \
        const int kv_head = blockIdx.x / tiles, first = (blockIdx.x % tiles) * ROWS;                              \
        const int head = kv_head * group + first;                                                                 \
        const Cache cache{k_cache, v_cache, tables + static_cast<int64_t>(piece.sequence) * table_stride,         \
                          kv_heads, kv_head, words.w, scores.first_seen(words.w)};                                \
        if (WINDOWED && piece.end * segment_pages * PAGE <= cache.seen) return;                                   \
        const int64_t row = row_of(starts, piece.sequence);                                                       \
        const int base = max(piece.base, 0);                                                                      \
        const int64_t part = static_cast<int64_t>(base) * heads + head;                                           \
        const Meeting meeting{partials + part * D, sums + part * 2, counters + base * gridDim.x + blockIdx.x,      \
                              heads};                                                                             \
        decode<ROWS, AHEAD>(qkv + (row * (heads + 2 * kv_heads) + head) * D, cache, piece, meeting,               \
                            min(ROWS, group - first), segment_pages, scores, head, out + (row * heads + head) * D); \
    }

#ifdef KV_FP8
DECODE_KERNEL(8, 2)
#if HEAD_DIM <= 128
DECODE_KERNEL(16, 2)
#endif
#elif HEAD_DIM > 128
DECODE_KERNEL(8, 1)
DECODE_KERNEL(8, 3)  // 225 KB of heads of 256: few contexts, where a block has a multiprocessor for itself
#else
DECODE_KERNEL(8, 2)
DECODE_KERNEL(16, 2)
DECODE_KERNEL(8, 4)
DECODE_KERNEL(16, 4)
#endif
