// A decode step of at most 8 tokens: products fused with what is around them, for latency. Five launches a layer
// with the attention between them. On every GPU from sm_80 on.
//
//   few_qkv_*     qkv of norm(x), bias, rotation; queries to qkv (T, (H + 2 G) D), keys and values to the pages, or with
//                 -DKV_FP8 to qkv: no block has a head whole, so that `kv_write` of `qkv_rope.cu` has to follow
//   few_input_*   out (T, outputs) = W norm(x), and by blocks behind these the same of a second matrix, elements or float:
//                 what layers with states, or with gates of attention, make of their input
//   few_residual  x += in W^T; in (T, K), x (T, outputs) float
//   few_swiglu_*  out (T, F) = silu(gate) * up of norm(x); W has F rows of gate, then F of up
//
// x (T, width) float, all else elements; weights (outputs, K) row-major, K a multiple of 32; norms as in `rms_norm.cu`, the others as
// `qkv.cuh` says. Everything is computed and rounded as by `rms_norm`, a product
// of `hopper_gemm.cu`, `qkv_rope_write` and `activate.cu` one after the other, to the same bits: sums go through K in order,
// 16 elements at a time (m16n8k16 with the tokens as rows), from one accumulator; on Hopper those of few_residual in the two
// halves of a long K, which two warps take.
//
// Bytes: the weights once. A block has 8 rows of W (few_swiglu: `groups` of 8 of gate and 8 of up), which it asks for
// all at once, by cp.async, before it waits for the kernel ahead of it: the chip has a whole matrix in flight, and
// a warp for each group multiplies when inputs and weights are there. Latency is that of K / 16 dependent products,
// or half as many.
//
// On Hopper few_swiglu has the weights of `down` brought to L2 when its own are there, for those blocks of `down` that find no
// room on a multiprocessor before it ends. Asked for earlier, they would be in the way of what is needed first. Other GPUs have
// no instruction for that, or kernels that do not overlap.
//
// Blocks that take little of a multiprocessor let those of the kernels behind them in early, and with them their
// weights: registers are spared, and blocks of few_swiglu are few enough to run all at once.
//
// Options: -DHEAD_DIM (64), -DINTERLEAVED (0). Dynamic shared memory: `pitch_of` bytes for each row of inputs and of W.
#include "common/qkv.cuh"
#include "common/waits.cuh"

static_assert(HEAD_DIM % 8 == 0, "a block has whole pairs of one head");

static constexpr int THREADS = 128;         // but for few_swiglu
static constexpr int SWIGLU_THREADS = 256;  // at most
static constexpr int TOKENS = 8;
static constexpr int ROWS = 8;  // of W that a product takes
static constexpr int MAX_PARTS = 32;
static constexpr int BOTH_SUMS = 1;  // a named barrier

extern __shared__ __align__(16) unsigned char shared[];

// Bytes between rows of K elements in shared memory: an odd number of 16-byte chunks, so that ldmatrix meets no conflict.
static __device__ __forceinline__ int pitch_of(int inputs) { return (inputs / 8 | 1) * 16; }

// Starts copying rows of K elements, row i from `row(i)`, to shared memory.
template <typename Source>
static __device__ __forceinline__ void fetch_rows(uint32_t target, int rows, int inputs, Source row) {
    const int chunks = inputs / 8, pitch = pitch_of(inputs);
    for (int i = 0; i < rows; ++i) {
        const Element* source = row(i);
        for (int chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x)
            copy_async(target + i * pitch + chunk * 16, source + chunk * 8, true);
    }
}

// Asks for this block's share of so many bytes, a multiple of 16, to be brought to L2. One thread of a block calls it.
static __device__ __forceinline__ void fetch_to_l2(const unsigned char* start, int bytes) {
#if __CUDA_ARCH__ >= 900
    const int blocks = gridDim.x, share = (bytes / blocks + 127) / 128 * 128;
    const int from = static_cast<int>(blockIdx.x) * share, size = min(share, bytes - from);
    if (size > 0)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(start + from), "r"(size) : "memory");
#endif
}

// norm(x) as rows of elements in shared memory, summed in the order of `rms_norm`: the warps of the block that a row has
// there are parts here, which the warps of this block share out.
struct NormShape {
    int tokens, width, chunks, pieces, parts, warps, warp, lane;
    const float* gains;

