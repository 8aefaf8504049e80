// Mamba-2 (Dao and Gu 2024, arXiv:2405.21060) for drawn tokens, one by one, but for gate and norm (`gated_norm.cu`).
//
// Of a token and a head, with B and C of its group: S <- exp(dt A) S + dt B x;  y = C S + skip x, where A is negative and dt =
// softplus(step + time_step_bias). Head h has group h / (heads / groups).
//
// convolved (T, I + 2 groups STATE_SIZE) float, I = heads HEAD_DIM: x, B, C; y takes the place of x. A row's step of each head is an
// element of `elements` (T, stride), unless `floats` has them (`Controls`). states float (slots, heads, STATE_SIZE, HEAD_DIM).
//
// Bytes: 8 STATE_SIZE HEAD_DIM a head and piece; blocks hold a state in registers and copy the next, as in `delta_recurrent.cu`.
#include "states/recurrent.cuh"

static constexpr int WARPS = STATE_SIZE * HEAD_DIM > 128 * 128 ? 16 : STATE_SIZE * HEAD_DIM >= 64 * 64 ? 8 : 4;
using Matrix = HeldMatrix<STATE_SIZE, HEAD_DIM, WARPS>;

extern "C" __global__ void __launch_bounds__(WARPS * 32, WARPS == 16 ? 1 : 16 / WARPS)
    mamba_recurrent(float* convolved, const Element* elements, int stride, const float* floats, int float_stride,
                    const float* time_step_bias, const float* decays, const float* skips, float* states, PIECES, int count,
                    int heads, int groups) {
    extern __shared__ __align__(16) unsigned char room[];
    __shared__ __align__(16) float writing[2][STATE_SIZE], reading[2][STATE_SIZE];
    __shared__ __align__(16) float parts[2][Matrix::GROUPS][HEAD_DIM];
    launch_next();
    wait_for_previous(convolved, elements, floats, states, rows, lengths, slots, starts);
    const Pieces pieces{rows, lengths, slots, starts};
    const int inner = heads * HEAD_DIM, shared = groups * STATE_SIZE;
    const Controls controls{floats, float_stride, elements, stride};
    Matrix matrix;
    auto state_of = [&](const Piece& piece, int head) {
        return states + (static_cast<int64_t>(piece.slot) * heads + head) * (STATE_SIZE * HEAD_DIM);
    };
    const int tasks = count * heads, step_over = gridDim.x;
    auto piece_of = [&](int task) { return task < tasks ? pieces[task / heads] : Piece{0, 0, 0, 0}; };
    auto ask = [&](const Piece& piece, int task) {
        if (piece.length > 0) matrix.ask(room, state_of(piece, task % heads), piece.start > 0);
    };
    Piece next = piece_of(blockIdx.x);
    ask(next, blockIdx.x);
    int turn = 0;  // of two: others may still read what is of the token before
    for (int task = blockIdx.x; task < tasks; task += step_over) {
        const Piece piece = next;
        const int head = task % heads, group = head / (heads / groups);
        next = piece_of(task + step_over);
        if (piece.length == 0) {
            ask(next, task + step_over);
            continue;
        }
        const float bias = time_step_bias[head], decay = decays[head], skip = skips[head];
        for (int token = 0; token < piece.length; ++token, turn ^= 1) {
            const int row = piece.row + token;
            float* const values = convolved + static_cast<int64_t>(row) * (inner + 2 * shared);
            for (int i = threadIdx.x; i < STATE_SIZE; i += WARPS * 32) {
                writing[turn][i] = values[inner + group * STATE_SIZE + i];
                reading[turn][i] = values[inner + shared + group * STATE_SIZE + i];
            }
            float4* const place = reinterpret_cast<float4*>(values + head * HEAD_DIM + matrix.column);
            const float4 x = *place;
            const float step = softplus(controls(row, head) + bias), kept = expf(step * decay);
            float4 input = x;
            scale_by(input, step);
            if (token == 0) {  // only now: what is small was asked for before the block waits for the matrix
                matrix.take(room);
                ask(next, task + step_over);
            }
            __syncthreads();
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int i = 0; i < Matrix::HELD; ++i) {
                scale_by(matrix.held[i], kept);
                add_scaled(matrix.held[i], writing[turn][matrix.row(i)], input);
                add_scaled(sum, reading[turn][matrix.row(i)], matrix.held[i]);
            }
            if (token + 1 == piece.length) matrix.store(state_of(piece, head));
            matrix.put(parts[turn], sum);
            __syncthreads();
            if (threadIdx.x < Matrix::LANES) {
                float4 y = matrix.total(parts[turn]);
                add_scaled(y, skip, x);
                *place = y;
            }
        }
    }
}
