// A decode step of at most 8 tokens: products fused with what is around them, for latency. Five launches a layer
// with the attention between them.
//
//   few_qkv       qkv of norm(x), bias, rotation; queries to qkv (T, (H + 2 G) D) half, keys and values to the pages
//   few_residual  x += in W^T; in (T, K) half, x (T, outputs) float
//   few_swiglu    out (T, F) half = silu(gate) * up of norm(x); W has F rows of gate, then F of up
//
// x (T, width) float, weights half (outputs, K) row-major, K a multiple of 32; norms, bias, positions, cache_rows,
// table and caches as in `rms_norm.cu` and `qkv_rope.cu`. Everything is computed and rounded as by `rms_norm`, a product
// of `hopper_gemm.cu`, `qkv_rope_write` and `swiglu` one after the other, to the same bits: sums go through K in order,
// 16 elements at a time (m16n8k16 with the tokens as rows), from one accumulator.
//
// Bytes: the weights once. A block of 4 warps has 8 rows of W (few_swiglu: 8 of gate and 8 of up), which it asks for
// all at once, by cp.async, before it waits for the kernel ahead of it: the chip has a whole matrix in flight, and
// one warp multiplies when inputs and weights are there. Latency is that of K / 16 dependent products.
//
// Options: -DHEAD_DIM (64), -DINTERLEAVED (0). Dynamic shared memory: `few_rows_shared` in the launcher.
#include "common.cuh"
#include "rotation.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef INTERLEAVED
#define INTERLEAVED 0
#endif
static_assert(HEAD_DIM % 8 == 0, "a block has whole pairs of one head");

static constexpr int THREADS = 128;
static constexpr int WARPS = THREADS / 32;
static constexpr int TOKENS = 8;
static constexpr int ROWS = 8;  // of W that a product takes
static constexpr int MAX_PARTS = 32;

// Bytes between rows of K halves in shared memory: an odd number of 16-byte chunks, so that ldmatrix meets no conflict.
static __device__ __forceinline__ int pitch_of(int inputs) { return (inputs / 8 | 1) * 16; }

// Starts copying rows of K halves, row i from `row(i)`, to shared memory.
template <typename Source>
static __device__ __forceinline__ void fetch_rows(uint32_t target, int rows, int inputs, Source row) {
    const int chunks = inputs / 8, pitch = pitch_of(inputs);
    for (int i = 0; i < rows; ++i) {
        const __half* source = row(i);
        for (int chunk = threadIdx.x; chunk < chunks; chunk += THREADS)
            copy_async(target + i * pitch + chunk * 16, source + chunk * 8, true);
    }
}

// Starts copying `count` floats, a multiple of 4.
static __device__ __forceinline__ void fetch_floats(uint32_t target, const float* source, int count) {
    for (int i = threadIdx.x; i < count / 4; i += THREADS) copy_async(target + i * 16, source + i * 4, true);
}

// norm(x) as rows of halves in shared memory, summed in the order of `rms_norm`: there, a row has the block
// that `_norm_shape` in the launcher says; here its warps are parts, which the warps of this block share out.
// The gains are in shared memory once copies have been waited for.
static __device__ __forceinline__ void norm_rows(unsigned char* target, const float* x, const float* gains_at,
                                                 int tokens, int width, float eps) {
    __shared__ float sums[TOKENS][MAX_PARTS];
    const int chunks = width / 8, pieces = chunks <= 256 ? 1 : chunks <= 512 ? 2 : 4;
    const int parts = (chunks + 32 * pieces - 1) / (32 * pieces);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int item = warp; item < tokens * parts; item += WARPS) {
        const int token = item / parts, part = item % parts;
        float sum = 0.0f;
        for (int piece = 0; piece < pieces; ++piece) {
            const int chunk = piece * parts * 32 + part * 32 + lane;
            if (chunk >= chunks) continue;
            float values[8];
            load8(x + static_cast<int64_t>(token) * width + chunk * 8, values);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum = fmaf(values[i], values[i], sum);
        }
        sum = warp_sum(sum);
        if (lane == 0) sums[token][part] = sum;
    }
    wait_for_copies<0>();
    __syncthreads();
    for (int item = warp; item < tokens * parts; item += WARPS) {
        const int token = item / parts, part = item % parts;
        const float total = warp_sum(lane < parts ? sums[token][lane] : 0.0f);
        const float scale = 1.0f / sqrtf(total / static_cast<float>(width) + eps);
        for (int piece = 0; piece < pieces; ++piece) {
            const int chunk = piece * parts * 32 + part * 32 + lane;
            if (chunk >= chunks) continue;
            float values[8], gains[8];
            load8(x + static_cast<int64_t>(token) * width + chunk * 8, values);
            load8(gains_at + chunk * 8, gains);
#pragma unroll
            for (int i = 0; i < 8; ++i) values[i] *= scale * gains[i];
            *reinterpret_cast<Half8*>(target + token * pitch_of(width) + chunk * 16) = pack(values);
        }
    }
}

