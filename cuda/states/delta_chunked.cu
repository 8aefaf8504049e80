// The gated delta rule (Yang et al. 2024, arXiv:2412.06464, section 3.3) for prompts, 64 positions at a time.
//
// Of a chunk and a value head, with d_t the logarithms of what tokens keep, D_t their sums, keys and queries as `delta_recurrent.cu`
// has them, and S the state before the chunk:
//   A_ts = beta_t exp(D_t - D_s) k_t k_s below the diagonal;  (I + A) U = beta (V - exp(D) K S)
//   out = exp(D) Q S + P U, where P_ts = exp(D_t - D_s) q_t k_s up to the diagonal;  S <- exp(D_63) S + (exp(D_63 - D) K)^T U
//
// convolved, controls and states as there; out takes the place of v in `convolved`, float: `gated_norm.cu` comes after.
//
// A block a (piece, value head), or 32 columns of the head (`narrow`: eight warps prepare, two have the columns), so that few prompts
// fill the card; it goes through the piece's chunks and keeps its columns of the state in registers (`chunk.cuh`). What each token
// writes, U, is found by blocks of 16 tokens: those of the diagonal are inverted in float, all else is products. A token's bits hang on
// those before it alone: rows behind it are zeros or come in as factors of zero, and columns know nothing of each other.
//
// FLOPs of a chunk and head of 128 x 128: 27 million of tensor cores (three products of each), at 0.1 MB that move.
#include "states/chunk.cuh"

static constexpr float LEAST_LENGTH = 1e-6f;  // added to squares of lengths

using Operand = Rows64<KEY_DIM>;

// Blocks of 16 x 16 on the diagonal of A, before they are inverted.
using Diagonal = float[4][16][17];

