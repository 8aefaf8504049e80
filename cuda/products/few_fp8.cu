// A decode step of at most 4 tokens with FP8 weights (sm_90a): products fused with what is around them, for latency.
//
//   few_fp8_qkv_*       qkv of norm(x), bias, rotation; queries to qkv (T, (H + 2 G) D), keys and values to the pages, or with
//                       -DKV_FP8 to qkv: no block has a head whole, so that `kv_write` of `qkv_rope.cu` has to follow
//   few_fp8_swiglu_*    out (T, F) elements = silu(gate) * up of norm(x); W has F rows of gate, then F of up
//   few_fp8_residual_*  x (T, outputs) float += in W^T; in (T, K) elements
//
// x (T, width) float; W (outputs, K) E4M3 through a tensor map with boxes of 128 columns by BN / 2 rows, w_scales (outputs,)
// float; K a multiple of 16 up to 8,192. Kernels are named by BN. Everything is computed and rounded as by `rms_norm_fp8` or
// `quantise`, a product of `hopper_fp8.cu`, and `qkv_rope_write` one after the other, to the same bits: a wgmma has the tokens
// as the first of its 64 rows, sums go through K as there.
//
// A block makes rows of FP8 of all its inputs itself, in shared memory, while the weights of its first steps are on their way:
// those are asked for before it waits for the kernel ahead of it. It takes so little of a multiprocessor that blocks of the
// next kernel find room beside it. A tile is BN rows of W, from two places BN / 2 each: pairs that are rotated together, or
// gate and up; one thread copies, a warpgroup multiplies, 4 boxes of 128 elements of K in a step, in turns.
// Bytes: the weights once.
//
// Options: -DHEAD_DIM (64), -DINTERLEAVED (0).
#include "common/fp8.cuh"
#include "common/rounding.cuh"
#include "products/few_rows.cuh"

static constexpr int TOKENS = 4;
static constexpr int THREADS = 256, WARPS = THREADS / 32, MULTIPLYING_WARPS = 4, COPYING_THREAD = 128;
static constexpr int LINE = 128;   // elements of K in a box, and bytes: the width of the swizzle
static constexpr int ATOM = 1024;  // bytes of so many of 8 rows
static constexpr int BOXES = 4, STAGES = 4, DEPTH = BOXES * LINE;
static constexpr int MOST_PARTS = 8;  // of a row, with up to 8,192 elements
static constexpr int MOST_CHUNKS = 4;  // of 8 of a row's elements that a thread has

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

static_assert(HEAD_DIM % 32 == 0, "a tile has whole pairs of one head");

extern __shared__ unsigned char dynamic[];

// Rows of FP8 in shared memory, as wgmma reads them: for each 128 columns an atom of 8 rows with the 128-byte swizzle.
struct Rows {
    uint32_t atoms;
    int tokens, inputs;
    float* scales;  // of the tokens, in shared memory

    __device__ __forceinline__ int steps() const { return (inputs + DEPTH - 1) / DEPTH; }

    // Eight numbers of a token from column 8 chunk on.
    __device__ __forceinline__ void store(int token, int chunk, uint2 eight) const {
        const uint32_t place = atoms + chunk / 16 * ATOM + token * LINE + (chunk / 2 % 8 ^ token) * 16 + chunk % 2 * 8;
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(place), "r"(eight.x), "r"(eight.y) : "memory");
    }

    // Columns that no input has count nothing. All threads call it when they have stored; it ends with a barrier.
    __device__ __forceinline__ void finish() const {
        const int first = inputs / 8, empty = steps() * (DEPTH / 8) - first;
        for (int i = threadIdx.x; i < tokens * empty; i += THREADS) store(i / empty, first + i % empty, make_uint2(0, 0));
        publish_to_wgmma();
        __syncthreads();
    }
};

static __device__ __forceinline__ float largest_of(const Element8& eight, float largest) {
    float values[8];
    unpack(eight, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(values[i]));
    return largest;
}

static __device__ __forceinline__ uint2 quantised(const Element8& eight, float factor) {
    float values[8];
    unpack(eight, values);
    return to_e4m3(values, factor);
}

