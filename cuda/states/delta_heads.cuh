// Which value heads have the queries and keys of one key head: those that are as far apart as there are key heads, or, as NEIGHBOURS
// (1 or 0, at compilation) says, those beside each other.
#pragma once

struct DeltaHeads {
    int values, keys;

    __device__ __forceinline__ int key_of(int head) const { return NEIGHBOURS ? head / (values / keys) : head % keys; }
    __device__ __forceinline__ int first_of(int key_head) const { return NEIGHBOURS ? key_head * (values / keys) : key_head; }
    __device__ __forceinline__ int after(int head) const { return head + (NEIGHBOURS ? 1 : keys); }
    // Whether no value head comes after this one that has the same keys.
    __device__ __forceinline__ bool is_last(int head) const {
        return NEIGHBOURS ? (head + 1) % (values / keys) == 0 : head + keys >= values;
    }
};
