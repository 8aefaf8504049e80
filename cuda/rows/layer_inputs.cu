// Inputs of layers for the token itself (Gemma 4): made for all layers at once, and read by each at its end.
//
//   layer_inputs          made (T, L W) elements: a product of the tokens' embeddings, in whose place comes
//                         (table[token] * table_scale + norm(scale * made)) / sqrt(2), the norm that of each layer's W
//                         alone: RMS, gains (W,) float
//   layer_inputs_Q4_K ..  the same from a packed table (common/packed.cuh), of which only the tokens' rows are unpacked
//   gate_inputs           gate (T, W) elements becomes gelu(gate) * made[rows[t]][layer], in place; rows null: made[t]
//
// table (V, L W); W is a multiple of 8. A token outside the table has a row of zeros there. Bytes a value: 4 of made and what
// the table takes; 6 for `gate_inputs`. All are bound by memory. A warp has a layer's part of a token, twice: for its sum of
// squares, and again.
#include "common/packed.cuh"

static constexpr int WARPS = 8;

// chunk_of(row, chunk): eight elements of the table.
template <typename Chunk>
static __device__ __forceinline__ void make_inputs(const int* __restrict__ tokens, Element* made, const float* __restrict__ gains,
                                                   int count, int layers, int width, int vocab, float scale, float eps,
                                                   float table_scale, Chunk chunk_of) {
    launch_next();
    wait_for_previous(tokens, made);
    const int64_t part = static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (part >= static_cast<int64_t>(count) * layers) return;
    const int lane = threadIdx.x % 32, chunks = width / 8, first = static_cast<int>(part % layers) * chunks;
    const int token = tokens[part / layers];
    Element8* own = reinterpret_cast<Element8*>(made + part * width);
    float squares = 0.0f;
    for (int chunk = lane; chunk < chunks; chunk += 32) {
        float values[8];
        unpack(own[chunk], values);
#pragma unroll
        for (int i = 0; i < 8; ++i) squares = fmaf(values[i] * scale, values[i] * scale, squares);
    }
    const float norm = scale / sqrtf(warp_sum(squares) / static_cast<float>(width) + eps);
    for (int chunk = lane; chunk < chunks; chunk += 32) {
        float values[8], gain[8], given[8] = {};
        unpack(own[chunk], values);
        load8(gains + chunk * 8, gain);
        if (token >= 0 && token < vocab) unpack(chunk_of(token, first + chunk), given);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = fmaf(given[i], table_scale, values[i] * norm * gain[i]) * 0.70710678f;
        own[chunk] = pack(values);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    layer_inputs(const int* __restrict__ tokens, const Element8* __restrict__ table, Element* made,
                 const float* __restrict__ gains, int count, int layers, int width, int vocab, float scale, float eps,
                 float table_scale) {
    make_inputs(tokens, made, gains, count, layers, width, vocab, scale, eps, table_scale,
                [=](int64_t row, int chunk) { return table[row * layers * (width / 8) + chunk]; });
}

#define LAYER_INPUTS(FORMAT)                                                                                                \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                                \
        layer_inputs_##FORMAT(const int* __restrict__ tokens, const unsigned char* __restrict__ table, Element* made,        \
                              const float* __restrict__ gains, int count, int layers, int width, int vocab, float scale,     \
                              float eps, float table_scale) {                                                                \
        make_inputs(tokens, made, gains, count, layers, width, vocab, scale, eps, table_scale, [=](int64_t row, int chunk) { \
            return packed::neighbours_of<packed::FORMAT>(table, layers * width, row, chunk);                                \
        });                                                                                                                 \
    }
PACKED_FORMATS(LAYER_INPUTS)

extern "C" __global__ void __launch_bounds__(256)
    gate_inputs(Element* gate, const Element* __restrict__ made, const int* __restrict__ rows, int count, int layers, int layer,
                int width) {
    launch_next();
    wait_for_previous(gate, made);
    const int chunks = width / 8;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
    if (index >= static_cast<int64_t>(count) * chunks) return;
    const int64_t token = index / chunks, row = rows == nullptr ? token : max(rows[token], 0);
    const Element* source = made + (row * layers + layer) * width + index % chunks * 8;
    float values[8], given[8];
    unpack(reinterpret_cast<const Element8*>(gate)[index], values);
    unpack(*reinterpret_cast<const Element8*>(source), given);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = gelu_times(values[i], given[i]);
    reinterpret_cast<Element8*>(gate)[index] = pack(values);
}
