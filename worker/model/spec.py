"""A model as data: what each layer computes, with which sizes, and which tensors of a file it is made of.

Everything that must know an architecture reads a `ModelSpec`: the check of the file, the loaders of both
runners, the memory plan and both forward passes. Which keys of a file say so is `worker.model.families`'.

A layer adds to the residual stream x twice: x += scale * after(attention(before(x))), and the same with the
feed-forward network; `before` and `after` are norms or nothing. What a runner cannot compute, it refuses.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from nightmill.worker.model.rope import Rope

__all__ = [
    "Activation", "Attention", "FeedForward", "LayerSpec", "ModelSpec", "Norm", "Role", "Shape",
    "Temperature", "Weight",
]  # fmt: skip

Shape = tuple[int, ...]


class Role(StrEnum):
    """What a weight does. The bias of a norm is called after the norm."""

    EMBEDDING = "embedding"
    ATTN_NORM = "attn_norm"
    ATTN_NORM_BIAS = "attn_norm_bias"
    QKV = "qkv"
    """Rows of all queries, then of keys, then of values."""
    QKV_BIAS = "qkv_bias"
    Q_NORM = "q_norm"
    K_NORM = "k_norm"
    ATTN_OUTPUT = "attn_output"
    ATTN_OUTPUT_BIAS = "attn_output_bias"
    ATTN_POST_NORM = "attn_post_norm"
    FFN_NORM = "ffn_norm"
    FFN_NORM_BIAS = "ffn_norm_bias"
    GATE_UP = "gate_up"
    """Rows of the gate, if there is one, then of what it is multiplied with."""
    GATE_UP_BIAS = "gate_up_bias"
    FFN_DOWN = "ffn_down"
    FFN_DOWN_BIAS = "ffn_down_bias"
    FFN_POST_NORM = "ffn_post_norm"
    OUTPUT_NORM = "output_norm"
    OUTPUT_NORM_BIAS = "output_norm_bias"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class Weight:
    """Tensors of a file, by name with their row-major shapes (outputs, inputs), stacked along the first axis.

    Those that share an input are one matrix, so that one product computes them.
    """

    parts: tuple[tuple[str, Shape], ...]

    @property
    def shape(self) -> Shape:
        """Of the stack."""
        return (sum(shape[0] for _, shape in self.parts), *self.parts[0][1][1:])

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors, in the order of their rows."""
        return tuple(name for name, _ in self.parts)

    @property
    def is_matrix(self) -> bool:
        """Whether inputs are multiplied with it; vectors are norms' weights and biases."""
        return len(self.parts[0][1]) == 2

    def under(self, prefix: str) -> "Weight":
        """The same with `prefix` before each name."""
        return Weight(tuple((prefix + name, shape) for name, shape in self.parts))


Weights = dict[Role, Weight]


