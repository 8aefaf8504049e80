// Rows picked by index: token embeddings, and the rows that draw.
//
//   embed          tokens (T,), table (V, width) elements -> out (T, width) float, times `scale`
//   embed_Q4_K ..  the same from a packed table (common/packed.cuh)
//   add_embeddings  x (T, width) float += table (rows, width) float [positions (T,)] + row (width,) float; either may be null
//   gather_rows    out[r] = x[rows[r]], rows of `chunks` 16-byte chunks
//
// width is a multiple of 8. A token outside the table or a row of -1 (padding) gives a row of zeros. Bytes: embed
// 6 a value, gather_rows twice the row. All are bound by memory; a thread moves one 16-byte chunk of the table or
// of the row, threads are numbered through the whole output, so that rows of any width fill the blocks of 256.
#include "common/packed.cuh"

// chunk_of(row, chunk): eight elements of the table.
template <typename Chunk>
static __device__ __forceinline__ void embed_rows(const int* __restrict__ tokens, float* __restrict__ out, int count, int width,
                                                  int vocab, float scale, Chunk chunk_of) {
    launch_next();
    wait_for_previous(tokens);
    const int chunks = width / 8;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
    if (index >= static_cast<int64_t>(count) * chunks) return;
    const int row = static_cast<int>(index / chunks);
    const int chunk = static_cast<int>(index % chunks);
    const int token = tokens[row];
    float values[8] = {};
    if (token >= 0 && token < vocab) unpack(chunk_of(token, chunk), values);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] *= scale;
    store8(out + index * 8, values);
}

extern "C" __global__ void __launch_bounds__(256)
    embed(const int* __restrict__ tokens, const Element8* __restrict__ table, float* __restrict__ out, int count, int width,
          int vocab, float scale) {
    embed_rows(tokens, out, count, width, vocab, scale,
               [=](int64_t row, int chunk) { return table[row * (width / 8) + chunk]; });
}

#define EMBED(FORMAT)                                                                                                       \
    extern "C" __global__ void __launch_bounds__(256)                                                                       \
        embed_##FORMAT(const int* __restrict__ tokens, const unsigned char* __restrict__ table, float* __restrict__ out,     \
                       int count, int width, int vocab, float scale) {                                                      \
        embed_rows(tokens, out, count, width, vocab, scale, [=](int64_t row, int chunk) {                                   \
            return packed::neighbours_of<packed::FORMAT>(table, width, row, chunk);                                         \
        });                                                                                                                 \
    }
PACKED_FORMATS(EMBED)

extern "C" __global__ void __launch_bounds__(256)
    add_embeddings(const int* __restrict__ positions, const float* __restrict__ table, const float* __restrict__ row,
                   float* __restrict__ x, int count, int width, int rows) {
    launch_next();
    wait_for_previous(x);
    const int chunks = width / 8;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
    if (index >= static_cast<int64_t>(count) * chunks) return;
    const int at = static_cast<int>(index % chunks) * 8, position = positions[index / chunks];
    float values[8], more[8] = {};
    load8(x + index * 8, values);
    if (row != nullptr) load8(row + at, more);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] += more[i];
    if (table != nullptr && position >= 0 && position < rows) {
        load8(table + static_cast<int64_t>(position) * width + at, more);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] += more[i];
    }
    store8(x + index * 8, values);
}

extern "C" __global__ void __launch_bounds__(256)
    gather_rows(const uint4* __restrict__ x, const int* __restrict__ rows, uint4* __restrict__ out, int count,
                int chunks) {
    launch_next();
    wait_for_previous(x);
    const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
    if (index >= static_cast<int64_t>(count) * chunks) return;
    const int row = rows[index / chunks];
    out[index] = row >= 0 ? x[static_cast<int64_t>(row) * chunks + index % chunks] : make_uint4(0, 0, 0, 0);
}
