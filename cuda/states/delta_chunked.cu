// The gated delta rule (Yang et al. 2024, arXiv:2412.06464, section 3.3) for prompts, 64 positions at a time.
//
// Of a chunk and a value head, with d_t the logarithms of what tokens keep, D_t their sums, keys and queries as `delta_recurrent.cu`
// has them, and S the state before the chunk:
//   A_ts = beta_t exp(D_t - D_s) k_t k_s below the diagonal;  (I + A) U = beta (V - exp(D) K S)
//   out = exp(D) Q S + P U, where P_ts = exp(D_t - D_s) q_t k_s up to the diagonal;  S <- exp(D_63) S + (exp(D_63 - D) K)^T U
//
// x, controls and states as there, and the convolution's inputs and weight as in `convolution.cu`; `convolved` has rows of as many
// channels, in which that left v, and out takes its place, float: `gated_norm.cu` comes after.
//
// What each token writes, U, is found by blocks of 16 tokens: those of the diagonal are inverted in float, all else is products. A
// token's bits hang on those before it alone: rows behind it are zeros or come in as factors of zero, and columns know nothing of
// each other.
//
//   delta_prepare  what hangs on no state, all chunks at once: a block a (chunk, key head) convolves keys and queries, divides them by
//                  their lengths and leaves them in `convolved` in two parts (`chunk.cuh`; a row's high parts, then its low ones), and
//                  for each of its value heads a `Record`: A, its diagonal inverted, P, and what tokens keep
//   delta_scan_*   the rest, chunk by chunk: a block a (piece, value head), or 32 columns of the head (`narrow`), so that few prompts
//                  fill the card. A warp has 16 columns of the state in registers. While a chunk is computed the next one is copied,
//                  where shared memory suffices for two (`stages`)
//
// FLOPs of a chunk and head of 128 x 128: 27 million of tensor cores (three products of each), at 0.2 MB that move.
#include "states/delta.cuh"

static constexpr float LEAST_LENGTH = 1e-6f;  // added to squares of lengths

using Operand = Rows64<KEY_DIM>;

// Blocks of 16 x 16 on the diagonal of A, before they are inverted.
using Diagonal = float[4][16][17];

static constexpr int KEPT = TAPS - 1;

// Columns of a chunk's rows before they are convolved, and what convolves them.
struct Inputs {
    const Element* x;  // rows of the step
    int stride;
    const float *states, *weight;  // as in `convolution.cu`
    int channels;

    // Two channels of the row that many behind the piece's first; what precedes it is in the state.
    __device__ __forceinline__ float2 operator()(const Piece& piece, int at, int channel) const {
        if (at >= 0)
            return to_floats(*reinterpret_cast<const Element2*>(x + static_cast<int64_t>(piece.row + at) * stride + channel));
        if (piece.start == 0) return make_float2(0.0f, 0.0f);
        const float* const before = states + (static_cast<int64_t>(piece.slot) * KEPT + KEPT + at) * channels;
        return *reinterpret_cast<const float2*>(before + channel);
    }
};

