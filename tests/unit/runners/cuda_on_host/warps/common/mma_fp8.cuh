// `common/mma_fp8.cuh` on the host.
#pragma once

#include "common/common.cuh"

namespace host {
// Of a byte: sign, 4 bits of exponent (bias 7), 3 bits.
inline double e4m3(uint32_t byte) {
    const int exponent = byte >> 3 & 15, fraction = byte & 7;
    const double size = exponent ? ldexp(8 + fraction, exponent - 10) : ldexp(fraction, -9);
    return byte & 0x80 ? -size : size;
}
}  // namespace host

inline void mma_e4m3(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    host::tell(a, b0, b1);
    auto number = [](uint32_t word, int which) { return host::e4m3(word >> 8 * which & 0xff); };
    const int first = host::first_of_warp(), g = host::lane() / 4, t = host::lane() % 4;
    for (int i = 0; i < 4; ++i) {
        double sum = c[i];
        for (int k = 0; k < 32; ++k) {
            const uint32_t left = host::told[first + g * 4 + k % 16 / 4][i / 2 + k / 16 * 2];
            const uint32_t right = host::told[first + (2 * t + i % 2) * 4 + k % 16 / 4][4 + k / 16];
            sum += number(left, k % 4) * number(right, k % 4);
        }
        c[i] = static_cast<float>(sum);
    }
    host::meet_warp();
}
