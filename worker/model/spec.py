"""A model as data: what each layer computes, with which sizes, and which tensors of a file it is made of.

Everything that must know an architecture reads a `ModelSpec`: the check of the file, the loaders of both
runners, the memory plan and both forward passes. Which keys of a file say so is `worker.model.families`'.

A layer adds to the residual stream x twice: x += attention(norm(x)), then x += feed_forward(norm(x)).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from nightmill.worker.model.rope import Rope

__all__ = [
    "Attention", "FeedForward", "LayerSpec", "ModelSpec", "Norm", "Role", "Shape", "Weight",
]  # fmt: skip

Shape = tuple[int, ...]


class Role(StrEnum):
    """What a weight does."""

    EMBEDDING = "embedding"
    ATTN_NORM = "attn_norm"
    QKV = "qkv"
    """Rows of all queries, then of keys, then of values."""
    QKV_BIAS = "qkv_bias"
    Q_NORM = "q_norm"
    K_NORM = "k_norm"
    ATTN_OUTPUT = "attn_output"
    FFN_NORM = "ffn_norm"
    GATE_UP = "gate_up"
    """Rows of the gate, then of what it is multiplied with."""
    FFN_DOWN = "ffn_down"
    OUTPUT_NORM = "output_norm"
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


@dataclass(frozen=True, slots=True)
class Norm:
    """x / sqrt(mean(x^2) + eps) * weight (RMS norm)."""

    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Causal self-attention; query head h reads KV head h // (heads // kv_heads)."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    bias: bool = False  # added to queries, keys and values
    qk_norm: Norm | None = None  # of each head's query and key, before rotation

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
        sizes = {"q": self.queries, "k": self.keys, "v": self.keys}
        weights = {Role.QKV: _stack({f"attn_{part}.weight": (size, width) for part, size in sizes.items()})}
        if self.bias:
            weights[Role.QKV_BIAS] = _stack({f"attn_{part}.bias": (size,) for part, size in sizes.items()})
        if self.qk_norm is not None:
            weights[Role.Q_NORM] = _stack({"attn_q_norm.weight": (self.head_dim,)})
            weights[Role.K_NORM] = _stack({"attn_k_norm.weight": (self.head_dim,)})
        return weights | {Role.ATTN_OUTPUT: _stack({"attn_output.weight": (width, self.queries)})}


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """down(silu(gate(x)) * up(x)), of `width` elements between (SwiGLU)."""

    width: int

    def weights(self, width: int) -> Weights:
        """Its weights in a block of the file, for a residual stream of `width` elements."""
        inner = self.width
        return {
            Role.GATE_UP: _stack({"ffn_gate.weight": (inner, width), "ffn_up.weight": (inner, width)}),
            Role.FFN_DOWN: _stack({"ffn_down.weight": (width, inner)}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One block. Layers that compute the same are equal."""

    attention_norm: Norm
    attention: Attention
    feed_forward_norm: Norm
    feed_forward: FeedForward

    def weights(self, width: int) -> Weights:
        """All its weights, with names as they follow `blk.N.`."""
        return (
            {Role.ATTN_NORM: _stack({"attn_norm.weight": (width,)})}
            | self.attention.weights(width)
            | {Role.FFN_NORM: _stack({"ffn_norm.weight": (width,)})}
            | self.feed_forward.weights(width)
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

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The different ones among those of the layers."""
        return tuple(dict.fromkeys(layer.attention for layer in self.layers))

    def weights(self) -> Weights:
        """Those outside the layers; a tied head has none of its own."""
        table = (self.vocab, self.width)
        weights = {
            Role.EMBEDDING: _stack({"token_embd.weight": table}),
            Role.OUTPUT_NORM: _stack({"output_norm.weight": (self.width,)}),
        }
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
