// Between two products: what the first has computed is added to the residual stream, which is normed for the second.
//
//   x += scale * after(added + bias)      x, added (T, width) float, bias (width,) float or null; not where added is null
//   x *= *factor                          float, or null (Gemma 4); not where added is null
//   out = before(x)                       out (T, width) elements; not where out is null
//   x = before(x)                         where `behind` is given: norms that stand behind what is added
// What a norm is: `stream_row.cuh`. `residual_three_*` give three RMS norms of x that have one eps, each with weights of its
// own: what a dense network, experts beside it and their router read (Gemma 4).
//
// width is a multiple of 8. Bytes a value: 4 of added, 8 of x, 2 of out. As in `rms_norm.cu`, with whose bits RMS norms come
// out: a block per row, of which a thread holds 1, 2 or 4 pieces of 8 values in registers; where these suffice, x and the
// norms' weights are asked for together with what is needed first.
#include "rows/stream_row.cuh"

struct Added {
    const float *values, *bias;
    Norm after;
    float scale;
    const float* factor;
    bool behind;
};

// x with what is added, in registers and in its place.
template <int PIECES>
static __device__ __forceinline__ void add_to_stream(Piece<PIECES>& row, Piece<PIECES>& gains, const Added& added, float* x,
                                                     int64_t start, int width, float (*partial)[32]) {
    constexpr bool EARLY = PIECES <= 2;
    if (added.values == nullptr) {
        row.load(x + start, width);
        return;
    }
    Piece<PIECES> stream;
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
        if (!added.behind) store8(x + start + at, row.values[piece]);
    });
}

template <int PIECES>
static __device__ __forceinline__ void residual_row(Added added, float* x, const Norm& before, Element* out, int width) {
    __shared__ float partial[4][32];
    constexpr bool EARLY = PIECES <= 2;
    launch_next();
    Piece<PIECES> row, after_gains, before_gains;
    if (EARLY && added.after.weight != nullptr) after_gains.load(added.after.weight, width);
    if (EARLY && before.weight != nullptr) before_gains.load(before.weight, width);
    wait_for_previous(added.values, x);
    const int64_t start = static_cast<int64_t>(blockIdx.x) * width;
    add_to_stream(row, after_gains, added, x, start, width, partial);
    if (out == nullptr) return;
    normalise<EARLY>(row, before_gains, before, width, partial + 2);
    row.each(width, [&](int piece, int at) {
        if (added.behind) store8(x + start + at, row.values[piece]);
        *reinterpret_cast<Element8*>(out + start + at) = pack(row.values[piece]);
    });
}

// The weight of a norm, and what it gives.
struct Given {
    const float* weight;
    Element* out;
};

template <int PIECES>
static __device__ __forceinline__ void three_norms(Added added, float* x, float eps, const Given (&all)[3], int width) {
    __shared__ float partial[4][32];
    launch_next();
    Piece<PIECES> row, after_gains;
    if (PIECES <= 2 && added.after.weight != nullptr) after_gains.load(added.after.weight, width);
    wait_for_previous(added.values, x);
    const int64_t start = static_cast<int64_t>(blockIdx.x) * width;
    add_to_stream(row, after_gains, added, x, start, width, partial);
    const float scale = inverse_rms(row, eps, width, partial[2]);
    for (const Given& given : all)
        row.each(width, [&](int piece, int at) {
            float gains[8];
            load8(given.weight + at, gains);
#pragma unroll
            for (int i = 0; i < 8; ++i) gains[i] = row.values[piece][i] * (scale * gains[i]);
            *reinterpret_cast<Element8*>(given.out + start + at) = pack(gains);
        });
}

#define RESIDUAL_KERNELS(PIECES, THREADS)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                         \
        residual_##PIECES(const float* added, const float* bias, const float* after, const float* after_bias,     \
                          float after_eps, int after_centred, float scale, const float* factor, float* x,         \
                          const float* before, const float* before_bias, float before_eps, int before_centred,    \
                          int behind, Element* out, int width) {                                                  \
        const Norm own{after, after_bias, after_eps, after_centred};                                              \
        residual_row<PIECES>({added, bias, own, scale, factor, behind != 0}, x,                                   \
                             {before, before_bias, before_eps, before_centred}, out, width);                      \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                         \
        residual_three_##PIECES(const float* added, const float* bias, const float* after,                        \
                                const float* after_bias, float after_eps, int after_centred, float scale,         \
                                const float* factor, float* x, float eps, const float* first, Element* first_out, \
                                const float* second, Element* second_out, const float* third, Element* third_out, \
                                int width) {                                                                      \
        const Norm own{after, after_bias, after_eps, after_centred};                                              \
        three_norms<PIECES>({added, bias, own, scale, factor, false}, x, eps,                                     \
                            {{first, first_out}, {second, second_out}, {third, third_out}}, width);               \
    }

RESIDUAL_KERNELS(1, 256)
RESIDUAL_KERNELS(2, 256)
RESIDUAL_KERNELS(4, 1024)
