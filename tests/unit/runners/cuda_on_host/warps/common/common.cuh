// `common/common.cuh` on the host: shared memory with 32-bit addresses, copies, tensor cores with the fragments of the PTX ISA.
#pragma once

#include "common/basics.cuh"
#include "common/element.cuh"

struct alignas(16) Element8 {
    uint32_t word[4];
};

struct alignas(8) Bytes8 {
    uint32_t word[2];
};

inline uint32_t pack(float low, float high) { return bits_as<uint32_t>(to_elements(low, high)); }
inline void unpack(const Element8& packed, float (&values)[8]) {
    for (int i = 0; i < 4; ++i) {
        const float2 pair = to_floats(bits_as<Element2>(packed.word[i]));
        values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
    }
}
inline float rounded(float value) { return to_float(to_element(value)); }
inline Element8 pack(const float (&values)[8]) {
    Element8 packed;
    for (int i = 0; i < 4; ++i) packed.word[i] = pack(values[2 * i], values[2 * i + 1]);
    return packed;
}

inline float logistic_times(float gate, float power, float up) { return gate / (1.0f + exp2f(power)) * up; }
inline float silu_times(float gate, float up) { return logistic_times(gate, gate * -LOG2_E, up); }
inline float gelu_erf_times(float gate, float up) {
    const float half = 0.5f * gate;
    return (half * erff(gate * 0.7071067811865476f) + half) * up;
}
inline float gelu_times(float gate, float up) {
    const float u = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
    return 0.5f * gate * (1.0f + tanhf(u)) * up;
}
inline float relu_squared_times(float gate, float up) { return gate < 0.0f ? 0.0f : gate * gate * up; }

namespace host {
inline float element_of(uint32_t word, int which) { return to_float(bits_as<Element>(uint16_t(word >> 16 * which))); }

inline unsigned char* at(uint32_t address, int alignment) {
    if (address % alignment) fail("an address in shared memory that is not aligned");
    return dynamic_shared + static_cast<int32_t>(address);
}
template <typename Loaded = Element8>
inline Loaded load(const void* source) {
    if (reinterpret_cast<uintptr_t>(source) % sizeof(Loaded)) fail("an address that is not aligned");
    Loaded result;
    memcpy(&result, source, sizeof(Loaded));
    return result;
}

// C (16 rows) += A B of 16 elements, for this lane's columns; A is `told` by the warp's lanes, `b(column, k)` an element of B.
template <typename B>
inline void multiply(float (&c)[4], int columns, B b) {
    const int g = lane() / 4, t = lane() % 4;
    for (int i = 0; i < 4; ++i) {
        double sum = c[i];
        for (int k = 0; k < 16; ++k) {
            const uint32_t a = told[first_of_warp() + g * 4 + k % 8 / 2][i / 2 + k / 8 * 2];
            sum += double(element_of(a, k % 2)) * b(columns + 2 * t + i % 2, k);
        }
        c[i] = static_cast<float>(sum);
    }
}
inline void tell(const uint32_t (&a)[4], uint32_t b0 = 0, uint32_t b1 = 0) {
    host::copy(a, a + 4, told[now]);
    told[now][4] = b0, told[now][5] = b1;
    meet_warp();
}

inline void load_matrices(uint32_t (&r)[4], uint32_t address, bool transposed) {
    const int g = lane() / 4, t = lane() % 4;
    told[now][0] = address;
    meet_warp();
    for (int matrix = 0; matrix < 4; ++matrix) {
        auto row = [&](int i) { return at(told[first_of_warp() + 8 * matrix + i][0], 16); };
        uint16_t pair[2];
        for (int i = 0; i < 2; ++i)
            memcpy(pair + i, transposed ? row(2 * t + i) + 2 * g : row(g) + 4 * t + 2 * i, 2);
        r[matrix] = pair[0] | uint32_t(pair[1]) << 16;
    }
    meet_warp();
}
}  // namespace host

inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - host::dynamic_shared);
}

inline Element8 load_streaming(const void* source) { return host::load(source); }
inline Element8 load_shared(uint32_t address) { return host::load(host::at(address, 16)); }
inline Bytes8 load_streaming_8(const void* source) { return host::load<Bytes8>(source); }
inline uint32_t load_streaming_4(const void* source) { return host::load<uint32_t>(source); }
inline Bytes8 load_shared_8(uint32_t address) { return host::load<Bytes8>(host::at(address, 8)); }
inline uint32_t load_shared_4(uint32_t address) { return host::load<uint32_t>(host::at(address, 4)); }
inline void store_shared(uint32_t address, const Element8& value) { memcpy(host::at(address, 16), &value, 16); }
inline void store_zeros(uint32_t address) { memset(host::at(address, 16), 0, 16); }

inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    host::tell(a, b0, b1);
    host::multiply(c, 0, [](int column, int k) {
        return host::element_of(host::told[host::first_of_warp() + column * 4 + k % 8 / 2][4 + k / 8], k % 2);
    });
    host::meet_warp();
}

inline uint32_t transposed(uint32_t pair) {
    const int g = host::lane() / 4, t = host::lane() % 4;
    host::told[host::now][0] = pair;
    host::meet_warp();
    uint32_t result = 0;
    for (int i = 0; i < 2; ++i)
        result |= (host::told[host::first_of_warp() + (2 * t + i) * 4 + g / 2][0] >> 16 * (g % 2) & 0xffff) << 16 * i;
    host::meet_warp();
    return result;
}

inline uint32_t turned(uint32_t pair) { return transposed(pair); }

inline void load_matrices(uint32_t (&r)[4], uint32_t address) { host::load_matrices(r, address, false); }
inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) { host::load_matrices(r, address, true); }

inline uint64_t read_once() { return 0; }
inline void copy_async(uint32_t target, const void* source, bool wanted, uint64_t = 0) {
    const Element8 copied = wanted ? host::load(source) : Element8{};
    memcpy(host::at(target, 16), &copied, 16);
}
inline void commit_copies() {}
template <int PENDING>
inline void wait_for_copies() {}
