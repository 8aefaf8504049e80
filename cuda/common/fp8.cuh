// wgmma of E4M3 (sm_90a): tiles of 64 rows by N columns, 32 elements deep, both K-major in shared memory with the 128-byte
// swizzle, as `hopper.cuh` has it for elements: rows of 128.
#pragma once

#include "common/hopper.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#define FP8_T24 HOPPER_T16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FP8_T48                                                                                                   \
    HOPPER_T32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FP8_WGMMA(N, COUNT, TEXT, A, B, MORE, ...)                                                                \
    static __device__ __forceinline__ void wgmma_fp8(float (&acc)[COUNT], uint64_t a, uint64_t b, int more) {     \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " MORE ", 0;\n"                                            \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" TEXT "}, " A ", " B             \
                     ", p, 1, 1;\n}\n"                                                                            \
                     : __VA_ARGS__                                                                                \
                     : "l"(a), "l"(b), "r"(more));                                                                \
    }

// acc (64 x N) += A B, 32 elements deep; `more` = 0: acc = A B. Both K-major in shared memory, in rows of 128 bytes.
FP8_WGMMA(16, 8, HOPPER_T8, "%8", "%9", "%10", HOPPER_R8(acc, 0))
FP8_WGMMA(32, 16, HOPPER_T16, "%16", "%17", "%18", HOPPER_R16(acc, 0))
FP8_WGMMA(48, 24, FP8_T24, "%24", "%25", "%26", HOPPER_R16(acc, 0), HOPPER_R8(acc, 16))
FP8_WGMMA(64, 32, HOPPER_T32, "%32", "%33", "%34", HOPPER_R32(acc, 0))
FP8_WGMMA(96, 48, FP8_T48, "%48", "%49", "%50", HOPPER_R32(acc, 0), HOPPER_R16(acc, 32))
FP8_WGMMA(128, 64, HOPPER_T64, "%64", "%65", "%66", HOPPER_R64(acc, 0))
FP8_WGMMA(160, 80, HOPPER_T80, "%80", "%81", "%82", HOPPER_R64(acc, 0), HOPPER_R16(acc, 64))
FP8_WGMMA(192, 96, HOPPER_T96, "%96", "%97", "%98", HOPPER_R64(acc, 0), HOPPER_R32(acc, 64))

#endif
