"""Attention as data."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from nightmill.worker.model.rope import Rope
from nightmill.worker.model.weights import Norm, Role, Weights, stack

__all__ = ["Attention", "Temperature"]


@dataclass(frozen=True, slots=True)
class Temperature:
    """Makes attention sharper the later a token is, so that long contexts do not blur it (Llama 4)."""

    scale: float
    length: int  # tokens between two steps

    def factors(self, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
        """Return the factors of queries at these positions: 1 + scale ln(1 + floor(position / length))."""
        steps = (positions // self.length).astype(np.float64)
        return np.asarray(1.0 + self.scale * np.log1p(steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Self-attention; query head h reads KV head h // (heads // kv_heads)."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope  # of queries and keys
    bias: bool = False  # added to queries, keys and values
    output_bias: bool = False
    fused: bool = False  # the file has queries, keys and values in one tensor
    gated: bool = (
        False  # a gate comes after each head's query; the head's output is multiplied by its sigmoid
    )
    qk_norm: Norm | None = None  # of each head's query and key
    qk_norm_rotated: bool = False  # after rotation instead of before it
    qk_norm_whole: bool = False  # it goes over all heads of a token at once
    window: int | None = None  # a token sees so many, itself included; None: all before it
    scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    temperature: Temperature | None = None
    sinks: bool = False  # each head has a score more in its softmax, which has no value (gpt-oss)
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    value_norm: Norm | None = None  # of each head's value, without weights
    values_are_keys: bool = False  # values are what keys are before norm and rotation
    causal: bool = True  # if not, tokens see those behind them, and of a window a half to each side
    keys_of: int | None = None  # the layer whose keys and values it reads, and makes none; None: its own

    title: ClassVar = "attention"

    @property
    def queries(self) -> int:
        """Elements of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Elements of all keys of a token, and of all values."""
        return self.kv_heads * self.head_dim

    @property
    def gated_queries(self) -> int:
        """Elements of all queries of a token, and of their gates, if there are any."""
        return 2 * self.queries if self.gated else self.queries

    @property
    def qkv(self) -> int:
        """Elements of queries (with their gates), keys and values of a token."""
        return self.gated_queries + 2 * self.keys

    def weights(self, width: int) -> Weights:
        """Its weights in a block of the file, for a residual stream of `width` elements."""
        sizes = {"qkv": self.qkv} if self.fused else {"q": self.gated_queries, "k": self.keys, "v": self.keys}
        if self.values_are_keys or self.keys_of is not None:
            del sizes["v"]
        if self.keys_of is not None:
            del sizes["k"]
        weights = {Role.QKV: stack({f"attn_{part}.weight": (size, width) for part, size in sizes.items()})}
        if self.bias:
            weights[Role.QKV_BIAS] = stack({f"attn_{part}.bias": (size,) for part, size in sizes.items()})
        if self.qk_norm is not None:
            q, k = (self.queries, self.keys) if self.qk_norm_whole else (self.head_dim, self.head_dim)
            weights |= self.qk_norm.weights(Role.Q_NORM, "attn_q_norm", q)
            if self.keys_of is None:
                weights |= self.qk_norm.weights(Role.K_NORM, "attn_k_norm", k)
        if self.sinks:
            weights[Role.SINKS] = stack({"attn_sinks.weight": (self.heads,)})
        weights[Role.ATTN_OUTPUT] = stack({"attn_output.weight": (width, self.queries)})
        if self.output_bias:
            weights[Role.ATTN_OUTPUT_BIAS] = stack({"attn_output.bias": (width,)})
        return weights
