// Waits inside a block: named barriers here, mbarriers in `hopper.cuh`; and what a build for tests makes of both.
//
// A barrier counts arrivals. It does not know who came, nor which of its phases somebody means. So beside every barrier stands
// an argument, `BARRIER name: ...`, that says who arrives, who waits, and why nobody can come in another's place, or wait for a
// phase that is not the one meant. `tests/unit/runners/test_barriers.py` asks for one wherever a barrier is used.
//
// All of them rest on two facts. A warp's lanes pass a wait together where a warp-wide instruction (`wgmma_begin`, `__syncwarp`,
// a shuffle) follows before the warp arrives anywhere: so one lane's arrival speaks for its warp. And `wgmma` is one operation
// of a warpgroup: it does not end before all four warps have issued it, so that after `wgmma_wait` one thread speaks for all.
//
// `__syncthreads` and barriers of a cluster, which all threads pass alike, need no argument and no limit: whoever is missing
// there has ended, or waits somewhere else, where there is a limit.
//
// Options of builds for tests; without them the machine code is what it would be if they did not exist:
//   -DNIGHTMILL_BOUNDED_WAITS       a wait that lasts longer than 2^32 clocks (2 s) leaves a record for the host
//                                   (`device/waits.py`), and traps. Named barriers are counters in shared memory, with the
//                                   same rule, because an instruction that waits cannot be given a limit
//   -DNIGHTMILL_LOST_ARRIVAL=WHICH  with it: arrivals of block 0 are lost, those of LostArrival::WHICH
//   -DNIGHTMILL_JITTER              with it: warps come late to waits, at random
//   -DNIGHTMILL_LATE_TURN=CLOCKS    the first turn at a block's second tile comes that late (`packed_product.cuh`)
#pragma once

#include <cstdint>

#ifdef NIGHTMILL_BOUNDED_WAITS

enum class LostArrival { NONE, RELEASES, COPIES, TURNS };
#ifdef NIGHTMILL_LOST_ARRIVAL
static constexpr LostArrival LOST_ARRIVAL = LostArrival::NIGHTMILL_LOST_ARRIVAL;
#else
static constexpr LostArrival LOST_ARRIVAL = LostArrival::NONE;
#endif
static constexpr int NAMED_BARRIERS = 16, MOST_LETTERS = 120;
static constexpr long long MOST_CLOCKS = 1ll << 32;

struct StuckWait {  // as in `device/waits.py`
    int taken, written, block[3], thread, barrier, parity;
    char kind[24], kernel[MOST_LETTERS];
};
extern "C" {
__device__ StuckWait* nightmill_stuck_wait;  // memory of the host, if it gave any
}

struct RunningKernel {
    const char* name;
    unsigned arrived[NAMED_BARRIERS];  // threads
};
static __device__ __forceinline__ RunningKernel& running_kernel() {
    __shared__ RunningKernel kernel;
    return kernel;
}

// Each kernel that has other waits than `__syncthreads` begins with this.
#define KERNEL_BEGINS() kernel_begins(__func__)
static __device__ __forceinline__ void kernel_begins(const char* name) {
    if (threadIdx.x == 0) {
        running_kernel().name = name;
        for (unsigned& arrived : running_kernel().arrived) arrived = 0;
    }
    __syncthreads();
}

static __device__ __forceinline__ bool loses(LostArrival which) {
    return which == LOST_ARRIVAL && blockIdx.x + blockIdx.y + blockIdx.z == 0;
}

static __device__ __forceinline__ void come_late() {
#ifdef NIGHTMILL_JITTER
    const long long began = clock64();
    const unsigned mixed = (static_cast<unsigned>(began) ^ threadIdx.x / 32 * 0x9e3779b9u) * 0x85ebca6bu >> 12;
    const int clocks = mixed % 61 == 0 ? 40000 : mixed % 7 == 0 ? 2000 : 0;
    while (clock64() - began < clocks) {}
#endif
}

// Of one wait.
struct WaitLimit {
    long long began = clock64();

    __device__ __forceinline__ void check(const char* kind, int barrier, int parity) const {
        if (clock64() - began < MOST_CLOCKS) return;
        StuckWait* const out = nightmill_stuck_wait;
        if (out != nullptr && atomicCAS_system(&out->taken, 0, 1) == 0) {
            const auto copy = [](char* to, const char* from, int most) {
                for (int i = 0; i < most - 1 && from[i] != 0; ++i) to[i] = from[i];
            };
            out->block[0] = blockIdx.x, out->block[1] = blockIdx.y, out->block[2] = blockIdx.z;
            out->thread = threadIdx.x, out->barrier = barrier, out->parity = parity;
            copy(out->kind, kind, sizeof(out->kind));
            copy(out->kernel, running_kernel().name, MOST_LETTERS);
            __threadfence_system();
            *const_cast<volatile int*>(&out->written) = 1;
            __threadfence_system();
        }
        // Others wait till the record is there: a trap ends all blocks at once.
        while (out != nullptr && *const_cast<volatile int*>(&out->written) == 0 && clock64() - began < 2 * MOST_CLOCKS) {}
        __trap();
    }
};

static __device__ __forceinline__ void named_count(int barrier, int threads, bool waits) {
    unsigned& arrived = running_kernel().arrived[barrier];
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        __threadfence_block();
        const unsigned count = static_cast<unsigned>(threads);
        const unsigned opens = (atomicAdd(&arrived, 32u) / count + 1) * count;
        const WaitLimit limit;
        while (waits && static_cast<int>(*const_cast<volatile unsigned*>(&arrived) - opens) < 0)
            limit.check("named barrier", barrier, 0);
        __threadfence_block();
    }
    __syncwarp();
}

static __device__ __forceinline__ void named_wait(int barrier, int threads) {
    come_late();
    named_count(barrier, threads, true);
}
static __device__ __forceinline__ void named_arrive(int barrier, int threads) {
    if (!loses(LostArrival::TURNS)) named_count(barrier, threads, false);
}

#else

#define KERNEL_BEGINS()

// A barrier of so many threads, of which some only say that they have come. What they wrote before is seen by those that wait.
static __device__ __forceinline__ void named_wait(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
static __device__ __forceinline__ void named_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

#endif

static __device__ __forceinline__ void late_turn() {
#ifdef NIGHTMILL_LATE_TURN
    for (const long long began = clock64(); clock64() - began < NIGHTMILL_LATE_TURN;) {}
#endif
}