// Rows of q or k from a channel on: convolved, SiLU, divided by their lengths; to shared memory, and in parts to `out`, rows of as
// many channels. A warp has rows that follow each other.
template <int WARPS>
static __device__ __forceinline__ void make_rows(const Operand& target, const Inputs& inputs, const Piece& piece, int first, int length,
                                                 int first_channel, float scale, float* out) {
    constexpr int PAIRS = KEY_DIM / 2, EACH = (PAIRS + 31) / 32, ROWS = CHUNK / WARPS;
    const int lane = threadIdx.x % 32, first_row = static_cast<int>(threadIdx.x) / 32 * ROWS;  // of the chunk
    float2 given[KEPT + ROWS][EACH], taps[TAPS][EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int channel = first_channel + 2 * (i * 32 + lane);
        const bool mine = i * 32 + lane < PAIRS;
#pragma unroll
        for (int j = 0; j < KEPT + ROWS; ++j) {
            const int row = first_row - KEPT + j;
            given[j][i] = mine && row < length ? inputs(piece, first + row, channel) : make_float2(0.0f, 0.0f);
        }
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) {
            const float* const weight = inputs.weight + static_cast<int64_t>(channel) * TAPS + tap;
            taps[tap][i] = mine ? make_float2(weight[0], weight[TAPS]) : make_float2(0.0f, 0.0f);
        }
    }
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
        const int row = first_row + j;
        float2 values[EACH];
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            float2 sum = make_float2(__fmul_rn(given[j][i].x, taps[0][i].x), __fmul_rn(given[j][i].y, taps[0][i].y));
#pragma unroll
            for (int tap = 1; tap < TAPS; ++tap) {
                sum.x = __fmaf_rn(given[j + tap][i].x, taps[tap][i].x, sum.x);
                sum.y = __fmaf_rn(given[j + tap][i].y, taps[tap][i].y, sum.y);
            }
            values[i] = row < length ? make_float2(silu(sum.x), silu(sum.y)) : make_float2(0.0f, 0.0f);
            squares = __fmaf_rn(values[i].x, values[i].x, squares);
            squares = __fmaf_rn(values[i].y, values[i].y, squares);
        }
        const float factor = scale / sqrtf(warp_sum(squares) + LEAST_LENGTH);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int pair = i * 32 + lane;
            if (pair >= PAIRS) continue;
            uint32_t high, low;
            split(values[i].x * factor, values[i].y * factor, high, low);
            target.store_parts(row, pair, high, low);
            if (row >= length) continue;
            uint32_t* const place = reinterpret_cast<uint32_t*>(out + static_cast<int64_t>(row) * inputs.channels + first_channel);
            place[pair] = high;
            place[PAIRS + pair] = low;
        }
    }
}

// A block of A: to `before` with its sign changed, or to the diagonal.
static __device__ __forceinline__ void store_known(const Triangle& before, Diagonal& diagonal, const Times& times, int block_row,
                                                   int block_column, const float (&c)[2][4]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
            const int row = g + 8 * lower, to = 16 * block_row + row, from = 16 * block_column + 8 * half + 2 * t;
            float values[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                values[i] = from + i < to ? c[half][2 * lower + i] * times.between(to, from + i) * times.weight[to] : 0.0f;
            if (block_row != block_column) {
                before.store(block_row, block_column, row, half, t, -values[0], -values[1]);
            } else {
                diagonal[block_row][row][8 * half + 2 * t] = values[0];
                diagonal[block_row][row][8 * half + 2 * t + 1] = values[1];
            }
        }
}

// Of two blocks of the diagonal: I plus that, inverted. A lane has a column.
static __device__ __forceinline__ void invert(const Diagonal& diagonal, const Triangle& before, int first_block) {
    const int lane = threadIdx.x % 32, block = first_block + lane / 16, column = lane % 16;
    float x[16];
#pragma unroll
    for (int row = 0; row < 16; ++row) {
        float sum = row == column ? 1.0f : 0.0f;
#pragma unroll
        for (int i = 0; i < row; ++i) sum = __fmaf_rn(-diagonal[block][row][i], x[i], sum);
        x[row] = sum;
        before.store_one(block, row, column, sum);
    }
}

static constexpr int PREPARING = 8;  // warps

