// Instructions of Hopper (sm_90a): barriers in shared memory, bulk tensor copies, wgmma, dependent launch.
//
// wgmma multiplies a tile of 64 rows by N columns, 16 elements deep, both K-major in shared memory with the
// 128-byte swizzle that bulk tensor copies write: rows of 64 elements, tiles aligned to 1,024 bytes (PTX ISA,
// "Asynchronous warpgroup level matrix instructions"). Thread (warp w, g = lane / 4, t = lane % 4) of a warpgroup
// has acc[4 j + 0, 1] = row 16 w + g, columns 8 j + 2 t, + 1, and acc[4 j + 2, 3] = the same of row 16 w + g + 8.
#pragma once

#include "common/common.cuh"
#include "common/store_row.cuh"
#include "common/waits.cuh"

struct alignas(64) TensorMap {  // CUtensorMap; opaque
    unsigned char bytes[128];
};

static __device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

#ifdef NIGHTMILL_BOUNDED_WAITS

static __device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
    if (loses(LostArrival::COPIES)) return;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint32_t barrier, uint32_t count = 1) {
    if (loses(LostArrival::RELEASES)) return;
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

static __device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
    if (loses(LostArrival::COPIES)) return;
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// SCOPE: empty, or "acquire.cluster." for what other blocks of the cluster stored.
#define BOUNDED_WAIT(NAME, SCOPE)                                                                                 \
    static __device__ __forceinline__ void NAME(uint32_t barrier, int parity) {                                   \
        come_late();                                                                                              \
        const WaitLimit limit;                                                                                    \
        for (uint32_t done = 0; true; limit.check("mbarrier", barrier, parity)) {                                 \
            asm volatile("{\n"                                                                                    \
                         ".reg .pred done;\n"                                                                     \
                         "mbarrier.try_wait.parity." SCOPE "shared::cta.b64 done, [%1], %2;\n"                    \
                         "selp.u32 %0, 1, 0, done;\n"                                                             \
                         "}\n"                                                                                    \
                         : "=r"(done)                                                                             \
                         : "r"(barrier), "r"(parity)                                                              \
                         : "memory");                                                                             \
            if (done) return;                                                                                     \
        }                                                                                                         \
    }
BOUNDED_WAIT(barrier_wait, "")
BOUNDED_WAIT(barrier_wait_for_cluster, "acquire.cluster.")

#else

static __device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// This thread's arrival, as soon as all copies have ended that it has asked for (cp.async). Who multiplies what they brought by
// wgmma waits, and then tells the other proxy (`publish_to_wgmma`): a fence here would wait for copies of later stages, too.
static __device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

static __device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier), "r"(parity)
        : "memory");
}

// `barrier_wait` for what other blocks of the cluster stored.
static __device__ __forceinline__ void barrier_wait_for_cluster(uint32_t barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier), "r"(parity)
        : "memory");
}

#endif

// Waits until the 128 threads of a warpgroup are here.
// BARRIER group: all 128 threads of one warpgroup arrive and wait, at a barrier of their own, in the order of their program: whoever
// comes to the next phase has passed this one.
static __device__ __forceinline__ void group_sync(int group) {
#ifdef NIGHTMILL_BOUNDED_WAITS
    named_wait(group + 1, 128);
#else
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
#endif
}

// What a thread of this warpgroup may have from now on; all its warps call it.
template <int REGISTERS>
static __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
static __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// True for one lane of a warp, and the compiler knows that it is one: it would else loop over lanes around each copy.
static __device__ __forceinline__ bool elected() {
    uint32_t chosen;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
    return chosen != 0;
}

// Brings a map close before its first use.
static __device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box of the tensor at (column, row) to shared memory; `barrier` counts its bytes.
static __device__ __forceinline__ void load_box(uint32_t target, const TensorMap* map, uint32_t barrier, int column,
                                                int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            target),
        "l"(map), "r"(barrier), "r"(column), "r"(row)
        : "memory");
}

// So many bytes, a multiple of 16, to shared memory; `barrier` counts them.
static __device__ __forceinline__ void load_bytes(uint32_t target, const void* source, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
                 "l"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}

// The same of a tensor of three dimensions.
static __device__ __forceinline__ void load_box(uint32_t target, const TensorMap* map, uint32_t barrier, int x, int y,
                                                int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(target),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// A box, to this place in those blocks of the cluster that `mask` says; each one's barrier counts the bytes.
static __device__ __forceinline__ void load_box_in(uint32_t target, const TensorMap* map, uint32_t barrier, int column,
                                                   int row, int mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target),
        "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(static_cast<uint16_t>(mask))
        : "memory");
}

// From shared memory to a box of the tensor at (column, row), clipped to it; or added to what is there, float. The thread
// that asked waits with `wait_for_reads` before the memory is written again, or the block ends.
static __device__ __forceinline__ void store_box(const TensorMap* map, uint32_t source, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(source),
                 "r"(column), "r"(row)
                 : "memory");
}

