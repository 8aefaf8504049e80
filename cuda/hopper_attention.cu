// Prefill attention on Hopper, by wgmma. Arguments, tiles of rows and order of keys as in `prefill_attention.cu`.
//
// A block of two warpgroups takes 128 rows, a row being a (token, query head) pair, 64 to a warpgroup. Queries stay in
// shared memory; keys and values come 64 at a time, STAGES deep, by cp.async, since pages lie anywhere. Tiles in shared
// memory are 64 halves wide with wgmma's 128-byte swizzle, D / 64 of them side by side. Scores S = Q K^T are FP32 in
// registers, and, rounded to half, are the left side of O += P V. Two blocks share a multiprocessor: while one
// takes exponentials, the other multiplies; at D = 64 there are as many cycles of the one as of the other.
//
// Keys past the last visible one arrive as zeros. Where no row of a warp has a new maximum, nothing is rescaled.
//
// Options: -DHEAD_DIM, 64 or 128. Dynamic shared memory: (128 + STAGES * 128) * D halves, and 1,024 bytes.
#include "attention.cuh"
#include "hopper.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "other head sizes: attention_any.cu");

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

static constexpr int D = HEAD_DIM;
static constexpr int ROWS = 128;
static constexpr int KEYS = 64;
static constexpr int THREADS = 256;
static constexpr int STAGES = 3;
static constexpr int CHUNKS = D / 8;  // 16-byte chunks in a row
static constexpr int TILE_BYTES = KEYS * D * 2;

