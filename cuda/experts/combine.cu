// What experts give, added up in the order of ranks, and then to the residual stream, which is normed for what comes next.
//
//   sum = base + weights[0] y[places[0]] + weights[1] y[places[1]] + ... + shared * sigmoid(gate)
//   x += scale * after(sum)
//   x *= *factor
//   out = before(x)
// y (positions, width) float; places (T, used) int, -1 for no position; weights (T, used) float (`route.cu`); base and shared
// (T, width) float or null; gate of a token is the sum of `parts` columns of gates (T, pitch) float, `part` apart, as a logit
// is in `route.cu`; null: shared is added as it is. Where experts stand beside the shared one (Gemma 4), what they add up to has a norm, `routed`,
// and what the shared one gives another, `of_shared`. factor is a float or null. Where x is null, out is the sum itself. x (T, width) float, out (T, width)
// elements; not where out is null. What a norm is: `rows/stream_row.cuh`.
//
// width is a multiple of 8. Bytes a value: 4 for each rank, 4 each of base and shared, 8 of x, 2 of out. As in `rms_norm.cu`:
// a block per row, of which a thread holds 1, 2 or 4 pieces of 8 values in registers; of four, registers hold no second row to norm,
// so that the launcher refuses `of_shared` there.
#include "rows/stream_row.cuh"

struct Ranks {
    const float* y;
    const int* places;
    const float* weights;
    int used;
};
struct Gate {
    const float* logits;
    int pitch, part, parts;
    float part_scale;

    __device__ __forceinline__ float of(int row) const {
        if (logits == nullptr) return 1.0f;
        const float* own = logits + static_cast<int64_t>(row) * pitch;
        float logit = 0.0f;
        for (int p = parts - 1; p > 0; --p) logit = (logit + own[p * part]) * part_scale;
        return 1.0f / (1.0f + expf(-(logit + own[0])));
    }
};

template <int PIECES>
static __device__ __forceinline__ void combine_row(Ranks ranks, const float* base, const float* shared, Gate gate,
                                                   const Norm& routed, const Norm& of_shared, const Norm& after, float scale,
                                                   const float* factor, float* x, const Norm& before, Element* out, int width) {
    __shared__ float partial[8][32];
    launch_next();
    wait_for_previous(ranks.y, ranks.places, ranks.weights, base, shared, gate.logits, x);
    const int64_t start = static_cast<int64_t>(blockIdx.x) * width, first = static_cast<int64_t>(blockIdx.x) * ranks.used;
    Piece<PIECES> row, gains;
    if (base != nullptr)
        row.load(base + start, width);
    else
        row.each(width, [&](int piece, int) {
#pragma unroll
            for (int i = 0; i < 8; ++i) row.values[piece][i] = 0.0f;
        });
    const auto add = [&](const float* more, float weight) {
        row.each(width, [&](int piece, int at) {
            float values[8];
            load8(more + at, values);
#pragma unroll
            for (int i = 0; i < 8; ++i) row.values[piece][i] = fmaf(weight, values[i], row.values[piece][i]);
        });
    };
#pragma unroll 4
    for (int rank = 0; rank < ranks.used; ++rank) {
        const int place = ranks.places[first + rank];
        if (place >= 0) add(ranks.y + static_cast<int64_t>(place) * width, ranks.weights[first + rank]);
    }
    normalise<false>(row, gains, routed, width, partial + 4);
    if (shared != nullptr && of_shared.weight == nullptr) add(shared + start, gate.of(blockIdx.x));
    if (PIECES <= 2 && shared != nullptr && of_shared.weight != nullptr) {
        Piece<PIECES> other;
        other.load(shared + start, width);
        normalise<false>(other, gains, of_shared, width, partial + 6);
        row.each(width, [&](int piece, int) {
#pragma unroll
            for (int i = 0; i < 8; ++i) row.values[piece][i] += other.values[piece][i];
        });
    }
    if (x != nullptr) {
        normalise<false>(row, gains, after, width, partial);
        const float times = factor == nullptr ? 1.0f : *factor;
        row.each(width, [&](int piece, int at) {
            float stream[8];
            load8(x + start + at, stream);
#pragma unroll
            for (int i = 0; i < 8; ++i) row.values[piece][i] = fmaf(scale, row.values[piece][i], stream[i]) * times;
            store8(x + start + at, row.values[piece]);
        });
        if (out == nullptr) return;
        normalise<false>(row, gains, before, width, partial + 2);
    }
    row.each(width,
             [&](int piece, int at) { *reinterpret_cast<Element8*>(out + start + at) = pack(row.values[piece]); });
}

#define COMBINE_KERNEL(PIECES, THREADS)                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                 \
        combine_##PIECES(const float* y, const int* places, const float* weights, int used, const float* base,            \
                         const float* shared, const float* gates, int pitch, int part, int parts, float part_scale,       \
                         const float* routed, const float* routed_bias, float routed_eps, int routed_centred,             \
                         const float* of_shared, const float* shared_bias, float shared_eps, int shared_centred,          \
                         const float* after, const float* after_bias, float after_eps, int after_centred, float scale,    \
                         const float* factor, float* x, const float* before, const float* before_bias, float before_eps,  \
                         int before_centred, Element* out, int width) {                                                   \
        combine_row<PIECES>({y, places, weights, used}, base, shared, {gates, pitch, part, parts, part_scale},            \
                            {routed, routed_bias, routed_eps, routed_centred},                                            \
                            {of_shared, shared_bias, shared_eps, shared_centred},                                         \
                            {after, after_bias, after_eps, after_centred}, scale, factor, x,                              \
                            {before, before_bias, before_eps, before_centred}, out, width);                               \
    }

COMBINE_KERNEL(1, 256)
COMBINE_KERNEL(2, 256)
COMBINE_KERNEL(4, 1024)
