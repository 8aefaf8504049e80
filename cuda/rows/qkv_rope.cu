// From the QKV product to what attention reads: bias, QK norm, rotation, and the write into the KV pages.
//
//   source          (T, M D) elements: M heads that the product has made, queries, keys, values. H + 2 G of them; or H + G, where
//                   values are what keys are before norm and rotation; or H, where keys and values are another layer's: none are
//                   written then
//   qkv             (T, (H + 2 G) D): the rotated queries; may be the same as source if M is H + 2 G
//   q_norm, k_norm  float, or null: weights of a norm of each head's query and key (Qwen3), (D,); with `statistics`, of norms
//                   that go over all heads of a token at once (OLMo 2), (H D,) and (G D,)
//   norm_is         CENTRED: LayerNorm, not RMS norm; ROTATED: the norm comes after rotation (Hunyuan), not before;
//                   VALUES: values have an RMS norm, too, without a weight (Gemma 4)
//   statistics      (T, 2, 2) float, from `qk_statistics`: of queries and of keys, what is subtracted and what multiplied; or null
//   factors         (table_rows,) float: what the queries at a position are multiplied by at last (Llama 4); or null
// The others as `qkv.cuh` says. Arithmetic is FP32. A head is the work of a group of LANES threads, of which D / (2 VECTOR)
// have work: each holds VECTOR elements of either half of the head, which makes its pairs complete in both styles. VECTOR
// is 8 (16-byte accesses) where 16 divides D, else 2. Threads are numbered through all heads of all tokens. 2 D bytes are
// read and written a head.
//
// `rope_table` runs once at start-up, in double, as positions may be large. Pairs behind the first `rotated` stay as they are.
//
// Options: -DHEAD_DIM (64), -DINTERLEAVED (0).
#include "common/block_sum.cuh"
#include "common/qkv.cuh"

static_assert(HEAD_DIM % 4 == 0 && HEAD_DIM <= 512, "head sizes are multiples of 4 up to 512");

static constexpr int CENTRED = 1, ROTATED = 2, VALUES = 4;
static constexpr int VECTOR = HEAD_DIM % 16 == 0 ? 8 : 2;
static constexpr int WORKERS = HEAD_DIM / (2 * VECTOR);
static constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }
static constexpr int LANES = power_of_two(WORKERS);
static_assert(LANES <= 32, "a head is the work of one warp at most: 16 must divide head sizes over 128");

[[maybe_unused]] static __device__ __forceinline__ void load_elements(const Element* source, float (&values)[8]) {
    unpack(*reinterpret_cast<const Element8*>(source), values);
}

[[maybe_unused]] static __device__ __forceinline__ void load_elements(const Element* source, float (&values)[2]) {
    const float2 pair = to_floats(*reinterpret_cast<const Element2*>(source));
    values[0] = pair.x, values[1] = pair.y;
}

[[maybe_unused]] static __device__ __forceinline__ void store_elements(Element* target, const float (&values)[8]) {
    *reinterpret_cast<Element8*>(target) = pack(values);
}

[[maybe_unused]] static __device__ __forceinline__ void store_elements(Element* target, const float (&values)[2]) {
    *reinterpret_cast<Element2*>(target) = to_elements(values[0], values[1]);
}

// VECTOR floats, which lie at a multiple of their size.
[[maybe_unused]] static __device__ __forceinline__ void load_floats(const float* source, float (&values)[8]) {
    load8(source, values);
}

[[maybe_unused]] static __device__ __forceinline__ void load_floats(const float* source, float (&values)[2]) {
    const float2 pair = *reinterpret_cast<const float2*>(source);
    values[0] = pair.x, values[1] = pair.y;
}

static __device__ __forceinline__ void add_from(const float* source, float (&values)[VECTOR]) {
    float more[VECTOR];
    load_floats(source, more);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) values[i] += more[i];
}

static __device__ __forceinline__ void multiply_by(const float* source, float scale, float (&values)[VECTOR]) {
    float gains[VECTOR];
    load_floats(source, gains);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) values[i] *= scale * gains[i];
}

static __device__ __forceinline__ void multiply_by(float scale, float (&values)[VECTOR]) {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) values[i] *= scale;
}

// Over the lanes of a head; all threads of the warp call it.
static __device__ __forceinline__ float head_sum(float value) {
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset >>= 1) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

#ifdef KV_FP8
static __device__ __forceinline__ void store_quantised(uint8_t* target, const float (&values)[VECTOR], const Power& power) {
    if constexpr (VECTOR == 8) {
        *reinterpret_cast<Bytes8*>(target) =
            Bytes8{{power.quantised(values[0], values[1]) | power.quantised(values[2], values[3]) << 16,
                    power.quantised(values[4], values[5]) | power.quantised(values[6], values[7]) << 16}};
    } else {
        *reinterpret_cast<uint16_t*>(target) = static_cast<uint16_t>(power.quantised(values[0], values[1]));
    }
}

