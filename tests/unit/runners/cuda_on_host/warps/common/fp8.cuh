// `common/fp8.cuh` on the host: wgmma of E4M3, both operands in shared memory.
#pragma once

#include "common/hopper.cuh"
#include "common/mma_fp8.cuh"

// Each lane computes what it has; those of a warpgroup meet, since one of them then gives the stage back for all.
template <int COUNT>
inline void wgmma_fp8(float (&acc)[COUNT], uint64_t a, uint64_t b, int more) {
    const auto number = [](uint32_t address) { return host::e4m3(*host::at(host::swizzled(address), 1)); };
    const uint32_t left = host::address_of(a) + (host::now / 32 % 4 * 16 + host::lane() / 4) * 128;
    const uint32_t right = host::address_of(b) + host::lane() % 4 * 2 * 128;
    for (int i = 0; i < COUNT; ++i) {
        double sum = more ? acc[i] : 0.0;
        for (int k = 0; k < 32; ++k)
            sum += number(left + i / 2 % 2 * 8 * 128 + k) * number(right + (i / 4 * 8 + i % 2) * 128 + k);
        acc[i] = static_cast<float>(sum);
    }
    host::meet(host::of_warpgroup[host::now / 128], 128);
}
