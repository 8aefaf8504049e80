// Which experts tokens go through, and the positions at which experts take them.
//
//   choose        logits (T, pitch) float -> chosen (T, used) int, the best first, and weights (T, used) float
//   place_tokens  chosen -> places (T, used) int, sources int, tiles int4, total int
//   route_few     both, for up to 8 tokens
//
// A logit is the sum of `parts` columns, `part` apart, the second times `part_scale`, the third times its square: a router's
// weights are so many elements each (`weights/router.py`). Plus a bias. What weights are made of, how experts are chosen of
// groups, and what becomes of the weights: as in the reference runner (`experts.py`), with its order of choice. Of equal scores
// the lower index comes first; what is no number comes last. A token of slot `padding` is sent nowhere: -1.
//
// Positions 0 .. n - 1 are those of the first expert's tokens, in their order, then of the second's, and so on.
// places[token][rank] is the position, or -1; sources[position] the token. A tile is {expert, first position, positions,
// n + 65536 i}: at most `tile_rows` positions of an expert, the i-th of its n tiles; `total` says how many tiles there are.
//
// A warp chooses for a token, float all through. A block places an expert's tokens: it counts those of all experts, which says
// where its own begin, and then goes through the choices in order. What is counted by atomics hangs on no order. Launches hang
// on the number of tokens alone, so graphs can replay them.
#include "experts/choose.cuh"

static constexpr int MOST = 1024;         // experts
static constexpr int WARPS = 4;           // of `choose`
static constexpr int FEW = 8;             // tokens of `route_few`, and its warps
static constexpr int THREADS = 256;       // of `place_tokens`
static constexpr int EACH = 16;           // choices that a thread of it has at once

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    choose(const float* __restrict__ logits, const float* __restrict__ bias, const float* __restrict__ selection_bias,
           const int* __restrict__ slots, int* __restrict__ chosen, float* __restrict__ weights, int tokens, int pitch,
           int part, int parts, float part_scale, int count, int used, int scores, int groups, int groups_used,
           int group_best, int normalise, float scale, int padding) {
    extern __shared__ __align__(16) unsigned char shared[];
    launch_next();
    wait_for_previous(logits, slots);
    const int warp = threadIdx.x / 32, token = blockIdx.x * WARPS + warp;
    if (token < tokens)
        choose_for({logits, bias, selection_bias, slots, chosen, weights, pitch, part, parts, part_scale, count, used, scores,
                    groups, groups_used, group_best, normalise, scale, padding},
                   token, reinterpret_cast<float*>(shared) + warp * 3 * count);
}

// Both for a few tokens, no more than a tile has positions and than there are warps: a block, of which a thread has a choice.
extern "C" __global__ void __launch_bounds__(FEW * 32)
    route_few(const float* __restrict__ logits, const float* __restrict__ bias, const float* __restrict__ selection_bias,
              const int* __restrict__ slots, int* __restrict__ chosen, float* __restrict__ weights, int tokens, int pitch,
              int part, int parts, float part_scale, int count, int used, int scores, int groups, int groups_used,
              int group_best, int normalise, float scale, int padding, int* __restrict__ places, int* __restrict__ sources,
              int4* __restrict__ tiles, int* __restrict__ total) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ int held[FEW * 32];
    __shared__ bool is_first[FEW * 32];  // of an expert's
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, choices = tokens * used, i = threadIdx.x;
    launch_next();
    wait_for_previous(logits, slots, places);
    if (warp < tokens) {
        const int mine = choose_for({logits, bias, selection_bias, slots, chosen, weights, pitch, part, parts, part_scale, count,
                                     used, scores, groups, groups_used, group_best, normalise, scale, padding},
                                    warp, reinterpret_cast<float*>(shared) + warp * 3 * count);
        if (lane < used) held[warp * used + lane] = mine;
    }
    __syncthreads();
    const int expert = i < choices ? held[i] : -1;
    int before = 0, own = 0, earlier = 0;  // choices of lower experts, of this one, and of these those that come first
    for (int other = 0; other < choices; ++other) {
        const int its = held[other];
        before += its >= 0 && its < expert;
        own += its == expert;
        earlier += its == expert && other < i;
    }
    if (i < choices) {
        is_first[i] = expert >= 0 && earlier == 0;
        places[i] = expert < 0 ? -1 : before + earlier;
        if (expert >= 0) sources[before + earlier] = i / used;
    }
    __syncthreads();
    int tile = 0, all = 0;
    for (int other = 0; other < choices; ++other) {
        all += is_first[other];
        tile += is_first[other] && held[other] < expert;
    }
    if (i < choices && is_first[i]) {
        const int4 one = {expert, before, own, 1};
        tiles[tile] = one;
    }
    if (i == 0) *total = all;
}

