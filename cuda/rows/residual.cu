// Between two products: what the first has computed is added to the residual stream, which is normed for the second.
//
//   x += scale * after(added + bias)      x, added (T, width) float, bias (width,) float or null; not where added is null
//   out = before(x)                       out (T, width) elements; not where out is null
// A norm divides v by sqrt(mean(v^2) + eps), multiplies by its weight (width,) float and adds its bias, if it has one; v is x
// less its mean where the norm is centred (LayerNorm: Ba et al. 2016), else x (RMS norm). Without a weight it is v = x.
//
// width is a multiple of 8. Bytes a value: 4 of added, 8 of x, 2 of out. As in `rms_norm.cu`, with whose bits RMS norms come
// out: a block per row, of which a thread holds 1, 2 or 4 pieces of 8 values in registers; where these suffice, x and the
// norms' weights are asked for together with what is needed first.
#include "common/block_sum.cuh"

struct Norm {
    const float *weight, *bias;
    float eps;
    int centred;
};

// This thread's pieces of a row.
template <int PIECES>
struct Piece {
    float values[PIECES][8];

    static __device__ __forceinline__ int column(int piece) {
        return static_cast<int>(piece * blockDim.x + threadIdx.x) * 8;
    }
    // Calls take(piece, column) for those that there are.
    template <typename Take>
    static __device__ __forceinline__ void each(int width, Take take) {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece)
            if (column(piece) < width) take(piece, column(piece));
    }
    __device__ __forceinline__ void load(const float* row, int width) {
        each(width, [&](int piece, int at) { load8(row + at, values[piece]); });
    }
    __device__ __forceinline__ void add(const float* row, int width) {
        each(width, [&](int piece, int at) {
            float more[8];
            load8(row + at, more);
#pragma unroll
            for (int i = 0; i < 8; ++i) values[piece][i] += more[i];
        });
    }
};

// `gains`: the norm's weight, if it was read already (EARLY).
template <bool EARLY, int PIECES>
static __device__ __forceinline__ void normalise(Piece<PIECES>& row, Piece<PIECES>& gains, const Norm& norm, int width,
                                                 float (*partial)[32]) {
    if (norm.weight == nullptr) return;
    if (norm.centred) {
        float sum = 0.0f;
        row.each(width, [&](int piece, int) {
#pragma unroll
            for (int i = 0; i < 8; ++i) sum += row.values[piece][i];
        });
        const float mean = block_sum(sum, partial[0]) / static_cast<float>(width);
        row.each(width, [&](int piece, int) {
#pragma unroll
            for (int i = 0; i < 8; ++i) row.values[piece][i] -= mean;
        });
    }
    float squares = 0.0f;
    row.each(width, [&](int piece, int) {
#pragma unroll
        for (int i = 0; i < 8; ++i) squares = fmaf(row.values[piece][i], row.values[piece][i], squares);
    });
    const float scale = 1.0f / sqrtf(block_sum(squares, partial[1]) / static_cast<float>(width) + norm.eps);
    row.each(width, [&](int piece, int at) {
        if (!EARLY) load8(norm.weight + at, gains.values[piece]);
#pragma unroll
        for (int i = 0; i < 8; ++i) row.values[piece][i] *= scale * gains.values[piece][i];
    });
    if (norm.bias != nullptr) row.add(norm.bias, width);
}

template <int PIECES>
static __device__ __forceinline__ void residual_row(const float* added, const float* bias, const Norm& after, float scale,
                                                    float* x, const Norm& before, Element* out, int width) {
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
        row.each(width, [&](int piece, int at) {
            if (!EARLY) load8(x + start + at, stream.values[piece]);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                row.values[piece][i] = fmaf(scale, row.values[piece][i], stream.values[piece][i]);
            store8(x + start + at, row.values[piece]);
        });
    }
    if (out == nullptr) return;
    normalise<EARLY>(row, before_gains, before, width, partial + 2);
    row.each(width,
             [&](int piece, int at) { *reinterpret_cast<Element8*>(out + start + at) = pack(row.values[piece]); });
}

#define RESIDUAL_KERNEL(PIECES, THREADS)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                         \
        residual_##PIECES(const float* added, const float* bias, const float* after, const float* after_bias,     \
                          float after_eps, int after_centred, float scale, float* x, const float* before,         \
                          const float* before_bias, float before_eps, int before_centred, Element* out,           \
                          int width) {                                                                            \
        residual_row<PIECES>(added, bias, {after, after_bias, after_eps, after_centred}, scale, x,                \
                             {before, before_bias, before_eps, before_centred}, out, width);                      \
    }

RESIDUAL_KERNEL(1, 256)
RESIDUAL_KERNEL(2, 256)
RESIDUAL_KERNEL(4, 1024)