extern "C" __global__ void __launch_bounds__(PREPARING * 32, 2)
    delta_prepare(const Element* x, int stride, const float* inputs, const float* weight, float* convolved, const float* floats,
                  int float_stride, const float* time_step_bias, const float* decays, Record* records, PIECES, int count, int heads,
                  int key_heads) {
    extern __shared__ __align__(16) unsigned char shared[];
    launch_next();
    wait_for_previous(x, inputs, convolved, floats, records, rows, lengths, slots, starts);
    const auto [index, first, length] = chunk_of(rows, lengths, count, blockIdx.x);
    if (length <= 0) return;
    const Piece piece = Pieces{rows, lengths, slots, starts}[index];
    const int row = piece.row + first;

    const Operand keys{shared}, queries{shared + Operand::BYTES};
    Record& record = *reinterpret_cast<Record*>(shared + 2 * Operand::BYTES);
    Diagonal& diagonal = *reinterpret_cast<Diagonal*>(shared + 2 * Operand::BYTES + sizeof(Record));
    const Triangle before{record.before}, reading{record.reading};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, key_head = blockIdx.y;
    const int all_keys = key_heads * KEY_DIM, all_values = heads * VALUE_DIM, channels = 2 * all_keys + all_values;
    const Controls controls{floats, float_stride, x + channels + all_values, stride};
    const Inputs from{x, stride, inputs, weight, channels};
    float* const out = convolved + static_cast<int64_t>(row) * channels;
    const float scale = 1.0f / sqrtf(static_cast<float>(KEY_DIM));
    make_rows<PREPARING>(queries, from, piece, first, length, key_head * KEY_DIM, scale, out);
    make_rows<PREPARING>(keys, from, piece, first, length, all_keys + key_head * KEY_DIM, 1.0f, out);
    __syncthreads();
    constexpr int JOBS = (20 + PREPARING - 1) / PREPARING;  // of a warp: blocks of keys keys^T, then of queries keys^T
    float products[JOBS][2][4];
#pragma unroll
    for (int i = 0; i < JOBS; ++i) {
        const int job = i * PREPARING + warp, block = job % 10, block_row = block_row_of(block);
        if (job < 20)
            multiply_rows(products[i], job < 10 ? keys : queries, block_row, keys, block - block_row * (block_row + 1) / 2);
    }
    const DeltaHeads all{heads, key_heads};
    for (int head = all.first_of(key_head), last = 0; !last; head = all.after(head)) {
        last = all.is_last(head);
        if (warp == 0) {
            const float bias = time_step_bias[head], decay = decays[head];
            float logarithms[2], betas[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int token = 2 * lane + i;
                logarithms[i] = betas[i] = 0.0f;
                if (token < length) {
                    betas[i] = sigmoid(controls(row + token, head));
                    logarithms[i] = decay * softplus(controls(row + token, heads + head) + bias);
                }
            }
            record.times.make(logarithms, betas);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < JOBS; ++i) {
            const int job = i * PREPARING + warp, block = job % 10, block_row = block_row_of(block);
            const int block_column = block - block_row * (block_row + 1) / 2;
            if (job < 10)
                store_known(before, diagonal, record.times, block_row, block_column, products[i]);
            else if (job < 20)
                store_reading(reading, record.times, block_row, block_column, products[i]);
        }
        __syncthreads();
        if (warp < 2) invert(diagonal, before, 2 * warp);
        __syncthreads();
        uint4* const target = reinterpret_cast<uint4*>(records + static_cast<int64_t>(blockIdx.x) * heads + head);
        for (int i = threadIdx.x; i < static_cast<int>(sizeof(Record) / 16); i += PREPARING * 32)
            target[i] = reinterpret_cast<const uint4*>(&record)[i];
        __syncthreads();
    }
}

// A chunk in shared memory.
struct alignas(16) Stage {
    unsigned char queries[Operand::BYTES], keys[Operand::BYTES];
    Record record;
};

template <int THREADS>
static __device__ __forceinline__ void copy_stage(Stage& stage, const float* queries, const float* keys, int stride, int length,
                                                  const Record* record) {
    copy_rows<KEY_DIM, THREADS>(stage.queries, queries, stride, length);
    copy_rows<KEY_DIM, THREADS>(stage.keys, keys, stride, length);
    copy_bytes<THREADS>(&stage.record, record, sizeof(Record));
}

