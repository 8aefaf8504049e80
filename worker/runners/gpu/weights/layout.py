"""A model's weights as operands of launchers, and how much memory they take."""

import math
from dataclasses import dataclass, replace
from itertools import groupby

from nightmill.worker.model.spec import ModelSpec, Role, Shape, Weight
from nightmill.worker.runners.gpu.device.device import aligned
from nightmill.worker.runners.gpu.device.operands import ABSENT, FLOAT, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat

__all__ = [
    "NO_NORM", "LayerWeights", "NormWeight", "Run", "Weights", "formats_in", "padded_vocab", "runs_of",
    "stored", "weight_bytes",
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
        """True if it is an RMS norm without a bias."""
        return self.weight is not ABSENT and not self.centred and self.bias is ABSENT


NO_NORM = NormWeight(ABSENT, 0.0)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one block; ABSENT those that the model lacks."""

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
        """Formats of its matrices and their parts, in the order of their use."""
        matrices = (self.qkv, self.attn_output, self.gate_up, self.ffn_down)
        return tuple(format_ for matrix in matrices for format_ in matrix.formats)


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights."""

    embedding: Matrix  # (vocab, width)
    layers: tuple[LayerWeights, ...]
    output_norm: NormWeight
    head: Matrix  # (padded_vocab, width), with rows of 0 at the end; the embedding's where the head is tied


@dataclass(frozen=True, slots=True)
class Run:
    """Tensors of a weight that follow each other and are kept in one format.

    parts  their names and shapes
    rows   of the matrix that they make, some more than theirs where it is the LM head
    """

    format: Format
    parts: tuple[tuple[str, Shape], ...]
    rows: int
    columns: int

    @property
    def bytes(self) -> int:
        """Without scales that are kept apart."""
        return self.format.bytes(self.rows, self.columns)


def runs_of(spec: ModelSpec, role: Role, weight: Weight, precision: Precision) -> list[Run]:
    """Return the runs that a matrix is stored as: one, unless its tensors are in different packed formats.

    Each tensor of a type that can be packed stays as it is in the file. Where a tensor of a stack has another
    type, all become elements: nothing is quantised anew, and products have the same bits in any case. If
    layers are rounded to a format (`WeightsFormat.rounded`), their matrices are, and the others are elements.
    """
    if (rounded := precision.weights.rounded) is not None and role in _OF_LAYERS:
        return [Run(rounded, weight.parts, weight.shape[0], weight.shape[1])]
    element = precision.element.format
    names = [spec.tensor_types.get(name, "") for name in weight.names]
    stay = precision.weights is WeightsFormat.FILE and all(name in _PACKED for name in names)
    formats = [_PACKED[name] for name in names] if stay else [element] * len(names)
    runs = []
    for format_, group in groupby(zip(formats, weight.parts, strict=True), lambda pair: pair[0]):
        parts = tuple(part for _, part in group)
        runs.append(Run(format_, parts, sum(shape[0] for _, shape in parts), weight.shape[1]))
    if len(runs) == 1:
        return [replace(runs[0], rows=stored(spec, role, weight)[0])]
    return runs


def formats_in(spec: ModelSpec, precision: Precision, *roles: Role) -> set[Format]:
    """Return all formats of a model's matrices, or of those with these roles, by parts if they are MIXED."""
    return {
        run.format
        for role, weight in spec.all_weights()
        if weight.is_matrix and (role in roles or not roles)
        for run in runs_of(spec, role, weight, precision)
    }


def padded_vocab(spec: ModelSpec) -> int:
    """Rows of the LM head, and numbers in a row of logits: a multiple of 8.

    Of other sizes the library's algorithms for few rows and for many sum in different orders.
    """
    return -(-spec.vocab // 8) * 8


def stored(spec: ModelSpec, role: Role, weight: Weight) -> tuple[int, ...]:
    """The shape on the device: the LM head has rows more than in the file, which no token has."""
    head = Role.EMBEDDING if spec.tied_head else Role.HEAD
    return (padded_vocab(spec), *weight.shape[1:]) if role is head else weight.shape


def weight_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Return the bytes that the weights take on the device."""
    return sum(
        aligned(size) for role, weight in spec.all_weights() for size in _sizes(spec, role, weight, precision)
    )


def _sizes(spec: ModelSpec, role: Role, weight: Weight, precision: Precision) -> list[int]:
    if weight.is_matrix:
        runs = runs_of(spec, role, weight, precision)
        return [size for run in runs for size in (run.bytes, run.format.scale_bytes(run.rows))]
    return [math.prod(weight.shape) * FLOAT.itemsize]


_PACKED = {format_.name: format_ for format_ in Format if format_.packed}
"""Formats by GGUF's names of types."""
_OF_LAYERS = (Role.QKV, Role.ATTN_OUTPUT, Role.GATE_UP, Role.FFN_DOWN)
