"""A model's weights as operands of launchers, and how much memory they take."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from nightmill.worker.model.spec import (
    Attention,
    Experts,
    GatedDeltaNet,
    Mamba2,
    Mixer,
    ModelSpec,
    Role,
    Shape,
    Weight,
)
from nightmill.worker.runners.gpu.device.arena import aligned
from nightmill.worker.runners.gpu.device.operands import ABSENT, ELEMENT, FLOAT, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.states.operands import MixerWeights
from nightmill.worker.runners.gpu.weights.head_order import HeadOrder, KindOrder, RowOrder, RowRange
from nightmill.worker.runners.gpu.weights.router import router_rows

__all__ = [
    "NO_MATRIX", "NO_NORM", "OF_EACH_HEAD", "OF_EXPERTS", "ExpertWeights", "HeadMatrices", "LatentWeights",
    "LayerWeights", "NormWeight", "PredictorWeights", "Run", "Weights", "all_weights", "formats_in",
    "keeps_packed", "layer_weights", "padded_vocab", "predictor_bytes", "predictor_precision",
    "predictor_weights", "rows_of", "runs_of", "stored", "weight_bytes",
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
NO_MATRIX = Matrix(0, 0, 0)
"""Stands for a matrix that a layer does not have."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of a mixture of experts; ABSENT or NO_MATRIX those that the model lacks.

    E experts of F elements between read rows of R elements, of the layer's input or of a latent.
    """

    router: Matrix  # elements, as `weights/router.py` says
    router_bias: Buffer  # float (E,)
    selection_bias: Buffer  # float (E,)
    gate_up: Matrix  # (2 E F, R): gates of all, then ups of all; fused, both of the first expert, and so on
    gate_up_bias: Buffer  # float, as long as gate_up has rows
    down: Matrix  # (E R, F)
    down_bias: Buffer  # float (E R,)
    gate_scale: Buffer  # float (E,), as the next two
    up_scale: Buffer
    down_scale: Buffer
    latent_down: Matrix  # (R, width)
    latent_up: Matrix  # (width, R)
    shared_gate_up: Matrix  # of the shared expert, as those of a feed-forward network
    shared_gate_up_bias: Buffer
    shared_down: Matrix
    shared_down_bias: Buffer
    # Where experts stand beside the shared one:
    router_norm: NormWeight  # of what the router reads
    routed_norm: NormWeight  # of what experts read
    routed_post_norm: NormWeight
    shared_post_norm: NormWeight

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The matrices that may be in any format, in the order of their use."""
        shared = self.shared_gate_up, self.shared_down
        return (self.latent_down, self.gate_up, self.down, self.latent_up, *shared)


