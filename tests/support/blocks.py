"""Random blocks of every GGUF tensor type, as files hold them."""

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

Kind = GGMLQuantizationType
# Where a block keeps its half-precision scales; random bytes there would be NaN or huge.
_SCALES = {
    Kind.Q4_0: (0,), Kind.Q4_1: (0, 2), Kind.Q5_0: (0,), Kind.Q5_1: (0, 2), Kind.Q8_0: (0,),
    Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,),
    Kind.TQ1_0: (52,), Kind.TQ2_0: (64,), Kind.IQ4_NL: (0,), Kind.IQ4_XS: (0,), Kind.IQ3_XXS: (0,),
    Kind.IQ3_S: (0,), Kind.IQ2_XXS: (0,), Kind.IQ2_XS: (0,), Kind.IQ2_S: (0,), Kind.IQ1_S: (0,),
}  # fmt: skip
_MOST_EXPONENT = 128  # of MXFP4, that packets keep for halves


def random_blocks(kind: GGMLQuantizationType, count: int) -> npt.NDArray[np.uint8]:
    """Random bytes with scales of both signs, subnormal ones and zeros among them: (count, bytes)."""
    rng = np.random.default_rng(int(kind))
    size = GGML_QUANT_SIZES[kind][1]
    if kind is Kind.F32:
        return rng.standard_normal(count).astype("<f4").view(np.uint8).reshape(count, 4)
    if kind is Kind.F16:
        return rng.standard_normal(count).astype("<f2").view(np.uint8).reshape(count, 2)
    if kind is Kind.BF16:
        floats = rng.standard_normal(count).astype("<f4").view("<u4") >> 16
        return floats.astype("<u2").view(np.uint8).reshape(count, 2)
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    if kind is Kind.MXFP4:
        blocks[:, 0] = rng.integers(0, _MOST_EXPONENT + 1, count)
    elif kind is Kind.IQ1_M:  # a scale's bits lie in the highest ones of four words
        words = blocks[:, 48:].view("<u2")
        bits = _scales(rng, count).view("<u2")[:, None] >> np.array([0, 4, 8, 12], dtype="<u2") & 15
        words[:] = words & 0x0FFF | bits << 12
    else:
        for offset in _SCALES[kind]:
            blocks[:, offset : offset + 2] = _scales(rng, count).view(np.uint8).reshape(count, 2)
    return blocks


def _scales(rng: np.random.Generator, count: int) -> npt.NDArray[np.float16]:
    sizes = np.choose(rng.integers(0, 4, count), [1e-2, 1e-4, 1e-7, 0.0])
    return (rng.standard_normal(count) * sizes).astype("<f2")
