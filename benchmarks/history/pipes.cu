// What instructions take from each other on one multiprocessor of a Hopper GPU: warps that make elements of 4-bit weights, or
// send one kind of instruction, beside a warpgroup that sends wgmma. Clocks of a scheduler for each instruction, or for each
// eight weights, and clocks for each wgmma; results are nowhere kept.
//
//   nvcc -gencode arch=compute_90a,code=sm_90a -O3 -std=c++17 -Icuda -o pipes benchmarks/pipes.cu && ./pipes
#include <cstdio>

#include "common/common.cuh"
#include "common/hopper.cuh"

HOPPER_WGMMA(8, 4, HOPPER_T4, "%4", "%5", "%6", HOPPER_R4(acc, 0))

enum class Wgmma { NONE, SHARED_8, SHARED_64, SHARED_128, REGISTERS_8, REGISTERS_64, REGISTERS_128 };
enum class Work { FFMA, TO_FLOAT, TO_HALVES, LOP3, PRMT, HFMA2, IMAD, FLOAT_AND_LOP3, HALVES_AND_LOP3, MAKING };

static constexpr int INSTRUCTIONS = 16, TURNS = 16, SHARED = 100'000;
__device__ int sink;

static __device__ __forceinline__ void one(Work work, uint32_t& a, uint32_t b) {
    if (work == Work::FFMA) asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+r"(a) : "r"(b));
    if (work == Work::TO_FLOAT) asm volatile("{.reg .b16 l, h; mov.b32 {l, h}, %0; cvt.f32.f16 %0, l;}" : "+r"(a));
    if (work == Work::TO_HALVES)
        asm volatile("{.reg .f32 x, y; mov.b32 x, %0; mov.b32 y, %1; cvt.rn.f16x2.f32 %0, x, y;}" : "+r"(a) : "r"(b));
    if (work == Work::LOP3) asm volatile("lop3.b32 %0, %0, %1, 0x000f000f, 0x6a;" : "+r"(a) : "r"(b));
    if (work == Work::PRMT) asm volatile("prmt.b32 %0, %0, %1, 0x7044;" : "+r"(a) : "r"(b));
    if (work == Work::HFMA2) asm volatile("fma.rn.f16x2 %0, %0, %1, %1;" : "+r"(a) : "r"(b));
    if (work == Work::IMAD) asm volatile("mad.lo.u32 %0, %0, %1, %1;" : "+r"(a) : "r"(b));
}

// Eight weights of Q4_K, as `packed.cuh` makes them: 25 instructions, and two that keep the compiler from leaving them out.
static __device__ __forceinline__ void make(uint32_t (&r)[16]) {
    const uint32_t word = r[0], upper = word >> 8;
    const float d = __uint_as_float(r[14]), m = __uint_as_float(r[15]);
    const uint32_t pairs[4] = {word & 0x000f000f, word & 0x00f000f0, upper & 0x000f000f, upper & 0x00f000f0};
    uint32_t made[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 q = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
        made[i] = pack(__fmaf_rn(q.x, d, m), __fmaf_rn(q.y, d, m));
    }
    r[0] = r[1], r[1] = r[2], r[2] = r[3];
    r[3] = made[0] ^ made[1] ^ made[2], r[15] ^= made[3];
}

template <Work WORK>
static __device__ __forceinline__ void work(uint32_t (&r)[16]) {
    if (WORK == Work::MAKING) return make(r);
    constexpr bool MIXED = WORK == Work::FLOAT_AND_LOP3 || WORK == Work::HALVES_AND_LOP3;
    constexpr Work FIRST = WORK == Work::FLOAT_AND_LOP3 ? Work::TO_FLOAT : WORK == Work::HALVES_AND_LOP3 ? Work::TO_HALVES : WORK;
#pragma unroll
    for (int i = 0; i < INSTRUCTIONS; ++i) one(MIXED && i % 2 ? Work::LOP3 : FIRST, r[i], r[(i + 2) % 16]);
}

