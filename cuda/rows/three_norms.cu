// As `residual.cu`, but that x is normed three times: for a dense network, for the experts beside it, and for their router, each
// with weights of its own (Gemma 4).
//
//   x += scale * after(added + bias)      x, added (T, width) float, bias (width,) float or null
//   x *= *factor                          float, or null
//   outs[i] = rms(x) * weights[i]         outs (T, width) elements, weights (width,) float; RMS norms with one eps
//
// With the bits of `residual.cu` and of two `rms_norm.cu` behind it, whose launches, and reads of x, are saved. Bytes a value: 4 of
// added, 8 of x, 6 of outs. A block per row, of which a thread holds 1, 2 or 4 pieces of 8 values in registers.
#include "rows/stream_row.cuh"

struct Added {
    const float *values, *bias;
    Norm after;
    float scale;
    const float* factor;
};

// The weight of a norm, and what it gives.
struct Given {
    const float* weight;
    Element* out;
};

template <int PIECES>
static __device__ __forceinline__ void three_norms(Added added, float* x, float eps, const Given (&all)[3], int width) {
    __shared__ float partial[3][32];
    constexpr bool EARLY = PIECES <= 2;
    launch_next();
    Piece<PIECES> row, stream, gains;
    if (EARLY && added.after.weight != nullptr) gains.load(added.after.weight, width);
    wait_for_previous(added.values, x);
    const int64_t start = static_cast<int64_t>(blockIdx.x) * width;
    row.load(added.values + start, width);
    if (EARLY) stream.load(x + start, width);
    if (added.bias != nullptr) row.add(added.bias, width);
    normalise<EARLY>(row, gains, added.after, width, partial);
    const float times = added.factor == nullptr ? 1.0f : *added.factor;
    row.each(width, [&](int piece, int at) {
        if (!EARLY) load8(x + start + at, stream.values[piece]);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            row.values[piece][i] = fmaf(added.scale, row.values[piece][i], stream.values[piece][i]) * times;
        store8(x + start + at, row.values[piece]);
    });
    float squares = 0.0f;
    row.each(width, [&](int piece, int) {
#pragma unroll
        for (int i = 0; i < 8; ++i) squares = fmaf(row.values[piece][i], row.values[piece][i], squares);
    });
    const float scale = 1.0f / sqrtf(block_sum(squares, partial[2]) / static_cast<float>(width) + eps);
    for (const Given& given : all)
        row.each(width, [&](int piece, int at) {
            float normed[8];
            load8(given.weight + at, normed);
#pragma unroll
            for (int i = 0; i < 8; ++i) normed[i] = row.values[piece][i] * (scale * normed[i]);
            *reinterpret_cast<Element8*>(given.out + start + at) = pack(normed);
        });
}

#define THREE_NORMS(PIECES, THREADS)                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                            \
        three_norms_##PIECES(const float* added, const float* bias, const float* after, const float* after_bias,     \
                             float after_eps, int after_centred, float scale, const float* factor, float* x,         \
                             float eps, const float* first, Element* first_out, const float* second,                 \
                             Element* second_out, const float* third, Element* third_out, int width) {               \
        three_norms<PIECES>({added, bias, {after, after_bias, after_eps, after_centred}, scale, factor}, x, eps,     \
                            {{first, first_out}, {second, second_out}, {third, third_out}}, width);                  \
    }

THREE_NORMS(1, 256)
THREE_NORMS(2, 256)
THREE_NORMS(4, 1024)
