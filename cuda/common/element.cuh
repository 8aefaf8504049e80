// The type of a model's weights and activations, and of its keys and values: half, or bfloat16 with -DELEMENT_BF16, which has 8
// bits of precision in place of 11 and the range of float. Sums are float in either.
#pragma once

#ifdef ELEMENT_BF16

#include <cuda_bf16.h>

using Element = __nv_bfloat16;
using Element2 = __nv_bfloat162;
#define ELEMENT "bf16"

static __device__ __forceinline__ float to_float(Element value) { return __bfloat162float(value); }
static __device__ __forceinline__ float2 to_floats(Element2 pair) { return __bfloat1622float2(pair); }
static __device__ __forceinline__ Element to_element(float value) { return __float2bfloat16_rn(value); }
static __device__ __forceinline__ Element2 to_elements(float low, float high) { return __floats2bfloat162_rn(low, high); }

#else

#include <cuda_fp16.h>

using Element = __half;
using Element2 = __half2;
#define ELEMENT "f16"

static __device__ __forceinline__ float to_float(Element value) { return __half2float(value); }
static __device__ __forceinline__ float2 to_floats(Element2 pair) { return __half22float2(pair); }
static __device__ __forceinline__ Element to_element(float value) { return __float2half_rn(value); }
static __device__ __forceinline__ Element2 to_elements(float low, float high) { return __floats2half2_rn(low, high); }

#endif