@dataclass(frozen=True, slots=True)
class HeadMatrices:
    """A matrix of elements for each head, (outputs, inputs), or `turned`: (inputs, outputs).

    stride  elements from one to the next
    """

    address: int
    stride: int
    outputs: int
    inputs: int
    turned: bool = False


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The weights of latent attention (`worker.model.latent`), but for its output."""

    q_down: Matrix  # (query latent, width), or NO_MATRIX
    q_norm: Buffer  # float (query latent,), or ABSENT
    q_up: Matrix  # (heads (key_dim + rotated), query latent or width)
    kv_down: Matrix  # (latent + rotated, width)
    kv_norm: Buffer  # float (latent,)
    k_up: HeadMatrices  # of queries to the latent
    v_up: HeadMatrices  # of the latent to values


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one block; ABSENT or NO_MATRIX those that the model lacks."""

    attn_norm: NormWeight  # before the mixer, whichever it is
    qkv: Matrix  # ((heads + 2 kv_heads) head_dim, width)
    qkv_bias: Buffer  # float ((heads + 2 kv_heads) head_dim,)
    q_norm: Buffer  # float (head_dim,), or of all heads
    k_norm: Buffer  # the same
    attn_output: Matrix  # (width, heads head_dim), or of another mixer's output
    ffn_norm: NormWeight
    gate_up: Matrix  # (2 ffn_width, width): rows of gate, if there is one, then of up
    ffn_down: Matrix  # (width, ffn_width)
    attn_output_bias: Buffer = ABSENT  # float (width,)
    attn_post_norm: NormWeight = NO_NORM
    gate_up_bias: Buffer = ABSENT  # float, as long as gate_up has rows
    ffn_down_bias: Buffer = ABSENT  # float (width,)
    ffn_post_norm: NormWeight = NO_NORM
    attn_gate: Matrix = NO_MATRIX  # (heads head_dim, width)
    sinks: Buffer = ABSENT  # float (heads,)
    mixer_input: Matrix = NO_MATRIX  # filled up with rows of 0, as `stored` says
    mixer_controls: Matrix = NO_MATRIX  # the same
    mixer: MixerWeights | None = None  # what else a mixer with a state has
    experts: ExpertWeights | None = None  # in place of gate_up and ffn_down
    latent: LatentWeights | None = None  # of a layer with latent attention
    input_gate: Matrix = NO_MATRIX  # (inputs, width), of inputs of its own
    input_up: Matrix = NO_MATRIX  # (width, inputs)
    input_post_norm: NormWeight = NO_NORM
    scale: Buffer = ABSENT  # float (1,), which its output is multiplied by

    @property
    def formats(self) -> tuple[Format, ...]:
        """Formats of its matrices and their parts, in the order of their use."""
        first = (self.qkv, self.attn_gate, self.mixer_input, self.mixer_controls)
        experts = () if self.experts is None else self.experts.matrices
        own = self.latent
        of_latent = () if own is None else (own.q_down, own.q_up, own.kv_down)
        own_inputs = self.input_gate, self.input_up
        matrices = (*first, *of_latent, self.attn_output, self.gate_up, self.ffn_down, *experts, *own_inputs)
        return tuple(format_ for matrix in matrices if matrix.rows for format_ in matrix.formats)


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights."""

    embedding: Matrix  # (vocab, width)
    layers: tuple[LayerWeights, ...]
    output_norm: NormWeight
    head: Matrix  # (padded_vocab, width), with rows of 0 at the end; the embedding's where the head is tied
    layer_embedding: Matrix = NO_MATRIX  # (vocab, layers inputs), of layers with inputs of their own
    layer_projection: Matrix = NO_MATRIX  # (layers inputs, width)
    layer_projection_norm: NormWeight = NO_NORM  # (inputs,)
    positions: Buffer = ABSENT  # float (places, width), of an encoder, as the next two
    text_types: Buffer = ABSENT  # float (kinds, width)
    embedding_norm: NormWeight = NO_NORM


@dataclass(frozen=True, slots=True)
class PredictorWeights:
    """The weights of a block that predicts further tokens; `block`: its layer beside the model's tables."""

    embedding_norm: NormWeight
    state_norm: NormWeight
    input: Matrix  # elements (width, 2 width): of embeddings, then of states
    block: Weights


@dataclass(frozen=True, slots=True)
class Run:
    """Tensors of a weight that follow each other and are kept in one format.

    parts  their names and shapes
    rows   of the matrix that they make, some more than theirs where products need that (`stored`)
    """

    format: Format
    parts: tuple[tuple[str, Shape], ...]
    rows: int
    columns: int

    @property
    def bytes(self) -> int:
        """Without scales that are kept apart."""
        return self.format.bytes(self.rows, self.columns)


def layer_weights(spec: ModelSpec, index: int) -> dict[Role, Weight]:
    """Return the weights of a layer as they are kept here: gates and controls are matrices of their own.

    So controls stay float, and a gate for each of a layer's heads takes nothing from what computes others.
    Where they are rows of a tensor that has more, `rows_of` says which. The matrices of all experts are one,
    one below the other; the gate of a shared expert is the last row of the router.
    """
    weights, mixer = spec.layer_weights(index), spec.layers[index].mixer
    if isinstance(spec.layers[index].feed_forward, Experts):
        weights |= {role: _below_each_other(weights[role]) for role in OF_EXPERTS}
    if (gate := weights.pop(Role.SHARED_GATE, None)) is not None:
        rows = tuple((name, (1, *shape)) for name, shape in gate.parts)
        weights |= {Role.ROUTER: Weight((*weights[Role.ROUTER].parts, *rows))}
    if isinstance(mixer, Attention) and mixer.gated:
        (queries, _), *others = weights[Role.QKV].parts
        half = queries, (mixer.queries, spec.width)
        weights |= {Role.QKV: Weight((half, *others)), Role.ATTN_GATE: Weight((half,))}
    elif isinstance(mixer, GatedDeltaNet):
        parts = weights[Role.MIXER_INPUT].parts
        weights |= {Role.MIXER_INPUT: Weight(parts[:2]), Role.MIXER_CONTROLS: Weight(parts[2:])}
    elif isinstance(mixer, Mamba2):
        ((name, _),) = weights[Role.MIXER_INPUT].parts
        first, steps = (
            Weight(((name, (rows, spec.width)),)) for rows in (mixer.inner + mixer.convolved, mixer.controls)
        )
        weights |= {Role.MIXER_INPUT: first, Role.MIXER_CONTROLS: steps}
    return weights