// norm(x) as `rms_norm_fp8` has it. A thread keeps what it has normed, as elements.
template <int PIECES>
static __device__ __forceinline__ void norm_rows(const Rows& rows, const NormShape& shape, const float* x, float eps) {
    constexpr int MOST = TOKENS * MOST_PARTS / WARPS;  // parts of a warp
    __shared__ __align__(16) float sums[TOKENS][MAX_PARTS], maxima[TOKENS][MOST_PARTS];
    const int items = rows.tokens * shape.parts, lane = shape.lane;
    const auto chunk_of = [&](int part, int piece) { return (piece * shape.parts + part) * 32 + lane; };
    for (int item = shape.warp; item < items; item += WARPS) {
        const int token = item / shape.parts, part = item % shape.parts;
        float sum = 0.0f;
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            const int chunk = chunk_of(part, piece);
            if (chunk >= shape.chunks) continue;
            float values[8];
            load8(x + static_cast<int64_t>(token) * shape.width + chunk * 8, values);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum = fmaf(values[i], values[i], sum);
        }
        sum = warp_sum(sum);
        if (lane == 0) sums[token][part] = sum;
    }
    __syncthreads();
    Element8 normed[MOST][PIECES];
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        const int item = shape.warp + i * WARPS, token = item / shape.parts, part = item % shape.parts;
        if (item >= items) break;
        const float scale = shape.scale_of(sums[token], eps);
        float largest = 0.0f;
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            const int chunk = chunk_of(part, piece);
            if (chunk >= shape.chunks) continue;
            float values[8], gains[8];
            load8(x + static_cast<int64_t>(token) * shape.width + chunk * 8, values);
            load8(shape.gains + chunk * 8, gains);
#pragma unroll
            for (int k = 0; k < 8; ++k) values[k] *= scale * gains[k];
            normed[i][piece] = pack(values);
            largest = largest_of(normed[i][piece], largest);
        }
        largest = warp_max(largest);
        if (lane == 0) maxima[token][part] = largest;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        const int item = shape.warp + i * WARPS, token = item / shape.parts, part = item % shape.parts;
        if (item >= items) break;
        const float largest = warp_max(lane < shape.parts ? maxima[token][lane] : 0.0f);
        const float factor = e4m3_factor(largest);
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece)
            if (chunk_of(part, piece) < shape.chunks)
                rows.store(token, chunk_of(part, piece), quantised(normed[i][piece], factor));
        if (part == 0 && lane == 0) rows.scales[token] = e4m3_scale(largest);
    }
    rows.finish();
}

static __device__ __forceinline__ void norm_rows(const Rows& rows, const float* x, const float* gains, float eps) {
    const NormShape shape(rows.tokens, rows.inputs, gains, false);
    if (shape.pieces == 1)
        norm_rows<1>(rows, shape, x, eps);
    else if (shape.pieces == 2)
        norm_rows<2>(rows, shape, x, eps);
    else
        norm_rows<4>(rows, shape, x, eps);
}

// Elements as `quantise` rounds them.
static __device__ __forceinline__ void round_rows(const Rows& rows, const Element* in) {
    __shared__ float maxima[TOKENS][WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunks = rows.inputs / 8;
    Element8 held[TOKENS][MOST_CHUNKS];
#pragma unroll
    for (int token = 0; token < TOKENS; ++token)
#pragma unroll
        for (int i = 0; i < MOST_CHUNKS; ++i) {
            const int chunk = threadIdx.x + i * THREADS;
            if (token < rows.tokens && chunk < chunks)
                held[token][i] =
                    *reinterpret_cast<const Element8*>(in + static_cast<int64_t>(token) * rows.inputs + chunk * 8);
        }
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) {
        if (token >= rows.tokens) break;
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < MOST_CHUNKS; ++i)
            if (static_cast<int>(threadIdx.x) + i * THREADS < chunks) largest = largest_of(held[token][i], largest);
        largest = warp_max(largest);
        if (lane == 0) maxima[token][warp] = largest;
    }
    __syncthreads();
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) {
        if (token >= rows.tokens) break;
        const float largest = warp_max(maxima[token][lane % WARPS]), factor = e4m3_factor(largest);
#pragma unroll
        for (int i = 0; i < MOST_CHUNKS; ++i) {
            const int chunk = threadIdx.x + i * THREADS;
            if (chunk < chunks) rows.store(token, chunk, quantised(held[token][i], factor));
        }
        if (threadIdx.x == 0) rows.scales[token] = e4m3_scale(largest);
    }
    rows.finish();
}

