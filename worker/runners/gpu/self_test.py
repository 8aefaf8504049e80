"""A look at the products of a model before it takes jobs: are they those of its weights?

Each product of layers and head that takes packed or FP8 weights is computed with the model's own matrices, by
the ways that were chosen for one row and for 64; of experts those of one, by the kernels for few rows and for
many. Some outputs of each row are held against NumPy in float64,
over rows of the file. So a kernel that does not suit a shape is found by the worker, not by its users.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import Activation, Attention, Experts, ModelSpec, Role, Weight
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT, Buffer, Matrix
from nightmill.worker.runners.gpu.feed_forward import Mixture
from nightmill.worker.runners.gpu.kinds import mixer_sizes
from nightmill.worker.runners.gpu.layers import LayerKernels
from nightmill.worker.runners.gpu.mixers import AttentionMixer, LatentMixer, StateMixer
from nightmill.worker.runners.gpu.model import Model
from nightmill.worker.runners.gpu.shapes import padded_rows
from nightmill.worker.runners.gpu.step_inputs import NO_INPUTS
from nightmill.worker.runners.gpu.weights.head_order import HeadOrder, RowOrder
from nightmill.worker.runners.gpu.weights.layout import LayerWeights, layer_weights, rows_of
from nightmill.worker.runners.reference import ops
from nightmill.worker.runners.reference.rounding import as_fp8
from nightmill.worker.runners.starting import SelfTestError

__all__ = ["ROWS", "CheckedProduct", "check_products", "checked_products"]

ROWS = (1, 64)
_SAMPLES = 48  # outputs of a product, beside the first and the last of each of its parts
# Times the root mean square of results, and times a result itself. Half rounds by 5e-4, bfloat16 by 4e-3.
# What FP8 products are held against is rounded as they round; a number between two may become the other.
_TOLERANCE, _TOLERANCE_BF16, _TOLERANCE_ROUNDED = 0.01, 0.04, 0.1

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CheckedProduct:
    """A product, the matrix that it is tried with, and where the results go.

    name        for a person
    product     queues it: x, weight, y, rows
    activation  that the product has inside, of the first half of the matrix's rows
    weights     rows of the matrix, by their numbers, from the file: (rows, inputs)
    compared    outputs of a row that are compared, from the first on; None: all
    bias        that is added to each output, if any is
    """

    name: str
    product: Callable[[Buffer, Matrix, Buffer, int], None]
    matrix: Matrix
    y: Buffer
    activation: Activation | None
    weights: Callable[[Indices], Floats]
    compared: int | None = None
    bias: Floats | None = None

    @property
    def outputs(self) -> int:
        """Numbers in a row of results."""
        return self.matrix.rows // 2 if self.activation else self.matrix.rows


def check_products(
    device: Device, products: Sequence[CheckedProduct], progress: Callable[[str], None]
) -> None:
    """Compute each and compare; raises SelfTestError, DeviceLostError if a kernel traps.

    progress  is told each product before it is launched, as one may never end
    """
    if not products:
        return
    rng = np.random.default_rng(0)
    widest = max(one.matrix.columns for one in products)
    activations = rng.standard_normal((max(ROWS), widest), dtype=np.float32)
    words = _as_words(activations, device.element)
    held = device.allocate(words.nbytes, "activations of a self-test")
    try:
        for one in products:
            inputs = one.matrix.columns
            x = np.ascontiguousarray(words[:, :inputs])
            device.copy_in(held, x)
            device.synchronize()
            numbers = _from_words(x, device.element)
            outputs = _sampled(one, rng)
            expected = _expected(one, outputs, numbers, device.element)
            for rows in sorted({min(rows, one.y.shape[0]) for rows in ROWS}):
                progress(f"{one.name}, {rows} rows")
                size = one.y.dtype.itemsize
                device.fill(one.y.address, 0, padded_rows(rows) * one.outputs * size)
                one.product(Buffer(held, x.shape, ELEMENT), one.matrix, one.y, rows)
                found = _results(device, one, rows, outputs)
                _compare(one, rows, outputs, found, expected[:rows], device.element)
    finally:
        if not device.lost:
            device.free(held)


def checked_products(
    device: Device, model: Model, spec: ModelSpec, file: GgufFile
) -> Iterator[CheckedProduct]:
    """List the products that take packed or FP8 weights, one of each kind, format and size."""
    at = model.activations
    seen: set[LayerKernels] = set()
    for index, layer in enumerate(model.layers):
        kernels, weights = layer.kernels, layer.weights
        if kernels in seen:
            continue
        seen.add(kernels)
        own, mixer, used = layer_weights(spec, index), kernels.mixer, spec.layers[index].mixer
        qkv = mixer.qkv if isinstance(mixer, AttentionMixer) else None
        queries = layer.at.qkv if qkv is None else qkv.target(layer.at.qkv)
        gate_up = None if kernels.gate_up is None else kernels.gate_up.product
        gated = None if gate_up is None else gate_up.activation
        inner = layer.at.activated if gated else layer.at.gate_up
        output = Role.ATTN_OUTPUT if Role.ATTN_OUTPUT in own else Role.MIXER_OUTPUT
        gates = mixer.gates if isinstance(mixer, AttentionMixer) else None
        entering = mixer.input if isinstance(mixer, StateMixer) else None
        for role, product, matrix, y, activation in (
            (Role.QKV, None if qkv is None else qkv.product, weights.qkv, queries, None),
            (Role.ATTN_GATE, gates, weights.attn_gate, layer.at.gates, None),
            (Role.MIXER_INPUT, entering, weights.mixer_input, layer.at.qkv, None),
            (output, kernels.output, weights.attn_output, at.x, None),
            (Role.GATE_UP, gate_up, weights.gate_up, inner, gated),
            (Role.FFN_DOWN, kernels.down, weights.ffn_down, at.x, None),
            (Role.INPUT_GATE, kernels.input_gate, weights.input_gate, at.input_gate, None),
            (Role.INPUT_UP, kernels.input_up, weights.input_up, at.added, None),
        ):
            if product is not None and not matrix.format.plain:
                rows = FileRows(file, own[role], rows_of(used, role))
                yield CheckedProduct(_name(role, matrix, index), product, matrix, y, activation, rows)
        for role, product, matrix, y, _ in mixer.products(layer) if isinstance(mixer, LatentMixer) else ():
            if not matrix.format.plain:
                yield CheckedProduct(
                    _name(role, matrix, index), product, matrix, y, None, FileRows(file, own[role])
                )
        if kernels.mixture is not None:
            yield from _of_experts(kernels.mixture, weights, spec, file, index)
        if qkv is not None and qkv.takes_packed and isinstance(used, Attention) and used.rope.magnitude == 1:
            yield _fused_qkv(device, model, spec, file, index)
    made = model.weights.layer_projection
    if model.projection is not None and not made.format.plain:
        rows = FileRows(file, spec.weights()[Role.LAYER_PROJECTION])
        name = _name(Role.LAYER_PROJECTION, made, None)
        yield CheckedProduct(name, model.projection, made, at.inputs, None, rows)
    head = model.weights.head
    if not head.format.plain:
        role = Role.EMBEDDING if spec.tied_head else Role.HEAD
        rows = FileRows(file, spec.weights()[role])
        yield CheckedProduct(_name(Role.HEAD, head, None), model.head, head, at.logits, None, rows)


def _of_experts(
    mixture: Mixture, weights: LayerWeights, spec: ModelSpec, file: GgufFile, index: int
) -> Iterator[CheckedProduct]:
    """The products of a layer's last expert; of gate and up where nothing is between sums and SwiGLU."""
    experts, held, own = spec.layers[index].feed_forward, weights.experts, layer_weights(spec, index)
    assert isinstance(experts, Experts)
    assert held is not None
    last, inner, scaled = experts.count - 1, experts.width, set(experts.expert_scales)
    gate_up, down = held.gate_up, held.down
    plain = experts.gated and not experts.bias and not scaled & {"gate", "up"} and not gate_up.parts
    if plain and experts.activation in (Activation.SILU, Activation.GELU) and not gate_up.format.plain:
        multiply = mixture.alone(held, last, down=False)
        ups = inner if experts.fused else experts.count * inner
        of_gate = last * inner * (2 if experts.fused else 1)
        rows = FileRows(file, own[Role.EXPERTS_GATE_UP])
        yield CheckedProduct(
            _name(Role.EXPERTS_GATE_UP, gate_up, index), multiply, replace(gate_up, rows=2 * inner),
            multiply.y, experts.activation,
            lambda asked: rows(of_gate + np.where(asked < inner, asked, asked - inner + ups)),
        )  # fmt: skip
    if "down" not in scaled and not down.format.plain:
        multiply, outputs = mixture.alone(held, last, down=True), down.rows // experts.count
        downs, bias = FileRows(file, own[Role.EXPERTS_DOWN]), None
        if experts.bias:
            bias = file.array(own[Role.EXPERTS_DOWN_BIAS].names[0])[last].astype(np.float64)
        yield CheckedProduct(
            _name(Role.EXPERTS_DOWN, down, index), multiply, replace(down, rows=outputs), multiply.y, None,
            lambda asked: downs(last * outputs + asked), None, bias,
        )  # fmt: skip


