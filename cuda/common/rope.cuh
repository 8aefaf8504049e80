// Rotation of a pair of elements (Su et al. 2021), with its roundings written out: the kernels that rotate agree to
// the bit.
#pragma once

static __device__ __forceinline__ void rotate(float& x, float& y, float cosine, float sine) {
    const float first = __fmaf_rn(x, cosine, -__fmul_rn(y, sine));
    y = __fmaf_rn(y, cosine, __fmul_rn(x, sine));
    x = first;
}