class Activation(StrEnum):
    """What a feed-forward network is not linear by."""

    SILU = "silu"
    """x / (1 + exp(-x))"""
    GELU = "gelu"
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))"""


@dataclass(frozen=True, slots=True)
class Norm:
    """x / sqrt(mean(x^2) + eps) * weight (RMS norm); `centred`: of x - mean(x) (LayerNorm)."""

    eps: float
    centred: bool = False
    bias: bool = False  # added at last

    def weights(self, role: Role, name: str, size: int) -> Weights:
        """Its weights, `role` and that of its bias, in tensors called `name`, for rows of `size` elements."""
        weights = {role: _stack({f"{name}.weight": (size,)})}
        return weights | {Role(f"{role}_bias"): _stack({f"{name}.bias": (size,)})} if self.bias else weights


@dataclass(frozen=True, slots=True)
class Temperature:
    """Makes attention sharper the later a token is, so that long contexts do not blur it (Llama 4)."""

    scale: float
    length: int  # tokens between two steps

    def factors(self, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
        """What queries at these positions are multiplied by: 1 + scale ln(1 + floor(position / length))."""
        steps = (positions // self.length).astype(np.float64)
        return np.asarray(1.0 + self.scale * np.log1p(steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Causal self-attention; query head h reads KV head h // (heads // kv_heads)."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope  # of queries and keys
    bias: bool = False  # added to queries, keys and values
    output_bias: bool = False
    fused: bool = False  # the file has queries, keys and values in one tensor
    qk_norm: Norm | None = None  # of each head's query and key
    qk_norm_rotated: bool = False  # after rotation instead of before it
    qk_norm_whole: bool = False  # it goes over all heads of a token at once
    window: int | None = None  # a token sees so many, itself included; None: all before it
    scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    temperature: Temperature | None = None
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)

    @property
    def queries(self) -> int:
        """Elements of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Elements of all keys of a token, and of all values."""
        return self.kv_heads * self.head_dim

    @property
    def qkv(self) -> int:
        """Elements of queries, keys and values of a token."""
        return self.queries + 2 * self.keys

    def weights(self, width: int) -> Weights:
        """Its weights in a block of the file, for a residual stream of `width` elements."""
        sizes = {"qkv": self.qkv} if self.fused else {"q": self.queries, "k": self.keys, "v": self.keys}
        weights = {Role.QKV: _stack({f"attn_{part}.weight": (size, width) for part, size in sizes.items()})}
        if self.bias:
            weights[Role.QKV_BIAS] = _stack({f"attn_{part}.bias": (size,) for part, size in sizes.items()})
        if self.qk_norm is not None:
            q, k = (self.queries, self.keys) if self.qk_norm_whole else (self.head_dim, self.head_dim)
            weights |= self.qk_norm.weights(Role.Q_NORM, "attn_q_norm", q)
            weights |= self.qk_norm.weights(Role.K_NORM, "attn_k_norm", k)
        weights[Role.ATTN_OUTPUT] = _stack({"attn_output.weight": (width, self.queries)})
        if self.output_bias:
            weights[Role.ATTN_OUTPUT_BIAS] = _stack({"attn_output.bias": (width,)})
        return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """down(activation(gate(x)) * up(x)), with `width` elements between.

    Without a gate it is down(activation(up(x))).
    """

    width: int
    activation: Activation = Activation.SILU
    gated: bool = True
    bias: bool = False  # of all its matrices
    fused: bool = False  # the file has gate and up in one tensor

    def weights(self, width: int) -> Weights:
        """Its weights in a block of the file, for a residual stream of `width` elements."""
        sizes = {"gate": self.width, "up": self.width} if self.gated else {"up": self.width}
        if self.fused:
            sizes = {"up": sum(sizes.values())}
        weights = {
            Role.GATE_UP: _stack({f"ffn_{part}.weight": (size, width) for part, size in sizes.items()}),
            Role.FFN_DOWN: _stack({"ffn_down.weight": (width, self.width)}),
        }
        if self.bias:
            weights[Role.GATE_UP_BIAS] = _stack({f"ffn_{part}.bias": (size,) for part, size in sizes.items()})
            weights[Role.FFN_DOWN_BIAS] = _stack({"ffn_down.bias": (width,)})
        return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One block. Layers that compute the same are equal."""

    attention_norm: Norm | None
    attention: Attention
    attention_post_norm: Norm | None = None
    feed_forward_norm: Norm | None
    feed_forward_norm_name: str = "ffn_norm"  # in the file
    feed_forward: FeedForward
    feed_forward_post_norm: Norm | None = None
    residual_scale: float = 1.0
    parallel: bool = False  # the feed-forward network reads what attention reads: attention's norm

    def weights(self, width: int) -> Weights:
        """All its weights, with names as they follow `blk.N.`."""

        def norm(norm: Norm | None, role: Role, name: str) -> Weights:
            return {} if norm is None else norm.weights(role, name, width)

        return (
            norm(self.attention_norm, Role.ATTN_NORM, "attn_norm")
            | self.attention.weights(width)
            | norm(self.attention_post_norm, Role.ATTN_POST_NORM, "post_attention_norm")
            | norm(self.feed_forward_norm, Role.FFN_NORM, self.feed_forward_norm_name)
            | self.feed_forward.weights(width)
            | norm(self.feed_forward_post_norm, Role.FFN_POST_NORM, "post_ffw_norm")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder-only transformer."""

    family: str  # `general.architecture`
    name: str
    width: int  # of the residual stream
    vocab: int  # rows of token_embd.weight; the tokenizer may have fewer tokens (padding)
    context_length: int
    layers: tuple[LayerSpec, ...]
    output_norm: Norm
    tied_head: bool  # the LM head is token_embd.weight
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # after the scale
    overflows_half: bool = False  # trained in BF16, with activations beyond 65,504
    tensor_types: Mapping[str, str] = field(default_factory=dict, compare=False)
    """GGUF's names of the types of the file's tensors, by name; empty if no file was read."""

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The different ones among those of the layers."""
        return tuple(dict.fromkeys(layer.attention for layer in self.layers))

    def weights(self) -> Weights:
        """Those outside the layers; a tied head has none of its own."""
        table = (self.vocab, self.width)
        weights = {Role.EMBEDDING: _stack({"token_embd.weight": table})}
        weights |= self.output_norm.weights(Role.OUTPUT_NORM, "output_norm", self.width)
        if not self.tied_head:
            weights[Role.HEAD] = _stack({"output.weight": table})
        return weights

    def layer_weights(self, index: int) -> Weights:
        """Those of a layer, with their names in the file."""
        weights = self.layers[index].weights(self.width)
        return {role: weight.under(f"blk.{index}.") for role, weight in weights.items()}

    def all_weights(self) -> Iterator[tuple[Role, Weight]]:
        """Every weight, in the order in which they are used but for the head's."""
        yield from self.weights().items()
        for index in range(len(self.layers)):
            yield from self.layer_weights(index).items()


def _stack(parts: dict[str, Shape]) -> Weight:
    return Weight(tuple(parts.items()))