    __device__ __forceinline__ NormShape(int tokens, int width, const float* gains, bool one_piece)
        : tokens(tokens), width(width), gains(gains) {
        chunks = width / 8, pieces = one_piece || chunks <= 256 ? 1 : chunks <= 512 ? 2 : 4;
        parts = (chunks + 32 * pieces - 1) / (32 * pieces);
        warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    }

    __device__ __forceinline__ float scale_of(const float* sums, float eps) const {
        float total;
        if (parts <= 4) {  // as `warp_sum` adds them
            const float4 four = *reinterpret_cast<const float4*>(sums);
            const float third = parts > 2 ? four.z : 0.0f, fourth = parts > 3 ? four.w : 0.0f;
            total = (four.x + third) + ((parts > 1 ? four.y : 0.0f) + fourth);
        } else {
            total = warp_sum(lane < parts ? sums[lane] : 0.0f);
        }
        return 1.0f / sqrtf(total / static_cast<float>(width) + eps);
    }

    static __device__ __forceinline__ void store(unsigned char* target, float (&values)[8], const float (&gains)[8],
                                                 float scale) {
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] *= scale * gains[i];
        *reinterpret_cast<Element8*>(target) = pack(values);
    }
};

// For a warp that has at most HELD parts, each of one piece: x stays in registers between the two passes, and the gains
// are there from the start. The code for one part is a third of that for all cases, and instructions have to come from
// afar when kernels take turns on a multiprocessor.
template <int HELD>
struct Norm : NormShape {
    int token[HELD], chunk[HELD];
    float held_gains[HELD][8], held[HELD][8];

    __device__ __forceinline__ Norm(int tokens, int width, const float* gains) : NormShape(tokens, width, gains, true) {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int item = warp + i * warps;
            token[i] = item / parts, chunk[i] = item % parts * 32 + lane;
            if (token[i] < tokens && chunk[i] < chunks) load8(gains + chunk[i] * 8, held_gains[i]);
        }
    }

    __device__ __forceinline__ void sum_squares(const float* x, float (*sums)[MAX_PARTS]) {
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (token[i] < tokens && chunk[i] < chunks)
                load8(x + static_cast<int64_t>(token[i]) * width + chunk[i] * 8, held[i]);
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            if (token[i] >= tokens) continue;
            float sum = 0.0f;
#pragma unroll
            for (int k = 0; k < 8; ++k)
                if (chunk[i] < chunks) sum = fmaf(held[i][k], held[i][k], sum);
            sum = warp_sum(sum);
            if (lane == 0) sums[token[i]][chunk[i] / 32] = sum;
        }
    }

    __device__ __forceinline__ void scale_rows(unsigned char* target, const float*, const float (*sums)[MAX_PARTS],
                                               float eps) {
        const int pitch = pitch_of(width);
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            if (token[i] >= tokens) continue;
            const float scale = scale_of(sums[token[i]], eps);
            if (chunk[i] < chunks) store(target + token[i] * pitch + chunk[i] * 16, held[i], held_gains[i], scale);
        }
    }
};

// In any case: x and the gains are read as they are needed.
template <>
struct Norm<0> : NormShape {
    __device__ __forceinline__ Norm(int tokens, int width, const float* gains) : NormShape(tokens, width, gains, false) {}