// c[0], c[1] of COUNT products at once: token lane / 4, rows 2 (lane % 4), + 1 of the 8 rows of W. Fragments have room
// for 8 tokens; where there are fewer, rows of weights are read in their place, and the results mean nothing.
template <int COUNT>
static __device__ __forceinline__ void multiply(float (&c)[COUNT][4], uint32_t inputs_at, uint32_t weights_at,
                                                int inputs) {
    constexpr int GROUP = 4 / COUNT;  // steps of 32 elements whose operands are read while the group before multiplies
    const int lane = threadIdx.x % 32, pitch = pitch_of(inputs);
    const uint32_t offset = lane % 8 * pitch + lane / 8 * 16;
    const uint32_t a_at = inputs_at + offset, b_at = weights_at + offset;
    uint32_t a[2][GROUP][4], b[2][GROUP][COUNT][4];
    auto read = [&](int buffer, int place, int step) {
        load_matrices(a[buffer][place], a_at + step * 64);
#pragma unroll
        for (int n = 0; n < COUNT; ++n) load_matrices(b[buffer][place][n], b_at + n * ROWS * pitch + step * 64);
    };
    auto take = [&](int buffer, int place) {
        const uint32_t(&four)[4] = a[buffer][place];
        const uint32_t low[4] = {four[0], 0, four[1], 0}, high[4] = {four[2], 0, four[3], 0};
#pragma unroll
        for (int n = 0; n < COUNT; ++n) mma(c[n], low, b[buffer][place][n][0], b[buffer][place][n][1]);
#pragma unroll
        for (int n = 0; n < COUNT; ++n) mma(c[n], high, b[buffer][place][n][2], b[buffer][place][n][3]);
    };
    const int steps = inputs / 32, whole = steps / (2 * GROUP) * (2 * GROUP);
#pragma unroll
    for (int i = 0; i < GROUP; ++i) read(0, i, min(i, steps - 1));
    for (int step = 0; step < whole; step += 2 * GROUP) {
#pragma unroll
        for (int buffer = 0; buffer < 2; ++buffer) {
            const int next = step + (buffer + 1) * GROUP;
#pragma unroll
            for (int i = 0; i < GROUP; ++i) read(buffer ^ 1, i, min(next + i, steps - 1));
#pragma unroll
            for (int i = 0; i < GROUP; ++i) take(buffer, i);
        }
    }
    for (int step = whole; step < steps; ++step) {
        read(0, 0, step);
        take(0, 0);
    }
}

static __device__ __forceinline__ float rounded(float value) { return __half2float(__float2half_rn(value)); }