def _fused_qkv(device: Device, model: Model, spec: ModelSpec, file: GgufFile, index: int) -> CheckedProduct:
    """Queries, keys and values with their rotation; of the first position, where queries are only copied.

    Keys and values are for no row of the pages, so these stay as they are.
    """
    layer, attention, own = model.layers[index], spec.layers[index].attention, layer_weights(spec, index)
    order, no_rows = HeadOrder(attention), model.activations.no_rows
    mixer = layer.kernels.mixer
    assert isinstance(mixer, AttentionMixer)
    qkv = mixer.qkv
    inputs = replace(NO_INPUTS, positions=no_rows.address, cache_rows=no_rows.address)

    def product(x: Buffer, weight: Matrix, y: Buffer, rows: int) -> None:
        device.fill(no_rows.address, 0xFF, no_rows.dtype.itemsize * padded_rows(rows))
        qkv(x, layer.weights, inputs, y, layer.cache, rows)

    bias = None
    if Role.QKV_BIAS in own:
        rows = np.arange(mixer_sizes(attention).inputs, dtype=np.int64)
        bias = FileRows(file, own[Role.QKV_BIAS], order)(rows)[:, 0]
    matrix = layer.weights.qkv
    return CheckedProduct(
        f"rotated {_name(Role.QKV, matrix, index)}", product, matrix, layer.at.qkv, None,
        FileRows(file, own[Role.QKV], order), attention.queries, bias,
    )  # fmt: skip