// One block's tiles. Those of tile i are BN / 2 rows of W from `row_of(i)` on, and as many from `apart` further on.
//
// enter(rows): waits for the kernel ahead and fills `rows`; all threads call it.
// prepare(tile): what the results of a tile need; only threads call it that have results: those of warp 0 with a token.
// finish(sums, token, ready): sums[4 j + e] is row 8 j + 2 t + e of the tile (t = lane % 4).
template <int BN, typename RowOf, typename Enter, typename Prepare, typename Finish>
static __device__ __forceinline__ void multiply(const TensorMap* w_map, int tokens, int inputs, int tiles, int apart,
                                                RowOf row_of, Enter enter, Prepare prepare, Finish finish) {
    constexpr int BOX = BN * LINE, STAGE = BOXES * BOX;
    __shared__ uint64_t barriers[2 * STAGES];
    __shared__ float scales[TOKENS];
    const Rows rows{(shared_address(dynamic) + ATOM - 1) & ~(ATOM - 1u), tokens, inputs, scales};
    const int steps = rows.steps(), stride = gridDim.x, first = blockIdx.x;
    const int count = (tiles - first + stride - 1) / stride * steps;  // of all tiles of the block
    // Rows 8 to 63 of wgmma, whose results nobody reads, are what lies behind an atom: this ring at the end.
    const uint32_t ring = rows.atoms + steps * BOXES * ATOM;
    const uint32_t full = shared_address(barriers), empty = full + 8 * STAGES;
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) barrier_init(full + 8 * stage, 1), barrier_init(empty + 8 * stage, 1);
        publish_barriers();
    }
    __syncthreads();
    const auto load = [&](int i) {
        const int row = row_of(first + i / steps * stride), stage = i % STAGES;
        const uint32_t barrier = full + 8 * stage, target = ring + stage * STAGE;
        barrier_expect(barrier, STAGE);
#pragma unroll
        for (int box = 0; box < BOXES; ++box) {
            const int depth = i % steps * DEPTH + box * LINE;  // beyond K there are zeros
            load_box(target + box * BOX, w_map, barrier, depth, row);
            load_box(target + box * BOX + BOX / 2, w_map, barrier, depth, row + apart);
        }
    };
    const bool copies = threadIdx.x == COPYING_THREAD;
    if (copies) {
        prefetch_map(w_map);
        for (int i = 0; i < min(STAGES, count); ++i) load(i);
    }
    __syncwarp();
    launch_next();
    enter(rows);
    if (warp >= MULTIPLYING_WARPS) {
        if (copies)
            for (int i = STAGES; i < count; ++i) {
                barrier_wait(empty + 8 * (i % STAGES), (i / STAGES - 1) & 1);
                load(i);
            }
        return;
    }
    const uint64_t x_start = tile_descriptor(rows.atoms), w_start = tile_descriptor(ring);
    const int token = threadIdx.x / 4;
    const bool has_results = token < tokens;
    int stage = 0, parity = 0;
    for (int tile = first; tile < tiles; tile += stride) {
        float sums[BN / 2], parts[BOXES][BN / 2];
#pragma unroll
        for (float& sum : sums) sum = 0.0f;
        const auto ready = prepare(tile, has_results ? token : 0);
        for (int step = 0; step < steps; ++step) {
            barrier_wait(full + 8 * stage, parity);
            const uint64_t x = x_start + step * (BOXES * ATOM / 16), w = w_start + stage * (STAGE / 16);
            wgmma_begin();
#pragma unroll
            for (int k = 0; k < LINE / 32; ++k)
#pragma unroll
                for (int i = 0; i < BOXES; ++i) wgmma_fp8(parts[i], x + i * (ATOM / 16) + 2 * k, w + i * (BOX / 16) + 2 * k, k > 0);
            wgmma_commit();
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < BOXES; ++i) wgmma_keep(parts[i]);
            if (threadIdx.x == 0) barrier_arrive(empty + 8 * stage);
#pragma unroll
            for (int i = 0; i < BOXES; ++i)
#pragma unroll
                for (int j = 0; j < BN / 2; ++j) sums[j] += parts[i][j];
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        if (has_results) {
#pragma unroll
            for (int j = 0; j < BN / 8; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    sums[4 * j + e] = __fmul_rn(__fmul_rn(sums[4 * j + e], scales[token]), ready.scale(j, e));
            finish(sums, tile, token, ready);
        }
    }
}

