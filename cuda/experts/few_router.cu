// A router's product for a few tokens, and the choice and places that hang on it, in one launch: what the product of
// `weights/router.py`'s parts and `route_few` (`route.cu`) give, to the bit.
//
//   x       (tokens, K) elements, up to 8 rows, K a multiple of 32     W  (rows, K) elements, `rows` a multiple of 8
//   logits  (tokens, rows) float = x W^T; then as in `route.cu`
//
// A block has 8 rows of W, which it asks for before it waits for x. Its first warp multiplies: W is the left operand of mma, half
// of which nobody reads, tokens are the columns. Sums go through K in order, 16 elements at a time, from one accumulator, as those
// of all products of elements do; so 128 instructions of 26 clocks wait for each other where K is 2,048, and hang on no number of rows.
//
// The block that ends last chooses: blocks count themselves in `arrived`, which is zero before and after. Nobody waits for others,
// so it ends whatever else runs, and graphs may replay it.
//
// Bytes: W once from memory, x once for each block from L2.
#include "common/hopper.cuh"
#include "experts/choose.cuh"

static constexpr int PANEL = 8;   // rows of W
static constexpr int PIECES = 4;  // of K, each of which is multiplied when it is there
static constexpr int HELD = 8;    // keys of a lane in registers: of up to 256 experts

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Inputs of a piece, and bytes from a row to the next, so that ldmatrix meets no conflict; as in `few.py`.
static __device__ __forceinline__ int piece_of(int inputs) { return (inputs / 32 + PIECES - 1) / PIECES * 32; }
static __device__ __forceinline__ int pitch_of(int inputs) { return inputs * static_cast<int>(sizeof(Element)) + 16; }

// A warp asks for rows that follow each other, lane 8 p + r for piece p of row r; the barrier of each piece counts its bytes.
static __device__ __forceinline__ void ask(uint32_t target, const Element* source, int rows, int inputs, uint32_t full) {
    const int lane = threadIdx.x % 32, row = lane % 8, begin = lane / 8 * piece_of(inputs);
    const int bytes = max(min(piece_of(inputs), inputs - begin), 0) * static_cast<int>(sizeof(Element));
    // BARRIER full: as `w_full` and `x_full` below, of a piece: one lane arrives and expects its bytes before the warp's lanes ask for
    // them; the same warp waits, once.
    if (row == 0) barrier_expect(full + 8 * (lane / 8), rows * bytes);
    __syncwarp();
    if (row < rows && bytes > 0)
        load_bytes(target + row * pitch_of(inputs) + begin * sizeof(Element), source + static_cast<int64_t>(row) * inputs + begin,
                   bytes, full + 8 * (lane / 8));
}

extern "C" __global__ void __launch_bounds__(FEW * 32)
    few_router(const Element* __restrict__ x, const Element* __restrict__ w, int inputs, unsigned* arrived, float* logits,
               const float* __restrict__ bias, const float* __restrict__ selection_bias, const int* __restrict__ slots,
               int* chosen, float* weights, int tokens, int pitch, int part, int parts, float part_scale, int count, int used,
               int scores, int groups, int groups_used, int group_best, int normalise, float scale, int padding, int* places,
               int* sources, int4* tiles, int* total) {
    extern __shared__ __align__(16) unsigned char dynamic[];
    __shared__ uint64_t barriers[2 * PIECES];
    __shared__ bool last;
    KERNEL_BEGINS();
    launch_next();
    const int lane = threadIdx.x % 32, row_bytes = pitch_of(inputs);
    const uint32_t own_w = shared_address(dynamic), own_x = own_w + PANEL * row_bytes;
    // BARRIER w_full, x_full: of pieces of W and of x, for one filling. A lane of the first warp arrives at each, that expects the
    // bytes which the warp's lanes ask for behind it; the first warp alone waits for them, once, in order.
    const uint32_t w_full = shared_address(barriers), x_full = w_full + 8 * PIECES;
    if (threadIdx.x < 32) {
        if (lane == 0) {
            for (int i = 0; i < PIECES; ++i) {
                barrier_init(w_full + 8 * i, 1);
                barrier_init(x_full + 8 * i, 1);
            }
            publish_barriers();
        }
        __syncwarp();
        ask(own_w, w + static_cast<int64_t>(blockIdx.x) * PANEL * inputs, PANEL, inputs, w_full);
    }
    wait_for_previous(x, slots, logits, chosen, weights, places, sources, tiles, total, arrived);
    if (threadIdx.x < 32) {
        ask(own_x, x, tokens, inputs, x_full);
        // Lanes have rows of both; tokens that there are not have the last one's, and nobody reads what they give.
        const uint32_t w_row = own_w + lane % 8 * row_bytes + lane / 8 * 16;
        const uint32_t x_row = own_x + min(lane % 8, tokens - 1) * row_bytes + lane / 8 * 16;
        float acc[4] = {};
        for (int piece = 0; piece < PIECES; ++piece) {
            const int begin = piece * piece_of(inputs), end = min(begin + piece_of(inputs), inputs);
            barrier_wait(w_full + 8 * piece, 0);
            barrier_wait(x_full + 8 * piece, 0);
#pragma unroll 8
            for (int k = begin; k < end; k += 32) {
                uint32_t a[4], b[4];
                load_matrices(a, w_row + k * sizeof(Element));
                load_matrices(b, x_row + k * sizeof(Element));
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const uint32_t left[4] = {a[2 * i], 0, a[2 * i + 1], 0};
                    mma(acc, left, b[2 * i], b[2 * i + 1]);
                }
            }
        }
#pragma unroll
        for (int e = 0; e < 2; ++e)
            if (const int token = lane % 4 * 2 + e; token < tokens)
                logits[static_cast<int64_t>(token) * pitch + blockIdx.x * PANEL + lane / 4] = acc[e];
        __threadfence();
        __syncwarp();
        if (lane == 0) last = atomicAdd(arrived, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    if (threadIdx.x == 0) *arrived = 0;
    choose_and_place<HELD>({logits, bias, selection_bias, slots, chosen, weights, pitch, part, parts, part_scale, count, used,
                            scores, groups, groups_used, group_best, normalise, scale, padding},
                           tokens, reinterpret_cast<float*>(dynamic), {places, sources, tiles, total});
}

#endif
