// What all kernels share, whatever the element: vectors of floats, warp reductions and dependent launch. Files that include no
// more are compiled once for both elements.
#pragma once

#include <stdint.h>

static constexpr float LOG2_E = 1.4426950408889634f;

static __device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

// Eight floats, two 16-byte accesses.
static __device__ __forceinline__ void load8(const float* source, float (&values)[8]) {
    const float4 a = reinterpret_cast<const float4*>(source)[0];
    const float4 b = reinterpret_cast<const float4*>(source)[1];
    values[0] = a.x, values[1] = a.y, values[2] = a.z, values[3] = a.w;
    values[4] = b.x, values[5] = b.y, values[6] = b.z, values[7] = b.w;
}

static __device__ __forceinline__ void store8(float* target, const float (&values)[8]) {
    reinterpret_cast<float4*>(target)[0] = make_float4(values[0], values[1], values[2], values[3]);
    reinterpret_cast<float4*>(target)[1] = make_float4(values[4], values[5], values[6], values[7]);
}

// One instruction each; numbers too small for normal ones are taken as 0.
static __device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
static __device__ __forceinline__ float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

static __device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1)
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
    return value;
}

// Dependent launch (sm_90 and later; elsewhere kernels follow each other without overlap). A kernel that is launched so
// may start while the one ahead of it runs: until `wait_for_previous` it touches nothing that a kernel of the same
// step writes, and writes nothing. All kernels wait, so what one sees after waiting is the work of all before it.
static __device__ __forceinline__ void launch_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// `pointers`: to what others write; where they are const __restrict__, the compiler would otherwise read ahead.
template <typename Pointer>
static __device__ __forceinline__ void read_after(Pointer& pointer) {
    asm volatile("" : "+l"(pointer)::"memory");
}

template <typename... Pointers>
static __device__ __forceinline__ void wait_for_previous(Pointers&... pointers) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    (read_after(pointers), ...);
#endif
}