// The sum over the block; all threads call it, with a `partial` of its own.
static __device__ __forceinline__ int sum_of_block(int value, int* partial) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(0xffffffffu, value, offset);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    int sum = 0;
    for (int warp = 0; warp < THREADS / 32; ++warp) sum += partial[warp];
    return sum;
}

// EACH choices from `first` on, -2 where there are none.
static __device__ __forceinline__ void load_choices(int (&own)[EACH], const int* chosen, int first, int choices) {
#pragma unroll
    for (int i = 0; i < EACH; i += 4) {
        const int at = first + i;
        if (at + 4 <= choices) {
            const int4 four = *reinterpret_cast<const int4*>(chosen + at);
            own[i] = four.x, own[i + 1] = four.y, own[i + 2] = four.z, own[i + 3] = four.w;
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) own[i + j] = at + j < choices ? chosen[at + j] : -2;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    place_tokens(const int* __restrict__ chosen, int* __restrict__ places, int* __restrict__ sources, int4* __restrict__ tiles,
                 int* __restrict__ total, int choices, int used, int count, int tile_rows) {
    constexpr int WARPS_HERE = THREADS / 32, ROUND = THREADS * EACH;
    __shared__ unsigned counts[MOST];
    __shared__ int partial[2][WARPS_HERE], in_warps[2][WARPS_HERE];
    launch_next();
    const int expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = threadIdx.x * EACH;
    for (int i = threadIdx.x; i < count; i += THREADS) counts[i] = 0;
    __syncthreads();
    wait_for_previous(chosen, places);
    int own[EACH];
    for (int start = 0; start < choices; start += ROUND) {
        load_choices(own, chosen, start + first, choices);
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (own[i] >= 0) atomicAdd(&counts[own[i]], 1);
    }
    __syncthreads();
    int before = 0, tiles_before = 0;
    for (int i = threadIdx.x; i < expert; i += THREADS) {
        const int of_other = static_cast<int>(counts[i]);
        before += of_other, tiles_before += (of_other + tile_rows - 1) / tile_rows;
    }
    int position = sum_of_block(before, partial[0]);
    tiles_before = sum_of_block(tiles_before, partial[1]);
    const int all_own = static_cast<int>(counts[expert]), own_tiles = (all_own + tile_rows - 1) / tile_rows;
    for (int i = threadIdx.x; i < own_tiles; i += THREADS) {
        const int4 tile = {expert, position + i * tile_rows, min(tile_rows, all_own - i * tile_rows), own_tiles + (i << 16)};
        tiles[tiles_before + i] = tile;
    }
    if (expert == count - 1 && threadIdx.x == 0) *total = tiles_before + own_tiles;
    for (int start = 0, turn = 0; start < choices; start += ROUND, turn ^= 1) {
        if (choices > ROUND) load_choices(own, chosen, start + first, choices);
        int mine = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) mine += own[i] == expert;
        int until = mine;  // of this lane and those before it
#pragma unroll
        for (int offset = 1; offset < 32; offset <<= 1) {
            const int other = __shfl_sync(0xffffffffu, until, max(lane - offset, 0));
            until += lane >= offset ? other : 0;
        }
        if (lane == 31) in_warps[turn][warp] = until;
        __syncthreads();
        int place = position + until - mine;
        for (int other = 0; other < WARPS_HERE; ++other) {
            place += other < warp ? in_warps[turn][other] : 0;
            position += in_warps[turn][other];
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int at = start + first + i;
            if (own[i] == expert) {
                places[at] = place;
                sources[place++] = at / used;
            } else if (expert == 0 && own[i] == -1) {
                places[at] = -1;
            }
        }
    }
}
