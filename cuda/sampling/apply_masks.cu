// Logits of tokens that a draw's mask does not allow become -inf, before anything else is done with them.
//
//   logits (R, V) float, rows with room for a multiple of 8; draws (R,), of which those without a mask are left alone
//   masks (M, words): bit t % 32 of word t / 32 is set where token t is allowed; masks[0] is number `first`
//
// The grid is (C, R): C blocks share a row. A thread takes 4 tokens at a time. Bytes: V / 8 read and 4 written for each
// token that is not allowed: at most 4 V a row.
#include "common/basics.cuh"
#include "sampling/slots.cuh"

extern "C" __global__ void __launch_bounds__(256)
    apply_masks(float* __restrict__ logits, int vocab, const Draw* __restrict__ draws,
                const unsigned* __restrict__ masks, int words, int first) {
    launch_next();
    wait_for_previous(logits, draws, masks);
    const int mask = draws[blockIdx.y].mask;
    if (mask < 0) return;
    const unsigned* allowed = masks + static_cast<int64_t>(mask - first) * words;
    float* row = logits + static_cast<int64_t>(blockIdx.y) * ((vocab + 7) / 8 * 8);
    const int fours = (vocab + 3) / 4;
    for (int four = blockIdx.x * 256 + threadIdx.x; four < fours; four += gridDim.x * 256) {
        const unsigned bits = allowed[four / 8] >> (four % 8 * 4) & 15u;
        if (bits == 15u) continue;
        float4* place = reinterpret_cast<float4*>(row) + four;
        const float none = negative_infinity();
        if (bits == 0u) {
            *place = make_float4(none, none, none, none);
        } else {
            if (!(bits & 1u)) place->x = none;
            if (!(bits & 2u)) place->y = none;
            if (!(bits & 4u)) place->z = none;
            if (!(bits & 8u)) place->w = none;
        }
    }
}
