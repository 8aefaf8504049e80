"""A model as data: what each layer computes, with which sizes, and which tensors of a file it is made of.

Everything that must know an architecture reads a `ModelSpec`: the check of the file, the loaders of both
runners, the memory plan and both forward passes. Which keys of a file say so is `worker.model.families`'.

A layer adds to the residual stream x twice: x += scale * after(mixer(before(x))), and the same with the
feed-forward network or the experts; `before` and `after` are norms or nothing. Some add a third time, for an
input of their own (`LayerInputs`). A mixer lets a token see those
before it: by attention, which keeps keys and values of each, or by a state of fixed size. What a runner
cannot compute, it refuses.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from nightmill.worker.model.attention import Attention, Temperature
from nightmill.worker.model.encoder import Encoder
from nightmill.worker.model.experts import Experts, RouterScores
from nightmill.worker.model.feed_forward import NO_FEED_FORWARD, Activation, FeedForward
from nightmill.worker.model.latent import LatentAttention
from nightmill.worker.model.layer_inputs import LayerInputs
from nightmill.worker.model.pooling import Pooling
from nightmill.worker.model.ranking import RankHead
from nightmill.worker.model.rope import Rope
from nightmill.worker.model.states import GatedDeltaNet, Mamba2, ShortConv, StateArray
from nightmill.worker.model.weights import Norm, Role, Shape, Weight, Weights, stack

__all__ = [
    "NO_FEED_FORWARD", "Activation", "Attention", "Encoder", "Experts", "FeedForward", "GatedDeltaNet",
    "LatentAttention", "LayerInputs", "LayerSpec", "Mamba2", "Mixer", "ModelSpec", "Norm", "Pooling",
    "Predictor", "RankHead", "Role", "RouterScores", "Shape", "ShortConv", "StateArray", "Temperature",
    "Weight",
]  # fmt: skip

Mixer = Attention | LatentAttention | GatedDeltaNet | Mamba2 | ShortConv


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One block. Layers that compute the same are equal.

    One of the two parts may be missing: then `mixer` is None, or the feed-forward network has no width.
    """

    attention_norm: Norm | None  # before the mixer, whichever it is
    attention_norm_name: str = "attn_norm"  # in the file
    mixer: Mixer | None
    attention_post_norm: Norm | None = None
    feed_forward_norm: Norm | None
    feed_forward_norm_name: str = "ffn_norm"  # in the file
    feed_forward: FeedForward | Experts
    feed_forward_post_norm: Norm | None = None
    norms_behind: bool = False  # x = norm(x + mixer(x)): both norms come behind what is added
    residual_scale: float = 1.0
    parallel: bool = False  # the feed-forward network reads what attention reads: attention's norm
    inputs: LayerInputs | None = None  # all layers of a model have the same, or none
    output_scale: bool = False  # at its end the residual stream is multiplied with a number from the file

    @property
    def attention(self) -> Attention:
        """The mixer of a layer of attention; for those who have refused all others."""
        if not isinstance(self.mixer, Attention):
            raise TypeError("a layer without attention was taken for one with it")
        return self.mixer

    @property
    def dense(self) -> FeedForward:
        """The feed-forward network of a layer without experts; for those who have refused all others."""
        if not isinstance(self.feed_forward, FeedForward):
            raise TypeError("a layer with experts was taken for one without")
        return self.feed_forward

    @property
    def state(self) -> tuple[StateArray, ...]:
        """The arrays that the layer keeps for each sequence beside keys and values."""
        return () if isinstance(self.mixer, Attention | LatentAttention | None) else self.mixer.state

    @property
    def controls(self) -> int:
        """The last rows of MIXER_INPUT that are never rounded to FP8."""
        return 0 if isinstance(self.mixer, Attention | LatentAttention | None) else self.mixer.controls

    def weights(self, width: int) -> Weights:
        """All its weights, with names as they follow `blk.N.`."""

        def norm(norm: Norm | None, role: Role, name: str) -> Weights:
            return {} if norm is None else norm.weights(role, name, width)

        return (
            norm(self.attention_norm, Role.ATTN_NORM, self.attention_norm_name)
            | ({} if self.mixer is None else self.mixer.weights(width))
            | norm(self.attention_post_norm, Role.ATTN_POST_NORM, "post_attention_norm")
            | norm(self.feed_forward_norm, Role.FFN_NORM, self.feed_forward_norm_name)
            | self.feed_forward.weights(width)
            | norm(self.feed_forward_post_norm, Role.FFN_POST_NORM, "post_ffw_norm")
            | ({} if self.inputs is None else self.inputs.weights(width))
            | ({Role.LAYER_SCALE: stack({"layer_output_scale.weight": (1,)})} if self.output_scale else {})
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """A block behind the last layer that guesses further tokens (MTP).

    Of the embedding e of a token and the normed hidden state h behind the token before it, it makes
    x = input [norm(e), norm(h)]; then come a layer over such x of all tokens, a norm, and the model's head:
    logits of the token that follows. For a further guess the embedding of the one before is taken, and what
    the layer gave.
    """

    block: int  # its number in the file
    layer: LayerSpec
    norm: Norm  # the kind of its own
    last_norm_name: str  # in the file, within its block
    hands_on_normed: bool  # for further guesses: what the layer gave with the last norm, or without

    def weights(self, width: int) -> Weights:
        """The weights before its layer, with their names in the file."""
        own = (
            self.norm.weights(Role.PREDICTOR_EMBEDDING_NORM, "nextn.enorm", width)
            | self.norm.weights(Role.PREDICTOR_STATE_NORM, "nextn.hnorm", width)
            | {Role.PREDICTOR_INPUT: stack({"nextn.eh_proj.weight": (width, 2 * width)})}
        )
        return {role: weight.under(f"blk.{self.block}.") for role, weight in own.items()}

    def model(self, model: "ModelSpec") -> "ModelSpec":
        """Its layer, and what follows, as a model of one layer beside that which it guesses for."""
        name = f"blk.{self.block}.{self.last_norm_name}"
        return replace(
            model, layers=(self.layer,), first_block=self.block, output_norm_name=name, predictor=None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One transformer: a decoder, or an encoder."""

    family: str  # `general.architecture`
    name: str
    width: int  # of the residual stream
    vocab: int  # rows of token_embd.weight; the tokenizer may have fewer tokens (padding)
    context_length: int
    layers: tuple[LayerSpec, ...]
    first_block: int = 0  # the number in the file of the first layer
    output_norm: Norm
    output_norm_name: str = "output_norm"  # in the file
    tied_head: bool  # the LM head is token_embd.weight
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # after the scale
    suppressed: tuple[int, ...] = ()  # tokens that are never drawn: their logits are -inf
    overflows_half: bool = False  # trained in BF16, with activations beyond 65,504
    encoder: Encoder | None = None  # None: it is a decoder
    pooling: Pooling | None = None  # of embeddings; None: it was not made for them
    ranking: RankHead | None = None  # of a cross-encoder, which ranks pairs of texts
    predictor: Predictor | None = None  # None: the file has none that can be computed
    tensor_types: Mapping[str, str] = field(default_factory=dict, compare=False)
    """GGUF's names of the types of the file's tensors, by name; empty if no file was read."""

    @property
    def paired_positions(self) -> int:
        """Rows of the table of positions if tokens of a pair's second text take another type; else 0."""
        apart = self.encoder is not None and self.ranking is not None and self.ranking.second_type
        return self.encoder.positions if apart and self.encoder is not None else 0

    @property
    def ropes(self) -> frozenset[Rope]:
        """All rotations of its layers."""
        mixers = (layer.mixer for layer in self.layers)
        return frozenset(mixer.rope for mixer in mixers if isinstance(mixer, Attention | LatentAttention))

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The different ones among those of the layers."""
        mixers = dict.fromkeys(layer.mixer for layer in self.layers)
        return tuple(mixer for mixer in mixers if isinstance(mixer, Attention))

    @property
    def latents(self) -> tuple[LatentAttention, ...]:
        """The same of those with latent attention."""
        mixers = dict.fromkeys(layer.mixer for layer in self.layers)
        return tuple(mixer for mixer in mixers if isinstance(mixer, LatentAttention))

    @property
    def experts(self) -> tuple[Experts, ...]:
        """The different mixtures of experts among the layers."""
        networks = dict.fromkeys(layer.feed_forward for layer in self.layers)
        return tuple(network for network in networks if isinstance(network, Experts))

    @property
    def layer_inputs(self) -> LayerInputs | None:
        """The inputs that its layers have of their own."""
        return self.layers[0].inputs

    @property
    def parameters(self) -> int:
        """All numbers of its weights."""
        return sum(math.prod(weight.shape) for _, weight in self.all_weights())

    @property
    def active_parameters(self) -> int:
        """The number of parameters that a token is computed with.

        All but those of the experts that it does not go through, and the embeddings of layers, of which it
        reads a row.
        """
        embedding = self.weights().get(Role.LAYER_EMBEDDING)
        idle = 0 if embedding is None else math.prod(embedding.shape)
        for index, layer in enumerate(self.layers):
            if isinstance(experts := layer.feed_forward, Experts):
                sizes = (
                    math.prod(weight.shape)
                    for role, weight in self.layer_weights(index).items()
                    if role.startswith("experts_")
                )
                idle += sum(size // experts.count * (experts.count - experts.used) for size in sizes)
        return self.parameters - idle

    @property
    def keys(self) -> int:
        """Elements of all keys of a token in all layers that keep such, and of all values."""
        return sum(mixer.keys for mixer in self.caches if mixer is not None)

    @property
    def caches(self) -> tuple[Attention | LatentAttention | None, ...]:
        """For each layer its mixer if that keeps keys and values; None: it has none, or reads others'."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(
            mixer
            if isinstance(mixer, LatentAttention) or (isinstance(mixer, Attention) and mixer.keys_of is None)
            else None
            for mixer in mixers
        )

    @property
    def state_bytes(self) -> int:
        """Memory that the states of a sequence take in all layers; 0: it has none."""
        return sum(array.bytes for layer in self.layers for array in layer.state)

    def weights(self) -> Weights:
        """Return the weights outside the layers; a tied head has none of its own."""
        table = (self.vocab, self.width)
        weights = {Role.EMBEDDING: stack({"token_embd.weight": table})}
        if (inputs := self.layer_inputs) is not None:
            weights |= inputs.model_weights(self.width, self.vocab, len(self.layers))
        if self.encoder is not None:
            weights |= self.encoder.weights(self.width)
        weights |= self.output_norm.weights(Role.OUTPUT_NORM, self.output_norm_name, self.width)
        if not self.tied_head:
            weights[Role.HEAD] = stack({"output.weight": table})
        return weights

    def layer_weights(self, index: int) -> Weights:
        """Return the weights of layer `index`, with their names in the file."""
        weights = self.layers[index].weights(self.width)
        return {role: weight.under(f"blk.{self.first_block + index}.") for role, weight in weights.items()}

    def all_weights(self) -> Iterator[tuple[Role, Weight]]:
        """Every weight, in the order in which they are used but for the head's."""
        yield from self.weights().items()
        for index in range(len(self.layers)):
            yield from self.layer_weights(index).items()
