// Mamba-2 (Dao and Gu 2024, arXiv:2405.21060, section 6) for prompts, 64 positions at a time, but for gate and norm.
//
// Of a chunk and a head, with dt and A as in `mamba_recurrent.cu`, D_t the sums of dt A, and S the state before the chunk:
//   y = exp(D) C S + P (dt x) + skip x, where P_ts = exp(D_t - D_s) C_t B_s up to the diagonal
//   S <- exp(D_63) S + (exp(D_63 - D) B)^T (dt x)
//
// Arrays as there; y takes the place of x in `convolved`. As in `delta_chunked.cu`, a token's bits hang on those before it alone.
//
//   mamba_prepare  what hangs on no state, all chunks at once: a block a (chunk, group) leaves B and C in `convolved` in two parts
//                  (`chunk.cuh`; a row's high parts, then its low ones), C B^T in `products`, and in `times` what tokens of each head keep
//   mamba_scan_*   the rest, chunk by chunk: a block a piece and two heads (`pair`, up to 64 columns each), a head (`wide`) or 32 columns
//                  of one (`narrow`), the fewer there are. A warp has 16 columns of a state in registers. While a chunk is computed the
//                  next one is copied, where shared memory suffices for two (`stages`)
//
// FLOPs of a chunk and head of 128 x 64: 7 million of tensor cores (three products of each), at 0.1 MB that move.
#include "states/mamba.cuh"

using Operand = Rows64<STATE_SIZE>;

// Rows of B or C in two parts: to shared memory, and back to where they were.
template <int WARPS>
static __device__ __forceinline__ void split_rows(const Operand& target, float* rows, int stride, int length) {
    constexpr int PAIRS = STATE_SIZE / 2, EACH = (PAIRS + 31) / 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 4
    for (int row = warp; row < CHUNK; row += WARPS) {
        float2* const source = reinterpret_cast<float2*>(rows + static_cast<int64_t>(row) * stride);
        float2 values[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int pair = i * 32 + lane;
            values[i] = make_float2(0.0f, 0.0f);
            if (pair < PAIRS && row < length) values[i] = source[pair];
        }
        __syncwarp();  // all lanes have read the row
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int pair = i * 32 + lane;
            if (pair >= PAIRS) continue;
            uint32_t high, low;
            split(values[i].x, values[i].y, high, low);
            target.store_parts(row, pair, high, low);
            if (row >= length) continue;
            reinterpret_cast<uint32_t*>(source)[pair] = high;
            reinterpret_cast<uint32_t*>(source)[PAIRS + pair] = low;
        }
    }
}

static constexpr int PREPARING = 8;  // warps

extern "C" __global__ void __launch_bounds__(PREPARING * 32)
    mamba_prepare(float* convolved, const Element* elements, int stride, const float* floats, int float_stride,
                  const float* time_step_bias, const float* decays, Products* products, Times* times, PIECES, int count, int heads,
                  int groups) {
    extern __shared__ __align__(16) unsigned char shared[];
    launch_next();
    wait_for_previous(convolved, elements, floats, products, times, rows, lengths, slots, starts);
    const auto [index, first, length] = chunk_of(rows, lengths, count, blockIdx.x);
    if (length <= 0) return;
    const int row = rows[index] + first;
    const Operand writing{shared}, from{shared + Operand::BYTES};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = blockIdx.y, of_group = heads / groups;
    const int inner = heads * HEAD_DIM, channels = inner + 2 * groups * STATE_SIZE;
    const Controls controls{floats, float_stride, elements, stride};
    float* const b = convolved + static_cast<int64_t>(row) * channels + inner + group * STATE_SIZE;
    split_rows<PREPARING>(writing, b, channels, length);
    split_rows<PREPARING>(from, b + groups * STATE_SIZE, channels, length);
    for (int head = group * of_group + warp; head < (group + 1) * of_group; head += PREPARING) {
        const float bias = time_step_bias[head], decay = decays[head];
        float logarithms[2], steps[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = 2 * lane + i;
            steps[i] = token < length ? softplus(controls(row + token, head) + bias) : 0.0f;
            logarithms[i] = steps[i] * decay;
        }
        times[static_cast<int64_t>(blockIdx.x) * heads + head].make(logarithms, steps);
    }
    __syncthreads();
    Products& own = products[static_cast<int64_t>(blockIdx.x) * groups + group];
    for (int block = warp; block < 10; block += PREPARING) {
        const int block_row = block_row_of(block), block_column = block - block_row * (block_row + 1) / 2, g = lane / 4, t = lane % 4;
        float c[2][4];
        multiply_rows(c, from, block_row, writing, block_column);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int lower = 0; lower < 2; ++lower)
                *reinterpret_cast<float2*>(&own[block][g + 8 * lower][8 * half + 2 * t]) =
                    make_float2(c[half][2 * lower], c[half][2 * lower + 1]);
    }
}

// A chunk in shared memory.
template <int HEADS>
struct alignas(16) Stage {
    unsigned char from[Operand::BYTES], writing[Operand::BYTES];
    Products products;
    Times times[HEADS];
};

