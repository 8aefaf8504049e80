// The second half of `delta_chunked.cu` on Hopper: products with the state by wgmma, for keys of 64 or 128.
//
// Arrays and arithmetic as there; sums are in the same order in both kernels here, but not that of `delta_scan_*`. A warpgroup has 64
// columns of the state in registers, as rows of the left operands: K S, Q S (64 tokens wide) and what is added to S (KEY_DIM wide) have
// their right operands in shared memory, read once for all four warps. mma.sync, which takes twice the time, and loads for each warp
// what it multiplies, is left with what tokens do to each other.
//
//   delta_hopper_wide    a block a (piece, value head) of 128 columns, two warpgroups
//   delta_hopper_narrow  one warpgroup with 64 columns
//
// While a chunk is computed the next one is copied; `stages` of them in shared memory, 86 KB each where keys have 128.
#ifndef ELEMENT_BF16
#define ELEMENT_BF16  // of wgmma here: parts of floats; no element is read or written
#endif
#include "common/hopper.cuh"
#include "states/delta.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

static constexpr int TILE = CHUNK * 128;  // bytes: 64 rows of 64 numbers, with the 128-byte swizzle
static constexpr int TILES = KEY_DIM / 64, PART = TILES * TILE;

// A chunk in shared memory: keys and queries, the high parts' tiles, then the low ones'.
struct alignas(1024) Stage {
    unsigned char keys[2 * PART], queries[2 * PART];
    Record record;
};

// Rows in parts to tiles; zeros behind the last.
template <int THREADS>
static __device__ __forceinline__ void copy_tiles(unsigned char* target, const float* source, int stride, int length) {
    constexpr int OF_PART = KEY_DIM / 8, EACH = 2 * OF_PART;  // pieces of 16 bytes
    const uint32_t place = shared_address(target);
#pragma unroll 4
    for (int i = threadIdx.x; i < CHUNK * EACH; i += THREADS) {
        const int row = i / EACH, part = i % EACH / OF_PART, tile = i % OF_PART / 8, column = i % 8;
        const bool wanted = row < length;
        copy_async(place + part * PART + tile * TILE + row * 128 + (column ^ (row & 7)) * 16,
                   source + static_cast<int64_t>(wanted ? row : 0) * stride + i % EACH * 4, wanted);
    }
}

// result (64 columns of the state by 64 tokens) += 64 rows of the state times a tile of keys or queries.
static __device__ __forceinline__ void start_products(Tokens& result, const Parts (&state)[4], const unsigned char* tile, bool more) {
    float(&sums)[32] = reinterpret_cast<float(&)[32]>(result.tiles);
    const uint64_t high = tile_descriptor(shared_address(tile)), low = tile_descriptor(shared_address(tile) + PART);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        wgmma(sums, state[step].low, further(high, 2 * step), more || step > 0);
        wgmma(sums, state[step].high, further(low, 2 * step), 1);
        wgmma(sums, state[step].high, further(high, 2 * step), 1);
    }
}

// Starts result (+)= 64 rows of the state times that tile of keys or queries; `left`: room for its left operands, until it is done.
static __device__ __forceinline__ void start_tile(Tokens& result, Parts (&left)[4], const HeldColumns<KEY_DIM>& state,
                                                  const unsigned char* rows, int tile) {
#pragma unroll
    for (int step = 0; step < 4; ++step)
        left[step] = left_of(state.tiles[8 * tile + 2 * step], state.tiles[8 * tile + 2 * step + 1]);
    wgmma_begin();
    start_products(result, left, rows + tile * TILE, tile > 0);
    wgmma_commit();
}
static __device__ __forceinline__ void finish(Tokens& result) {
    wgmma_wait<0>();
    wgmma_keep(reinterpret_cast<float(&)[32]>(result.tiles));
}

// Starts: the state += what tokens write times rows of keys.
static __device__ __forceinline__ void start_addition(HeldColumns<KEY_DIM>& held, const Parts (&written)[4], const unsigned char* rows) {
    float(&sums)[KEY_DIM / 2] = reinterpret_cast<float(&)[KEY_DIM / 2]>(held.tiles);
    const uint64_t high = tile_descriptor(shared_address(rows), TILE), low = tile_descriptor(shared_address(rows) + PART, TILE);
#pragma unroll
    for (int block = 0; block < 4; ++block) {
        const int at = block * 16 * 128 / 16;
        wgmma_rows(sums, written[block].low, further(high, at));
        wgmma_rows(sums, written[block].high, further(low, at));
        wgmma_rows(sums, written[block].high, further(high, at));
    }
}

// A chunk's values, 16 columns for each warp, which copies and reads them by itself; rows are padded so that lanes read different banks.
struct Values {
    static constexpr int STRIDE = 20;  // floats

    float rows[CHUNK][STRIDE];

    __device__ __forceinline__ void copy(const float* source, int stride, int length) {
        const uint32_t place = shared_address(rows);
        __syncwarp();  // nobody reads the chunk before any more
#pragma unroll
        for (int i = 0; i < CHUNK * 4 / 32; ++i) {
            const int row = i * 8 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 4;
            const bool wanted = row < length;
            copy_async(place + (row * STRIDE + column) * 4, source + static_cast<int64_t>(wanted ? row : 0) * stride + column,
                       wanted);
        }
        commit_copies();
    }
};

