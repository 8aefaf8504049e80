// The page of the KV cache, for kernels that need not know how keys and values are kept in it (`kv_cache.cuh`).
#pragma once

static constexpr int PAGE = 16;  // tokens