// Scales of a tile's rows, two for each 8.
template <int BN>
struct Scales {
    static constexpr int HALF = BN / 16;  // groups of 8 rows from one place
    float2 of[BN / 8];

    __device__ __forceinline__ float scale(int j, int e) const { return e ? of[j].y : of[j].x; }

    // From the first of its rows; those from the second place are `apart` further on. W has so many rows in all.
    __device__ __forceinline__ void load(const float* w_scales, int row, int apart, int all) {
#pragma unroll
        for (int j = 0; j < BN / 8; ++j) {
            const int at = row + (j < HALF ? j : j - HALF) * 8 + (j < HALF ? 0 : apart) + threadIdx.x % 4 * 2;
            of[j] = *reinterpret_cast<const float2*>(w_scales + min(at, all - 2));
        }
    }
};

template <int BN>
struct Pairs : Scales<BN> {
    Pair pair[BN / 8];
};

template <int BN>
static __device__ __forceinline__ void qkv_rows(const float* __restrict__ x, const float* __restrict__ gains, float eps,
                                                const TensorMap* w, const float* w_scales, const Qkv& to, int tokens,
                                                int width) {
    constexpr int TILES = HEAD_DIM / BN, HALF = BN / 16;  // of a head; groups of 8 rows from one place
    const int tiles = to.all_heads() * TILES, apart = INTERLEAVED ? BN / 2 : HEAD_DIM / 2, t = threadIdx.x % 4;
    const auto row_of = [&](int tile) { return tile / TILES * HEAD_DIM + tile % TILES * (INTERLEAVED ? BN : BN / 2); };
    const auto enter = [&](const Rows& rows) {
        wait_for_previous(x);
        norm_rows(rows, x, gains, eps);
    };
    const auto prepare = [&](int tile, int token) {
        Pairs<BN> ready;
        ready.load(w_scales, row_of(tile), apart, to.all_heads() * HEAD_DIM);
#pragma unroll
        for (int i = 0; i < BN / 8; ++i) {
            const int pair = tile % TILES * (BN / 2) + (INTERLEAVED ? 4 * i + t : i / 2 * 8 + 2 * t + i % 2);
            ready.pair[i] = Pair(to, tile / TILES, token, pair, true);
        }
        return ready;
    };
    const auto finish = [&](const float(&sums)[BN / 2], int, int, const Pairs<BN>& ready) {
#pragma unroll
        for (int i = 0; i < BN / 8; ++i) {
            if (INTERLEAVED)
                ready.pair[i].finish(to, sums[4 * i], sums[4 * i + 1]);
            else
                ready.pair[i].finish(to, sums[4 * (i / 2) + i % 2], sums[4 * (HALF + i / 2) + i % 2]);
        }
    };
    multiply<BN>(w, tokens, width, tiles, apart, row_of, enter, prepare, finish);
}