template <int GROUPS>
static __device__ __forceinline__ void scan(unsigned char* shared, float* convolved, const Record* records, float* states,
                                            const Piece& piece, int heads, int key_heads, int stages) {
    constexpr int PER_HEAD = VALUE_DIM / (64 * GROUPS), THREADS = 128 * GROUPS;  // PER_HEAD: blocks
    Stage* const chunks = reinterpret_cast<Stage*>(shared);
    Values& next = reinterpret_cast<Values*>(shared + stages * sizeof(Stage))[threadIdx.x / 32];
    const int head = blockIdx.x / PER_HEAD, key_head = head % key_heads;
    const int column = blockIdx.x % PER_HEAD * 64 * GROUPS + threadIdx.x / 32 * 16;  // of this warp
    const int all_keys = key_heads * KEY_DIM, channels = 2 * all_keys + heads * VALUE_DIM;
    float* const state = states + (static_cast<int64_t>(piece.slot) * heads + head) * (KEY_DIM * VALUE_DIM) + column;
    float* const row_values = convolved + static_cast<int64_t>(piece.row) * channels;
    auto copy = [&](int first) {
        int stride = channels;
        asm volatile("" : "+r"(stride));  // or addresses of all rows are kept from chunk to chunk, in registers that are not there
        Stage& stage = chunks[first / CHUNK % stages];
        const float* const queries = row_values + static_cast<int64_t>(first) * channels + key_head * KEY_DIM;
        const int length = min(piece.length - first, CHUNK);
        copy_tiles<THREADS>(stage.keys, queries + all_keys, stride, length);
        copy_tiles<THREADS>(stage.queries, queries, stride, length);
        copy_bytes<THREADS>(&stage.record, records + static_cast<int64_t>(first / CHUNK) * heads + head, sizeof(Record));
        commit_copies();
    };
    float* const all_head_values = row_values + 2 * all_keys + head * VALUE_DIM + column;
    copy(0);
    next.copy(all_head_values, channels, min(piece.length, CHUNK));
    HeldColumns<KEY_DIM> held;
    held.load(state, VALUE_DIM, piece.start > 0);

    for (int first = 0; first < piece.length; first += CHUNK) {
        const int length = min(piece.length - first, CHUNK), left_over = piece.length - first - CHUNK;
        if (stages > 1 && left_over > 0) {
            copy(first + CHUNK);
            wait_for_copies<1>();
        } else {
            wait_for_copies<0>();
        }
        publish_to_wgmma();
        __syncthreads();
        Stage& stage = chunks[first / CHUNK % stages];
        Tokens own, mixed, known;
        int stride = channels;
        asm volatile("" : "+r"(stride));
        Parts left[4];  // for all tiles at once there are not enough registers
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            start_tile(known, left, held, stage.keys, tile);
            finish(known);
        }
        start_tile(mixed, left, held, stage.queries, 0);  // meanwhile: what tokens write
        float* const values = all_head_values + static_cast<int64_t>(first) * stride;
        own.load(next.rows[0], Values::STRIDE, length);
        if (left_over > 0) next.copy(values + static_cast<int64_t>(CHUNK) * stride, stride, min(left_over, CHUNK));
        Parts written[4];
        solve(own, known, stage.record, written);
        finish(mixed);
#pragma unroll
        for (int tile = 1; tile < TILES; ++tile) {
            start_tile(mixed, left, held, stage.queries, tile);
            finish(mixed);
        }
        read(mixed, stage.record, written);
        mixed.store(values, stride, length);
        Parts kept[4];
        weigh(own, stage.record.times, kept);
        held.scale(stage.record.times.kept[CHUNK - 1]);
        wgmma_begin();
        start_addition(held, kept, stage.keys);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_keep(reinterpret_cast<float(&)[KEY_DIM / 2]>(held.tiles));
        __syncthreads();  // nobody reads the chunk any more
        if (stages == 1 && left_over > 0) copy(first + CHUNK);
    }
    held.store(state, VALUE_DIM);
}

#define SCAN_KERNEL(NAME, GROUPS)                                                                                       \
    extern "C" __global__ void __launch_bounds__(GROUPS * 128, 1)                                                       \
        NAME(float* convolved, const Record* records, float* states, PIECES, int heads, int key_heads, int stages) {    \
        extern __shared__ __align__(1024) unsigned char shared[];                                                       \
        launch_next();                                                                                                  \
        wait_for_previous(convolved, records, states, rows, lengths, slots, starts);                                    \
        const Piece piece = Pieces{rows, lengths, slots, starts}[blockIdx.y];                                           \
        if (piece.length == 0) return;                                                                                  \
        const Record* const own = records + static_cast<int64_t>(record_of(rows, blockIdx.y)) * heads;                  \
        scan<GROUPS>(shared, convolved, own, states, piece, heads, key_heads, stages);                                  \
    }

#if VALUE_DIM == 128
SCAN_KERNEL(delta_hopper_wide, 2)
#endif
SCAN_KERNEL(delta_hopper_narrow, 1)

#endif