static __device__ __forceinline__ void add_box(const TensorMap* map, uint32_t source, int column, int row) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(source), "r"(column), "r"(row)
                 : "memory");
}

static __device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until what this thread stored or added so is in memory.
static __device__ __forceinline__ void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

static __device__ __forceinline__ void wait_for_reads() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Writes four tiles of 8 x 8 elements, of which each lane has two neighbours (row lane / 4, columns 2 (lane % 4), + 1):
// lane 8 i + j gives the address of row j of tile i.
static __device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

static __device__ __forceinline__ uint32_t rank_in_cluster() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The address of what lies at `address` here in block `rank` of the cluster.
static __device__ __forceinline__ uint32_t address_in(uint32_t address, int rank) {
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

// Arrives at a barrier of any block of the cluster (`address_in`).
static __device__ __forceinline__ void barrier_arrive_there(uint32_t barrier) {
#ifdef NIGHTMILL_BOUNDED_WAITS
    if (loses(LostArrival::RELEASES)) return;
#endif
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

static __device__ __forceinline__ void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.aligned;\n"
        "barrier.cluster.wait.aligned;\n" ::: "memory");
}

// The two halves of `cluster_sync`, of which the first publishes nothing but barriers: `publish_barriers` before it.
static __device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
static __device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

static __device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Stores two floats in a block of the cluster; the barrier there counts their 8 bytes (addresses: `address_in`).
static __device__ __forceinline__ void store_async(uint32_t target, uint32_t barrier, float x, float y) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(target), "f"(x),
        "f"(y), "r"(barrier)
        : "memory");
}

// What a wgmma needs to know of a tile: address, 1,024 bytes from 8 rows to the next 8, 128-byte swizzle.
// `side`: bytes to the next 64 columns where B is row-major in K and wider.
static __device__ __forceinline__ uint64_t tile_descriptor(uint32_t address, uint32_t side = 16) {
    return (uint64_t(address & 0x3ffff) >> 4) | uint64_t(side >> 4) << 16 | uint64_t(64) << 32 | uint64_t(1) << 62;
}

// Two or four floats to shared memory, and back.
template <int COUNT>
static __device__ __forceinline__ void put_floats_at(uint32_t place, const float (&values)[COUNT]) {
    static_assert(COUNT == 2 || COUNT == 4, "as one instruction has them");
    if constexpr (COUNT == 4)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(place), "f"(values[0]), "f"(values[1]), "f"(values[2]),
                     "f"(values[3])
                     : "memory");
    else
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(place), "f"(values[0]), "f"(values[1]) : "memory");
}
template <int COUNT>
static __device__ __forceinline__ void take_floats_at(float (&values)[COUNT], uint32_t place) {
    static_assert(COUNT == 2 || COUNT == 4, "as one instruction has them");
    if constexpr (COUNT == 4)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
                     : "r"(place)
                     : "memory");
    else
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(values[0]), "=f"(values[1]) : "r"(place) : "memory");
}

// The descriptor of what is so many times 16 bytes further on in shared memory: its low word alone, which takes one addition.
static __device__ __forceinline__ uint64_t further(uint64_t descriptor, int sixteens) {
    uint64_t moved;
    asm("{\n"
        ".reg .b32 low, high;\n"
        "mov.b64 {low, high}, %1;\n"
        "add.s32 low, low, %2;\n"
        "mov.b64 %0, {low, high};\n"
        "}\n"
        : "=l"(moved)
        : "l"(descriptor), "r"(sixteens));
    return moved;
}

static __device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
static __device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
static __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// After `wgmma_wait<0>`: the compiler may not use results from before it.
template <int COUNT>
static __device__ __forceinline__ void wgmma_keep(float (&acc)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

#define HOPPER_R4(a, i) "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3])
#define HOPPER_R8(a, i)                                                                                           \
    "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3]), "+f"(a[i + 4]), "+f"(a[i + 5]), "+f"(a[i + 6]),   \
        "+f"(a[i + 7])
#define HOPPER_R16(a, i) HOPPER_R8(a, i), HOPPER_R8(a, i + 8)
#define HOPPER_R32(a, i) HOPPER_R16(a, i), HOPPER_R16(a, i + 16)
#define HOPPER_R64(a, i) HOPPER_R32(a, i), HOPPER_R32(a, i + 32)
#define HOPPER_T4 "%0, %1, %2, %3"
#define HOPPER_T8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define HOPPER_T16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define HOPPER_T32                                                                                                \
    HOPPER_T16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define HOPPER_T48                                                                                                \
    HOPPER_T32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define HOPPER_T64                                                                                                \
    HOPPER_T32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "               \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HOPPER_T80                                                                                                \
    HOPPER_T64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define HOPPER_T96                                                                                                \
    HOPPER_T80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define HOPPER_T112                                                                                               \
    HOPPER_T96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define HOPPER_T128                                                                                               \
    HOPPER_T112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define HOPPER_WGMMA(N, COUNT, TEXT, A, B, MORE, ...)                                                             \
    static __device__ __forceinline__ void wgmma(float (&acc)[COUNT], uint64_t a, uint64_t b, int more) {         \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " MORE ", 0;\n"                                            \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." ELEMENT "." ELEMENT " {" TEXT "}, " A ", " B \
                     ", p, 1, 1, 0, 0;\n}\n"                                                                      \
                     : __VA_ARGS__                                                                                \
                     : "l"(a), "l"(b), "r"(more));                                                                \
    }

