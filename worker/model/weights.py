"""Weights of a model as data: what each does, and which tensors of a file it is made of."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

__all__ = ["Norm", "Role", "Shape", "Weight", "Weights", "stack"]

Shape = tuple[int, ...]


class Role(StrEnum):
    """The function of a weight in the model. The bias of a norm is called after the norm."""

    EMBEDDING = "embedding"
    POSITIONS = "positions"
    TEXT_TYPES = "text_types"
    """Kinds of texts, of which each token takes the first."""
    EMBEDDING_NORM = "embedding_norm"
    EMBEDDING_NORM_BIAS = "embedding_norm_bias"
    ATTN_NORM = "attn_norm"
    ATTN_NORM_BIAS = "attn_norm_bias"
    QKV = "qkv"
    """Rows of all queries, then of keys, then of values."""
    QKV_BIAS = "qkv_bias"
    ATTN_GATE = "attn_gate"
    """Rows of the gates that come after queries in QKV, for a runner that keeps them apart."""
    Q_NORM = "q_norm"
    K_NORM = "k_norm"
    SINKS = "sinks"
    """For each head a score that takes part in the softmax, and has no value."""
    Q_DOWN = "q_down"
    Q_DOWN_NORM = "q_down_norm"
    Q_UP = "q_up"
    KV_DOWN = "kv_down"
    """Rows of what keys and values are made of, then of the part of keys that is rotated."""
    KV_DOWN_NORM = "kv_down_norm"
    K_UP = "k_up"
    """For each head keys, (latent, elements): the other way round than V_UP."""
    V_UP = "v_up"
    """For each head values, (elements, latent)."""
    KV_UP = "kv_up"
    """For each head rows of keys, then of values: older files."""
    ATTN_OUTPUT = "attn_output"
    ATTN_OUTPUT_BIAS = "attn_output_bias"
    MIXER_INPUT = "mixer_input"
    """Rows of all that a mixer with a state makes of its input by a product."""
    MIXER_CONTROLS = "mixer_controls"
    """The last of these, of which decays are made (and betas), for a runner that keeps them apart."""
    CONVOLUTION = "convolution"
    """For each channel a factor for each of the last tokens, the oldest first."""
    CONVOLUTION_BIAS = "convolution_bias"
    TIME_STEP_BIAS = "time_step_bias"
    DECAY = "decay"
    """Less than 0: by how much a head's state decays in a time step of 1."""
    SKIP = "skip"
    """For each head the factor by which its input is added to its output."""
    MIXER_NORM = "mixer_norm"
    MIXER_OUTPUT = "mixer_output"
    ATTN_POST_NORM = "attn_post_norm"
    FFN_NORM = "ffn_norm"
    FFN_NORM_BIAS = "ffn_norm_bias"
    GATE_UP = "gate_up"
    """Rows of the gate, if there is one, then of what it is multiplied with."""
    GATE_UP_BIAS = "gate_up_bias"
    FFN_DOWN = "ffn_down"
    FFN_DOWN_BIAS = "ffn_down_bias"
    ROUTER = "router"
    """Rows of a logit for each expert."""
    ROUTER_BIAS = "router_bias"
    SELECTION_BIAS = "selection_bias"
    """Added to the scores by which experts are chosen."""
    LATENT_DOWN = "latent_down"
    """Makes what experts read of the input; LATENT_UP makes what the layer adds of their outputs."""
    LATENT_UP = "latent_up"
    EXPERTS_GATE_UP = "experts_gate_up"
    """Gates of all experts, then what they are multiplied with; if fused, for each expert both."""
    EXPERTS_GATE_UP_BIAS = "experts_gate_up_bias"
    EXPERTS_DOWN = "experts_down"
    EXPERTS_DOWN_BIAS = "experts_down_bias"
    EXPERTS_GATE_SCALE = "experts_gate_scale"
    EXPERTS_UP_SCALE = "experts_up_scale"
    EXPERTS_DOWN_SCALE = "experts_down_scale"
    """For each expert the factor of its product, before the bias."""
    SHARED_GATE = "shared_gate"
    SHARED_GATE_UP = "shared_gate_up"
    SHARED_GATE_UP_BIAS = "shared_gate_up_bias"
    SHARED_DOWN = "shared_ffn_down"
    SHARED_DOWN_BIAS = "shared_ffn_down_bias"
    ROUTER_NORM = "router_norm"
    """The norm before the router alone, where experts stand beside a dense network."""
    ROUTED_NORM = "routed_norm"
    ROUTED_POST_NORM = "routed_post_norm"
    SHARED_POST_NORM = "shared_post_norm"
    """Before the experts and after them, and after the network beside them."""
    FFN_POST_NORM = "ffn_post_norm"
    INPUT_GATE = "input_gate"
    INPUT_UP = "input_up"
    INPUT_POST_NORM = "input_post_norm"
    LAYER_SCALE = "layer_scale"
    """A number that the residual stream is multiplied with at the layer's end."""
    LAYER_EMBEDDING = "layer_embedding"
    """For each token a row for each layer, one behind the other."""
    LAYER_PROJECTION = "layer_projection"
    LAYER_PROJECTION_NORM = "layer_projection_norm"
    PREDICTOR_EMBEDDING_NORM = "predictor_embedding_norm"
    PREDICTOR_STATE_NORM = "predictor_state_norm"
    PREDICTOR_INPUT = "predictor_input"
    """Columns for the embedding of a token, then for the hidden state behind the token before it."""
    OUTPUT_NORM = "output_norm"
    OUTPUT_NORM_BIAS = "output_norm_bias"
    RANK_DENSE = "rank_dense"
    RANK_DENSE_BIAS = "rank_dense_bias"
    RANK_NORM = "rank_norm"
    RANK_NORM_BIAS = "rank_norm_bias"
    RANK_OUTPUT = "rank_output"
    RANK_OUTPUT_BIAS = "rank_output_bias"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class Weight:
    """Tensors of a file, by name with their row-major shapes (outputs, inputs), stacked along the first axis.

    Those that share an input are one matrix, so that one product computes them.

    product  inputs are multiplied with it, if it has two dimensions; else it is used element by element
    """

    parts: tuple[tuple[str, Shape], ...]
    product: bool = True

    @property
    def shape(self) -> Shape:
        """The shape of the stack, row-major: the parts' rows added up."""
        return (sum(shape[0] for _, shape in self.parts), *self.parts[0][1][1:])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors, in the order of their rows."""
        return tuple(name for name, _ in self.parts)

    @property
    def is_matrix(self) -> bool:
        """True if inputs are multiplied with it; vectors are norms' weights and biases."""
        return self.product and len(self.parts[0][1]) == 2

    @property
    def is_matrices(self) -> bool:
        """True if it holds matrices of experts or heads, one behind the other."""
        return self.product and len(self.parts[0][1]) == 3

    def under(self, prefix: str) -> "Weight":
        """The same with `prefix` before each name."""
        return self.called(lambda name: prefix + name)

    def called(self, rename: Callable[[str], str]) -> "Weight":
        """The same with other names."""
        return replace(self, parts=tuple((rename(name), shape) for name, shape in self.parts))


Weights = dict[Role, Weight]


@dataclass(frozen=True, slots=True)
class Norm:
    """x / sqrt(mean(x^2) + eps) * weight (RMS norm); `centred`: of x - mean(x) (LayerNorm)."""

    eps: float
    centred: bool = False
    bias: bool = False  # added at last

    def weights(self, role: Role, name: str, size: int) -> Weights:
        """Its weights, `role` and that of its bias, in tensors called `name`, for rows of `size` elements."""
        weights = {role: stack({f"{name}.weight": (size,)})}
        return weights | {Role(f"{role}_bias"): stack({f"{name}.bias": (size,)})} if self.bias else weights


def stack(parts: dict[str, Shape], *, product: bool = True) -> Weight:
    """The tensors of these names and shapes as one weight; `product`: see `Weight`."""
    return Weight(tuple(parts.items()), product=product)
