// What becomes of a product, for the kernels of Hopper that compute several kinds.
#pragma once

#include "common/common.cuh"

enum class Kind { PLAIN, FLOAT, SWIGLU, GEGLU, RESIDUAL, ADDEND };

template <bool FLOATS>
struct ResultOf {
    using type = Element;
};
template <>
struct ResultOf<true> {
    using type = float;
};

// What a kind of product leaves: elements, of two numbers one where it is GATED; or floats, added to what there is where it ADDS.
template <Kind KIND>
struct Written {
    static constexpr bool GATED = KIND == Kind::SWIGLU || KIND == Kind::GEGLU;
    static constexpr bool ADDS = KIND == Kind::RESIDUAL, SUMMED = ADDS || KIND == Kind::ADDEND;  // SUMMED: may have two sums
    static constexpr bool FLOATS = SUMMED || KIND == Kind::FLOAT;
    using type = typename ResultOf<FLOATS>::type;
};