// acc (64 x N) += A B; `more` = 0: acc = A B. The shape follows from the number of accumulators, N / 2.
HOPPER_WGMMA(16, 8, HOPPER_T8, "%8", "%9", "%10", HOPPER_R8(acc, 0))
HOPPER_WGMMA(32, 16, HOPPER_T16, "%16", "%17", "%18", HOPPER_R16(acc, 0))
HOPPER_WGMMA(64, 32, HOPPER_T32, "%32", "%33", "%34", HOPPER_R32(acc, 0))
HOPPER_WGMMA(96, 48, HOPPER_T48, "%48", "%49", "%50", HOPPER_R32(acc, 0), HOPPER_R16(acc, 32))
HOPPER_WGMMA(128, 64, HOPPER_T64, "%64", "%65", "%66", HOPPER_R64(acc, 0))
HOPPER_WGMMA(160, 80, HOPPER_T80, "%80", "%81", "%82", HOPPER_R64(acc, 0), HOPPER_R16(acc, 64))
HOPPER_WGMMA(192, 96, HOPPER_T96, "%96", "%97", "%98", HOPPER_R64(acc, 0), HOPPER_R32(acc, 64))
HOPPER_WGMMA(224, 112, HOPPER_T112, "%112", "%113", "%114", HOPPER_R64(acc, 0), HOPPER_R32(acc, 64), HOPPER_R16(acc, 96))
HOPPER_WGMMA(256, 128, HOPPER_T128, "%128", "%129", "%130", HOPPER_R64(acc, 0), HOPPER_R64(acc, 64))

// The same with A (64 x 16) in registers, as m16n8k16 has it for each warp's 16 rows.
#define HOPPER_WGMMA_A(N, COUNT, TEXT, A, B, MORE, ...)                                                           \
    static __device__ __forceinline__ void wgmma(float (&acc)[COUNT], const uint32_t (&a)[4], uint64_t b, int more) { \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " MORE ", 0;\n"                                            \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." ELEMENT "." ELEMENT " {" TEXT "}, {" A "}, " B \
                     ", p, 1, 1, 0;\n}\n"                                                                         \
                     : __VA_ARGS__                                                                                \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more));                            \
    }
HOPPER_WGMMA_A(8, 4, HOPPER_T4, "%4, %5, %6, %7", "%8", "%9", HOPPER_R4(acc, 0))
HOPPER_WGMMA_A(16, 8, HOPPER_T8, "%8, %9, %10, %11", "%12", "%13", HOPPER_R8(acc, 0))
HOPPER_WGMMA_A(32, 16, HOPPER_T16, "%16, %17, %18, %19", "%20", "%21", HOPPER_R16(acc, 0))
HOPPER_WGMMA_A(64, 32, HOPPER_T32, "%32, %33, %34, %35", "%36", "%37", HOPPER_R32(acc, 0))
HOPPER_WGMMA_A(96, 48, HOPPER_T48, "%48, %49, %50, %51", "%52", "%53", HOPPER_R32(acc, 0), HOPPER_R16(acc, 32))
HOPPER_WGMMA_A(128, 64, HOPPER_T64, "%64, %65, %66, %67", "%68", "%69", HOPPER_R64(acc, 0))
HOPPER_WGMMA_A(192, 96, HOPPER_T96, "%96, %97, %98, %99", "%100", "%101", HOPPER_R64(acc, 0), HOPPER_R32(acc, 64))
HOPPER_WGMMA_A(256, 128, HOPPER_T128, "%128, %129, %130, %131", "%132", "%133", HOPPER_R64(acc, 0), HOPPER_R64(acc, 64))

// acc += A B with A in registers and B row-major in K: N columns side by side in shared memory, 64 to a swizzled tile.
static __device__ __forceinline__ void wgmma_rows(float (&acc)[32], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT " {" HOPPER_T32
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
                 : HOPPER_R32(acc, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
static __device__ __forceinline__ void wgmma_rows(float (&acc)[64], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT "." ELEMENT " {" HOPPER_T64
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
                 : HOPPER_R64(acc, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Shared memory that this thread wrote, cp.async included, becomes visible to wgmma after the next barrier.
static __device__ __forceinline__ void publish_to_wgmma() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
