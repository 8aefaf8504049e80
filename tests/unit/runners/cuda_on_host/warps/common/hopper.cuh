// `common/hopper.cuh` on the host, for one block: barriers that count bytes, tensor maps with the 128-byte swizzle, wgmma.
// Clusters are not there: what only they use fails.
#pragma once

#include <map>

#include "common/common.cuh"
#include "common/store_row.cuh"
#include "common/waits.cuh"

// Of 2 or 3 dimensions, the fastest first; strides in bytes. What is outside is zero. Elements and bytes are swizzled, words of 8 bytes not.
struct TensorMap {
    const unsigned char* base;
    int size[3], stride[3], box[3], unit;
};
#define __cluster_dims__(...)

namespace host {
struct Barrier {
    int arrivals, missing;
    int64_t bytes;
    int parity;

    void check() {
        if (missing < 0) fail("too many arrivals at a barrier");
        if (missing > 0 || bytes != 0) return;
        missing = arrivals, parity ^= 1;
        happened();
    }
};
static std::map<uint32_t, Barrier> barriers;

inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }
inline float element_at(uint32_t address) {
    uint16_t bits;
    memcpy(&bits, at(swizzled(address), 2), 2);
    return element_of(bits, 0);
}
inline uint32_t address_of(uint64_t descriptor) { return uint32_t(descriptor & 0x3fff) << 4; }
inline uint32_t side_of(uint64_t descriptor) { return uint32_t(descriptor >> 16 & 0x3fff) << 4; }

// acc += A B, 8 columns at a time; A is `told`.
template <int COUNT, typename B>
inline void multiply_all(float (&acc)[COUNT], bool more, B b) {
    for (int i = 0; i < COUNT; i += 4) {
        float c[4] = {};
        if (more) host::copy(acc + i, acc + i + 4, c);
        multiply(c, 2 * i, b);
        host::copy(c, c + 4, acc + i);
    }
    meet_warp();
}
}  // namespace host

inline void publish_barriers() {}

inline void barrier_init(uint32_t barrier, int count) { host::barriers[barrier] = {count, count, 0, 0}; }
inline void barrier_expect(uint32_t barrier, int bytes) {
    host::Barrier& expected = host::barriers.at(barrier);
    expected.bytes += bytes, --expected.missing;
    expected.check();
}
inline void barrier_arrive(uint32_t barrier, int count = 1) {
    host::Barrier& arrived = host::barriers.at(barrier);
    arrived.missing -= count;
    arrived.check();
}
inline void barrier_arrive_after_copies(uint32_t barrier) { barrier_arrive(barrier); }
inline void barrier_wait(uint32_t barrier, int parity) {
    while (host::barriers.at(barrier).parity == parity) host::wait_a_turn();
}
inline bool elected() { return host::lane() == 0; }
inline void group_sync(int group) { host::meet(host::of_warpgroup[group], 128); }

inline void prefetch_map(const TensorMap*) {}
inline void load_box(uint32_t target, const TensorMap* map, uint32_t barrier, int x, int y, int z = 0) {
    const int first[3] = {x, y, z};
    int elements = 0;
    for (int c = 0; c < map->box[2]; ++c)
        for (int b = 0; b < map->box[1]; ++b)
            for (int a = 0; a < map->box[0]; ++a, ++elements) {
                const int place[3] = {first[0] + a, first[1] + b, first[2] + c};
                const unsigned char* source = map->base;
                bool inside = true;
                for (int i = 0; i < 3; ++i) {
                    inside &= place[i] >= 0 && place[i] < map->size[i];
                    source += int64_t(place[i]) * map->stride[i];
                }
                const uint32_t there = target + map->unit * elements;
                unsigned char* to = host::at(map->unit <= 2 ? host::swizzled(there) : there, map->unit);
                inside ? memcpy(to, source, map->unit) : memset(to, 0, map->unit);
            }
    host::barriers.at(barrier).bytes -= map->unit * elements;
    host::barriers.at(barrier).check();
}
inline void load_bytes(uint32_t target, const void* source, int bytes, uint32_t barrier) {
    if (bytes % 16 || reinterpret_cast<uintptr_t>(source) % 16) fail("a bulk copy is of pieces of 16 bytes");
    memcpy(host::at(target, 16), source, bytes);
    host::barriers.at(barrier).bytes -= bytes;
    host::barriers.at(barrier).check();
}

inline uint64_t tile_descriptor(uint32_t address, uint32_t side = 16) {
    return uint64_t(address & 0x3ffff) >> 4 | uint64_t(side >> 4) << 16;
}
inline uint64_t further(uint64_t descriptor, int sixteens) { return descriptor + sixteens; }
inline void wgmma_begin() {}
inline void wgmma_commit() {}
template <int PENDING>
inline void wgmma_wait() {}
template <int COUNT>
inline void wgmma_keep(float (&)[COUNT]) {}
inline void publish_to_wgmma() {}
template <int COUNT>
inline void put_floats_at(uint32_t place, const float (&values)[COUNT]) {
    memcpy(host::at(place, 4 * COUNT), values, sizeof values);
}
template <int COUNT>
inline void take_floats_at(float (&values)[COUNT], uint32_t place) {
    memcpy(values, host::at(place, 4 * COUNT), sizeof values);
}
template <int REGISTERS>
inline void give_registers() {}
template <int REGISTERS>
inline void take_registers() {}

// B has rows of K: columns 128 bytes apart.
template <int COUNT>
inline void wgmma(float (&acc)[COUNT], const uint32_t (&a)[4], uint64_t b, int more) {
    const uint32_t from = host::address_of(b);
    host::tell(a);
    host::multiply_all(acc, more, [&](int n, int k) { return host::element_at(from + n * 128 + k * 2); });
}
// A is in shared memory as B is: a warp has 16 rows.
template <int COUNT>
inline void wgmma(float (&acc)[COUNT], uint64_t a, uint64_t b, int more) {
    const int row = host::now / 32 % 4 * 16 + host::lane() / 4, k = host::lane() % 4 * 2;
    uint32_t fragment[4];
    for (int i = 0; i < 4; ++i) {
        const uint32_t place = host::address_of(a) + (row + i % 2 * 8) * 128 + (k + i / 2 * 8) * 2;
        memcpy(fragment + i, host::at(host::swizzled(place), 4), 4);
    }
    wgmma(acc, fragment, b, more);
}
// B has rows of columns, 64 to a tile.
template <int COUNT>
inline void wgmma_rows(float (&acc)[COUNT], const uint32_t (&a)[4], uint64_t b) {
    const uint32_t from = host::address_of(b), side = host::side_of(b);
    host::tell(a);
    host::multiply_all(acc, true, [&](int n, int k) {
        return host::element_at(from + n / 64 * side + k * 128 + n % 64 * 2);
    });
}

inline uint32_t rank_in_cluster() { return 0; }
inline void cluster_sync() { fail("no clusters here"); }
inline void barrier_arrive_there(uint32_t) { fail("no clusters here"); }
inline void load_box_in(uint32_t, const TensorMap*, uint32_t, int, int, int) { fail("no clusters here"); }
inline uint32_t address_in(uint32_t, int) { fail("no clusters here"); }
inline void store_async(uint32_t, uint32_t, float, float) { fail("no clusters here"); }
inline void barrier_wait_for_cluster(uint32_t, int) { fail("no clusters here"); }
inline void cluster_arrive() { fail("no clusters here"); }
inline void cluster_wait() { fail("no clusters here"); }