extern "C" __global__ void __launch_bounds__(THREADS)
    few_qkv(const float* __restrict__ x, const float* __restrict__ norm, float eps, const __half* __restrict__ w,
            const float* __restrict__ bias, const int* __restrict__ positions, const int* __restrict__ cache_rows,
            const float* __restrict__ table, int table_rows, __half* __restrict__ qkv, __half* __restrict__ k_cache,
            __half* __restrict__ v_cache, int tokens, int width, int heads, int kv_heads) {
    extern __shared__ __align__(16) unsigned char shared[];
    constexpr int BLOCKS = HEAD_DIM / ROWS;  // of a head
    const int head = blockIdx.x / BLOCKS, first_pair = blockIdx.x % BLOCKS * (ROWS / 2);
    auto element = [&](int pair, int which) {
        return INTERLEAVED ? 2 * pair + which : pair + which * (HEAD_DIM / 2);
    };
    const int pitch = pitch_of(width);
    const uint32_t inputs_at = shared_address(shared), weights_at = inputs_at + tokens * pitch;
    launch_next();
    fetch_rows(weights_at, ROWS, width, [&](int i) {
        return w + static_cast<int64_t>(head * HEAD_DIM + element(first_pair + i / 2, i % 2)) * width;
    });
    fetch_floats(weights_at + ROWS * pitch, norm, width);
    commit_copies();
    // What the step's arrays hold is there before it starts.
    const int token = threadIdx.x / 4, pair = first_pair + threadIdx.x % 4;
    const int low_at = element(pair, 0), high_at = element(pair, 1);
    const bool exists = token < tokens, is_query = head < heads, is_value = head >= heads + kv_heads;
    float low_bias = 0.0f, high_bias = 0.0f;
    float2 angle = make_float2(1.0f, 0.0f);
    int row = 0;
    if (exists) {
        if (bias != nullptr) low_bias = bias[head * HEAD_DIM + low_at], high_bias = bias[head * HEAD_DIM + high_at];
        const int position = min(max(positions[token], 0), table_rows - 1);
        angle = *reinterpret_cast<const float2*>(table + static_cast<int64_t>(position) * HEAD_DIM + 2 * pair);
        row = cache_rows[token];
    }
    wait_for_previous(x);
    norm_rows(shared, x, reinterpret_cast<const float*>(shared + (tokens + ROWS) * pitch), tokens, width, eps);
    __syncthreads();
    if (threadIdx.x >= 32) return;
    float c[1][4] = {};
    multiply(c, inputs_at, weights_at, width);

    if (!exists) return;
    float low = rounded(c[0][0]), high = rounded(c[0][1]);
    if (bias != nullptr) low += low_bias, high += high_bias;
    if (!is_value) rotate(low, high, angle.x, angle.y);
    __half* target = qkv + (static_cast<int64_t>(token) * (heads + 2 * kv_heads) + head) * HEAD_DIM;
    if (!is_query) {
        if (row < 0) return;
        const int kv_head = (head - heads) % kv_heads;
        const int64_t place = (static_cast<int64_t>(row / PAGE) * kv_heads + kv_head) * PAGE + row % PAGE;
        target = (is_value ? v_cache : k_cache) + place * HEAD_DIM;
    }
    target[low_at] = __float2half_rn(low);
    target[high_at] = __float2half_rn(high);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    few_residual(const __half* __restrict__ in, const __half* __restrict__ w, float* x, int tokens,
                 int outputs, int inputs) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int first = blockIdx.x * ROWS, pitch = pitch_of(inputs);
    const uint32_t inputs_at = shared_address(shared), weights_at = inputs_at + tokens * pitch;
    launch_next();
    fetch_rows(weights_at, ROWS, inputs,
               [&](int i) { return w + static_cast<int64_t>(min(first + i, outputs - 1)) * inputs; });
    wait_for_previous(in);
    fetch_rows(inputs_at, tokens, inputs, [&](int i) { return in + static_cast<int64_t>(i) * inputs; });
    commit_copies();
    const int token = threadIdx.x / 4, column = first + threadIdx.x % 4 * 2;
    const bool exists = token < tokens && column < outputs;
    float2* target = reinterpret_cast<float2*>(x + static_cast<int64_t>(token) * outputs + column);
    const float2 old = exists ? *target : make_float2(0.0f, 0.0f);
    wait_for_copies<0>();
    __syncthreads();
    if (threadIdx.x >= 32) return;
    float c[1][4] = {};
    multiply(c, inputs_at, weights_at, inputs);
    if (!exists) return;
    *target = make_float2(old.x + c[0][0], old.y + c[0][1]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    few_swiglu(const float* __restrict__ x, const float* __restrict__ norm, float eps, const __half* __restrict__ w,
               __half* __restrict__ out, int tokens, int width, int ffn_width) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int first = blockIdx.x * ROWS, pitch = pitch_of(width);
    const uint32_t inputs_at = shared_address(shared), weights_at = inputs_at + tokens * pitch;
    launch_next();
    fetch_rows(weights_at, 2 * ROWS, width, [&](int i) {
        const int row = first + i % ROWS + (i < ROWS ? 0 : ffn_width);
        return w + static_cast<int64_t>(row) * width;
    });
    fetch_floats(weights_at + 2 * ROWS * pitch, norm, width);
    commit_copies();
    wait_for_previous(x);
    norm_rows(shared, x, reinterpret_cast<const float*>(shared + (tokens + 2 * ROWS) * pitch), tokens, width, eps);
    __syncthreads();
    if (threadIdx.x >= 32) return;
    float c[2][4] = {};
    multiply(c, inputs_at, weights_at, width);
    const int token = threadIdx.x / 4, column = first + threadIdx.x % 4 * 2;
    if (token >= tokens) return;
    const uint32_t pair = pack(silu_times(rounded(c[0][0]), rounded(c[1][0])),
                               silu_times(rounded(c[0][1]), rounded(c[1][1])));
    *reinterpret_cast<uint32_t*>(out + static_cast<int64_t>(token) * ffn_width + column) = pair;
}