// `times_wgmma`: the warpgroup that multiplies is timed, and the others work till it has ended; else the other way round.
template <Work WORK, Wgmma KIND, int GROUPS>
static __global__ void __launch_bounds__(128 * (GROUPS + 1), 1) run(long long* out, bool times_wgmma) {
    extern __shared__ unsigned char dynamic[];
    __shared__ volatile bool ended;
    if (threadIdx.x == 0) ended = false;
    __syncthreads();
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
    const long long began = clock64();
    long long count = 0;
    if (warp < 4) {
        if constexpr (KIND != Wgmma::NONE) {
            constexpr bool IN_SHARED = KIND == Wgmma::SHARED_8 || KIND == Wgmma::SHARED_64 || KIND == Wgmma::SHARED_128;
            constexpr int N = KIND == Wgmma::SHARED_8 || KIND == Wgmma::REGISTERS_8     ? 8
                              : KIND == Wgmma::SHARED_64 || KIND == Wgmma::REGISTERS_64 ? 64
                                                                                        : 128;
            const uint64_t b = tile_descriptor((shared_address(dynamic) + 1023) & ~1023u);
            float acc[N / 2] = {};
            uint32_t a[4];
            for (int i = 0; i < 4; ++i) asm volatile("mov.u32 %0, %1;" : "=r"(a[i]) : "r"(threadIdx.x * 3 + i));
            for (const int most = times_wgmma ? 4000 : 12000; count < most; count += 32) {
                wgmma_begin();
#pragma unroll
                for (int i = 0; i < 32; ++i) {
                    if constexpr (IN_SHARED)
                        wgmma(acc, b + 1024, b, 1);
                    else
                        wgmma(acc, a, b, 1);
                }
                wgmma_commit();
                wgmma_wait<0>();
            }
            wgmma_keep(acc);
            if (acc[0] == 123.0f) sink = 1;
            if (times_wgmma) ended = true;
        }
    } else {
        uint32_t r[16];
        for (int i = 0; i < 16; ++i) r[i] = threadIdx.x * 77 + i;
        for (; times_wgmma ? !ended : count < 1000; count += TURNS) {
#pragma unroll 1
            for (int i = 0; i < TURNS / 4; ++i) work<WORK>(r), work<WORK>(r), work<WORK>(r), work<WORK>(r);
        }
        int sum = 0;
        for (const uint32_t word : r) sum += word;
        if (sum == 12345) sink = sum;
    }
    const long long took = clock64() - began;
    if (blockIdx.x == 0 && threadIdx.x == (times_wgmma ? 0 : 128)) out[0] = took, out[1] = count;
}

template <Work WORK, Wgmma KIND, int GROUPS>
static void time(const char* work, const char* beside) {
    long long *out, found[2];
    double clocks[2] = {};
    cudaMalloc(&out, sizeof(found));
    cudaFuncSetAttribute(run<WORK, KIND, GROUPS>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    for (int timed = 0; timed < (KIND == Wgmma::NONE ? 1 : 2); ++timed) {
        for (int repeat = 0; repeat < 2; ++repeat) run<WORK, KIND, GROUPS><<<132, 128 * (GROUPS + 1), SHARED>>>(out, timed == 1);
        if (const cudaError_t error = cudaMemcpy(found, out, sizeof(found), cudaMemcpyDefault); error != cudaSuccess) {
            printf("%s beside %s: %s\n", work, beside, cudaGetErrorString(error));
            return;
        }
        const double each = WORK == Work::MAKING ? 1 : INSTRUCTIONS;
        clocks[timed] = static_cast<double>(found[0]) / found[1] / (timed == 1 ? 1 : each * GROUPS);
    }
    cudaFree(out);
    printf("%-20s %d warps a scheduler, beside %-22s %6.2f clocks", work, GROUPS, beside, clocks[0]);
    if (KIND != Wgmma::NONE) printf(", %6.1f a wgmma", clocks[1]);
    printf("\n");
}

template <Work WORK>
static void beside_wgmma(const char* work) {
    time<WORK, Wgmma::NONE, 1>(work, "nothing");
    time<WORK, Wgmma::NONE, 3>(work, "nothing");
    time<WORK, Wgmma::SHARED_64, 3>(work, "wgmma of 64");
    time<WORK, Wgmma::SHARED_128, 3>(work, "wgmma of 128");
}

int main() {
    beside_wgmma<Work::FFMA>("FFMA");
    beside_wgmma<Work::TO_FLOAT>("HADD2.F32");
    beside_wgmma<Work::TO_HALVES>("F2FP");
    beside_wgmma<Work::LOP3>("LOP3");
    beside_wgmma<Work::PRMT>("PRMT");
    beside_wgmma<Work::HFMA2>("HFMA2");
    beside_wgmma<Work::IMAD>("IMAD");
    beside_wgmma<Work::FLOAT_AND_LOP3>("HADD2.F32 and LOP3");
    beside_wgmma<Work::HALVES_AND_LOP3>("F2FP and LOP3");
    beside_wgmma<Work::MAKING>("eight weights");
    time<Work::MAKING, Wgmma::SHARED_8, 2>("eight weights", "wgmma of 8");
    time<Work::MAKING, Wgmma::REGISTERS_8, 2>("eight weights", "of 8, by registers");
    time<Work::MAKING, Wgmma::REGISTERS_64, 2>("eight weights", "of 64, by registers");
    time<Work::MAKING, Wgmma::REGISTERS_128, 2>("eight weights", "of 128, by registers");
}
