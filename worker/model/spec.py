"""A model as data: what each layer computes, with which sizes, and which tensors of a file it is made of.

Everything that must know an architecture reads a `ModelSpec`: the check of the file, the loaders of both
runners, the memory plan and both forward passes. Which keys of a file say so is `worker.model.families`'.

A layer adds to the residual stream x twice: x += scale * after(mixer(before(x))), and the same with the
feed-forward network; `before` and `after` are norms or nothing. A mixer lets a token see those before it: by
attention, which keeps keys and values of each, or by a state of fixed size. What a runner cannot compute, it
refuses.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from nightmill.worker.model.attention import Attention, Temperature
from nightmill.worker.model.states import GatedDeltaNet, Mamba2, ShortConv, StateArray
from nightmill.worker.model.weights import Norm, Role, Shape, Weight, Weights, stack

__all__ = [
    "NO_FEED_FORWARD", "Activation", "Attention", "FeedForward", "GatedDeltaNet", "LayerSpec", "Mamba2",
    "Mixer", "ModelSpec", "Norm", "Role", "Shape", "ShortConv", "StateArray", "Temperature", "Weight",
]  # fmt: skip

Mixer = Attention | GatedDeltaNet | Mamba2 | ShortConv


class Activation(StrEnum):
    """The nonlinear function of a feed-forward network."""

    SILU = "silu"
    """x / (1 + exp(-x))"""
    GELU = "gelu"
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))"""
    RELU_SQUARED = "relu_squared"
    """max(x, 0)^2"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """down(activation(gate(x)) * up(x)), with `width` elements between.

    Without a gate it is down(activation(up(x))). With a width of 0 there is none: nothing is added.
    """

    width: int
    activation: Activation = Activation.SILU
    gated: bool = True
    bias: bool = False  # of all its matrices
    fused: bool = False  # the file has gate and up in one tensor

    def weights(self, width: int) -> Weights:
        """Its weights in a block of the file, for a residual stream of `width` elements."""
        if not self.width:
            return {}
        sizes = {"gate": self.width, "up": self.width} if self.gated else {"up": self.width}
        if self.fused:
            sizes = {"up": sum(sizes.values())}
        weights = {
            Role.GATE_UP: stack({f"ffn_{part}.weight": (size, width) for part, size in sizes.items()}),
            Role.FFN_DOWN: stack({"ffn_down.weight": (width, self.width)}),
        }
        if self.bias:
            weights[Role.GATE_UP_BIAS] = stack({f"ffn_{part}.bias": (size,) for part, size in sizes.items()})
            weights[Role.FFN_DOWN_BIAS] = stack({"ffn_down.bias": (width,)})
        return weights


NO_FEED_FORWARD: Final = FeedForward(width=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One block. Layers that compute the same are equal.

    One of the two parts may be missing: then `mixer` is None, or the feed-forward network has no width.
    """

    attention_norm: Norm | None  # before the mixer, whichever it is
    mixer: Mixer | None
    attention_post_norm: Norm | None = None
    feed_forward_norm: Norm | None
    feed_forward_norm_name: str = "ffn_norm"  # in the file
    feed_forward: FeedForward
    feed_forward_post_norm: Norm | None = None
    residual_scale: float = 1.0
    parallel: bool = False  # the feed-forward network reads what attention reads: attention's norm

    @property
    def attention(self) -> Attention:
        """The mixer of a layer of attention; for those who have refused all others."""
        if not isinstance(self.mixer, Attention):
            raise TypeError("a layer without attention was taken for one with it")
        return self.mixer

    @property
    def state(self) -> tuple[StateArray, ...]:
        """The arrays that the layer keeps for each sequence beside keys and values."""
        return () if self.mixer is None or isinstance(self.mixer, Attention) else self.mixer.state

    @property
    def controls(self) -> int:
        """The last rows of MIXER_INPUT that are never rounded to FP8."""
        return 0 if self.mixer is None or isinstance(self.mixer, Attention) else self.mixer.controls

    def weights(self, width: int) -> Weights:
        """All its weights, with names as they follow `blk.N.`."""

        def norm(norm: Norm | None, role: Role, name: str) -> Weights:
            return {} if norm is None else norm.weights(role, name, width)

        return (
            norm(self.attention_norm, Role.ATTN_NORM, "attn_norm")
            | ({} if self.mixer is None else self.mixer.weights(width))
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
    output_norm_name: str = "output_norm"  # in the file
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
        mixers = dict.fromkeys(layer.mixer for layer in self.layers)
        return tuple(mixer for mixer in mixers if isinstance(mixer, Attention))

    @property
    def keys(self) -> int:
        """Elements of all keys of a token in all layers, and of all values."""
        return sum(layer.mixer.keys for layer in self.layers if isinstance(layer.mixer, Attention))

    @property
    def state_bytes(self) -> int:
        """Memory that the states of a sequence take in all layers; 0: it has none."""
        return sum(array.bytes for layer in self.layers for array in layer.state)

    def weights(self) -> Weights:
        """Return the weights outside the layers; a tied head has none of its own."""
        table = (self.vocab, self.width)
        weights = {Role.EMBEDDING: stack({"token_embd.weight": table})}
        weights |= self.output_norm.weights(Role.OUTPUT_NORM, self.output_norm_name, self.width)
        if not self.tied_head:
            weights[Role.HEAD] = stack({"output.weight": table})
        return weights

    def layer_weights(self, index: int) -> Weights:
        """Return the weights of layer `index`, with their names in the file."""
        weights = self.layers[index].weights(self.width)
        return {role: weight.under(f"blk.{index}.") for role, weight in weights.items()}

    def all_weights(self) -> Iterator[tuple[Role, Weight]]:
        """Every weight, in the order in which they are used but for the head's."""
        yield from self.weights().items()
        for index in range(len(self.layers)):
            yield from self.layer_weights(index).items()