class FileRows:
    """Rows of a weight as the file has them, by their numbers on the GPU; rows that the file lacks are 0."""

    def __init__(self, file: GgufFile, weight: Weight, order: RowOrder | None = None) -> None:
        self._file, self._weight, self._order = file, weight, order

    def __call__(self, rows: Indices) -> Floats:
        columns = self._weight.shape[1] if self._weight.is_matrix else 1
        found = np.zeros((len(rows), columns))
        first = 0
        for name, (count, *_) in self._weight.parts:
            inside = (rows >= first) & (rows < first + count)
            if inside.any():
                shape = self._file.tensors[name].shape
                stored = math.prod(shape[: max(1, len(shape) - 1)])  # of experts, of all of them
                places = self._places(first, stored)[rows[inside] - first]
                raw = GgufFile.raw(self._file, name)  # not as weights are loaded
                raw = raw.reshape(stored, -1)[places]
                numbers = dequantize(np.ascontiguousarray(raw), self._file.tensors[name].kind)
                found[inside] = numbers.reshape(len(places), columns)
            first += count
        return found

    def _places(self, first: int, count: int) -> Indices:
        """Return the row of the file's tensor, which has `count`, that each row on the GPU is."""
        numbers = np.arange(count, dtype=np.int64)
        if self._order is None:
            return numbers
        return self._order.arranged(numbers.view(np.uint8), first, count).view(np.int64)


