// The KV cache: pages of PAGE tokens, for each layer elements [pages, kv_heads, PAGE, head_dim] of keys, and as much of
// values. Where a head's numbers lie is said here alone; `worker/runners/gpu/kv_cache.py` allocates the pages.
#pragma once

#include <stdint.h>

static constexpr int PAGE = 16;  // tokens in a page

// The row (of head_dim numbers) with which a head's part of a page begins.
static __device__ __forceinline__ int64_t page_row(int page, int kv_head, int kv_heads) {
    return (static_cast<int64_t>(page) * kv_heads + kv_head) * PAGE;
}

// The row of a token's key and value; `cache_row` is page * PAGE + its place in the page.
static __device__ __forceinline__ int64_t token_row(int cache_row, int kv_head, int kv_heads) {
    return page_row(cache_row / PAGE, kv_head, kv_heads) + cache_row % PAGE;
}
