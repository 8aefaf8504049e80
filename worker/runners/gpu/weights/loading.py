"""Gets a model's weights onto the GPU: raw GGUF bytes go up, and are dequantised there.

Matrices become elements, row-major (outputs, inputs) as in the file; those that share an input are
stacked, as `Role` says. Vectors become float.
"""

import logging
import math
from collections.abc import Callable

from nightmill.jobs.errors import ModelFileError
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec, Norm, Role, Weight
from nightmill.worker.runners.gpu.device.device import Arena, Device
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import ABSENT, FLOAT, Buffer, Matrix
from nightmill.worker.runners.gpu.weights.dequantizer import SUPPORTED, Dequantizer
from nightmill.worker.runners.gpu.weights.head_order import HeadOrder
from nightmill.worker.runners.gpu.weights.layout import (
    NO_NORM,
    LayerWeights,
    NormWeight,
    Weights,
    format_of,
    stored,
    weight_bytes,
)

__all__ = ["load_weights"]

log = logging.getLogger(__name__)


def load_weights(
    device: Device, file: GgufFile, spec: ModelSpec, *, report: Callable[[str], None] = log.info
) -> Weights:
    """Upload all weights into one allocation of `weight_bytes(spec)`.

    Raises ModelFileError for a tensor type that is not supported and for weights beyond the element's range,
    DeviceMemoryError where the device has no room.
    """
    for _, weight in spec.all_weights():
        for name in weight.names:
            if (kind := file.tensors[name].kind) not in SUPPORTED:
                file.fail(
                    f"tensor {name}: the type {kind.name} is not supported on the GPU; requantise the model"
                )
    arena = Arena(device, weight_bytes(spec), "the weights")
    dequantizer = Dequantizer(device)
    try:
        weights = _Loader(device, file, spec, arena, dequantizer).load()
        if not dequantizer.fits():
            element = device.element
            remedy = "--dtype bf16" if element is Element.F16 else "--reference"
            raise ModelFileError(
                f"{file.path}: a weight is beyond {element.largest:g}, the largest number of {element.name}, "
                f"or is not a number; if the file is not damaged, give {remedy}"
            )
    finally:
        dequantizer.close()
    report(f"weights: {arena.used:,} bytes on {device.name}")
    return weights


class _Loader:
    """Places the weights of a spec in an arena, and queues their way there."""

    def __init__(
        self, device: Device, file: GgufFile, spec: ModelSpec, arena: Arena, dequantizer: Dequantizer
    ) -> None:
        self._device = device
        self._file = file
        self._spec = spec
        self._arena = arena
        self._dequantizer = dequantizer

    def load(self) -> Weights:
        spec, own = self._spec, self._spec.weights()
        embedding = self._matrix(own, Role.EMBEDDING)
        layers = tuple(self._layer(index) for index in range(len(spec.layers)))
        return Weights(
            embedding=embedding,
            layers=layers,
            output_norm=self._norm(own, Role.OUTPUT_NORM, spec.output_norm),
            head=embedding if spec.tied_head else self._matrix(own, Role.HEAD),
        )

    def _layer(self, index: int) -> LayerWeights:
        layer, own = self._spec.layers[index], self._spec.layer_weights(index)
        order = HeadOrder(layer.attention)
        return LayerWeights(
            attn_norm=self._norm(own, Role.ATTN_NORM, layer.attention_norm),
            qkv=self._matrix(own, Role.QKV, order),
            qkv_bias=self._vector(own, Role.QKV_BIAS, order),
            q_norm=self._vector(own, Role.Q_NORM, order),
            k_norm=self._vector(own, Role.K_NORM, order),
            attn_output=self._matrix(own, Role.ATTN_OUTPUT),
            ffn_norm=self._norm(own, Role.FFN_NORM, layer.feed_forward_norm),
            gate_up=self._matrix(own, Role.GATE_UP),
            ffn_down=self._matrix(own, Role.FFN_DOWN),
            attn_output_bias=self._vector(own, Role.ATTN_OUTPUT_BIAS),
            attn_post_norm=self._norm(own, Role.ATTN_POST_NORM, layer.attention_post_norm),
            gate_up_bias=self._vector(own, Role.GATE_UP_BIAS),
            ffn_down_bias=self._vector(own, Role.FFN_DOWN_BIAS),
            ffn_post_norm=self._norm(own, Role.FFN_POST_NORM, layer.feed_forward_post_norm),
        )

    def _matrix(self, own: dict[Role, Weight], role: Role, order: HeadOrder | None = None) -> Matrix:
        weight = own[role]
        rows, columns = stored(self._spec, role, weight)
        kept = format_of(weight, self._device.element)
        size, used = kept.bytes(rows, columns), kept.bytes(weight.shape[0], columns)
        sizes = [kept.bytes(*shape) for _, shape in weight.parts]
        address = self._place(weight, size, sizes, order, floats=False)
        self._device.fill(address + used, 0, size - used)
        return Matrix(address, rows, columns, kept)

    def _norm(self, own: dict[Role, Weight], role: Role, norm: Norm | None) -> NormWeight:
        if norm is None:
            return NO_NORM
        bias = self._vector(own, Role(f"{role}_bias")) if norm.bias else ABSENT
        return NormWeight(self._vector(own, role), norm.eps, norm.centred, bias)

    def _vector(self, own: dict[Role, Weight], role: Role, order: HeadOrder | None = None) -> Buffer:
        if role not in own:
            return ABSENT
        weight = own[role]
        sizes = [math.prod(shape) * FLOAT.itemsize for _, shape in weight.parts]
        return Buffer(self._place(weight, sum(sizes), sizes, order, floats=True), weight.shape, FLOAT)

    def _place(
        self, weight: Weight, size: int, sizes: list[int], order: HeadOrder | None, *, floats: bool
    ) -> int:
        """Take `size` bytes and queue the weight's tensors, of these sizes, one behind the other.

        order  of the elements of heads, where rows of the tensors are such
        """
        start = address = self._arena.take(size)
        first = 0  # row of the weight
        for (name, shape), taken in zip(weight.parts, sizes, strict=True):
            kind, raw = self._file.tensors[name].kind, self._file.raw(name)
            if order is not None:
                raw = order.arranged(raw, first, shape[0])
            self._dequantizer.load(raw, kind, address, floats=floats)
            address += taken
            first += shape[0]
        return start
