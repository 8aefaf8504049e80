// What kernels that compute with elements share: 16-byte vectors, asynchronous copies and tensor-core instructions of
// sm_80 and later. Fragment layouts are those of the PTX ISA, "Matrix fragments for mma.m16n8k16":
// with g = lane / 4 and t = lane % 4,
//   A (16x16): a0 = (row g, columns 2t, 2t+1), a1 = (row g+8, same), a2 = (row g, columns 2t+8, 2t+9), a3 = (row g+8, same)
//   B (16x8):  b0 = (rows 2t, 2t+1, column g), b1 = (rows 2t+8, 2t+9, column g)
//   C (16x8):  c0, c1 = (row g, columns 2t, 2t+1), c2, c3 = (row g+8, same)
#pragma once

#include "common/basics.cuh"
#include "common/element.cuh"

// Eight elements, one 16-byte access.
struct alignas(16) Element8 {
    uint32_t word[4];
};

static __device__ __forceinline__ void unpack(const Element8& packed, float (&values)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = to_floats(*reinterpret_cast<const Element2*>(&packed.word[i]));
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
    }
}

static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const Element2 pair = to_elements(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

static __device__ __forceinline__ Element8 pack(const float (&values)[8]) {
    Element8 packed;
#pragma unroll
    for (int i = 0; i < 4; ++i) packed.word[i] = pack(values[2 * i], values[2 * i + 1]);
    return packed;
}

static __device__ __forceinline__ float rounded(float value) { return to_float(to_element(value)); }

// Data read once: around L1.
static __device__ __forceinline__ Element8 load_streaming(const void* source) {
    Element8 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(source));
    return v;
}

struct alignas(8) Bytes8 {
    uint32_t word[2];
};

static __device__ __forceinline__ Bytes8 load_streaming_8(const void* source) {
    Bytes8 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.word[0]), "=r"(v.word[1]) : "l"(source));
    return v;
}

static __device__ __forceinline__ uint32_t load_streaming_4(const void* source) {
    uint32_t word;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(word) : "l"(source));
    return word;
}

// C += A B in FP32.
static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Of an 8 x 8 matrix of elements, of which each lane has elements 2t, 2t+1 of row g: those of column g.
static __device__ __forceinline__ uint32_t transposed(uint32_t pair) {
    uint32_t result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

// gate / (1 + 2^power) * up; 2^power = inf makes that 0, its limit. Numbers too small for normal ones are taken as 0, which
// saves a third of the instructions: next to 1 they are nothing.
static __device__ __forceinline__ float logistic_times(float gate, float power, float up) {
    return __fmul_rn(__fmul_rn(gate, reciprocal_fast(__fadd_rn(exp2_fast(power), 1.0f))), up);
}

// silu(gate) * up.
static __device__ __forceinline__ float silu_times(float gate, float up) {
    return logistic_times(gate, __fmul_rn(gate, -LOG2_E), up);
}

// gelu(gate) * up, where (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)) for u = sqrt(2 / pi) (gate + 0.044715 gate^3).
static __device__ __forceinline__ float gelu_times(float gate, float up) {
    constexpr float LINEAR = -2.0f * 0.7978845608028654f * LOG2_E, CUBIC = LINEAR * 0.044715f;
    return logistic_times(gate, __fmul_rn(gate, __fmaf_rn(__fmul_rn(gate, gate), CUBIC, LINEAR)), up);
}

// gate (1 + erf(gate / sqrt(2))) / 2 * up.
static __device__ __forceinline__ float gelu_erf_times(float gate, float up) {
    const float half = __fmul_rn(0.5f, gate);
    return __fmul_rn(__fmaf_rn(half, erff(__fmul_rn(gate, 0.7071067811865476f)), half), up);
}

// max(gate, 0)^2 * up; what is no number stays so.
static __device__ __forceinline__ float relu_squared_times(float gate, float up) {
    return gate < 0.0f ? 0.0f : __fmul_rn(__fmul_rn(gate, gate), up);
}

static __device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

static __device__ __forceinline__ Element8 load_shared(uint32_t address) {
    Element8 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "r"(address));
    return v;
}

static __device__ __forceinline__ Bytes8 load_shared_8(uint32_t address) {
    Bytes8 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.word[0]), "=r"(v.word[1]) : "r"(address));
    return v;
}

static __device__ __forceinline__ uint32_t load_shared_4(uint32_t address) {
    uint32_t word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
    return word;
}

static __device__ __forceinline__ void store_shared(uint32_t address, const Element8& v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.word[0]), "r"(v.word[1]),
                 "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}

// 16 bytes of them.
static __device__ __forceinline__ void store_zeros(uint32_t address) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

static __device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

static __device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// 16 bytes to shared memory, or 16 zero bytes where not `wanted` (the source is then not read).
static __device__ __forceinline__ void copy_async(uint32_t target, const void* source, bool wanted) {
    const int bytes = wanted ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes)
                 : "memory");
}

// What L2 shall do with lines that nothing else will read: they are the first to make room.
static __device__ __forceinline__ uint64_t read_once() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// `copy_async` with a policy for L2.
static __device__ __forceinline__ void copy_async(uint32_t target, const void* source, bool wanted, uint64_t policy) {
    const int bytes = wanted ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(target), "l"(source),
                 "r"(bytes), "l"(policy)
                 : "memory");
}

static __device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
static __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Of an 8 x 8 tile of elements, of which lane (g, t) has row g, columns 2 t, + 1: those of row 2 t, + 1 in column g.
static __device__ __forceinline__ uint32_t turned(uint32_t word) {
    uint32_t result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
    return result;
}
