// How a warp chooses the experts of a token. What it leaves: `route.cu`.
#pragma once

#include "common/basics.cuh"

enum Scores { SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN };

static constexpr float LEAST_SUM = 1e-20f;  // added to what is divided by

// Larger numbers have larger keys; what is no number has the least, 1; 0 is for what is taken.
static __device__ __forceinline__ uint32_t key_of(float value) {
    const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 is 0
    if (!(value == value)) return 1;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The place of the largest of so many keys, the first of equals. All lanes get it.
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