// Writes this lane's numbers of a head to its page, unless cache_row is negative; they are rounded to elements first, as they are
// where those are kept. All threads of the warp call it.
static __device__ __forceinline__ void keep(const Qkv& to, const float (&low)[VECTOR], const float (&high)[VECTOR],
                                            int cache_row, int head, int lane) {
    float a[VECTOR], b[VECTOR];
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        a[i] = rounded(low[i]), b[i] = rounded(high[i]);
        largest = max(largest, max(magnitude_bits(a[i]), magnitude_bits(b[i])));
    }
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset >>= 1)
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    if (cache_row < 0) return;
    const Power power(largest);
    Kept* target = to.in_cache(cache_row, head);
    store_quantised(target + lane * VECTOR, a, power);
    store_quantised(target + HEAD_DIM / 2 + lane * VECTOR, b, power);
    if (lane == 0) *to.exponent_in_cache(cache_row, head) = static_cast<uint8_t>(power.exponent);
}

// Keys and values that are in qkv, finished, to their pages: where the kernel ahead has no head whole (`few_rows.cu`).
extern "C" __global__ void __launch_bounds__(256)
    kv_write(Element* __restrict__ qkv, const int* __restrict__ cache_rows, Kept* __restrict__ k_cache,
             Kept* __restrict__ v_cache, int tokens, int heads, int kv_heads) {
    launch_next();
    wait_for_previous(qkv);
    const Qkv to{qkv, k_cache, v_cache, nullptr, nullptr, cache_rows, nullptr, 0, heads, kv_heads};
    const int group = blockIdx.x * (256 / LANES) + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const bool exists = group < tokens * 2 * kv_heads && lane < WORKERS;
    const int token = exists ? group / (2 * kv_heads) : 0, head = heads + (exists ? group % (2 * kv_heads) : 0);
    float low[VECTOR] = {}, high[VECTOR] = {};
    if (exists) {
        load_elements(to.in_qkv(token, head) + lane * VECTOR, low);
        load_elements(to.in_qkv(token, head) + HEAD_DIM / 2 + lane * VECTOR, high);
    }
    keep(to, low, high, exists ? cache_rows[token] : -1, head, lane);
}
#endif

extern "C" __global__ void __launch_bounds__(256)
    qkv_rope_write(const Element* made, int made_heads, Element* qkv, const float* __restrict__ bias,
                   const float* __restrict__ q_norm,
                   const float* __restrict__ k_norm, float eps, int norm_is, const float2* __restrict__ statistics,
                   const int* __restrict__ positions, const int* __restrict__ cache_rows,
                   const float* __restrict__ table, int table_rows, const float* __restrict__ factors,
                   Kept* __restrict__ k_cache, Kept* __restrict__ v_cache, int tokens, int heads, int kv_heads) {
    launch_next();
    wait_for_previous(made, qkv, statistics);
    const Qkv to{qkv, k_cache, v_cache, bias, positions, cache_rows, table, table_rows, heads, kv_heads};
    const int all_heads = made_heads > heads ? to.all_heads() : heads;
    const unsigned group = blockIdx.x * (256 / LANES) + threadIdx.x / LANES;  // T (H + 2 G) is far below 2^32
    const int lane = threadIdx.x % LANES;
    const bool exists = group < static_cast<unsigned>(tokens) * all_heads && lane < WORKERS;
    const int token = exists ? group / static_cast<unsigned>(all_heads) : 0;
    const int head = exists ? group % static_cast<unsigned>(all_heads) : 0;
    const int first = lane * VECTOR;
    const int second = HEAD_DIM / 2 + first;
    const int source_head = head < made_heads ? head : head - kv_heads;  // a value's is the key's
    const Element* source = made + (static_cast<int64_t>(token) * made_heads + source_head) * HEAD_DIM;

    float low[VECTOR] = {}, high[VECTOR] = {};
    if (exists) {
        load_elements(source + first, low);
        load_elements(source + second, high);
        if (bias != nullptr) {
            add_from(bias + source_head * HEAD_DIM + first, low);
            add_from(bias + source_head * HEAD_DIM + second, high);
        } else {  // -0 becomes 0, as where the product is fused, which adds a bias of 0 then
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) low[i] += 0.0f, high[i] += 0.0f;
        }
    }
    const bool is_query = to.is_query(head), is_value = to.is_value(head);
    const auto subtract = [&](float mean) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) low[i] -= mean, high[i] -= mean;
    };
    const auto normalise = [&] {  // all threads of the warp call it
        const float* gains = is_query ? q_norm : k_norm;
        float scale;
        if (statistics != nullptr) {
            const float2 known = statistics[2 * token + (is_query ? 0 : 1)];
            if (norm_is & CENTRED && !is_value) subtract(known.x);
            scale = known.y;
            gains += (is_query ? head : is_value ? 0 : head - heads) * HEAD_DIM;
        } else {
            if (norm_is & CENTRED) {
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) sum += low[i] + high[i];
                const float mean = head_sum(sum) / HEAD_DIM;
                if (exists && !is_value) subtract(mean);  // where a head has no elements, zeros stay
            }
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) sum += low[i] * low[i] + high[i] * high[i];
            scale = 1.0f / sqrtf(head_sum(sum) / HEAD_DIM + eps);
        }
        if (!exists) return;
        if (!is_value) {
            multiply_by(gains + first, scale, low);
            multiply_by(gains + second, scale, high);
        } else if (norm_is & VALUES) {
            multiply_by(scale, low);
            multiply_by(scale, high);
        }
    };
    const bool has_norm = q_norm != nullptr;  // the same for all threads
    if (has_norm && !(norm_is & ROTATED)) normalise();
    const int table_row = exists ? to.table_row(positions[token]) : 0;
    if (exists && !is_value) {
        const float* angles = to.angles(table_row);
        float a[VECTOR], b[VECTOR];  // pairs (cosine, sine)
        load_floats(angles + (INTERLEAVED ? first : 2 * first), a);
        load_floats(angles + (INTERLEAVED ? second : 2 * first + VECTOR), b);
        if (INTERLEAVED) {
#pragma unroll
            for (int i = 0; i < VECTOR; i += 2) {
                rotate(low[i], low[i + 1], a[i], a[i + 1]);
                rotate(high[i], high[i + 1], b[i], b[i + 1]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                const float cosine = 2 * i < VECTOR ? a[2 * i % VECTOR] : b[2 * i % VECTOR];
                const float sine = 2 * i < VECTOR ? a[2 * i % VECTOR + 1] : b[2 * i % VECTOR + 1];
                rotate(low[i], high[i], cosine, sine);
            }
        }
    }
    if (has_norm && norm_is & ROTATED) normalise();
#ifdef KV_FP8
    keep(to, low, high, exists && !is_query ? cache_rows[token] : -1, head, lane);
    if (!is_query) return;
#endif
    if (!exists) return;
    if (factors != nullptr && is_query) {
        const float factor = factors[table_row];
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) low[i] *= factor, high[i] *= factor;
    }
    Element* target = to.in_qkv(token, head);
