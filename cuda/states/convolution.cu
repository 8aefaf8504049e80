// Causal convolutions by channel over TAPS tokens, with their states, in rows of a product.
//
//   SHORT 0  out (T, C) float = silu(convolution(x) + bias); bias float (C,) or null
//   SHORT 1  out (T, C) elements = c convolution(b x), where a row of x has b, c and x of C numbers each (LFM2)
//
// x elements (T, stride), the columns that count in front; weight float (C, TAPS), the oldest token's tap first; states float (slots,
// TAPS - 1, C): the inputs before a piece, the oldest first (of SHORT, b x). C and stride are multiples of 8.
//
//   convolve_prompts  rows of pieces that follow each other, channels from `first_channel` on. A thread has 8 channels of 16 rows and
//                     keeps the last inputs in registers: each row is read 1.2 times. Finds a row's piece by bisection. States are
//                     read only.
//   keep_inputs       afterwards: the last inputs of those pieces to their slots. A kernel of its own, since the blocks that read a
//                     slot's old inputs are not the one that has the last rows.
//   convolve_drawn    a piece's rows one after the other, and its slot's inputs; a thread has 8 channels.
//
// Bytes: a row's elements once, 4 C (SHORT: 2 C) out; of a drawn piece 8 (TAPS - 1) C of the state. A result is a function of the
// row's and the preceding inputs, summed from the oldest tap on, whichever kernel computes it.
#include "states/mixing.cuh"

static constexpr int ROWS = 16;  // of a thread, of prompts, ...
static constexpr int TOGETHER = 4;  // ... which are asked for together
static constexpr int KEPT = TAPS - 1;

#if SHORT
using Out = Element;
#else
using Out = float;
#endif

struct Rows {
    const Element* x;
    int stride, channels;

    // What is convolved of a row, 8 channels.
    __device__ __forceinline__ void input(int row, int channel, float (&values)[8]) const {
        const Element* source = x + static_cast<int64_t>(row) * stride + channel;
        load8_elements(source, values);
#if SHORT
        float more[8];
        load8_elements(source + 2 * channels, more);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = __fmul_rn(values[i], more[i]);
#endif
    }
    __device__ __forceinline__ void store(int row, int channel, float (&sums)[8], const float* bias, Out* out) const {
        Out* target = out + static_cast<int64_t>(row) * channels + channel;
#if SHORT
        float gates[8];
        load8_elements(x + static_cast<int64_t>(row) * stride + channels + channel, gates);
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i] = __fmul_rn(sums[i], gates[i]);
        store8_elements(target, sums);
#else
        if (bias != nullptr) {
            float more[8];
            load8(bias + channel, more);
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[i] = __fadd_rn(sums[i], more[i]);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i] = silu(sums[i]);
        store8(target, sums);
#endif
    }
};

// The inputs before a row and the taps, of 8 channels.
struct Window {
    float before[KEPT][8], taps[8][TAPS];

    __device__ __forceinline__ void load_taps(const float* weight, int channel) {
#pragma unroll
        for (int i = 0; i < TAPS; ++i) {  // 8 at a time, of 8 TAPS that lie together
            float some[8];
            load8(weight + static_cast<int64_t>(channel) * TAPS + 8 * i, some);
#pragma unroll
            for (int j = 0; j < 8; ++j) taps[(8 * i + j) / TAPS][(8 * i + j) % TAPS] = some[j];
        }
    }
    // Those before the piece's row `at`: earlier rows of it, else what the state holds, which is zeros where the sequence starts.
    __device__ __forceinline__ void begin(const Rows& rows, const Piece& piece, int at, int channel, const float* states) {
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const int behind = at - KEPT + i;
            if (behind >= 0) {
                rows.input(piece.row + behind, channel, before[i]);
            } else if (piece.start > 0) {
                load8(states + (static_cast<int64_t>(piece.slot) * KEPT + KEPT + behind) * rows.channels + channel, before[i]);
            } else {
#pragma unroll
                for (int j = 0; j < 8; ++j) before[i][j] = 0.0f;
            }
        }
    }
    __device__ __forceinline__ void next(const float (&input)[8], float (&sums)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float sum = __fmul_rn(before[0][i], taps[i][0]);
#pragma unroll
            for (int tap = 1; tap < KEPT; ++tap) sum = __fmaf_rn(before[tap][i], taps[i][tap], sum);
            sums[i] = __fmaf_rn(input[i], taps[i][KEPT], sum);
#pragma unroll
            for (int tap = 1; tap < KEPT; ++tap) before[tap - 1][i] = before[tap][i];
            before[KEPT - 1][i] = input[i];
        }
    }
    __device__ __forceinline__ void keep(const Piece& piece, int channels, int channel, float* states) {
#pragma unroll
        for (int i = 0; i < KEPT; ++i)
            store8(states + (static_cast<int64_t>(piece.slot) * KEPT + i) * channels + channel, before[i]);
    }
};

