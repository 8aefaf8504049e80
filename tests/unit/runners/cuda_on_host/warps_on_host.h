// Blocks of CUDA on the host: a thread is a coroutine, which the others take turns with wherever threads meet.
//
// `run_block` runs one block; what threads do between two meetings happens at once, lane by lane. Asynchronous copies and
// products are done when they are asked for: this finds wrong places and wrong sums, not too few waits.
#pragma once

// Without <algorithm> and <functional>, which would take a third of the time in which a kernel is compiled.
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>
#include <utility>

#include "cuda_on_host.h"

#define __launch_bounds__(...)
#define __align__(size) __attribute__((aligned(size)))
#define __shared__ static  // there is one block at a time
#define __grid_constant__

template <typename Value>
constexpr const Value& max(const Value& a, const Value& b) {
    return a < b ? b : a;
}
template <typename Value>
constexpr const Value& min(const Value& a, const Value& b) {
    return b < a ? b : a;
}

struct uint2 {
    uint32_t x, y;
};
struct int2 {
    int x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};
struct int4 {
    int x, y, z, w;
};
struct float4 {
    float x, y, z, w;
};
struct longlong2 {
    long long x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

inline float __int_as_float(uint32_t bits) { return bits_as<float>(bits); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __ull2float_rn(unsigned long long value) { return static_cast<float>(value); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t(a) * b >> 32); }
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t which) {
    const uint64_t bytes = uint64_t(high) << 32 | low;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) result |= uint32_t(bytes >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
template <typename Value>
inline Value __ldg(const Value* source) {
    return *source;
}
template <typename Value>
inline Value __ldcg(const Value* source) {
    return *source;
}
inline unsigned long long atomicAdd(unsigned long long* target, unsigned long long value) {
    return std::exchange(*target, *target + value);
}
inline unsigned atomicAdd(unsigned* target, int value) { return std::exchange(*target, *target + value); }
inline unsigned atomicOr(unsigned* target, unsigned value) { return std::exchange(*target, *target | value); }
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline void __threadfence() {}
inline size_t __cvta_generic_to_shared(const void* pointer) { return reinterpret_cast<size_t>(pointer); }

extern "C" {
Index gridDim;  // set by who calls
}

[[noreturn]] inline void fail(const char* why) {
    fprintf(stderr, "%s\n", why);
    abort();
}

namespace host {
template <typename Value>
inline void copy(const Value* from, const Value* end, Value* to) {
    while (from != end) *to++ = *from++;
}

static constexpr int MOST_THREADS = 1024, STACK = 1 << 18, MOST_IDLE_TURNS = 200;

// Addresses in shared memory count from here.
alignas(1 << 18) static unsigned char dynamic_shared[1 << 18];

// Where a thread is; it begins with `context`, and turns without that, whose switch asks the kernel for signals.
struct Thread {
    ucontext_t context;
    jmp_buf at;
    char* stack;  // not cleared: of most, a page is used
    bool begun, done;
};
// How many of those who meet are here, and how often they met.
struct Meeting {
    int here;
    unsigned times;
};
static Thread threads[MOST_THREADS];
static jmp_buf turn_taker;
static void (*kernel)(const void*);
static const void* launched;
static int now, count, idle_turns;
static Meeting of_warp[32], of_warpgroup[8], of_block;
static uint32_t told[MOST_THREADS][8];  // what each thread tells the others of its warp

// Others have run meanwhile, of which a compiler knows nothing.
inline void look_again() { asm volatile("" ::: "memory"); }
__attribute__((noinline)) inline void wait_a_turn() {
    if (_setjmp(threads[now].at) == 0) _longjmp(turn_taker, 1);
    look_again();
}
__attribute__((noinline)) inline void give_a_turn() {
    if (_setjmp(turn_taker) == 0) {
        Thread& thread = threads[now];
        if (thread.begun) _longjmp(thread.at, 1);
        thread.begun = true;
        setcontext(&thread.context);
    }
    look_again();
}
inline void happened() { idle_turns = 0; }

inline void come(Meeting& meeting, int everyone) {
    if (++meeting.here == everyone) {
        meeting = {0, meeting.times + 1};
        happened();
    }
}
inline void meet(Meeting& meeting, int everyone) {
    const unsigned before = meeting.times;
    come(meeting, everyone);
    while (meeting.times == before) wait_a_turn();
}
inline void meet_warp() { meet(of_warp[now / 32], 32); }
inline int lane() { return now % 32; }
inline int first_of_warp() { return now / 32 * 32; }

inline void run_thread() {
    kernel(launched);
    threads[now].done = true;
    happened();
    wait_a_turn();
}

template <typename Kernel>
void call(const void* launched) {
    (*static_cast<const Kernel*>(launched))();
}

template <typename Kernel>
void run_block(int block_threads, const Kernel& now_launched) {
    kernel = call<Kernel>, launched = &now_launched, count = block_threads, idle_turns = 0;
    for (Meeting& meeting : of_warp) meeting = {};
    for (Meeting& meeting : of_warpgroup) meeting = {};
    of_block = {};
    for (int i = 0; i < count; ++i) {
        Thread& thread = threads[i];
        thread.begun = thread.done = false;
        if (!thread.stack) thread.stack = static_cast<char*>(malloc(STACK));
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack, thread.context.uc_stack.ss_size = STACK;
        makecontext(&thread.context, run_thread, 0);
    }
    for (int left = count; left > 0;) {
        if (++idle_turns > MOST_IDLE_TURNS) fail("threads wait for each other");
        left = 0;
        for (now = 0; now < count; ++now) {
            if (threads[now].done) continue;
            threadIdx.x = now;
            give_a_turn();
            left += !threads[now].done;
        }
    }
}

template <typename Value>
inline Value from_lane(Value value, int other) {
    static_assert(sizeof(Value) <= sizeof told[0], "so many words are told");
    memcpy(told[now], &value, sizeof(Value));
    meet_warp();
    Value result;
    memcpy(&result, told[first_of_warp() + other], sizeof(Value));
    meet_warp();
    return result;
}
}  // namespace host

inline void __syncthreads() { host::meet(host::of_block, host::count); }
inline void __syncwarp() { host::meet_warp(); }
template <typename Value>
inline Value __shfl_xor_sync(uint32_t, Value value, int mask) {
    return host::from_lane(value, host::lane() ^ mask);
}
template <typename Value>
inline Value __shfl_sync(uint32_t, Value value, int lane) {
    return host::from_lane(value, lane);
}
template <typename Choose>
inline uint32_t reduced(uint32_t value, Choose choose) {
    for (int mask = 16; mask > 0; mask /= 2) value = choose(value, host::from_lane(value, host::lane() ^ mask));
    return value;
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
    return reduced(value, [](uint32_t a, uint32_t b) { return max(a, b); });
}
inline uint32_t __reduce_min_sync(uint32_t, uint32_t value) {
    return reduced(value, [](uint32_t a, uint32_t b) { return min(a, b); });
}
inline uint32_t __ballot_sync(uint32_t, bool mine) {
    host::told[host::now][0] = mine;
    host::meet_warp();
    uint32_t votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= host::told[host::first_of_warp() + lane][0] << lane;
    host::meet_warp();
    return votes;
}
inline bool __any_sync(uint32_t mask, bool mine) { return __ballot_sync(mask, mine) != 0; }