def _below_each_other(weight: Weight) -> Weight:
    """Matrices of experts (E, rows, columns) as matrices (E rows, columns)."""
    return Weight(tuple((name, (math.prod(shape[:-1]), shape[-1])) for name, shape in weight.parts))


def rows_of(mixer: Mixer | None, role: Role) -> RowOrder | None:
    """Return which rows of a tensor of the file a weight of this role has, in which order; None: as it is."""
    if isinstance(mixer, Attention) and role in _OF_HEADS:
        return HeadOrder(mixer, gates=role is Role.ATTN_GATE)
    if isinstance(mixer, Mamba2) and role in _FILLED_UP:
        first = mixer.inner + mixer.convolved
        return RowRange(first, None) if role is Role.MIXER_CONTROLS else RowRange(0, first)
    if isinstance(mixer, GatedDeltaNet) and mixer.by_key_head and role is Role.MIXER_CONTROLS:
        return KindOrder(mixer.key_heads, 2)
    return None


def all_weights(spec: ModelSpec) -> Iterator[tuple[Role, Weight]]:
    """Every weight as it is kept here, in the order in which they are used but for the head's."""
    yield from spec.weights().items()
    for index in range(len(spec.layers)):
        yield from layer_weights(spec, index).items()


def runs_of(spec: ModelSpec, role: Role, weight: Weight, precision: Precision) -> list[Run]:
    """Return the runs that a matrix is stored as: one, unless its tensors are in different packed formats.

    Each tensor of a type that can be packed stays as it is in the file. Where a tensor of a stack has another
    type, all become elements: nothing is quantised anew, and products have the same bits in any case. If
    layers are rounded to a format (`WeightsFormat.rounded`), their matrices are, and the others are elements.
    A table of embeddings of layers stays as it is whatever is chosen: it is the larger part of a model.
    """
    if (rounded := precision.weights.rounded) is not None and role in _OF_LAYERS:
        return [Run(rounded, weight.parts, stored(spec, role, weight)[0], weight.shape[1])]
    element = precision.element.format
    names = [spec.tensor_types.get(name, "") for name in weight.names]
    in_file = precision.weights is WeightsFormat.FILE or role is Role.LAYER_EMBEDDING
    packs = in_file and role not in _ELEMENTS
    stay = packs and all(name in _PACKED for name in names)
    formats = [_PACKED[name] for name in names] if stay else [element] * len(names)
    runs = []
    for format_, group in groupby(zip(formats, weight.parts, strict=True), lambda pair: pair[0]):
        parts = tuple(part for _, part in group)
        runs.append(Run(format_, parts, sum(shape[0] for _, shape in parts), weight.shape[1]))
    more = stored(spec, role, weight)[0] - weight.shape[0]
    runs[-1] = replace(runs[-1], rows=runs[-1].rows + more)
    return runs


def formats_in(
    spec: ModelSpec, precision: Precision, *roles: Role, but: Collection[Role] = ()
) -> set[Format]:
    """Return all formats of a model's matrices, or of those with these roles, by parts if they are MIXED.

    but  roles that are left out
    """
    return {
        run.format
        for role, weight in all_weights(spec)
        if weight.is_matrix and (role in roles or not roles) and role not in but
        for run in runs_of(spec, role, weight, precision)
    }


def keeps_packed(spec: ModelSpec, precision: Precision) -> bool:
    """Return whether anything of a model stays as it is in the file."""
    table = spec.weights().get(Role.LAYER_EMBEDDING)
    tables = () if table is None else runs_of(spec, Role.LAYER_EMBEDDING, table, precision)
    formats = formats_in(spec, precision) | {run.format for run in tables}
    return any(format_.packed for format_ in formats)