def _name(role: Role, matrix: Matrix, index: int | None) -> str:
    formats = "+".join(one.name for one in matrix.formats)
    where = "" if index is None else f" of layer {index}"
    return f"{role.value}{where}: {matrix.rows:,} x {matrix.columns:,}, {formats}"


def _sampled(one: CheckedProduct, rng: np.random.Generator) -> Indices:
    """Choose some outputs, in order, the ends of all parts among them."""
    most = one.outputs if one.compared is None else one.compared
    ends = np.cumsum([part.rows for part in one.matrix.parts], dtype=np.int64)
    edges = np.concatenate([[0, most - 1], ends - 1, ends])
    return np.unique([*edges[edges < most], *rng.integers(0, most, _SAMPLES)])


def _expected(one: CheckedProduct, outputs: Indices, x: Floats, element: Element) -> Floats:
    """Return the chosen outputs of all rows; where the matrix is FP8, of numbers that are rounded to it."""
    rounded = one.matrix.format.scaled
    if rounded:
        x = _as_fp8(x)

    def sums_of(rows: Indices) -> Floats:
        weights = one.weights(rows)
        sums: Floats = x @ (_as_fp8(_to_elements(weights, element)) if rounded else weights).T
        return sums

    sums = sums_of(outputs)
    if one.bias is not None:
        sums += one.bias[outputs]
    if one.activation is None:
        return sums
    gated = ops.swiglu if one.activation is Activation.SILU else ops.geglu
    both = np.concatenate([sums, sums_of(outputs + one.outputs)], axis=1)
    return gated(both).astype(np.float64)


def _as_fp8(numbers: Floats) -> Floats:
    """Round rows to FP8 and back, in single precision as the kernel does."""
    return as_fp8(numbers.astype(np.float32)).astype(np.float64)


def _to_elements(numbers: Floats, element: Element) -> Floats:
    """Round to the nearest elements, as weights are before they are rounded to FP8."""
    if element is Element.F16:
        return numbers.astype(np.float16).astype(np.float64)
    bits = numbers.astype(np.float32).view(np.uint32)
    return (
        ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000)
        .astype(np.uint32)
        .view(np.float32)
        .astype(np.float64)
    )


def _results(device: Device, one: CheckedProduct, rows: int, outputs: Indices) -> Floats:
    """The chosen outputs of the rows that were computed."""
    kind = np.float32 if one.y.dtype == FLOAT else np.uint16
    found = device.download(one.y.address, (rows, one.outputs), kind)[:, outputs]
    return found.astype(np.float64) if kind is np.float32 else _from_words(found, device.element)


def _compare(
    one: CheckedProduct, rows: int, outputs: Indices, found: Floats, expected: Floats, element: Element
) -> None:  # fmt: skip
    scale = float(np.sqrt(np.mean(np.square(expected))))
    tolerance = _TOLERANCE if element is Element.F16 else _TOLERANCE_BF16
    if one.matrix.format.scaled:
        tolerance = _TOLERANCE_ROUNDED
    wrong = ~(np.abs(found - expected) <= tolerance * (scale + np.abs(expected)))
    if wrong.any():
        row, place = (int(places[0]) for places in np.nonzero(wrong))
        raise SelfTestError(
            f"the product {one.name} is wrong on this GPU for {rows} rows: {np.count_nonzero(wrong)} of "
            f"{wrong.size} results that were looked at, as row {row}, output {outputs[place]:,}, which is "
            f"{found[row, place]:g} and should be {expected[row, place]:g}: give --weights 16bit, and "
            "report it with the model's name"
        )


def _as_words(numbers: npt.NDArray[np.float32], element: Element) -> npt.NDArray[np.uint16]:
    """Convert to elements; those of bfloat16 are cut, not rounded."""
    if element is Element.F16:
        return numbers.astype(np.float16).view(np.uint16)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def _from_words(words: npt.NDArray[np.uint16], element: Element) -> Floats:
    if element is Element.F16:
        return words.view(np.float16).astype(np.float64)
    return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
