"""Rotary positions, in one place, so that every runner rotates by the same angles.

Token at position p: pair i of a head is rotated by the angle p * frequency[i], and cosine and sine are
multiplied by one magnitude (Su et al. 2021, arXiv:2104.09864).
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["Rope", "RopeScaling", "RopeStyle"]

FloatArray = npt.NDArray[np.float64]


class RopeStyle(StrEnum):
    """Which elements of a head are rotated together."""

    HALVES = "halves"
    """Element i with i + dim/2 (GPT-NeoX order: qwen2, qwen3)."""
    PAIRS = "pairs"
    """Element 2i with 2i + 1 (llama: the GGUF converter permutes the weights to this order)."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The stretching of a model's positions past the context it was first trained on.

    `attention_factor` multiplies cosine and sine, whatever the kind. `original_context`, `beta_fast`,
    `beta_slow`, `log_multiplier`, `own_magnitude` and `rounded` matter for YaRN alone.
    """

    kind: Literal["none", "linear", "yarn"] = "none"
    factor: float = 1.0
    attention_factor: float = 1.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    log_multiplier: float = 0.0
    own_magnitude: float | None = None  # in the place of the formula's
    rounded: bool = True  # the ramp's ends are whole pairs; gpt-oss has them between pairs

    @property
    def magnitude(self) -> float:
        """The factor of cosine and sine; scores are therefore multiplied by its square.

        YaRN: 0.1 ln(factor) + 1 (Peng et al. 2023, arXiv:2309.00071, section 3.4), divided by the same with
        0.1 times the multiplier, as Hugging Face's `_compute_yarn_parameters` has it for `mscale` 1 and
        `mscale_all_dim`; llama.cpp multiplies the file's attn_factor on top.
        """
        if self.kind == "yarn" and self.factor > 1.0:
            if self.own_magnitude is not None:
                return self.own_magnitude * self.attention_factor
            stretch = 0.1 * math.log(self.factor)
            return (stretch + 1.0) / (stretch * self.log_multiplier + 1.0) * self.attention_factor
        return self.attention_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotation of heads by position: which elements, and how fast.

    divisors  one a frequency, how llama.cpp's converter writes Llama 3's scaling; none: ()
    """

    style: RopeStyle
    dim: int  # leading elements of a head that are rotated; 0: none, positions do not count
    base: float
    scaling: RopeScaling = RopeScaling()
    divisors: tuple[float, ...] = ()

    @property
    def magnitude(self) -> float:
        """The factor of cosine and sine."""
        return self.scaling.magnitude

    def frequencies(self) -> FloatArray:
        """Radians per position of each rotated pair, shape (dim / 2,).

        Unscaled: base ** (-2i / dim). YaRN blends as ggml's `rope_yarn` does: fast pairs keep their
        frequency, slow ones are divided by the factor, and between the two lies a linear ramp over the
        pair's index.
        """
        pairs, scaling = np.arange(self.dim // 2, dtype=np.float64), self.scaling
        plain = self.base ** (-2.0 * pairs / self.dim)
        if self.divisors:
            plain = plain / np.array(self.divisors)
        if scaling.kind == "none":
            return plain
        stretched = plain / scaling.factor
        if scaling.kind == "linear":
            return stretched
        low, high = self._pair_turning(scaling.beta_fast), self._pair_turning(scaling.beta_slow)
        if scaling.rounded:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(0.0, low), min(self.dim - 1.0, high)
        ramp = np.clip((pairs - low) / max(0.001, high - low), 0.0, 1.0)
        return stretched * ramp + plain * (1.0 - ramp)

    def _pair_turning(self, rotations: float) -> float:
        """The (fractional) pair that turns this many times over the original context."""
        turns = self.scaling.original_context / (rotations * 2.0 * math.pi)
        return self.dim * math.log(turns) / (2.0 * math.log(self.base))
