// Between a recurrence and the product of its output: norms and gates of rows.
//
//   norm_then_gate  a delta net's prompts: out = norm(y) silu(gate), normed by head of `width` numbers
//   gate_then_norm  Mamba-2: out = norm(y silu(gate)), normed by group of `width` numbers
//
// y float, rows of `y_stride`, and gate elements, rows of `stride`, both from their first column on; norm float
// (width,), of gate_then_norm (groups, width); out (T, groups width) elements. width is a multiple of 4.
//
// 8 bytes a number. Rows are those of pieces: where `whole` is set, those that follow each other from the first piece's on, a block
// a (row, group); else a block a (piece, group), row after row. norm_then_gate has a warp for a head. Sums are in an
// order that hangs on the width alone.
#include "common/block_sum.cuh"
#include "states/mixing.cuh"

static constexpr int THREADS = 256;

struct Four {
    float values[4];
};

static __device__ __forceinline__ Four load4(const float* source) {
    const float4 v = *reinterpret_cast<const float4*>(source);
    return {{v.x, v.y, v.z, v.w}};
}
static __device__ __forceinline__ Four load4_elements(const Element* source) {
    const float2 low = to_floats(reinterpret_cast<const Element2*>(source)[0]);
    const float2 high = to_floats(reinterpret_cast<const Element2*>(source)[1]);
    return {{low.x, low.y, high.x, high.y}};
}
static __device__ __forceinline__ void store4(Element* target, const Four& v) {
    *reinterpret_cast<uint2*>(target) = make_uint2(pack(v.values[0], v.values[1]), pack(v.values[2], v.values[3]));
}

// The rows that a block has: of all that follow each other one, or a piece's.
static __device__ __forceinline__ Piece rows_of(const Pieces& pieces, int index, int whole) {
    if (whole) return {pieces.rows[0] + index, 1, 0, 0};
    return pieces[index];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    norm_then_gate(const float* y, int y_stride, const Element* gate, int stride, const float* norm, float eps, PIECES, int whole,
                   int heads, int width, Element* out) {
    launch_next();
    wait_for_previous(y, gate, rows, lengths, slots, starts);
    const int head = static_cast<int>(blockIdx.y * (THREADS / 32) + threadIdx.x / 32), column = static_cast<int>(threadIdx.x % 32) * 4;
    const bool mine = head < heads && column < width;
    const Piece piece = rows_of({rows, lengths, slots, starts}, blockIdx.x, whole);
    for (int row = piece.row; row < piece.row + piece.length; ++row) {
        const int64_t at = static_cast<int64_t>(row);
        const int place = head * width + column;
        Four v{};
        float squares = 0.0f;
        if (mine) {
            v = load4(y + at * y_stride + place);
#pragma unroll
            for (int i = 0; i < 4; ++i) squares = __fmaf_rn(v.values[i], v.values[i], squares);
        }
        const float factor = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(width) + eps);
        if (!mine) continue;
        const Four gates = load4_elements(gate + at * stride + place), gains = load4(norm + column);
#pragma unroll
        for (int i = 0; i < 4; ++i) v.values[i] = v.values[i] * factor * gains.values[i] * silu(gates.values[i]);
        store4(out + at * heads * width + place, v);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gate_then_norm(const float* y, int y_stride, const Element* gate, int stride, const float* norm, float eps, PIECES, int whole,
                   int groups, int width, Element* out) {
    __shared__ float partial[2][32];
    launch_next();
    wait_for_previous(y, gate, rows, lengths, slots, starts);
    const int group = blockIdx.y;
    const Piece piece = rows_of({rows, lengths, slots, starts}, blockIdx.x, whole);
    for (int token = 0; token < piece.length; ++token) {
        const int64_t row = piece.row + token;
        const float* const from = y + row * y_stride + group * width;
        const Element* const gates = gate + row * stride + group * width;
        auto gated = [&](int column) {
            Four v = load4(from + column);
            const Four by = load4_elements(gates + column);
#pragma unroll
            for (int i = 0; i < 4; ++i) v.values[i] *= silu(by.values[i]);
            return v;
        };
        float squares = 0.0f;
        for (int column = threadIdx.x * 4; column < width; column += THREADS * 4) {
            const Four v = gated(column);
#pragma unroll
            for (int i = 0; i < 4; ++i) squares = __fmaf_rn(v.values[i], v.values[i], squares);
        }
        // Of two tokens, one sums while some threads still read the other's.
        const float mean = block_sum(squares, partial[token % 2]) / static_cast<float>(width);
        const float factor = 1.0f / sqrtf(mean + eps);
        for (int column = threadIdx.x * 4; column < width; column += THREADS * 4) {
            Four v = gated(column);
            const Four gains = load4(norm + group * width + column);
#pragma unroll
            for (int i = 0; i < 4; ++i) v.values[i] *= factor * gains.values[i];
            store4(out + row * groups * width + group * width + column, v);
        }
    }
}
