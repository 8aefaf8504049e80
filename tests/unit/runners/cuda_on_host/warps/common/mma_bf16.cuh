// `common/mma_bf16.cuh` on the host.
#pragma once

#include "common/common.cuh"

inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    host::tell(a, b0, b1);
    auto number = [](uint32_t word, int which) { return bits_as<float>(which ? word & 0xffff0000u : word << 16); };
    const int first = host::first_of_warp(), g = host::lane() / 4, t = host::lane() % 4;
    for (int i = 0; i < 4; ++i) {
        double sum = c[i];
        for (int k = 0; k < 16; ++k) {
            const uint32_t left = host::told[first + g * 4 + k % 8 / 2][i / 2 + k / 8 * 2];
            const uint32_t right = host::told[first + (2 * t + i % 2) * 4 + k % 8 / 2][4 + k / 8];
            sum += double(number(left, k % 2)) * number(right, k % 2);
        }
        c[i] = static_cast<float>(sum);
    }
    host::meet_warp();
}
