// Between two products: what the first has computed is added to the residual stream, which is normed for the second.
//
//   x += scale * after(added + bias)      x, added (T, width) float, bias (width,) float or null; not where added is null
//   x *= *factor                          float, or null (Gemma 4); not where added is null
//   out = before(x)                       out (T, width) elements; not where out is null
//   x = before(x)                         where `behind` is given: norms that stand behind what is added
// What a norm is: `stream_row.cuh`.
//
// width is a multiple of 8. Bytes a value: 4 of added, 8 of x, 2 of out. As in `rms_norm.cu`, with whose bits RMS norms come
// out: a block per row, of which a thread holds 1, 2 or 4 pieces of 8 values in registers; where these suffice, x and the
// norms' weights are asked for together with what is needed first.
#include "rows/stream_row.cuh"

template <int PIECES>
static __device__ __forceinline__ void residual_row(const float* added, const float* bias, const Norm& after, float scale,
                                                    const float* factor, float* x, const Norm& before, bool behind,
                                                    Element* out, int width) {
    __shared__ float partial[4][32];
    constexpr bool EARLY = PIECES <= 2;
    launch_next();
    Piece<PIECES> row, stream, after_gains, before_gains;
    if (EARLY && after.weight != nullptr) after_gains.load(after.weight, width);
    if (EARLY && before.weight != nullptr) before_gains.load(before.weight, width);
    wait_for_previous(added, x);
    const int64_t start = static_cast<int64_t>(blockIdx.x) * width;
    if (added == nullptr) {
        row.load(x + start, width);
    } else {
        row.load(added + start, width);
        if (EARLY) stream.load(x + start, width);
        if (bias != nullptr) row.add(bias, width);
        normalise<EARLY>(row, after_gains, after, width, partial);
        const float times = factor == nullptr ? 1.0f : *factor;
        row.each(width, [&](int piece, int at) {
            if (!EARLY) load8(x + start + at, stream.values[piece]);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                row.values[piece][i] = fmaf(scale, row.values[piece][i], stream.values[piece][i]) * times;
            if (!behind) store8(x + start + at, row.values[piece]);
        });
    }
    if (out == nullptr) return;
    normalise<EARLY>(row, before_gains, before, width, partial + 2);
    row.each(width, [&](int piece, int at) {
        if (behind) store8(x + start + at, row.values[piece]);
        *reinterpret_cast<Element8*>(out + start + at) = pack(row.values[piece]);
    });
}

#define RESIDUAL_KERNEL(PIECES, THREADS)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                         \
        residual_##PIECES(const float* added, const float* bias, const float* after, const float* after_bias,     \
                          float after_eps, int after_centred, float scale, const float* factor, float* x,         \
                          const float* before, const float* before_bias, float before_eps, int before_centred,    \
                          int behind, Element* out, int width) {                                                  \
        residual_row<PIECES>(added, bias, {after, after_bias, after_eps, after_centred}, scale, factor, x,        \
                             {before, before_bias, before_eps, before_centred}, behind != 0, out, width);         \
    }

RESIDUAL_KERNEL(1, 256)
RESIDUAL_KERNEL(2, 256)
RESIDUAL_KERNEL(4, 1024)