def padded_vocab(spec: ModelSpec) -> int:
    """Rows of the LM head, and numbers in a row of logits: a multiple of 8.

    Of other sizes the library's algorithms for few rows and for many sum in different orders.
    """
    return -(-spec.vocab // 8) * 8


def stored(spec: ModelSpec, role: Role, weight: Weight) -> tuple[int, ...]:
    """The shape on the device.

    The LM head, and what is made of a mixer's input, have rows of 0 behind those of the file, up to a
    multiple of 8. A router has several parts of each of its rows (`weights/router.py`).
    """
    if role is Role.ROUTER:
        return (router_rows(weight.shape[0]), *weight.shape[1:])
    head = Role.EMBEDDING if spec.tied_head else Role.HEAD
    if role is head:
        return (padded_vocab(spec), *weight.shape[1:])
    return (-(-weight.shape[0] // 8) * 8, *weight.shape[1:]) if role in _FILLED_UP else weight.shape


def weight_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Return the bytes that the weights take on the device."""
    return sum(
        aligned(size) for role, weight in all_weights(spec) for size in _sizes(spec, role, weight, precision)
    )


def predictor_weights(spec: ModelSpec) -> Iterator[tuple[Role, Weight]]:
    """Every weight of the block that predicts further tokens, which the model has, as it is kept here."""
    assert spec.predictor is not None
    alone = spec.predictor.model(spec)
    yield from spec.predictor.weights(spec.width).items()
    yield from layer_weights(alone, 0).items()
    yield from spec.output_norm.weights(Role.OUTPUT_NORM, alone.output_norm_name, spec.width).items()


def predictor_precision(spec: ModelSpec, precision: Precision) -> Precision | None:
    """Return the precision of that block: the model's, or elements where products of it would lack kernels.

    Kernels are there for the formats that the model has in a role. None: there are none for its experts.
    """
    for tried in (precision, replace(precision, weights=WeightsFormat.ELEMENT)):
        lacking = {
            role
            for role, weight in predictor_weights(spec)
            if weight.is_matrix and role is not Role.PREDICTOR_INPUT
            and not {run.format for run in runs_of(spec, role, weight, tried)}
            <= formats_in(spec, precision, role)
        }  # fmt: skip
        if not lacking or (tried is not precision and lacking.isdisjoint(OF_EXPERTS)):
            return tried
    return None


def predictor_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Return the bytes that the weights of that block take, at its precision."""
    return sum(
        aligned(size)
        for role, weight in predictor_weights(spec)
        for size in _sizes(spec, role, weight, precision)
    )


def _sizes(spec: ModelSpec, role: Role, weight: Weight, precision: Precision) -> list[int]:
    if weight.is_matrix or role is Role.LAYER_EMBEDDING:
        runs = runs_of(spec, role, weight, precision)
        return [size for run in runs for size in (run.bytes, run.format.scale_bytes(run.rows))]
    kind = ELEMENT if role in OF_EACH_HEAD else FLOAT
    tables = 2 if role is Role.POSITIONS and spec.paired_positions else 1
    return [math.prod(weight.shape) * kind.itemsize * tables]


_PACKED = {format_.name: format_ for format_ in Format if format_.packed}
"""Formats by GGUF's names of types."""
_OF_HEADS = (Role.QKV, Role.QKV_BIAS, Role.Q_NORM, Role.K_NORM, Role.ATTN_GATE)
_FILLED_UP = (Role.MIXER_INPUT, Role.MIXER_CONTROLS)
_ELEMENTS = (Role.MIXER_CONTROLS, Role.ROUTER, Role.PREDICTOR_INPUT)
"""Matrices that are elements in any case: decays are powers of what they give, or experts chosen by it; or a
file has one of them, of a shape of its own."""
OF_EXPERTS = (Role.EXPERTS_GATE_UP, Role.EXPERTS_DOWN)
"""Matrices that products of their own multiply (`experts/grouped.py`)."""
_OF_LAYERS = (
    Role.QKV, Role.ATTN_GATE, Role.MIXER_INPUT, Role.ATTN_OUTPUT, Role.MIXER_OUTPUT, Role.GATE_UP,
    Role.FFN_DOWN, Role.LATENT_DOWN, *OF_EXPERTS, Role.LATENT_UP, Role.SHARED_GATE_UP, Role.SHARED_DOWN,
    Role.Q_DOWN, Role.Q_UP, Role.KV_DOWN,
)  # fmt: skip
OF_EACH_HEAD = (Role.K_UP, Role.V_UP, Role.KV_UP)
"""Matrices that each head has for itself: elements, whatever the others are."""