template <int BN>
static __device__ __forceinline__ void swiglu_rows(const float* __restrict__ x, const float* __restrict__ gains,
                                                   float eps, const TensorMap* w, const float* w_scales, Element* out,
                                                   int tokens, int width, int ffn_width) {
    constexpr int HALF = BN / 16;
    const int tiles = (ffn_width + BN / 2 - 1) / (BN / 2);
    const auto row_of = [&](int tile) { return tile * (BN / 2); };
    const auto enter = [&](const Rows& rows) {
        wait_for_previous(x);
        norm_rows(rows, x, gains, eps);
    };
    const auto prepare = [&](int tile, int) {
        Scales<BN> ready;
        ready.load(w_scales, row_of(tile), ffn_width, 2 * ffn_width);
        return ready;
    };
    const auto finish = [&](const float(&sums)[BN / 2], int tile, int token, const Scales<BN>&) {
#pragma unroll
        for (int j = 0; j < HALF; ++j) {
            const int column = row_of(tile) + 8 * j + threadIdx.x % 4 * 2;
            const float *gate = sums + 4 * j, *up = sums + 4 * (HALF + j);
            if (column < ffn_width)
                *reinterpret_cast<uint32_t*>(out + static_cast<int64_t>(token) * ffn_width + column) =
                    pack(silu_times(rounded(gate[0]), rounded(up[0])), silu_times(rounded(gate[1]), rounded(up[1])));
        }
    };
    multiply<BN>(w, tokens, width, tiles, ffn_width, row_of, enter, prepare, finish);
}

// What x holds of a tile.
template <int BN>
struct Stream : Scales<BN> {
    float2 old[BN / 8];
};

template <int BN>
static __device__ __forceinline__ void residual_rows(const Element* in, const TensorMap* w, const float* w_scales,
                                                     float* x, int tokens, int outputs, int inputs) {
    const auto row_of = [&](int tile) { return tile * BN; };
    const auto place = [&](int tile, int token, int j) {
        return reinterpret_cast<float2*>(x + static_cast<int64_t>(token) * outputs + row_of(tile) + 8 * j + threadIdx.x % 4 * 2);
    };
    const auto exists = [&](int tile, int j) { return row_of(tile) + 8 * j < outputs; };
    const auto enter = [&](const Rows& rows) {
        wait_for_previous(in, x);
        round_rows(rows, in);
    };
    const auto prepare = [&](int tile, int token) {
        Stream<BN> ready;
        ready.load(w_scales, row_of(tile), BN / 2, outputs);
#pragma unroll
        for (int j = 0; j < BN / 8; ++j)
            if (exists(tile, j)) ready.old[j] = *place(tile, token, j);
        return ready;
    };
    const auto finish = [&](const float(&sums)[BN / 2], int tile, int token, const Stream<BN>& ready) {
#pragma unroll
        for (int j = 0; j < BN / 8; ++j)
            if (exists(tile, j))
                *place(tile, token, j) = make_float2(__fadd_rn(sums[4 * j], ready.old[j].x), __fadd_rn(sums[4 * j + 1], ready.old[j].y));
    };
    multiply<BN>(w, tokens, inputs, (outputs + BN - 1) / BN, BN / 2, row_of, enter, prepare, finish);
}

#define FEW_FP8_KERNELS(BN)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) few_fp8_qkv_##BN(                                    \
        const float* x, const float* norm, float eps, const __grid_constant__ TensorMap w, const float* w_scales, \
        const float* bias, const int* positions, const int* cache_rows, const float* table, int table_rows,       \
        Element* qkv, Kept* k_cache, Kept* v_cache, int tokens, int width, int heads, int kv_heads) {             \
        const Qkv to{qkv, k_cache, v_cache, bias, positions, cache_rows, table, table_rows, heads, kv_heads};     \
        qkv_rows<BN>(x, norm, eps, &w, w_scales, to, tokens, width);                                              \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) few_fp8_swiglu_##BN(                                 \
        const float* x, const float* norm, float eps, const __grid_constant__ TensorMap w, const float* w_scales, \
        Element* out, int tokens, int width, int ffn_width) {                                                     \
        swiglu_rows<BN>(x, norm, eps, &w, w_scales, out, tokens, width, ffn_width);                               \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) few_fp8_residual_##BN(                               \
        const Element* in, const __grid_constant__ TensorMap w, const float* w_scales, float* x, int tokens,      \
        int outputs, int inputs) {                                                                                \
        residual_rows<BN>(in, &w, w_scales, x, tokens, outputs, inputs);                                          \
    }

FEW_FP8_KERNELS(16)
FEW_FP8_KERNELS(32)

#endif
