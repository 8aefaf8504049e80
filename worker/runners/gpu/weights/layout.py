"""A model's weights as operands of launchers, and how much memory they take."""

import math
from dataclasses import dataclass

from nightmill.worker.model.spec import ModelSpec, Role, Weight
from nightmill.worker.runners.gpu.device.device import aligned
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import ABSENT, FLOAT, Buffer, Format, Matrix

__all__ = [
    "NO_NORM", "LayerWeights", "NormWeight", "Weights", "format_of", "padded_vocab", "stored", "weight_bytes",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class NormWeight:
    """A norm; ABSENT its weight where there is none: rows are only rounded."""

    weight: Buffer  # float (width,)
    eps: float
    centred: bool = False
    bias: Buffer = ABSENT  # float (width,)

    @property
    def plain(self) -> bool:
        """Whether it is an RMS norm without a bias."""
        return self.weight is not ABSENT and not self.centred and self.bias is ABSENT


NO_NORM = NormWeight(ABSENT, 0.0)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block's weights; ABSENT what the model has none of."""

    attn_norm: NormWeight
    qkv: Matrix  # ((heads + 2 kv_heads) head_dim, width)
    qkv_bias: Buffer  # float ((heads + 2 kv_heads) head_dim,)
    q_norm: Buffer  # float (head_dim,), or of all heads
    k_norm: Buffer  # the same
    attn_output: Matrix  # (width, heads head_dim)
    ffn_norm: NormWeight
    gate_up: Matrix  # (2 ffn_width, width): rows of gate, if there is one, then of up
    ffn_down: Matrix  # (width, ffn_width)
    attn_output_bias: Buffer = ABSENT  # float (width,)
    attn_post_norm: NormWeight = NO_NORM
    gate_up_bias: Buffer = ABSENT  # float, as long as gate_up has rows
    ffn_down_bias: Buffer = ABSENT  # float (width,)
    ffn_post_norm: NormWeight = NO_NORM

    @property
    def formats(self) -> tuple[Format, ...]:
        """Of its matrices, in the order of their use."""
        return tuple(matrix.format for matrix in (self.qkv, self.attn_output, self.gate_up, self.ffn_down))


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights."""

    embedding: Matrix  # (vocab, width)
    layers: tuple[LayerWeights, ...]
    output_norm: NormWeight
    head: Matrix  # (padded_vocab, width), with rows of 0 at the end; the embedding's where the head is tied


def format_of(weight: Weight, element: Element) -> Format:
    """In which format a matrix is kept."""
    return element.format


def padded_vocab(spec: ModelSpec) -> int:
    """Rows of the LM head, and numbers in a row of logits: a multiple of 8.

    Of other sizes the library's algorithms for few rows and for many sum in different orders.
    """
    return -(-spec.vocab // 8) * 8


def stored(spec: ModelSpec, role: Role, weight: Weight) -> tuple[int, ...]:
    """The shape on the device: the LM head has rows more than in the file, which no token has."""
    head = Role.EMBEDDING if spec.tied_head else Role.HEAD
    return (padded_vocab(spec), *weight.shape[1:]) if role is head else weight.shape


def weight_bytes(spec: ModelSpec) -> int:
    """Bytes that the weights take on the device."""
    return sum(aligned(_bytes(spec, role, weight)) for role, weight in spec.all_weights())


def _bytes(spec: ModelSpec, role: Role, weight: Weight) -> int:
    shape = stored(spec, role, weight)
    if weight.is_matrix:
        return format_of(weight, Element.F16).bytes(shape[0], shape[1])  # as many in any other
    return math.prod(shape) * FLOAT.itemsize
