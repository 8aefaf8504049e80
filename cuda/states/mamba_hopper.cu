// The second half of `mamba_chunked.cu` on Hopper: products with the state by wgmma, for states of 64 or 128 and heads of 64 or 128.
//
// Arrays and arithmetic as there; sums are in the same order in both kernels here, but not that of `mamba_scan_*`. A warpgroup has 64
// columns of a state (`hopper_chunk.cuh`): C S and what is added to S are by wgmma, what tokens do to each other is left to mma.sync.
//
//   mamba_hopper_wide    a block a piece and 128 columns, two warpgroups: a head, or two heads of one group
//   mamba_hopper_narrow  one warpgroup with 64 columns
//
// While a chunk is computed the next one is copied; `stages` of them in shared memory, 76 KB each where states have 128 rows.
#ifndef ELEMENT_BF16
#define ELEMENT_BF16  // of wgmma here: parts of floats; no element is read or written
#endif
#include "states/hopper_chunk.cuh"
#include "states/mamba.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A chunk in shared memory.
template <int HEADS>
struct alignas(1024) Stage {
    unsigned char from[Tiles<STATE_SIZE>::BYTES], writing[Tiles<STATE_SIZE>::BYTES];
    Products products;
    Times times[HEADS];
};

template <int GROUPS>
static __device__ __forceinline__ void scan(unsigned char* shared, float* convolved, const Products* products, const Times* all_times,
                                            const float* skips, float* states, const Piece& piece, int heads, int groups,
                                            int stages) {
    constexpr int HEADS = HEAD_DIM == 64 ? GROUPS : 1, THREADS = 128 * GROUPS;
    constexpr int PER_HEAD = HEAD_DIM * HEADS / (64 * GROUPS);  // blocks
    Stage<HEADS>* const chunks = reinterpret_cast<Stage<HEADS>*>(shared);
    unsigned char* const triangles = shared + stages * sizeof(Stage<HEADS>);
    Values& next = reinterpret_cast<Values*>(triangles + HEADS * Triangle::BYTES)[threadIdx.x / 32];
    const int of_block = threadIdx.x / 32 * 16;             // this warp's first column among the block's
    const int turn = HEADS == 1 ? 0 : of_block / HEAD_DIM;  // its head among the block's
    const int first_head = blockIdx.x / PER_HEAD * HEADS, head = first_head + turn, group = head / (heads / groups);
    const int column = blockIdx.x % PER_HEAD * 64 * GROUPS + of_block - turn * HEAD_DIM;
    const int inner = heads * HEAD_DIM, channels = inner + 2 * groups * STATE_SIZE;
    float* const state = states + (static_cast<int64_t>(piece.slot) * heads + head) * (STATE_SIZE * HEAD_DIM) + column;
    float* const row_values = convolved + static_cast<int64_t>(piece.row) * channels;
    float* const all_head_values = row_values + head * HEAD_DIM + column;
    const float skip = skips[head];
    auto copy = [&](int first) {
        int stride = channels;
        asm volatile("" : "+r"(stride));  // or addresses of all rows are kept from chunk to chunk, in registers that are not there
        Stage<HEADS>& stage = chunks[first / CHUNK % stages];
        const float* const b = row_values + static_cast<int64_t>(first) * channels + inner + group * STATE_SIZE;
        const int length = min(piece.length - first, CHUNK);
        copy_tiles<STATE_SIZE, THREADS>(stage.writing, b, stride, length);
        copy_tiles<STATE_SIZE, THREADS>(stage.from, b + groups * STATE_SIZE, stride, length);
        copy_bytes<THREADS>(&stage.products, products + static_cast<int64_t>(first / CHUNK) * groups + group, sizeof(Products));
        copy_bytes<THREADS>(stage.times, all_times + static_cast<int64_t>(first / CHUNK) * heads + first_head,
                            HEADS * sizeof(Times));
        commit_copies();
    };
    copy(0);
    next.copy(all_head_values, channels, min(piece.length, CHUNK));
    HeldColumns<STATE_SIZE> held;
    held.load(state, HEAD_DIM, piece.start > 0);

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
        Stage<HEADS>& stage = chunks[first / CHUNK % stages];
        Tokens own, mixed;
        int stride = channels;
        asm volatile("" : "+r"(stride));
        Parts left[4];
        start_tile(mixed, left, held, stage.from, 0);  // meanwhile: what tokens read of each other
#pragma unroll
        for (int i = 0; i < HEADS; ++i)
            make_reading<THREADS>({triangles + i * Triangle::BYTES}, stage.products, stage.times[i]);
        finish(mixed);
#pragma unroll
        for (int tile = 1; tile < Tiles<STATE_SIZE>::COUNT; ++tile) {
            start_tile(mixed, left, held, stage.from, tile);
            finish(mixed);
        }
        float* const values = all_head_values + static_cast<int64_t>(first) * stride;
        own.load(next.rows[0], Values::STRIDE, length);
        if (left_over > 0) next.copy(values + static_cast<int64_t>(CHUNK) * stride, stride, min(left_over, CHUNK));
        __syncthreads();
        const Times& times = stage.times[turn];
        Parts written[4], kept[4];
        take_inputs(own, mixed, times, skip, written);
        mixed.read(written, {triangles + turn * Triangle::BYTES});
#pragma unroll
        for (int block = 0; block < 4; ++block) kept[block] = own.left(block, times.last);
        held.scale(times.kept[CHUNK - 1]);
        wgmma_begin();
        start_addition(held, kept, stage.writing);
        wgmma_commit();
        mixed.store(values, stride, length);
        wgmma_wait<0>();
        wgmma_keep(reinterpret_cast<float(&)[STATE_SIZE / 2]>(held.tiles));
        __syncthreads();  // nobody reads the chunk any more
        if (stages == 1 && left_over > 0) copy(first + CHUNK);
    }
    held.store(state, HEAD_DIM);
}

#define SCAN_KERNEL(NAME, GROUPS)                                                                                       \
    extern "C" __global__ void __launch_bounds__(GROUPS * 128, 1)                                                       \
        NAME(float* convolved, const Products* products, const Times* times, const float* skips, float* states, PIECES, \
             int heads, int groups, int stages) {                                                                       \
        extern __shared__ __align__(1024) unsigned char shared[];                                                       \
        launch_next();                                                                                                  \
        wait_for_previous(convolved, products, times, states, rows, lengths, slots, starts);                            \
        const Piece piece = Pieces{rows, lengths, slots, starts}[blockIdx.y];                                           \
        if (piece.length == 0) return;                                                                                  \
        const int64_t record = record_of(rows, blockIdx.y);                                                             \
        scan<GROUPS>(shared, convolved, products + record * groups, times + record * heads, skips, states, piece,       \
                     heads, groups, stages);                                                                            \
    }

SCAN_KERNEL(mamba_hopper_wide, 2)
SCAN_KERNEL(mamba_hopper_narrow, 1)

#endif