#ifndef KV_FP8
    if (!is_query) {
        if (cache_rows[token] < 0) return;
        target = to.in_cache(cache_rows[token], head);
    }
#endif
    store_elements(target + first, low);
    store_elements(target + second, high);
}

// statistics[t][0] = (mean, 1 / sqrt(mean(v^2) + eps)) of all queries of token t, [t][1] of its keys, bias added; v is less
// the mean where `norm_is` CENTRED. Grid (T, 2), a block for each; 2 bytes an element, read once more where it is centred.
extern "C" __global__ void __launch_bounds__(256)
    qk_statistics(const Element* __restrict__ qkv, const float* __restrict__ bias, float eps, int norm_is,
                  float2* __restrict__ statistics, int heads, int kv_heads) {
    __shared__ float partial[2][32];
    launch_next();
    wait_for_previous(qkv);
    const int count = (blockIdx.y == 0 ? heads : kv_heads) * HEAD_DIM, begin = blockIdx.y == 0 ? 0 : heads * HEAD_DIM;
    const Element* source = qkv + static_cast<int64_t>(blockIdx.x) * (heads + 2 * kv_heads) * HEAD_DIM + begin;
    const auto sum_of = [&](auto term) {
        float sum = 0.0f;
        for (int i = 2 * threadIdx.x; i < count; i += 512) {
            float2 pair = to_floats(*reinterpret_cast<const Element2*>(source + i));
            if (bias != nullptr) pair.x += bias[begin + i], pair.y += bias[begin + i + 1];
            sum += term(pair.x) + term(pair.y);
        }
        return sum;
    };
    float mean = 0.0f;
    if (norm_is & CENTRED) mean = block_sum(sum_of([](float x) { return x; }), partial[0]) / count;
    const float squares = block_sum(sum_of([&](float x) { return (x - mean) * (x - mean); }), partial[1]);
    if (threadIdx.x == 0) statistics[2 * blockIdx.x + blockIdx.y] = make_float2(mean, 1.0f / sqrtf(squares / count + eps));
}

extern "C" __global__ void __launch_bounds__(256)
    rope_table(const double* __restrict__ frequencies, double magnitude, float2* __restrict__ table, int rows, int rotated) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
    if (index >= static_cast<int64_t>(rows) * (HEAD_DIM / 2)) return;
    const int pair = static_cast<int>(index % (HEAD_DIM / 2));
    if (pair >= rotated) {
        table[index] = make_float2(1.0f, 0.0f);
        return;
    }
    const double angle = static_cast<double>(index / (HEAD_DIM / 2)) * frequencies[pair];
    double sine, cosine;
    sincos(angle, &sine, &cosine);
    table[index] = make_float2(static_cast<float>(cosine * magnitude), static_cast<float>(sine * magnitude));
}