    __device__ __forceinline__ void sum_squares(const float* x, float (*sums)[MAX_PARTS]) const {
        for (int item = warp; item < tokens * parts; item += warps) {
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
    }

    __device__ __forceinline__ void scale_rows(unsigned char* target, const float* x, const float (*sums)[MAX_PARTS],
                                               float eps) const {
        const int pitch = pitch_of(width);
        for (int item = warp; item < tokens * parts; item += warps) {
            const int token = item / parts, part = item % parts;
            const float scale = scale_of(sums[token], eps);
            for (int piece = 0; piece < pieces; ++piece) {
                const int chunk = piece * parts * 32 + part * 32 + lane;
                if (chunk >= chunks) continue;
                float values[8], gain[8];
                load8(x + static_cast<int64_t>(token) * width + chunk * 8, values);
                load8(gains + chunk * 8, gain);
                store(target + token * pitch + chunk * 16, values, gain, scale);
            }
        }
    }
};

// Waits for copies, too, and ends with a barrier.
template <int HELD>
static __device__ __forceinline__ void normalise(Norm<HELD>& norm, unsigned char* target, const float* x, float eps) {
    __shared__ __align__(16) float sums[TOKENS][MAX_PARTS];
    norm.sum_squares(x, sums);
    wait_for_copies<0>();
    __syncthreads();
    norm.scale_rows(target, x, sums, eps);
    __syncthreads();
}

// c[0], c[1] of COUNT products at once: token lane / 4, rows 2 (lane % 4), + 1 of the 8 rows of W. Fragments have room
// for 8 tokens; where there are fewer, rows of weights are read in their place, and the results mean nothing.
template <int COUNT>
static __device__ __forceinline__ void multiply(float (&c)[COUNT][4], uint32_t inputs_at, uint32_t weights_at,
                                                int inputs, int pitch) {
    constexpr int AHEAD = 4;  // steps of 32 elements whose operands are read before they are multiplied
    const int lane = threadIdx.x % 32, steps = inputs / 32;
    // A's rows 8 to 15 are rows 0 to 7 again, so that one instruction reads a fragment as it is multiplied.
    const uint32_t a_at = inputs_at + lane % 8 * pitch + lane / 16 * 16;
    const uint32_t b_at = weights_at + lane % 8 * pitch + lane / 8 * 16;
    uint32_t a[AHEAD][2][4], b[AHEAD][COUNT][4];
    auto read = [&](int place, int step) {
        load_matrices(a[place][0], a_at + step * 64);
        load_matrices(a[place][1], a_at + step * 64 + 32);
#pragma unroll
        for (int n = 0; n < COUNT; ++n) load_matrices(b[place][n], b_at + n * ROWS * pitch + step * 64);
    };
    auto take = [&](int place) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < COUNT; ++n)
                mma(c[n], a[place][half], b[place][n][2 * half], b[place][n][2 * half + 1]);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) read(i, min(i, steps - 1));
    int step = 0;
    // Reads between products, not before them: they are issued while a product is under way.
#pragma unroll 1
    for (; step + 2 * AHEAD <= steps; step += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) take(i), read(i, step + AHEAD + i);
    }
#pragma unroll 1
    for (; step < steps; step += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (step + i >= steps) break;
            take(i);
            if (step + AHEAD + i < steps) read(i, step + AHEAD + i);
        }
    }
}

// This warp's turn among those of its block: warp 0 is not the first in all, for blocks that share a multiprocessor
// should not share one of its four tensor cores.
static __device__ __forceinline__ int turn() { return (threadIdx.x / 32 - blockIdx.x) % (THREADS / 32); }

// A pair of results that is rotated together: elements `low` and `high` of a head of a token.
struct Pair {
    const Qkv& to;
    int head, token, low, high, cache_row = 0;
    float low_bias = 0.0f, high_bias = 0.0f;
    float2 angle = make_float2(1.0f, 0.0f);

    static __device__ __forceinline__ int element(int pair, int which) {
        return INTERLEAVED ? 2 * pair + which : pair + which * (HEAD_DIM / 2);
    }

    // Loads what the step's arrays hold: it is there before the step starts.
    __device__ __forceinline__ Pair(const Qkv& to, int head, int token, int pair, bool exists)
        : to(to), head(head), token(token), low(element(pair, 0)), high(element(pair, 1)) {
        if (!exists) return;
        if (to.bias != nullptr)
            low_bias = to.bias[head * HEAD_DIM + low], high_bias = to.bias[head * HEAD_DIM + high];
        angle = *reinterpret_cast<const float2*>(to.angles(to.table_row(to.positions[token])) + 2 * pair);
        cache_row = to.cache_rows[token];
    }

    __device__ __forceinline__ void finish(float x, float y) const {
        x = rounded(x), y = rounded(y);
        x += low_bias, y += high_bias;  // where there is none they are 0, which makes 0 of -0, as in the other kernels
        if (!to.is_value(head)) rotate(x, y, angle.x, angle.y);
        Element* target = to.in_qkv(token, head);
#ifndef KV_FP8
        if (!to.is_query(head)) {
            if (cache_row < 0) return;
            target = to.in_cache(cache_row, head);
        }
#endif
        target[low] = to_element(x);
        target[high] = to_element(y);
    }
};

