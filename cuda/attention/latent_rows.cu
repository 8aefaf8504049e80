// Rows of latent attention, between its products: norms, rotation, and the write into the KV pages.
//
// latent_keep: grid (T, 2 or 1), a block of whole warps a row. Row 0 of the grid has what becomes keys and values:
//   kept     (T, latent + rotated) elements, which stay: the latent is normed, the rest rotated; both, beside each other, are what
//            `cache` has of the token. cache_rows: the row of each token, negative: none
// and row 1, where queries are made of a latent of their own,
//   down     (T, query_latent) elements, normed in place
//   table    (table_rows, rotated / 2, 2) float: cosines and sines of positions. Pairs are neighbours if `neighbours`, else i and
//            i + rotated / 2
//
// Arithmetic is FP32; each element is read once, and rounded once.
#include "attention/latent.cuh"
#include "common/block_sum.cuh"
#include "common/kv_cache.cuh"

static constexpr int THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
    latent_keep(const Element* __restrict__ kept, const float* __restrict__ norm, Element* __restrict__ down,
                const float* __restrict__ down_norm, float eps, const int* __restrict__ positions,
                const int* __restrict__ cache_rows, const float2* __restrict__ table, int table_rows,
                Kept* __restrict__ cache, int latent, int rotated, int query_latent, int neighbours) {
    __shared__ float partial[32];
    launch_next();
    wait_for_previous(kept, down);
    const int token = blockIdx.x;
    const bool of_queries = blockIdx.y == 1;
    const int count = of_queries ? query_latent : latent;
    const Element* source = of_queries ? down + static_cast<int64_t>(token) * query_latent
                                       : kept + static_cast<int64_t>(token) * (latent + rotated);
    float sum = 0.0f;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const float value = to_float(source[i]);
        sum = __fmaf_rn(value, value, sum);
    }
    const float scale = 1.0f / sqrtf(block_sum(sum, partial) / count + eps);
    if (of_queries) {
        Element* target = down + static_cast<int64_t>(token) * query_latent;
        for (int i = threadIdx.x; i < count; i += THREADS) target[i] = to_element(to_float(source[i]) * scale * down_norm[i]);
        return;
    }
    const int row = cache_rows[token];
    if (row < 0) return;
    Kept* target = cache + token_of(row, 0, 1, latent + rotated);
    for (int i = threadIdx.x; i < latent; i += THREADS) target[i] = to_element(to_float(source[i]) * scale * norm[i]);
    const float2* angles = table + static_cast<int64_t>(row_of_table(positions[token], table_rows)) * (rotated / 2);
    for (int pair = threadIdx.x; pair < rotated / 2; pair += THREADS) {
        const int2 places = places_of(pair, rotated, neighbours);
        const float2 result =
            turned_by(to_float(source[latent + places.x]), to_float(source[latent + places.y]), angles[pair]);
        target[latent + places.x] = to_element(result.x), target[latent + places.y] = to_element(result.y);
    }
}
