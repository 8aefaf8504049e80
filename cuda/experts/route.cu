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
// `place_tokens` and `route_few` set `counted` numbers of `counters` to zero (`expert_gemm.cu`).
//
// A warp chooses for a token, float all through. A block places an expert's tokens: it counts those of all experts, which says
// where its own begin, and then goes through the choices in order. What is counted by atomics hangs on no order. Launches hang
// on the number of tokens alone, so graphs can replay them.
#include "common/basics.cuh"

enum Scores { SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN };

static constexpr int MOST = 1024;         // experts
static constexpr int WARPS = 4;           // of `choose`
static constexpr int THREADS = 256;       // of `place_tokens`
static constexpr int EACH = 16;           // choices that a thread of it has at once
static constexpr int FEW = 8;             // tokens of `route_few`, and its warps
static constexpr float LEAST_SUM = 1e-20f;  // added to what is divided by

// Larger numbers have larger keys; what is no number has the least, 1; 0 is for what is taken.
static __device__ __forceinline__ uint32_t key_of(float value) {
    const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 is 0
    if (!(value == value)) return 1;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The place of the largest key, the first of equals. All lanes get it.
static __device__ __forceinline__ int largest(const uint32_t* keys, int count) {
    const int lane = threadIdx.x % 32;
    uint32_t best = 0, place = lane < count ? lane : 0xffffffffu;
    for (int i = lane; i < count; i += 32)
        if (keys[i] > best) best = keys[i], place = i;
    const uint32_t most = __reduce_max_sync(0xffffffffu, best);
    return static_cast<int>(__reduce_min_sync(0xffffffffu, best == most ? place : 0xffffffffu));
}

// Lane r has the number of rank r: their sum, in the order of ranks.
static __device__ __forceinline__ float sum_of_ranks(float value, int used) {
    float sum = __shfl_sync(0xffffffffu, value, 0);
    for (int rank = 1; rank < used; ++rank) sum += __shfl_sync(0xffffffffu, value, rank);
    return sum;
}

// Keys of the experts of all but the best groups become that of minus infinity.
static __device__ __forceinline__ void keep_best_groups(const float* values, const float* bias, uint32_t* keys, uint32_t* good,
                                                        int count, int groups, int groups_used, int group_best) {
    const int lane = threadIdx.x % 32, size = count / groups;
    for (int group = lane; group < groups; group += 32) {
        float first = negative_infinity(), second = negative_infinity();
        for (int i = group * size; i < (group + 1) * size; ++i) {
            const float score = bias == nullptr ? values[i] : values[i] + bias[i];
            if (score > first)
                second = first, first = score;
            else if (score > second)
                second = score;
        }
        good[group] = key_of(group_best == 2 && size > 1 ? first + second : first);
    }
    __syncwarp();
    for (int i = 0; i < groups_used; ++i) {
        const int group = largest(good, groups);
        __syncwarp();
        if (lane == 0) good[group] = 0;
        __syncwarp();
    }
    for (int i = lane; i < count; i += 32)
        if (good[i / size] != 0) keys[i] = key_of(negative_infinity());
    __syncwarp();
}

// What a kernel that chooses is given.
struct Router {
    const float *logits, *bias, *selection_bias;
    const int* slots;
    int* chosen;
    float* weights;
    int pitch, part, parts;
    float part_scale;
    int count, used, scores, groups, groups_used, group_best, normalise;
    float scale;
    int padding;
};

// A warp's choice for a token, which each lane whose number is a rank returns; `values`: 3 `count` words of shared memory.
static __device__ __forceinline__ int choose_for(const Router& given, int token, float* values) {
    const int lane = threadIdx.x % 32, count = given.count, used = given.used;
    const int64_t first = static_cast<int64_t>(token) * used;
    if (given.slots != nullptr && given.slots[token] == given.padding) {
        if (lane < used) given.chosen[first + lane] = -1, given.weights[first + lane] = 0.0f;
        return -1;
    }
    uint32_t *keys = reinterpret_cast<uint32_t*>(values + count), *good = keys + count;
    const float *row = given.logits + static_cast<int64_t>(token) * given.pitch, *selection_bias = given.selection_bias;
    float most = negative_infinity();
    for (int i = lane; i < count; i += 32) {
        float logit = 0.0f;
        for (int p = given.parts - 1; p > 0; --p) logit = (logit + row[p * given.part + i]) * given.part_scale;
        logit += row[i];
        if (given.bias != nullptr) logit += given.bias[i];
        values[i] = logit;
        most = fmaxf(most, logit);
    }
    if (given.scores == SOFTMAX) {
        most = warp_max(most);
        float sum = 0.0f;
        for (int i = lane; i < count; i += 32) {
            values[i] = expf(values[i] - most);
            sum += values[i];
        }
        sum = warp_sum(sum);
        for (int i = lane; i < count; i += 32) values[i] = values[i] / sum;
    } else if (given.scores == SIGMOID) {
        for (int i = lane; i < count; i += 32) values[i] = 1.0f / (1.0f + expf(-values[i]));
    }
    for (int i = lane; i < count; i += 32)
        keys[i] = key_of(selection_bias == nullptr ? values[i] : values[i] + selection_bias[i]);
    __syncwarp();
    if (given.groups > 1)
        keep_best_groups(values, selection_bias, keys, good, count, given.groups, given.groups_used, given.group_best);
    int mine = 0;
    for (int rank = 0; rank < used; ++rank) {
        const int expert = largest(keys, count);
        __syncwarp();
        if (lane == 0) keys[expert] = 0;
        __syncwarp();
        if (lane == rank) mine = expert;
    }
    float weight = values[mine];
    if (given.scores == SOFTMAX_OF_CHOSEN) {
        weight = expf(weight - __shfl_sync(0xffffffffu, weight, 0));
        weight = weight / sum_of_ranks(weight, used);
    }
    if (given.normalise) weight = weight / (sum_of_ranks(weight, used) + LEAST_SUM);
    if (lane < used) given.chosen[first + lane] = mine, given.weights[first + lane] = weight * given.scale;
    return mine;
}

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
              int4* __restrict__ tiles, int* __restrict__ total, int* __restrict__ counters, int counted) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ int held[FEW * 32];
    __shared__ bool is_first[FEW * 32];  // of an expert's
    launch_next();
    wait_for_previous(logits, slots, places);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, choices = tokens * used, i = threadIdx.x;
    for (int at = i; at < counted; at += FEW * 32) counters[at] = 0;
    if (warp < tokens) {
        const int mine = choose_for({logits, bias, selection_bias, slots, chosen, weights, pitch, part, parts, part_scale,
                                     count, used, scores, groups, groups_used, group_best, normalise, scale, padding},
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
                 int* __restrict__ total, int* __restrict__ counters, int choices, int used, int count, int tile_rows,
                 int counted) {
    constexpr int WARPS_HERE = THREADS / 32, ROUND = THREADS * EACH;
    __shared__ unsigned counts[MOST];
    __shared__ int partial[2][WARPS_HERE], in_warps[2][WARPS_HERE];
    launch_next();
    const int expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = threadIdx.x * EACH;
    for (int i = threadIdx.x; i < count; i += THREADS) counts[i] = 0;
    __syncthreads();
    wait_for_previous(chosen, places);
    for (int i = expert * THREADS + threadIdx.x; i < counted; i += count * THREADS) counters[i] = 0;
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