template <int HELD>
static __device__ __forceinline__ void qkv_rows(const float* __restrict__ x, const float* __restrict__ gains, float eps,
                                                const Element* __restrict__ w, const Qkv& to, int tokens, int width) {
    constexpr int BLOCKS = HEAD_DIM / ROWS;  // of a head
    const int head = blockIdx.x / BLOCKS, first_pair = blockIdx.x % BLOCKS * (ROWS / 2);
    const int pitch = pitch_of(width);
    const uint32_t inputs_at = shared_address(shared), weights_at = inputs_at + tokens * pitch;
    launch_next();
    Norm<HELD> norm(tokens, width, gains);
    fetch_rows(weights_at, ROWS, width, [&](int i) {
        return w + static_cast<int64_t>(head * HEAD_DIM + Pair::element(first_pair + i / 2, i % 2)) * width;
    });
    commit_copies();
    const int token = threadIdx.x % 32 / 4;
    const bool exists = token < tokens;
    const Pair pair(to, head, token, first_pair + threadIdx.x % 4, exists);
    wait_for_previous(x);
    normalise(norm, shared, x, eps);
    if (turn() != 0) return;
    float c[1][4] = {};
    multiply(c, inputs_at, weights_at, width, pitch);
    if (exists) pair.finish(c[0][0], c[0][1]);
}

// A matrix, and where its products go.
struct Projection {
    const Element* w;
    void* out;
    int outputs, floats;
};

template <int HELD>
static __device__ __forceinline__ void input_rows(const float* __restrict__ x, const float* __restrict__ gains, float eps,
                                                  const Projection& first, const Projection& second, int tokens, int width) {
    const int blocks = first.outputs / ROWS, block = blockIdx.x;
    const bool ahead = block < blocks;
    const Projection to{ahead ? first.w : second.w, ahead ? first.out : second.out,  // by parts: without a stack
                        ahead ? first.outputs : second.outputs, ahead ? first.floats : second.floats};
    const int first_row = (ahead ? block : block - blocks) * ROWS, pitch = pitch_of(width);
    const uint32_t inputs_at = shared_address(shared), weights_at = inputs_at + tokens * pitch;
    launch_next();
    Norm<HELD> norm(tokens, width, gains);
    fetch_rows(weights_at, ROWS, width, [&](int i) { return to.w + static_cast<int64_t>(first_row + i) * width; });
    commit_copies();
    wait_for_previous(x);
    normalise(norm, shared, x, eps);
    if (turn() != 0) return;
    float c[1][4] = {};
    multiply(c, inputs_at, weights_at, width, pitch);
    const int token = threadIdx.x % 32 / 4;
    if (token >= tokens) return;
    const int64_t place = static_cast<int64_t>(token) * to.outputs + first_row + threadIdx.x % 4 * 2;
    if (to.floats)
        *reinterpret_cast<float2*>(static_cast<float*>(to.out) + place) = make_float2(c[0][0], c[0][1]);
    else
        *reinterpret_cast<uint32_t*>(static_cast<Element*>(to.out) + place) = pack(c[0][0], c[0][1]);
}

// `first`: elements of K in the first sum, a multiple of 64; the others, if there are any, are added after it.
extern "C" __global__ void __launch_bounds__(THREADS)
    few_residual(const Element* __restrict__ in, const Element* __restrict__ w, float* x, int tokens,
                 int outputs, int inputs, int first) {
    KERNEL_BEGINS();
    __shared__ float2 second[32];  // sums of each lane
    const int first_row = blockIdx.x * ROWS, pitch = pitch_of(inputs);
    const uint32_t inputs_at = shared_address(shared), weights_at = inputs_at + tokens * pitch;
    launch_next();
    fetch_rows(weights_at, ROWS, inputs,
               [&](int i) { return w + static_cast<int64_t>(min(first_row + i, outputs - 1)) * inputs; });
    wait_for_previous(in);
    fetch_rows(inputs_at, tokens, inputs, [&](int i) { return in + static_cast<int64_t>(i) * inputs; });
    commit_copies();
    const int lane = threadIdx.x % 32, token = lane / 4, column = first_row + lane % 4 * 2;
    const bool exists = token < tokens && column < outputs;
    float2* target = reinterpret_cast<float2*>(x + static_cast<int64_t>(token) * outputs + column);
    const float2 old = exists ? *target : make_float2(0.0f, 0.0f);
    wait_for_copies<0>();
    __syncthreads();
    const int mine = turn(), sums = first < inputs ? 2 : 1;
    if (mine >= sums) return;
    const int skipped = mine * first * 2;  // bytes
    float c[1][4] = {};
    multiply(c, inputs_at + skipped, weights_at + skipped, mine ? inputs - first : first, pitch);
    float2 result = make_float2(old.x + c[0][0], old.y + c[0][1]);
    if (sums > 1) {
        if (mine) second[lane] = make_float2(c[0][0], c[0][1]);
        // BARRIER BOTH_SUMS: the two warps that sum arrive and wait, once; all others have ended.
        named_wait(BOTH_SUMS, 64);
        if (mine) return;
        result = make_float2(result.x + second[lane].x, result.y + second[lane].y);
    }
    if (exists) *target = result;
}

