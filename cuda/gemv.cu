// y = x W^T for 1 to 8 rows of x: the products of a decode step with few sequences, which only read weights.
//
// x  half (M, K) row-major            W  half (N, K) row-major, as in the file
// y  half or float (M, N) row-major   sums in float, in an order that depends on K alone
//
// Bytes moved: 2 N K, each weight once; x comes from L1. WARPS warps share a row of W and ROWS rows are in flight a
// warp, so that each lane has ROWS 16-byte loads outstanding a turn: about 20 KB a multiprocessor must be in flight
// to reach the memory's bandwidth. A block is 8 warps: 8 / WARPS groups of ROWS rows. The partial sums of a row are
// joined by shuffles, then across its warps in shared memory. K must be a multiple of 8 (16-byte loads).

#include <cuda_fp16.h>
#include <stdint.h>

namespace {

constexpr int BLOCK_WARPS = 8;

__device__ __forceinline__ uint4 load_once(const __half* p) {  // weights are read once: keep them out of L1
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

__device__ __forceinline__ float2 floats(uint32_t pair) { return __half22float2(*reinterpret_cast<__half2*>(&pair)); }

__device__ __forceinline__ float dot8(const uint4& w, const uint4& x, float sum) {
    const uint32_t a[4] = {w.x, w.y, w.z, w.w}, b[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 p = floats(a[i]), q = floats(b[i]);
        sum = fmaf(p.x, q.x, sum);
        sum = fmaf(p.y, q.y, sum);
    }
    return sum;
}

__device__ __forceinline__ void store(float* y, float value) { *y = value; }
__device__ __forceinline__ void store(__half* y, float value) { *y = __float2half_rn(value); }

template <int M, int ROWS, int WARPS, typename Out>
__device__ __forceinline__ void gemv(const __half* __restrict__ x, const __half* __restrict__ w,
                                     Out* __restrict__ y, int n, int k) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = warp / WARPS, part = warp % WARPS;
    const int first = (blockIdx.x * (BLOCK_WARPS / WARPS) + group) * ROWS;
    float sum[ROWS][M] = {};
    const __half* rows[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) rows[r] = w + int64_t(min(first + r, n - 1)) * k;
#pragma unroll 2
    for (int i = (part * 32 + lane) * 8; i < k; i += WARPS * 256) {
        uint4 weights[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) weights[r] = load_once(rows[r] + i);
#pragma unroll
        for (int m = 0; m < M; m++) {
            const uint4 inputs = *reinterpret_cast<const uint4*>(x + int64_t(m) * k + i);
#pragma unroll
            for (int r = 0; r < ROWS; r++) sum[r][m] = dot8(weights[r], inputs, sum[r][m]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int offset = 16; offset; offset /= 2) sum[r][m] += __shfl_xor_sync(~0u, sum[r][m], offset);
    __shared__ float partial[BLOCK_WARPS][ROWS][M];
    if constexpr (WARPS > 1) {
        if (lane == 0)
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int m = 0; m < M; m++) partial[warp][r][m] = sum[r][m];
        __syncthreads();
        if (part) return;
    }
    if (lane) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int m = 0; m < M; m++) {
            float total = sum[r][m];
#pragma unroll
            for (int other = 1; other < WARPS; other++) total += partial[warp + other][r][m];
            if (first + r < n) store(y + int64_t(m) * n + first + r, total);
        }
}

}  // namespace

#define GEMV(M, ROWS, WARPS)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256) gemv_##M##_##ROWS##_##WARPS##_f16(                           \
        const __half* x, const __half* w, __half* y, int n, int k) {                                               \
        gemv<M, ROWS, WARPS>(x, w, y, n, k);                                                                       \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(256) gemv_##M##_##ROWS##_##WARPS##_f32(                           \
        const __half* x, const __half* w, float* y, int n, int k) {                                                \
        gemv<M, ROWS, WARPS>(x, w, y, n, k);                                                                       \
    }
#define GEMV_SHAPES(M) GEMV(M, 1, 4) GEMV(M, 1, 1) GEMV(M, 2, 1)

GEMV_SHAPES(1)
GEMV_SHAPES(2)
GEMV_SHAPES(3)
GEMV_SHAPES(4)
GEMV_SHAPES(5)
GEMV_SHAPES(6)
GEMV_SHAPES(7)
GEMV_SHAPES(8)
GEMV(1, 4, 1)
GEMV(2, 4, 1)
GEMV(3, 4, 1)
GEMV(4, 4, 1)