// Rows of q or k, divided by their lengths, to shared memory.
template <int WARPS>
static __device__ __forceinline__ void load_rows(const Operand& target, const float* source, int stride, int length, float scale) {
    constexpr int PAIRS = KEY_DIM / 2, EACH = (PAIRS + 31) / 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 4
    for (int row = warp; row < CHUNK; row += WARPS) {
        float2 values[EACH];
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int pair = i * 32 + lane;
            values[i] = make_float2(0.0f, 0.0f);
            if (pair < PAIRS && row < length)
                values[i] = reinterpret_cast<const float2*>(source + static_cast<int64_t>(row) * stride)[pair];
            squares = __fmaf_rn(values[i].x, values[i].x, squares);
            squares = __fmaf_rn(values[i].y, values[i].y, squares);
        }
        const float factor = scale / sqrtf(warp_sum(squares) + LEAST_LENGTH);
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (i * 32 + lane < PAIRS) target.store(row, i * 32 + lane, values[i].x * factor, values[i].y * factor);
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

// COLUMN_WARPS of the WARPS have 16 columns each.
template <int COLUMN_WARPS, int WARPS>
static __device__ __forceinline__ void run(unsigned char* shared, float* convolved, const Controls& controls,
                                           const float* time_step_bias, const float* decays, float* states, const Piece& piece,
                                           int heads, int key_heads) {
    constexpr int PER_HEAD = VALUE_DIM / (16 * COLUMN_WARPS);  // blocks
    const Operand keys{shared}, queries{shared + Operand::BYTES};
    const Triangle before{shared + 2 * Operand::BYTES}, reading{shared + 2 * Operand::BYTES + Triangle::BYTES};
    unsigned char* const rest = shared + 2 * Operand::BYTES + 2 * Triangle::BYTES;
    Times& times = *reinterpret_cast<Times*>(rest);
    Diagonal& diagonal = *reinterpret_cast<Diagonal*>(rest + sizeof(Times));

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int head = blockIdx.x / PER_HEAD, key_head = head % key_heads;
    const int column = (blockIdx.x % PER_HEAD * COLUMN_WARPS + warp) * 16;  // of this warp
    const int all_keys = key_heads * KEY_DIM, channels = 2 * all_keys + heads * VALUE_DIM;
    const bool has_columns = warp < COLUMN_WARPS;
    float* const state = states + (static_cast<int64_t>(piece.slot) * heads + head) * (KEY_DIM * VALUE_DIM) + column;
    const float bias = time_step_bias[head], decay = decays[head];
    HeldColumns<KEY_DIM> held;
    if (has_columns) held.load(state, VALUE_DIM, piece.start > 0);

    for (int first = 0; first < piece.length; first += CHUNK) {
        const int row = piece.row + first, length = min(piece.length - first, CHUNK);
        float* const qkv = convolved + static_cast<int64_t>(row) * channels;
        float* const values = qkv + 2 * all_keys + head * VALUE_DIM + column;
        __syncthreads();  // nobody reads the chunk before any more
        load_rows<WARPS>(queries, qkv + key_head * KEY_DIM, channels, length, 1.0f / sqrtf(static_cast<float>(KEY_DIM)));
        load_rows<WARPS>(keys, qkv + all_keys + key_head * KEY_DIM, channels, length, 1.0f);
        if (warp == WARPS - 1) {
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
            times.make(logarithms, betas);
        }
        __syncthreads();
        for (int job = warp; job < 20; job += WARPS) {
            const int block = job % 10, block_row = block_row_of(block);
            const int block_column = block - block_row * (block_row + 1) / 2;
            float c[2][4];
            multiply_rows(c, job < 10 ? keys : queries, block_row, keys, block_column);
            if (job < 10)
                store_known(before, diagonal, times, block_row, block_column, c);
            else
                store_reading(reading, times, block_row, block_column, c);
        }
        __syncthreads();
        if (warp >= WARPS - 2) invert(diagonal, before, 2 * (warp - (WARPS - 2)));
        Tokens own, mixed, known;
        if (has_columns) {
            own.load(values, channels, length);
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
            const int t = lane % 4;
#pragma unroll
            for (int tile = 0; tile < 8; ++tile)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int token = 8 * tile + 2 * t + i % 2;
                    const float kept = times.kept[token];
                    own.tiles[tile][i] = times.weight[token] * (own.tiles[tile][i] - kept * known.tiles[tile][i]);
                    mixed.tiles[tile][i] *= kept;
                }
        }
        __syncthreads();
        if (!has_columns) continue;
        Parts written[4];
#pragma unroll
        for (int block = 0; block < 4; ++block) {
            float(&low)[4] = own.tiles[2 * block];
            float(&high)[4] = own.tiles[2 * block + 1];
#pragma unroll
            for (int earlier = 0; earlier < block; ++earlier)
                multiply(low, high, written[earlier], before.right(block, earlier));
            const Parts left = left_of(low, high);
#pragma unroll
            for (int i = 0; i < 4; ++i) low[i] = high[i] = 0.0f;
            multiply(low, high, left, before.right(block, block));
            written[block] = left_of(low, high);
        }
        mixed.read(written, reading);
        mixed.store(values, channels, length);
#pragma unroll
        for (int block = 0; block < 4; ++block) written[block] = own.left(block, times.last);
        held.scale(times.kept[CHUNK - 1]);
        held.add(written, keys);
    }
    if (has_columns) held.store(state, VALUE_DIM);
}

#define DELTA_KERNEL(NAME, COLUMN_WARPS, WARPS)                                                                         \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)                                                         \
        NAME(float* convolved, const Element* elements, int stride, const float* floats, int float_stride,              \
             const float* time_step_bias, const float* decays, float* states, PIECES, int heads, int key_heads) {       \
        extern __shared__ __align__(16) unsigned char shared[];                                                         \
        launch_next();                                                                                                  \
        wait_for_previous(convolved, elements, floats, states, rows, lengths, slots, starts);                           \
        const Piece piece = Pieces{rows, lengths, slots, starts}[blockIdx.y];                                           \
        if (piece.length == 0) return;                                                                                  \
        run<COLUMN_WARPS, WARPS>(shared, convolved, {floats, float_stride, elements, stride}, time_step_bias, decays,   \
                                 states, piece, heads, key_heads);                                                      \
    }

DELTA_KERNEL(delta_chunked_wide, VALUE_DIM / 16, (VALUE_DIM / 16 > 4 ? VALUE_DIM / 16 : 4))
#if VALUE_DIM > 32
DELTA_KERNEL(delta_chunked_narrow, 2, 8)
#endif
