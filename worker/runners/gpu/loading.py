"""Gets a model's weights onto the GPU: raw GGUF bytes go up, and are repacked or dequantised there.

Matrices stay as they are in the file, or become elements or FP8, row-major (outputs, inputs); those that
share an input are stacked, as `Role` says. Vectors become float.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from nightmill.jobs.errors import ModelFileError
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import (
    Experts,
    LatentAttention,
    Mixer,
    ModelSpec,
    Norm,
    Predictor,
    Role,
    Weight,
)
from nightmill.worker.runners.gpu.device.arena import Arena
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import ABSENT, ELEMENT, FLOAT, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.products.formats import MatrixRounder, ModelFormats
from nightmill.worker.runners.gpu.states.operands import MixerWeights
from nightmill.worker.runners.gpu.weights.dequantizer import SUPPORTED, Dequantizer
from nightmill.worker.runners.gpu.weights.head_order import RowOrder
from nightmill.worker.runners.gpu.weights.layout import (
    NO_MATRIX,
    NO_NORM,
    ExpertWeights,
    HeadMatrices,
    LatentWeights,
    LayerWeights,
    NormWeight,
    PredictorWeights,
    Run,
    Weights,
    all_weights,
    keeps_packed,
    layer_weights,
    predictor_bytes,
    predictor_precision,
    predictor_weights,
    rows_of,
    runs_of,
    weight_bytes,
)
from nightmill.worker.runners.gpu.weights.repacker import Repacker
from nightmill.worker.runners.gpu.weights.router import router_parts
from nightmill.worker.runners.gpu.weights.staging import Staging

__all__ = ["load_predictor", "load_weights"]

log = logging.getLogger(__name__)


def load_weights(
    device: Device,
    file: GgufFile,
    spec: ModelSpec,
    precision: Precision,
    *,
    report: Callable[[str], None] = log.info,
) -> Weights:
    """Upload all weights into one allocation of `weight_bytes(spec, precision)`.

    Raises ModelFileError for a tensor type that is not supported and for weights beyond the element's range,
    DeviceMemoryError where the device has no room.
    """
    _check_types(file, all_weights(spec))
    arena = Arena(device, weight_bytes(spec, precision), "the weights")
    with _loader(device, file, spec, precision, arena) as loader:
        weights = loader.load()
    report(f"weights: {arena.used:,} bytes on {device.name}")
    return weights


def load_predictor(
    device: Device, file: GgufFile, spec: ModelSpec, precision: Precision, weights: Weights
) -> PredictorWeights:
    """Upload the block that predicts further tokens beside the weights of its model; raises as these do."""
    predictor, own = spec.predictor, predictor_precision(spec, precision)
    assert predictor is not None
    assert own is not None
    _check_types(file, predictor_weights(spec))
    arena = Arena(device, predictor_bytes(spec, own), "the block that predicts further tokens")
    with _loader(device, file, predictor.model(spec), own, arena) as loader:
        return loader.predictor(predictor, weights)


def _check_types(file: GgufFile, weights: Iterable[tuple[Role, Weight]]) -> None:
    for _, weight in weights:
        for name in weight.names:
            if (kind := file.tensors[name].kind) not in SUPPORTED:
                file.fail(
                    f"tensor {name}: the type {kind.name} is not supported on the GPU; requantise the model"
                )


@contextmanager
def _loader(
    device: Device, file: GgufFile, spec: ModelSpec, precision: Precision, arena: Arena
) -> Iterator["_Loader"]:
    """Give what loads weights; at the end all that it queued is done and right."""
    staging = Staging(device)
    makers: list[Dequantizer | Repacker] = [dequantizer := Dequantizer(device, staging)]
    repacker = None
    if keeps_packed(spec, precision):
        makers.append(repacker := Repacker(device, staging))
    rounded = ModelFormats(spec, precision).rounded
    rounder = None if rounded is None else rounded.rounder(device, dequantizer)
    try:
        yield _Loader(device, file, spec, precision, arena, dequantizer, repacker, rounder)
        if not all(maker.fits() for maker in makers):
            raise _beyond(file, device.element)
    finally:
        staging.close()
        for maker in makers:
            maker.close()
        if rounder is not None:
            rounder.close()


def _beyond(file: GgufFile, element: Element) -> ModelFileError:
    """A weight is no element."""
    remedy = "--dtype bf16" if element is Element.F16 else "--reference"
    return ModelFileError(
        f"{file.path}: a weight is beyond {element.largest:g}, the largest number of {element.name}, "
        f"or is not a number; if the file is not damaged, give {remedy}"
    )


class _Loader:
    """Places the weights of a spec in an arena, and queues their way there."""

    def __init__(
        self, device: Device, file: GgufFile, spec: ModelSpec, precision: Precision, arena: Arena,
        dequantizer: Dequantizer, repacker: Repacker | None, rounder: MatrixRounder | None,
    ) -> None:  # fmt: skip
        self._device = device
        self._file = file
        self._spec = spec
        self._precision = precision
        self._arena = arena
        self._dequantizer = dequantizer
        self._repacker = repacker
        self._rounder = rounder
        self._uploading: list[npt.NDArray[np.uint16]] = []
        """Host memory that is kept until all copies are done."""

    def load(self) -> Weights:
        spec, own = self._spec, self._spec.weights()
        embedding = self._matrix(own, Role.EMBEDDING)
        layers = tuple(self._layer(index) for index in range(len(spec.layers)))
        inputs = None if spec.layer_inputs is None else spec.layer_inputs.norm
        if spec.paired_positions:
            positions, text_types = self._paired_positions(), ABSENT
        else:
            positions, text_types = self._vector(own, Role.POSITIONS), self._vector(own, Role.TEXT_TYPES)
        return Weights(
            embedding=embedding,
            layers=layers,
            output_norm=self._norm(own, Role.OUTPUT_NORM, spec.output_norm),
            head=embedding if spec.tied_head else self._matrix(own, Role.HEAD),
            layer_embedding=self._matrix(own, Role.LAYER_EMBEDDING),
            layer_projection=self._matrix(own, Role.LAYER_PROJECTION),
            layer_projection_norm=self._norm(own, Role.LAYER_PROJECTION_NORM, inputs),
            positions=positions,
            text_types=text_types,
            embedding_norm=self._norm(
                own, Role.EMBEDDING_NORM, None if spec.encoder is None else spec.encoder.norm
            ),
        )

    def predictor(self, predictor: Predictor, weights: Weights) -> PredictorWeights:
        """The block of these sizes, whose layer is the spec's, beside a model's weights."""
        own = predictor.weights(self._spec.width)
        norm = self._norm(self._spec.weights(), Role.OUTPUT_NORM, self._spec.output_norm)
        return PredictorWeights(
            embedding_norm=self._norm(own, Role.PREDICTOR_EMBEDDING_NORM, predictor.norm),
            state_norm=self._norm(own, Role.PREDICTOR_STATE_NORM, predictor.norm),
            input=self._matrix(own, Role.PREDICTOR_INPUT),
            block=replace(weights, layers=(self._layer(0),), output_norm=norm),
        )

    def _layer(self, index: int) -> LayerWeights:
        layer, own = self._spec.layers[index], layer_weights(self._spec, index)
        mixer, network = layer.mixer, layer.feed_forward
        inputs = None if layer.inputs is None else layer.inputs.norm
        output = Role.ATTN_OUTPUT if Role.ATTN_OUTPUT in own else Role.MIXER_OUTPUT
        return LayerWeights(
            attn_norm=self._norm(own, Role.ATTN_NORM, layer.attention_norm),
            qkv=self._matrix(own, Role.QKV, mixer),
            qkv_bias=self._vector(own, Role.QKV_BIAS, mixer),
            q_norm=self._vector(own, Role.Q_NORM, mixer),
            k_norm=self._vector(own, Role.K_NORM, mixer),
            attn_output=self._matrix(own, output),
            ffn_norm=self._norm(own, Role.FFN_NORM, layer.feed_forward_norm),
            gate_up=self._matrix(own, Role.GATE_UP),
            ffn_down=self._matrix(own, Role.FFN_DOWN),
            attn_output_bias=self._vector(own, Role.ATTN_OUTPUT_BIAS),
            attn_post_norm=self._norm(own, Role.ATTN_POST_NORM, layer.attention_post_norm),
            gate_up_bias=self._vector(own, Role.GATE_UP_BIAS),
            ffn_down_bias=self._vector(own, Role.FFN_DOWN_BIAS),
            ffn_post_norm=self._norm(own, Role.FFN_POST_NORM, layer.feed_forward_post_norm),
            attn_gate=self._matrix(own, Role.ATTN_GATE, mixer),
            sinks=self._vector(own, Role.SINKS),
            mixer_input=self._matrix(own, Role.MIXER_INPUT, mixer),
            mixer_controls=self._matrix(own, Role.MIXER_CONTROLS, mixer),
            mixer=self._mixer(own) if Role.MIXER_INPUT in own else None,
            experts=self._experts(own, network) if isinstance(network, Experts) else None,
            latent=self._latent(own, mixer) if isinstance(mixer, LatentAttention) else None,
            input_gate=self._matrix(own, Role.INPUT_GATE),
            input_up=self._matrix(own, Role.INPUT_UP),
            input_post_norm=self._norm(own, Role.INPUT_POST_NORM, inputs),
            scale=self._vector(own, Role.LAYER_SCALE),
        )

    def _experts(self, own: dict[Role, Weight], experts: Experts) -> ExpertWeights:
        """The weights of a mixture of experts."""
        beside = experts.beside
        plain = None if beside is None else Norm(beside.eps)
        return ExpertWeights(
            router=self._router(own[Role.ROUTER], 1.0 if beside is None else self._spec.width**-0.5),
            router_bias=self._vector(own, Role.ROUTER_BIAS),
            selection_bias=self._vector(own, Role.SELECTION_BIAS),
            gate_up=self._matrix(own, Role.EXPERTS_GATE_UP),
            gate_up_bias=self._vector(own, Role.EXPERTS_GATE_UP_BIAS),
            down=self._matrix(own, Role.EXPERTS_DOWN),
            down_bias=self._vector(own, Role.EXPERTS_DOWN_BIAS),
            gate_scale=self._vector(own, Role.EXPERTS_GATE_SCALE),
            up_scale=self._vector(own, Role.EXPERTS_UP_SCALE),
            down_scale=self._vector(own, Role.EXPERTS_DOWN_SCALE),
            latent_down=self._matrix(own, Role.LATENT_DOWN),
            latent_up=self._matrix(own, Role.LATENT_UP),
            shared_gate_up=self._matrix(own, Role.SHARED_GATE_UP),
            shared_gate_up_bias=self._vector(own, Role.SHARED_GATE_UP_BIAS),
            shared_down=self._matrix(own, Role.SHARED_DOWN),
            shared_down_bias=self._vector(own, Role.SHARED_DOWN_BIAS),
            router_norm=self._norm(own, Role.ROUTER_NORM, plain),
            routed_norm=self._norm(own, Role.ROUTED_NORM, beside),
            routed_post_norm=self._norm(own, Role.ROUTED_POST_NORM, beside),
            shared_post_norm=self._norm(own, Role.SHARED_POST_NORM, beside),
        )

    def _router(self, weight: Weight, scale: float) -> Matrix:
        """A router, whose elements are made here: it is small. `scale`: what its logits are multiplied by."""
        device, columns = self._device, weight.shape[1]
        rows = np.concatenate([self._file.array(name).reshape(-1, columns) for name in weight.names])
        if not (np.abs(rows) <= device.element.largest).all():
            raise _beyond(self._file, device.element)
        words = router_parts(rows * np.float32(scale), device.element)
        address = self._arena.take(words.nbytes)
        self._uploading.append(pinned := device.pinned(words.shape, np.uint16))
        pinned[:] = words
        device.copy_in(address, pinned)
        return Matrix(address, len(words), columns, device.element.format)

    def _latent(self, own: dict[Role, Weight], mixer: LatentAttention) -> LatentWeights:
        """The weights of latent attention; in older files each head's keys and values are one matrix."""
        latent, keys, values = mixer.latent, mixer.key_dim, mixer.value_dim
        if mixer.fused:
            address, stride = self._elements(own[Role.KV_UP]), (keys + values) * latent
            k_up = HeadMatrices(address, stride, latent, keys, turned=True)
            v_up = HeadMatrices(address + keys * latent * ELEMENT.itemsize, stride, values, latent)
        else:
            k_up = HeadMatrices(self._elements(own[Role.K_UP]), latent * keys, latent, keys)
            v_up = HeadMatrices(self._elements(own[Role.V_UP]), values * latent, values, latent)
        return LatentWeights(
            q_down=self._matrix(own, Role.Q_DOWN),
            q_norm=self._vector(own, Role.Q_DOWN_NORM),
            q_up=self._matrix(own, Role.Q_UP),
            kv_down=self._matrix(own, Role.KV_DOWN),
            kv_norm=self._vector(own, Role.KV_DOWN_NORM),
            k_up=k_up,
            v_up=v_up,
        )

    def _elements(self, weight: Weight) -> int:
        """The address of a tensor as elements."""
        ((name, shape),) = weight.parts
        address = self._arena.take(math.prod(shape) * ELEMENT.itemsize)
        self._dequantizer.load(self._file.raw(name), self._file.tensors[name].kind, address, floats=False)
        return address

    def _mixer(self, own: dict[Role, Weight]) -> MixerWeights:
        """The small weights of a mixer with a state."""
        return MixerWeights(
            convolution=self._vector(own, Role.CONVOLUTION),
            convolution_bias=self._vector(own, Role.CONVOLUTION_BIAS),
            time_step_bias=self._vector(own, Role.TIME_STEP_BIAS),
            decay=self._vector(own, Role.DECAY),
            skip=self._vector(own, Role.SKIP),
            norm=self._vector(own, Role.MIXER_NORM),
        )

    def _matrix(self, own: dict[Role, Weight], role: Role, mixer: Mixer | None = None) -> Matrix:
        """mixer: whose tensors may have their rows in another order, or more than the weight."""
        if role not in own:
            return NO_MATRIX
        weight, first, parts, order = own[role], 0, [], rows_of(mixer, role)
        for run in runs_of(self._spec, role, weight, self._precision):
            parts.append(self._run(run, first, order))
            first += run.rows
        if len(parts) == 1:
            return parts[0]
        return Matrix(parts[0].address, first, weight.shape[1], Format.MIXED, parts=tuple(parts))

    def _run(self, run: Run, first: int, order: RowOrder | None) -> Matrix:
        """Some tensors of a weight, from its row `first` on, as one matrix."""
        address, scales = map(self._arena.take, (run.bytes, run.format.scale_bytes(run.rows)))
        matrix = Matrix(address, run.rows, run.columns, run.format, scales)
        if run.format.packed:
            assert self._repacker is not None
            self._repacker.clear(matrix, sum(shape[0] for _, shape in run.parts))
        place = 0
        for name, (rows, _) in run.parts:
            kind, raw = self._file.tensors[name].kind, self._arranged(name, first + place, rows, order)
            if self._repacker is not None and run.format.packed:
                self._repacker.load(raw, matrix, place)
            elif self._rounder is not None and run.format.scaled:
                self._rounder.load(raw, kind, matrix, place, rows)
            else:
                address = matrix.address + run.format.bytes(place, run.columns)
                self._dequantizer.load(raw, kind, address, floats=False)
            place += rows
        if not run.format.packed:
            used = run.format.bytes(place, run.columns)
            self._device.fill(matrix.address + used, 0, matrix.bytes - used)
        return matrix

    def _norm(self, own: dict[Role, Weight], role: Role, norm: Norm | None) -> NormWeight:
        if norm is None:
            return NO_NORM
        bias = self._vector(own, Role(f"{role}_bias")) if norm.bias else ABSENT
        return NormWeight(self._vector(own, role), norm.eps, norm.centred, bias)

    def _paired_positions(self) -> Buffer:
        """Positions with the kind of text added: those of first texts, below them those of second ones."""
        types, table = (self._file.array(f"{name}.weight") for name in ("token_types", "position_embd"))
        both = np.concatenate([table + types[0], table + types[1]]).astype("<f4")
        address = self._arena.take(both.nbytes)
        self._dequantizer.load(
            both.reshape(-1).view(np.uint8), GGMLQuantizationType.F32, address, floats=True
        )
        return Buffer(address, both.shape, FLOAT)

    def _vector(self, own: dict[Role, Weight], role: Role, mixer: Mixer | None = None) -> Buffer:
        """mixer: the same."""
        if role not in own:
            return ABSENT
        weight, order = own[role], rows_of(mixer, role)
        address, first = self._arena.take(math.prod(weight.shape) * FLOAT.itemsize), 0
        for name, shape in weight.parts:
            raw = self._arranged(name, first, shape[0], order)
            place = address + first * math.prod(shape[1:]) * FLOAT.itemsize
            self._dequantizer.load(raw, self._file.tensors[name].kind, place, floats=True)
            first += shape[0]
        return Buffer(address, weight.shape, FLOAT)

    def _arranged(self, name: str, first: int, rows: int, order: RowOrder | None) -> npt.NDArray[np.uint8]:
        """A tensor's bytes, or those of some of its rows, in the GPU's order."""
        raw = self._file.raw(name)
        if order is None:
            return raw
        return order.arranged(raw, first, self._file.tensors[name].shape[0])