// COLUMN_WARPS of the WARPS have 16 columns each; all copy.
template <int COLUMN_WARPS, int WARPS>
static __device__ __forceinline__ void scan(unsigned char* shared, float* convolved, const Record* records, float* states,
                                            const Piece& piece, int heads, int key_heads, int stages) {
    constexpr int PER_HEAD = VALUE_DIM / (16 * COLUMN_WARPS);  // blocks
    Stage* const chunks = reinterpret_cast<Stage*>(shared);
    const int warp = threadIdx.x / 32;
    const int head = blockIdx.x / PER_HEAD, key_head = DeltaHeads{heads, key_heads}.key_of(head);
    const int column = (blockIdx.x % PER_HEAD * COLUMN_WARPS + warp) * 16;  // of this warp
    const int all_keys = key_heads * KEY_DIM, channels = 2 * all_keys + heads * VALUE_DIM;
    const bool has_columns = warp < COLUMN_WARPS;
    float* const state = states + (static_cast<int64_t>(piece.slot) * heads + head) * (KEY_DIM * VALUE_DIM) + column;
    float* const row_values = convolved + static_cast<int64_t>(piece.row) * channels;
    auto copy = [&](int first) {
        const float* const queries = row_values + static_cast<int64_t>(first) * channels + key_head * KEY_DIM;
        copy_stage<WARPS * 32>(chunks[first / CHUNK % stages], queries, queries + all_keys, channels,
                               min(piece.length - first, CHUNK), records + static_cast<int64_t>(first / CHUNK) * heads + head);
        commit_copies();
    };
    copy(0);
    HeldColumns<KEY_DIM> held;
    if (has_columns) held.load(state, VALUE_DIM, piece.start > 0);

    for (int first = 0; first < piece.length; first += CHUNK) {
        const int length = min(piece.length - first, CHUNK);
        float* const values = row_values + static_cast<int64_t>(first) * channels + 2 * all_keys + head * VALUE_DIM + column;
        const bool ahead = stages > 1 && first + CHUNK < piece.length;
        Tokens own, mixed, known;
        if (has_columns) own.load(values, channels, length);
        if (ahead) {
            copy(first + CHUNK);
            wait_for_copies<1>();
        } else {
            wait_for_copies<0>();
        }
        __syncthreads();
        if (has_columns) {
            Stage& stage = chunks[first / CHUNK % stages];
            const Operand keys{stage.keys}, queries{stage.queries};
            mixed.clear();
            known.clear();
#pragma unroll
            for (int at = 0; at < KEY_DIM; at += 16) {
                const Parts left = left_of(held.tiles[at / 8], held.tiles[at / 8 + 1]);
#pragma unroll
                for (int block = 0; block < 4; ++block) {
                    multiply(known.tiles[2 * block], known.tiles[2 * block + 1], left, keys.right(16 * block, at));
                    multiply(mixed.tiles[2 * block], mixed.tiles[2 * block + 1], left, queries.right(16 * block, at));
                }
            }
            Parts written[4];
            solve(own, known, stage.record, written);
            read(mixed, stage.record, written);
            mixed.store(values, channels, length);
            weigh(own, stage.record.times, written);
            held.scale(stage.record.times.kept[CHUNK - 1]);
            held.add(written, keys);
        }
        __syncthreads();  // nobody reads the chunk any more
        if (stages == 1 && first + CHUNK < piece.length) copy(first + CHUNK);
    }
    if (has_columns) held.store(state, VALUE_DIM);
}

#define SCAN_KERNEL(NAME, COLUMN_WARPS, WARPS)                                                                          \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)                                                         \
        NAME(float* convolved, const Record* records, float* states, PIECES, int heads, int key_heads, int stages) {    \
        extern __shared__ __align__(16) unsigned char shared[];                                                         \
        launch_next();                                                                                                  \
        wait_for_previous(convolved, records, states, rows, lengths, slots, starts);                                    \
        const Piece piece = Pieces{rows, lengths, slots, starts}[blockIdx.y];                                           \
        if (piece.length == 0) return;                                                                                  \
        const Record* const own = records + static_cast<int64_t>(record_of(rows, blockIdx.y)) * heads;                  \
        scan<COLUMN_WARPS, WARPS>(shared, convolved, own, states, piece, heads, key_heads, stages);                     \
    }

SCAN_KERNEL(delta_scan_wide, VALUE_DIM / 16, (VALUE_DIM / 16 > 4 ? VALUE_DIM / 16 : 4))
#if VALUE_DIM > 32
SCAN_KERNEL(delta_scan_narrow, 2, 4)
#endif
