"""Mixers that keep a state of fixed size instead of keys and values, as data.

A state is some arrays for each sequence. `StateArray` says their shapes; whoever plans memory, clears or
copies states needs no more than that. Before the first token all are zeros.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nightmill.worker.model.weights import Norm, Role, Shape, Weights, stack

__all__ = ["GatedDeltaNet", "Mamba2", "ShortConv", "StateArray"]


@dataclass(frozen=True, slots=True)
class StateArray:
    """An array of a layer's state, for one sequence."""

    name: str
    shape: Shape
    type: str = "float32"

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return math.prod(self.shape) * np.dtype(self.type).itemsize


def _inputs(kernel: int, channels: int) -> StateArray:
    """The last inputs of a causal convolution over `kernel` tokens, the oldest first."""
    return StateArray("inputs", (kernel - 1, channels))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet:
    """Linear attention that replaces what a key stood for (Yang et al. 2024, arXiv:2412.06464).

    q, k and v go through a causal convolution and SiLU; q and k are divided by their lengths, q by
    sqrt(key_dim) too. Each value head has a matrix S (key_dim, value_dim). At a token, with decay g < 0 and 0
    < beta < 1: S <- exp(g) S; S <- S + beta k (v - k S); the output is q S, normed by head, times SiLU of a
    gate. Value head h has the keys and queries of head h % key_heads: the order of GGUF files, but for
    qwen3next's, where it is that of head h // (value_heads / key_heads).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # tokens of the convolution
    norm: Norm  # of each head's output
    by_key_head: bool = False  # value heads of a key head are neighbours, and beta and alpha one tensor

    title: ClassVar = "a gated delta net"

    @property
    def keys(self) -> int:
        """Elements of all keys of a token, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of all values of a token, and of their gates."""
        return self.value_heads * self.value_dim

    @property
    def convolved(self) -> int:
        """Elements of a token that go through the convolution: queries, keys, then values."""
        return 2 * self.keys + self.values

    @property
    def controls(self) -> int:
        """The last rows of MIXER_INPUT, for betas and decays: what becomes a power is not rounded to FP8."""
        return 2 * self.value_heads

    @property
    def state(self) -> tuple[StateArray, ...]:
        """The arrays that the layer keeps for each sequence."""
        return (
            _inputs(self.kernel, self.convolved),
            StateArray("matrix", (self.value_heads, self.key_dim, self.value_dim)),
        )

    def weights(self, width: int) -> Weights:
        """Its weights in a block of the file, for a residual stream of `width` elements."""
        heads = self.value_heads
        inputs = {
            "attn_qkv.weight": self.convolved,
            "attn_gate.weight": self.values,
        } | (
            {"ssm_ba.weight": 2 * heads}
            if self.by_key_head
            else {"ssm_beta.weight": heads, "ssm_alpha.weight": heads}
        )
        return {
            Role.MIXER_INPUT: stack({name: (size, width) for name, size in inputs.items()}),
            Role.CONVOLUTION: stack({"ssm_conv1d.weight": (self.convolved, self.kernel)}, product=False),
            Role.TIME_STEP_BIAS: stack({"ssm_dt.bias": (heads,)}),
            Role.DECAY: stack({"ssm_a": (heads,)}),
            **self.norm.weights(Role.MIXER_NORM, "ssm_norm", self.value_dim),
            Role.MIXER_OUTPUT: stack({"ssm_out.weight": (width, self.values)}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """A selective state space (Dao and Gu 2024, arXiv:2405.21060).

    x, B and C go through a causal convolution and SiLU. Each head has a matrix S (state_size, head_dim). At a
    token, with time step dt > 0 and A < 0: S <- exp(dt A) S + dt B x; y = C S + D x. The output is y times
    SiLU of a gate, normed by group. Head h has B and C of group h // (heads / groups).
    """

    heads: int
    head_dim: int
    groups: int
    state_size: int
    kernel: int  # tokens of the convolution
    norm: Norm  # of each group's output
    convolution_bias: bool = True

    title: ClassVar = "Mamba-2"

    @property
    def inner(self) -> int:
        """Elements of x, y and the gate of a token."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Elements of B of a token, and of C."""
        return self.groups * self.state_size

    @property
    def convolved(self) -> int:
        """Elements of a token that go through the convolution: x, B, then C."""
        return self.inner + 2 * self.shared

    @property
    def controls(self) -> int:
        """The last rows of MIXER_INPUT, for time steps: what becomes a power is not rounded to FP8."""
        return self.heads

    @property
    def state(self) -> tuple[StateArray, ...]:
        """The arrays that the layer keeps for each sequence."""
        return (
            _inputs(self.kernel, self.convolved),
            StateArray("matrix", (self.heads, self.state_size, self.head_dim)),
        )

    def weights(self, width: int) -> Weights:
        """Its weights in a block of the file, for a residual stream of `width` elements."""
        heads, by_group = self.heads, (self.groups, self.inner // self.groups)
        weights = {
            Role.MIXER_INPUT: stack({"ssm_in.weight": (self.inner + self.convolved + heads, width)}),
            Role.CONVOLUTION: stack({"ssm_conv1d.weight": (self.convolved, self.kernel)}, product=False),
        }
        if self.convolution_bias:
            weights[Role.CONVOLUTION_BIAS] = stack({"ssm_conv1d.bias": (self.convolved,)})
        return weights | {
            Role.TIME_STEP_BIAS: stack({"ssm_dt.bias": (heads,)}),
            Role.DECAY: stack({"ssm_a": (heads, 1)}, product=False),
            Role.SKIP: stack({"ssm_d": (heads, 1)}, product=False),
            Role.MIXER_NORM: stack({"ssm_norm.weight": by_group}, product=False),
            Role.MIXER_OUTPUT: stack({"ssm_out.weight": (width, self.inner)}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """A gated causal convolution (LFM2): out(c * convolution(b * x)); b, c and x are made of the input."""

    width: int  # of b, c and x
    kernel: int  # tokens of the convolution

    title: ClassVar = "a short convolution"
    controls: ClassVar = 0

    @property
    def state(self) -> tuple[StateArray, ...]:
        """The arrays that the layer keeps for each sequence."""
        return (_inputs(self.kernel, self.width),)

    def weights(self, width: int) -> Weights:
        """Its weights in a block of the file, for a residual stream of `width` elements."""
        return {
            Role.MIXER_INPUT: stack({"shortconv.in_proj.weight": (3 * self.width, width)}),
            Role.CONVOLUTION: stack({"shortconv.conv.weight": (self.width, self.kernel)}, product=False),
            Role.MIXER_OUTPUT: stack({"shortconv.out_proj.weight": (width, self.width)}),
        }
