// From the QKV product to what attention reads: bias, QK norm, rotation, and the write into the KV pages.
//
//   qkv             (T, (H + 2 G) D) half: queries, keys, values; the queries are replaced by the rotated ones
//   q_norm, k_norm  (D,) float, or null: RMS norm of each head (Qwen3)
// The others as `qkv.cuh` says. Arithmetic is FP32. A head is the work of a group of LANES threads, of which D / (2 VECTOR)
// have work: each holds VECTOR elements of either half of the head, which makes its pairs complete in both styles. VECTOR
// is 8 (16-byte accesses) where 16 divides D, else 2. Threads are numbered through all heads of all tokens. 2 D bytes are
// read and written a head.
//
// `rope_table` runs once at start-up, in double, as positions may be large.
//
// Options: -DHEAD_DIM (64), -DINTERLEAVED (0).
#include "common/qkv.cuh"

static_assert(HEAD_DIM % 4 == 0 && HEAD_DIM <= 512, "head sizes are multiples of 4 up to 512");

static constexpr int VECTOR = HEAD_DIM % 16 == 0 ? 8 : 2;
static constexpr int WORKERS = HEAD_DIM / (2 * VECTOR);
static constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }
static constexpr int LANES = power_of_two(WORKERS);
static_assert(LANES <= 32, "a head is the work of one warp at most: 16 must divide head sizes over 128");

[[maybe_unused]] static __device__ __forceinline__ void load_half(const Element* source, float (&values)[8]) {
    unpack(*reinterpret_cast<const Element8*>(source), values);
}

[[maybe_unused]] static __device__ __forceinline__ void load_half(const Element* source, float (&values)[2]) {
    const float2 pair = to_floats(*reinterpret_cast<const Element2*>(source));
    values[0] = pair.x, values[1] = pair.y;
}

[[maybe_unused]] static __device__ __forceinline__ void store_half(Element* target, const float (&values)[8]) {
    *reinterpret_cast<Element8*>(target) = pack(values);
}

[[maybe_unused]] static __device__ __forceinline__ void store_half(Element* target, const float (&values)[2]) {
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

extern "C" __global__ void __launch_bounds__(256)
    qkv_rope_write(Element* __restrict__ qkv, const float* __restrict__ bias, const float* __restrict__ q_norm,
                   const float* __restrict__ k_norm, float eps, const int* __restrict__ positions,
                   const int* __restrict__ cache_rows, const float* __restrict__ table, int table_rows,
                   Element* __restrict__ k_cache, Element* __restrict__ v_cache, int tokens, int heads,
                   int kv_heads) {
    launch_next();
    wait_for_previous(qkv);
    const Qkv to{qkv, k_cache, v_cache, bias, positions, cache_rows, table, table_rows, heads, kv_heads};
    const int all_heads = to.all_heads();
    const unsigned group = blockIdx.x * (256 / LANES) + threadIdx.x / LANES;  // T (H + 2 G) is far below 2^32
    const int lane = threadIdx.x % LANES;
    const bool exists = group < static_cast<unsigned>(tokens) * all_heads && lane < WORKERS;
    const int token = exists ? group / static_cast<unsigned>(all_heads) : 0;
    const int head = exists ? group % static_cast<unsigned>(all_heads) : 0;
    const int first = lane * VECTOR;
    const int second = HEAD_DIM / 2 + first;
    Element* source = to.in_qkv(token, head);

    float low[VECTOR] = {}, high[VECTOR] = {};
    if (exists) {
        load_half(source + first, low);
        load_half(source + second, high);
        if (bias != nullptr) {
            add_from(bias + head * HEAD_DIM + first, low);
            add_from(bias + head * HEAD_DIM + second, high);
        }
    }
    const bool is_query = to.is_query(head), is_value = to.is_value(head);
    if (q_norm != nullptr && k_norm != nullptr) {  // the same for all threads
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum += low[i] * low[i] + high[i] * high[i];
#pragma unroll
        for (int offset = LANES / 2; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (!is_value && exists) {
            const float* gains = is_query ? q_norm : k_norm;
            const float scale = 1.0f / sqrtf(sum / HEAD_DIM + eps);
            multiply_by(gains + first, scale, low);
            multiply_by(gains + second, scale, high);
        }
    }
    if (!exists) return;
    if (!is_value) {
        const float* angles = to.angles(to.table_row(positions[token]));
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
    Element* target = source;
    if (!is_query) {
        if (cache_rows[token] < 0) return;
        target = to.in_cache(cache_rows[token], head);
    }
    store_half(target + first, low);
    store_half(target + second, high);
}

extern "C" __global__ void __launch_bounds__(256)
    rope_table(const double* __restrict__ frequencies, double magnitude, float2* __restrict__ table, int rows) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
    if (index >= static_cast<int64_t>(rows) * (HEAD_DIM / 2)) return;
    const double angle = static_cast<double>(index / (HEAD_DIM / 2)) * frequencies[index % (HEAD_DIM / 2)];
    double sine, cosine;
    sincos(angle, &sine, &cosine);
    table[index] = make_float2(static_cast<float>(cosine * magnitude), static_cast<float>(sine * magnitude));
}
