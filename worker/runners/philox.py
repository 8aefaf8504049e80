"""Philox4x32-10: random numbers as a pure function of a key and a counter.

Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC'11); constants and test vectors
are those of Random123 1.14. Every runner draws from this generator, laid out like this:

    key      (seed & 0xffffffff, seed >> 32)       the job's 64-bit seed
    counter  (token_id // 4, position, 0, 0)       position: index in the sequence of the token being drawn,
                                                   the prompt included; words 2 and 3 are kept for later uses
    output   word token_id % 4 belongs to token_id

A 32-bit word x becomes the uniform v = min((x + 0.5) * 2**-32, 1 - 2**-24), in float32: v is never
0 or 1, and small v keep their full relative precision, which decides between unlikely tokens (`sampling`).
"""

import numpy as np
import numpy.typing as npt

UIntArray = npt.NDArray[np.uint32]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10
_LARGEST = np.float32(1 - 2**-24)


def philox4x32(
    counter: tuple[UIntArray, UIntArray, UIntArray, UIntArray], key: tuple[UIntArray, UIntArray]
) -> tuple[UIntArray, UIntArray, UIntArray, UIntArray]:
    """Return the four output words; counters and keys are uint32 arrays that broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    with np.errstate(over="ignore"):  # wrapping around is the point
        for _ in range(_ROUNDS):
            left = c0.astype(np.uint64) * _MULTIPLIERS[0]
            right = c2.astype(np.uint64) * _MULTIPLIERS[1]
            c0 = (right >> _SHIFT).astype(np.uint32) ^ c1 ^ k0
            c2 = (left >> _SHIFT).astype(np.uint32) ^ c3 ^ k1
            c1 = (right & _LOW).astype(np.uint32)
            c3 = (left & _LOW).astype(np.uint32)
            k0 = k0 + _WEYL[0]
            k1 = k1 + _WEYL[1]
    return c0, c1, c2, c3


def token_words(seeds: npt.NDArray[np.uint64], positions: UIntArray, blocks: UIntArray) -> UIntArray:
    """Random words (N, 4) of the tokens 4 * block .. 4 * block + 3, from N seeds, positions and blocks."""
    zero = np.zeros(1, dtype=np.uint32)
    key = ((seeds & _LOW).astype(np.uint32), (seeds >> _SHIFT).astype(np.uint32))
    words = philox4x32((blocks, positions, zero, zero), key)
    return np.stack(np.broadcast_arrays(*words), axis=-1)


def uniform(words: UIntArray) -> npt.NDArray[np.float32]:
    """Random words to uniforms in (0, 1), float32, same shape."""
    scaled = ((words.astype(np.float64) + 0.5) * 2.0**-32).astype(np.float32)
    return np.minimum(scaled, _LARGEST)