static __device__ __forceinline__ float exp2_fast(float x) {  // -inf gives 0; x is never large
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Byte offset of a chunk of a row in tiles of `rows` rows.
static __device__ __forceinline__ uint32_t place(int rows, int row, int chunk) {
    return static_cast<uint32_t>(chunk / 8 * rows * 128 + row * 128 + ((chunk % 8 ^ (row & 7)) * 16));
}

static __device__ __forceinline__ void load_tile(uint32_t target, const __half* cache, const int* table, int kv_heads,
                                                 int kv_head, int first_key, int keys) {
#pragma unroll
    for (int i = 0; i < KEYS * CHUNKS / THREADS; ++i) {
        const int index = i * THREADS + threadIdx.x;
        const int row = index / CHUNKS, chunk = index % CHUNKS;
        const int key = first_key + row;
        const bool wanted = key < keys;
        const int64_t page = wanted ? table[key / PAGE] : 0;
        const __half* source = cache + ((page * kv_heads + kv_head) * PAGE + key % PAGE) * D + chunk * 8;
        copy_async(target + place(KEYS, row, chunk), source, wanted);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, D == 64 ? 2 : 1)
    hopper_attention(const __half* qkv, const __half* k_cache, const __half* v_cache, const int* __restrict__ tables,
                     int table_stride, const int* __restrict__ lengths, const int* __restrict__ starts,
                     const int* __restrict__ tiles, __half* __restrict__ out, int heads, int kv_heads, float scale) {
    extern __shared__ unsigned char shared[];
    launch_next();
    wait_for_previous(qkv, k_cache, v_cache);
    const int sequence = tiles[2 * blockIdx.y];
    if (sequence < 0) return;
    const int group = heads / kv_heads, kv_head = blockIdx.x;
    const int start = starts[sequence], chunk_tokens = starts[sequence + 1] - start;
    const int length = lengths[sequence];
    const int tile_tokens = ROWS / group;
    const int first_token = tiles[2 * blockIdx.y + 1] * tile_tokens;
    const int tokens = min(tile_tokens, chunk_tokens - first_token);
    if (tokens <= 0 || length <= 0) return;
    const int before = length - chunk_tokens;             // tokens of the context before the chunk
    const int first_visible = before + first_token + 1;   // keys that the tile's first token sees
    const int keys = first_visible + tokens - 1;          // and the last one
    const int* table = tables + static_cast<int64_t>(sequence) * table_stride;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    const int all_heads = heads + 2 * kv_heads;

    const uint32_t q_tile = (shared_address(shared) + 1023) & ~1023u;
    auto k_tile = [&](int stage) { return q_tile + ROWS * D * 2 + stage * 2 * TILE_BYTES; };
    auto v_tile = [&](int stage) { return k_tile(stage) + TILE_BYTES; };
    const int key_tiles = (keys + KEYS - 1) / KEYS;
    auto load = [&](int tile) {
        if (tile < key_tiles) {
            load_tile(k_tile(tile % STAGES), k_cache, table, kv_heads, kv_head, tile * KEYS, keys);
            load_tile(v_tile(tile % STAGES), v_cache, table, kv_heads, kv_head, tile * KEYS, keys);
        }
        commit_copies();
    };
#pragma unroll
    for (int i = 0; i < ROWS * CHUNKS / THREADS; ++i) {
        const int index = i * THREADS + threadIdx.x;
        const int row = index / CHUNKS, chunk = index % CHUNKS, token = row / group;
        const bool exists = token < tokens;
        const int64_t first = static_cast<int64_t>(start + first_token + token) * all_heads + kv_head * group;
        copy_async(q_tile + place(ROWS, row, chunk), qkv + (first + row % group) * D + chunk * 8, exists);
    }
    load(0);
    load(1);

    int visible[2];  // keys that the rows g and g + 8 of the warp see
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int token = (warp * 16 + g + 8 * half) / group;
        visible[half] = token < tokens ? first_visible + token : 0;
    }
    float o[D / 2] = {};
    float m[2] = {negative_infinity(), negative_infinity()}, l[2] = {};  // m in units of scores before scaling

    for (int tile = 0; tile < key_tiles; ++tile) {
        const int stage = tile % STAGES;
        wait_for_copies<1>();
        publish_to_wgmma();
        __syncthreads();
        load(tile + 2);

        float s[KEYS / 2];
        wgmma_begin();
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
            const uint32_t along = step % 4 * 32;
            const uint64_t a = tile_descriptor(q_tile + step / 4 * ROWS * 128 + warp / 4 * 64 * 128 + along);
            const uint64_t b = tile_descriptor(k_tile(stage) + step / 4 * KEYS * 128 + along);
            wgmma(s, a, b, step > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_keep(s);

        const bool masked = (tile + 1) * KEYS > first_visible;
        float shrink[2];
        bool grown = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = m[half];
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& score = s[4 * n + 2 * half + i];
                    if (masked && tile * KEYS + n * 8 + 2 * t + i >= visible[half]) score = negative_infinity();
                    largest = fmaxf(largest, score);
                }
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            // Rows without a token see nothing: any finite reference keeps their zeros zero.
            const float reference = largest == negative_infinity() ? 0.0f : __fmul_rn(largest, scale);
            // Exactly 1 where nothing changed, so that it does not matter whether the warp's other rows rescale.
            shrink[half] = largest > m[half] ? exp2_fast(__fsub_rn(__fmul_rn(m[half], scale), reference)) : 1.0f;
            grown |= largest > m[half];
            m[half] = largest;
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& score = s[4 * n + 2 * half + i];
                    score = exp2_fast(__fmaf_rn(score, scale, -reference));
                    sum += score;
                }
            l[half] = __fmaf_rn(l[half], shrink[half], sum);
        }
        if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
            for (int i = 0; i < D / 2; ++i) o[i] *= shrink[i >> 1 & 1];
        }
        uint32_t p[KEYS / 16][4];
#pragma unroll
        for (int block = 0; block < KEYS / 16; ++block)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = &s[4 * (2 * block + (i >> 1)) + 2 * (i & 1)];
                p[block][i] = pack(pair[0], pair[1]);
            }
        wgmma_keep(o);
        wgmma_begin();
#pragma unroll
        for (int block = 0; block < KEYS / 16; ++block)
            wgmma_rows(o, p[block], tile_descriptor(v_tile(stage) + block * 16 * 128, KEYS * 128));
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_keep(o);
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = l[half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (visible[half] == 0) continue;
        const float inverse = 1.0f / sum;
        const int row = warp * 16 + g + 8 * half;
        const int64_t first = static_cast<int64_t>(start + first_token + row / group) * heads + kv_head * group;
        __half* target = out + (first + row % group) * D + 2 * t;
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
            *reinterpret_cast<__half2*>(target + n * 8) =
                __floats2half2_rn(o[4 * n + 2 * half] * inverse, o[4 * n + 2 * half + 1] * inverse);
    }
}
#endif