// `groups` of 8 outputs in a block, a warp each; more warps help to fetch and to norm.
template <int HELD>
static __device__ __forceinline__ void swiglu_rows(const float* __restrict__ x, const float* __restrict__ gains,
                                                   float eps, const Element* __restrict__ w, Element* __restrict__ out,
                                                   int tokens, int width, int ffn_width, int groups,
                                                   const unsigned char* down, int down_bytes) {
    const int first = blockIdx.x * groups * ROWS, pitch = pitch_of(width);
    const int mine = min(groups, (ffn_width - first) / ROWS);
    const uint32_t inputs_at = shared_address(shared), weights_at = inputs_at + tokens * pitch;
    launch_next();
    Norm<HELD> norm(tokens, width, gains);
    fetch_rows(weights_at, 2 * ROWS * mine, width, [&](int i) {
        const int row = first + i / (2 * ROWS) * ROWS + i % ROWS + (i & ROWS ? ffn_width : 0);
        return w + static_cast<int64_t>(row) * width;
    });
    commit_copies();
    wait_for_previous(x);
    normalise(norm, shared, x, eps);
    if (threadIdx.x == blockDim.x - 1) fetch_to_l2(down, down_bytes);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp >= mine) return;
    float c[2][4] = {};
    multiply(c, inputs_at, weights_at + warp * 2 * ROWS * pitch, width, pitch);
    const int token = lane / 4, column = first + warp * ROWS + lane % 4 * 2;
    if (token >= tokens) return;
    const uint32_t pair = pack(silu_times(rounded(c[0][0]), rounded(c[1][0])),
                               silu_times(rounded(c[0][1]), rounded(c[1][1])));
    *reinterpret_cast<uint32_t*>(out + static_cast<int64_t>(token) * ffn_width + column) = pair;
}

#define NORM_KERNELS(HELD)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS) few_qkv_##HELD(                                         \
        const float* __restrict__ x, const float* __restrict__ norm, float eps, const Element* __restrict__ w,     \
        const float* __restrict__ bias, const int* __restrict__ positions, const int* __restrict__ cache_rows,    \
        const float* __restrict__ table, int table_rows, Element* __restrict__ qkv, Kept* __restrict__ k_cache,     \
        Kept* __restrict__ v_cache, int tokens, int width, int heads, int kv_heads) {                           \
        KERNEL_BEGINS();                                                                                          \
        const Qkv to{qkv, k_cache, v_cache, bias, positions, cache_rows, table, table_rows, heads, kv_heads};     \
        qkv_rows<HELD>(x, norm, eps, w, to, tokens, width);                                                       \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS) few_input_##HELD(                                       \
        const float* __restrict__ x, const float* __restrict__ norm, float eps, const Element* __restrict__ w,     \
        Element* __restrict__ out, int outputs, const Element* __restrict__ other_w, void* __restrict__ other_out, \
        int other_outputs, int floats, int tokens, int width) {                                                   \
        KERNEL_BEGINS();                                                                                          \
        const Projection first{w, out, outputs, 0}, second{other_w, other_out, other_outputs, floats};            \
        input_rows<HELD>(x, norm, eps, first, second, tokens, width);                                             \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(SWIGLU_THREADS) few_swiglu_##HELD(                               \
        const float* __restrict__ x, const float* __restrict__ norm, float eps, const Element* __restrict__ w,     \
        Element* __restrict__ out, int tokens, int width, int ffn_width, int groups,                               \
        const unsigned char* __restrict__ down, int down_bytes) {                                                 \
        KERNEL_BEGINS();                                                                                          \
        swiglu_rows<HELD>(x, norm, eps, w, out, tokens, width, ffn_width, groups, down, down_bytes);              \
    }

NORM_KERNELS(0)
NORM_KERNELS(1)
NORM_KERNELS(2)
NORM_KERNELS(4)
