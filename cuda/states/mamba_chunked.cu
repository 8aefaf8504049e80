// Mamba-2 (Dao and Gu 2024, arXiv:2405.21060, section 6) for prompts, 64 positions at a time, but for gate and norm.
//
// Of a chunk and a head, with dt and A as in `mamba_recurrent.cu`, D_t the sums of dt A, and S the state before the chunk:
//   y = exp(D) C S + P (dt x) + skip x, where P_ts = exp(D_t - D_s) C_t B_s up to the diagonal
//   S <- exp(D_63) S + (exp(D_63 - D) B)^T (dt x)
//
// Arrays as there; y takes the place of x in `convolved`. Blocks, their shared memory and which bits a token's bits hang on are those
// of `delta_chunked.cu`, without what is solved there.
#include "states/chunk.cuh"

using Operand = Rows64<STATE_SIZE>;

// Rows of B or C to shared memory; zeros where there are none.
template <int WARPS>
static __device__ __forceinline__ void load_rows(const Operand& target, const float* source, int stride, int length) {
    constexpr int PAIRS = STATE_SIZE / 2, EACH = (PAIRS + 31) / 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 4
    for (int row = warp; row < CHUNK; row += WARPS)
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int pair = i * 32 + lane;
            if (pair >= PAIRS) continue;
            float2 values = make_float2(0.0f, 0.0f);
            if (row < length) values = reinterpret_cast<const float2*>(source + static_cast<int64_t>(row) * stride)[pair];
            target.store(row, pair, values.x, values.y);
        }
}

// COLUMN_WARPS of the WARPS have 16 columns each.
template <int COLUMN_WARPS, int WARPS>
static __device__ __forceinline__ void run(unsigned char* shared, float* convolved, const Controls& controls,
                                           const float* time_step_bias, const float* decays, const float* skips, float* states,
                                           const Piece& piece, int heads, int groups) {
    constexpr int PER_HEAD = HEAD_DIM / (16 * COLUMN_WARPS);  // blocks
    const Operand writing{shared}, from{shared + Operand::BYTES};
    const Triangle reading{shared + 2 * Operand::BYTES};
    Times& times = *reinterpret_cast<Times*>(shared + 2 * Operand::BYTES + Triangle::BYTES);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int head = blockIdx.x / PER_HEAD, group = head / (heads / groups);
    const int column = (blockIdx.x % PER_HEAD * COLUMN_WARPS + warp) * 16;  // of this warp
    const int inner = heads * HEAD_DIM, channels = inner + 2 * groups * STATE_SIZE;
    const bool has_columns = warp < COLUMN_WARPS;
    float* const state = states + (static_cast<int64_t>(piece.slot) * heads + head) * (STATE_SIZE * HEAD_DIM) + column;
    const float bias = time_step_bias[head], decay = decays[head], skip = skips[head];
    HeldColumns<STATE_SIZE> held;
    if (has_columns) held.load(state, HEAD_DIM, piece.start > 0);

    for (int first = 0; first < piece.length; first += CHUNK) {
        const int row = piece.row + first, length = min(piece.length - first, CHUNK);
        float* const row_values = convolved + static_cast<int64_t>(row) * channels;
        float* const values = row_values + head * HEAD_DIM + column;
        __syncthreads();  // nobody reads the chunk before any more
        load_rows<WARPS>(writing, row_values + inner + group * STATE_SIZE, channels, length);
        load_rows<WARPS>(from, row_values + inner + (groups + group) * STATE_SIZE, channels, length);
        if (warp == WARPS - 1) {
            float logarithms[2], steps[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int token = 2 * lane + i;
                steps[i] = token < length ? softplus(controls(row + token, head) + bias) : 0.0f;
                logarithms[i] = steps[i] * decay;
            }
            times.make(logarithms, steps);
        }
        __syncthreads();
        for (int block = warp; block < 10; block += WARPS) {
            const int block_row = block_row_of(block), block_column = block - block_row * (block_row + 1) / 2;
            float c[2][4];
            multiply_rows(c, from, block_row, writing, block_column);
            store_reading(reading, times, block_row, block_column, c);
        }
        __syncthreads();
        if (!has_columns) continue;
        Tokens own, mixed;
        own.load(values, channels, length);
        mixed.clear();
#pragma unroll
        for (int at = 0; at < STATE_SIZE; at += 16) {
            const Parts left = left_of(held.tiles[at / 8], held.tiles[at / 8 + 1]);
#pragma unroll
            for (int block = 0; block < 4; ++block)
                multiply(mixed.tiles[2 * block], mixed.tiles[2 * block + 1], left, from.right(16 * block, at));
        }
        const int t = lane % 4;
#pragma unroll
        for (int tile = 0; tile < 8; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = 8 * tile + 2 * t + i % 2;
                float &x = own.tiles[tile][i], &y = mixed.tiles[tile][i];
                y = __fmaf_rn(skip, x, y * times.kept[token]);
                x *= times.weight[token];
            }
        Parts written[4];
#pragma unroll
        for (int block = 0; block < 4; ++block) written[block] = own.left(block);
        mixed.read(written, reading);
        mixed.store(values, channels, length);
#pragma unroll
        for (int block = 0; block < 4; ++block) written[block] = own.left(block, times.last);
        held.scale(times.kept[CHUNK - 1]);
        held.add(written, writing);
    }
    if (has_columns) held.store(state, HEAD_DIM);
}

#define MAMBA_KERNEL(NAME, COLUMN_WARPS, WARPS)                                                                         \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)                                                         \
        NAME(float* convolved, const Element* elements, int stride, const float* floats, int float_stride,              \
             const float* time_step_bias, const float* decays, const float* skips, float* states, PIECES, int heads,    \
             int groups) {                                                                                              \
        extern __shared__ __align__(16) unsigned char shared[];                                                         \
        launch_next();                                                                                                  \
        wait_for_previous(convolved, elements, floats, states, rows, lengths, slots, starts);                           \
        const Piece piece = Pieces{rows, lengths, slots, starts}[blockIdx.y];                                           \
        if (piece.length == 0) return;                                                                                  \
        run<COLUMN_WARPS, WARPS>(shared, convolved, {floats, float_stride, elements, stride}, time_step_bias, decays,   \
                                 skips, states, piece, heads, groups);                                                  \
    }

MAMBA_KERNEL(mamba_chunked_wide, HEAD_DIM / 16, (HEAD_DIM / 16 > 4 ? HEAD_DIM / 16 : 4))
#if HEAD_DIM > 32 && HEAD_DIM % 32 == 0
MAMBA_KERNEL(mamba_chunked_narrow, 2, 8)
#endif