extern "C" __global__ void __launch_bounds__(128)
    convolve_prompts(const Element* x, int stride, int channels, int first_channel, const float* weight, const float* bias,
                     const float* states, PIECES, int count, int total, Out* out) {
    launch_next();
    const int channel = first_channel + static_cast<int>(blockIdx.x * 128 + threadIdx.x) * 8;
    const bool mine = channel < channels;
    Window window;
    if (mine) window.load_taps(weight, channel);
    wait_for_previous(x, states, rows, lengths, slots, starts);
    if (!mine) return;
    const Pieces pieces{rows, lengths, slots, starts};
    const Rows from{x, stride, channels};
    const int first = rows[0] + static_cast<int>(blockIdx.y) * ROWS, end = min(first + ROWS, rows[0] + total);
    int index = 0;
    for (int above = count; above - index > 1;) {
        const int middle = (index + above) / 2;
        (rows[middle] <= first ? index : above) = middle;
    }
    Piece piece = pieces[index];
    window.begin(from, piece, first - piece.row, channel, states);
    for (int group = first; group < end; group += TOGETHER) {
        float inputs[TOGETHER][8];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) from.input(min(group + i, end - 1), channel, inputs[i]);
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const int row = group + i;
            if (row >= end) break;
            if (row - piece.row >= piece.length) {
                piece = pieces[++index];
                window.begin(from, piece, 0, channel, states);
            }
            float sums[8];
            window.next(inputs[i], sums);
            from.store(row, channel, sums, bias, out);
        }
    }
}

extern "C" __global__ void __launch_bounds__(128)
    keep_inputs(const Element* x, int stride, int channels, float* states, PIECES) {
    launch_next();
    wait_for_previous(x, states, rows, lengths, slots, starts);
    const int channel = static_cast<int>(blockIdx.x * 128 + threadIdx.x) * 8;
    const Piece piece = Pieces{rows, lengths, slots, starts}[blockIdx.y];
    if (channel >= channels || piece.length == 0) return;
    Window window;
    window.begin({x, stride, channels}, piece, piece.length, channel, states);
    window.keep(piece, channels, channel, states);
}

extern "C" __global__ void __launch_bounds__(128)
    convolve_drawn(const Element* x, int stride, int channels, const float* weight, const float* bias, float* states, PIECES,
                   Out* out) {
    launch_next();
    const int channel = static_cast<int>(blockIdx.x * 128 + threadIdx.x) * 8;
    const bool mine = channel < channels;
    Window window;
    if (mine) window.load_taps(weight, channel);
    wait_for_previous(x, states, rows, lengths, slots, starts);
    const Piece piece = Pieces{rows, lengths, slots, starts}[blockIdx.y];
    if (!mine || piece.length == 0) return;
    const Rows from{x, stride, channels};
    window.begin(from, piece, 0, channel, states);
    for (int row = piece.row; row < piece.row + piece.length; ++row) {
        float input[8], sums[8];
        from.input(row, channel, input);
        window.next(input, sums);
        from.store(row, channel, sums, bias, out);
    }
    window.keep(piece, channels, channel, states);
}
