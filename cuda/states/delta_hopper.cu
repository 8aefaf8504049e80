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
#include "states/delta.cuh"
#include "states/hopper_chunk.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A chunk in shared memory.
struct alignas(1024) Stage {
    unsigned char keys[Tiles<KEY_DIM>::BYTES], queries[Tiles<KEY_DIM>::BYTES];
    Record record;
};

template <int GROUPS>
static __device__ __forceinline__ void scan(unsigned char* shared, float* convolved, const Record* records, float* states,
                                            const Piece& piece, int heads, int key_heads, int stages) {
    constexpr int PER_HEAD = VALUE_DIM / (64 * GROUPS), THREADS = 128 * GROUPS;  // PER_HEAD: blocks
    Stage* const chunks = reinterpret_cast<Stage*>(shared);
    Values& next = reinterpret_cast<Values*>(shared + stages * sizeof(Stage))[threadIdx.x / 32];
    const int head = blockIdx.x / PER_HEAD, key_head = DeltaHeads{heads, key_heads}.key_of(head);
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
        copy_tiles<KEY_DIM, THREADS>(stage.keys, queries + all_keys, stride, length);
        copy_tiles<KEY_DIM, THREADS>(stage.queries, queries, stride, length);
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
        for (int tile = 0; tile < Tiles<KEY_DIM>::COUNT; ++tile) {
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
        for (int tile = 1; tile < Tiles<KEY_DIM>::COUNT; ++tile) {
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
