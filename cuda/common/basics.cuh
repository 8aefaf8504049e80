// What all kernels share, whatever the element: warp reductions and dependent launch. Files that include no more are compiled
// once for both elements.
#pragma once

#include <stdint.h>

static constexpr float LOG2_E = 1.4426950408889634f;

static __device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

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