// HEADS heads of one group; of the WARPS each has COLUMN_WARPS with 16 columns each; all copy.
template <int HEADS, int COLUMN_WARPS, int WARPS>
static __device__ __forceinline__ void scan(unsigned char* shared, float* convolved, const Products* products, const Times* all_times,
                                            const float* skips, float* states, const Piece& piece, int heads, int groups,
                                            int stages) {
    constexpr int PER_HEAD = HEAD_DIM / (16 * COLUMN_WARPS), THREADS = WARPS * 32;  // PER_HEAD: blocks, where HEADS is 1
    Stage<HEADS>* const chunks = reinterpret_cast<Stage<HEADS>*>(shared);
    unsigned char* const triangles = shared + stages * sizeof(Stage<HEADS>);
    const int warp = threadIdx.x / 32;
    const bool has_columns = warp < HEADS * COLUMN_WARPS;
    const int turn = has_columns ? warp / COLUMN_WARPS : 0;  // of this warp's head among the block's
    const int first_head = blockIdx.x / PER_HEAD * HEADS, head = first_head + turn, group = head / (heads / groups);
    const int column = (blockIdx.x % PER_HEAD * COLUMN_WARPS + warp % COLUMN_WARPS) * 16;  // of this warp
    const int inner = heads * HEAD_DIM, channels = inner + 2 * groups * STATE_SIZE;
    float* const state = states + (static_cast<int64_t>(piece.slot) * heads + head) * (STATE_SIZE * HEAD_DIM) + column;
    float* const row_values = convolved + static_cast<int64_t>(piece.row) * channels;
    const float skip = skips[head];
    auto copy = [&](int first) {
        Stage<HEADS>& stage = chunks[first / CHUNK % stages];
        const float* const b = row_values + static_cast<int64_t>(first) * channels + inner + group * STATE_SIZE;
        const int length = min(piece.length - first, CHUNK);
        copy_rows<STATE_SIZE, THREADS>(stage.writing, b, channels, length);
        copy_rows<STATE_SIZE, THREADS>(stage.from, b + groups * STATE_SIZE, channels, length);
        copy_bytes<THREADS>(&stage.products, products + static_cast<int64_t>(first / CHUNK) * groups + group, sizeof(Products));
        copy_bytes<THREADS>(stage.times, all_times + static_cast<int64_t>(first / CHUNK) * heads + first_head,
                            HEADS * sizeof(Times));
        commit_copies();
    };
    copy(0);
    HeldColumns<STATE_SIZE> held;
    if (has_columns) held.load(state, HEAD_DIM, piece.start > 0);

    for (int first = 0; first < piece.length; first += CHUNK) {
        const int length = min(piece.length - first, CHUNK);
        float* const values = row_values + static_cast<int64_t>(first) * channels + head * HEAD_DIM + column;
        Tokens own, mixed;
        if (has_columns) own.load(values, channels, length);
        if (stages > 1 && first + CHUNK < piece.length) {
            copy(first + CHUNK);
            wait_for_copies<1>();
        } else {
            wait_for_copies<0>();
        }
        __syncthreads();
        Stage<HEADS>& stage = chunks[first / CHUNK % stages];
        const Operand writing{stage.writing}, from{stage.from};
#pragma unroll
        for (int i = 0; i < HEADS; ++i)
            make_reading<THREADS>({triangles + i * Triangle::BYTES}, stage.products, stage.times[i]);
        if (has_columns) {
            mixed.clear();
#pragma unroll
            for (int at = 0; at < STATE_SIZE; at += 16) {
                const Parts left = left_of(held.tiles[at / 8], held.tiles[at / 8 + 1]);
#pragma unroll
                for (int block = 0; block < 4; ++block)
                    multiply(mixed.tiles[2 * block], mixed.tiles[2 * block + 1], left, from.right(16 * block, at));
            }
        }
        __syncthreads();
        if (has_columns) {
            const Times& times = stage.times[turn];
            Parts written[4];
            take_inputs(own, mixed, times, skip, written);
            mixed.read(written, {triangles + turn * Triangle::BYTES});
            mixed.store(values, channels, length);
#pragma unroll
            for (int block = 0; block < 4; ++block) written[block] = own.left(block, times.last);
            held.scale(times.kept[CHUNK - 1]);
            held.add(written, writing);
        }
        __syncthreads();  // nobody reads the chunk any more
        if (stages == 1 && first + CHUNK < piece.length) copy(first + CHUNK);
    }
    if (has_columns) held.store(state, HEAD_DIM);
}

#define SCAN_KERNEL(NAME, HEADS, COLUMN_WARPS, WARPS)                                                                   \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)                                                         \
        NAME(float* convolved, const Products* products, const Times* times, const float* skips, float* states, PIECES, \
             int heads, int groups, int stages) {                                                                       \
        extern __shared__ __align__(16) unsigned char shared[];                                                         \
        launch_next();                                                                                                  \
        wait_for_previous(convolved, products, times, states, rows, lengths, slots, starts);                            \
        const Piece piece = Pieces{rows, lengths, slots, starts}[blockIdx.y];                                           \
        if (piece.length == 0) return;                                                                                  \
        const int64_t record = record_of(rows, blockIdx.y);                                                             \
        scan<HEADS, COLUMN_WARPS, WARPS>(shared, convolved, products + record * groups, times + record * heads, skips,  \
                                         states, piece, heads, groups, stages);                                         \
    }

#if HEAD_DIM <= 64
SCAN_KERNEL(mamba_scan_pair, 2, HEAD_DIM / 16, (HEAD_DIM / 8 > 4 ? HEAD_DIM / 8 : 4))
#endif
SCAN_KERNEL(mamba_scan_wide, 1, HEAD_DIM / 16, (HEAD_DIM / 16 > 4 ? HEAD_DIM / 16 : 4))
#if HEAD_DIM > 32 && HEAD_DIM % 32 == 0
SCAN_KERNEL(mamba_scan_narrow, 1, 2, 4)
#endif
