"""Gets a model's weights onto the GPU: raw GGUF bytes go up, and are dequantised there.

Matrices become half, row-major (outputs, inputs) as in the file; those that share an input are stacked: the
QKV matrix has the rows of q, then k, then v, the gate-up matrix those of gate, then up. Vectors become float.

The bytes travel from the mapped file through two pinned buffers: while the GPU fetches and dequantises one,
threads fill the other.
"""

import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from nightmill.jobs.errors import ModelFileError
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec, Role, Weight
from nightmill.worker.runners.gpu.device import Arena, Device, aligned
from nightmill.worker.runners.gpu.functions import Function, Module
from nightmill.worker.runners.gpu.sources import source_of

__all__ = [
    "SUPPORTED",
    "Dequantizer",
    "LayerWeights",
    "Weights",
    "load_weights",
    "padded_vocab",
    "weight_bytes",
]

log = logging.getLogger(__name__)

_Kind = GGMLQuantizationType
SUPPORTED = (
    _Kind.F32, _Kind.F16, _Kind.BF16, _Kind.Q8_0, _Kind.Q4_0, _Kind.Q4_1, _Kind.Q5_0, _Kind.Q5_1,
    _Kind.Q2_K, _Kind.Q3_K, _Kind.Q4_K, _Kind.Q5_K, _Kind.Q6_K, _Kind.IQ4_NL,
)  # fmt: skip
"""The tensor types that `cuda/dequantize.cu` knows."""

STAGING_BYTES = 32 << 20
_COPY_THREADS = 4
_THREADS = 256


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block's weights as device addresses; 0 where the model has none."""

    attn_norm: int  # float (width,)
    qkv: int  # half ((heads + 2 kv_heads) head_dim, width)
    qkv_bias: int  # float ((heads + 2 kv_heads) head_dim,)
    q_norm: int  # float (head_dim,)
    k_norm: int  # float (head_dim,)
    attn_output: int  # half (width, heads head_dim)
    ffn_norm: int  # float (width,)
    gate_up: int  # half (2 ffn_width, width)
    ffn_down: int  # half (width, ffn_width)


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights as device addresses."""

    embedding: int  # half (padded_vocab, width)
    layers: tuple[LayerWeights, ...]
    output_norm: int  # float (width,)
    head: int  # half (padded_vocab, width), with rows of 0 at the end; `embedding` where the head is tied
    rope_frequencies: npt.NDArray[np.float64]  # radians per position, (rope_dim / 2,), on the host
    rope_magnitude: float


class Dequantizer:
    """Uploads tensors and dequantises them on the device's stream.

    staging  bytes of each of the two pinned buffers, and of their twins on the device
    """

    def __init__(self, device: Device, *, staging: int = STAGING_BYTES) -> None:
        self._device = device
        self._module = Module.of(device, source_of("dequantize"))
        self._functions: dict[str, Function] = {}
        self._pinned = [device.pinned(staging, np.uint8) for _ in range(2)]
        self._raw = [device.allocate(staging, "staged weights") for _ in range(2)]
        self._free = [device.event() for _ in range(2)]
        self._bad = device.upload(np.zeros(1, dtype=np.int32))
        self._turn = 0
        self._staging = staging
        self._pool = ThreadPoolExecutor(_COPY_THREADS, "weights")

    def load(self, raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType, out: int, *, half: bool) -> None:
        """Queue the tensor with these bytes to be written at `out` as half, or else as float."""
        block, size = GGML_QUANT_SIZES[kind]
        step = self._staging // (size * 256) * size * 256  # whole blocks, and aligned results
        for start in range(0, len(raw), step):
            part = raw[start : start + step]
            count = len(part) // size * block
            self._load_part(part, kind, out + start // size * block * (2 if half else 4), count, half)

    def _load_part(
        self, part: npt.NDArray[np.uint8], kind: GGMLQuantizationType, out: int, count: int, half: bool
    ) -> None:
        turn, self._turn = self._turn, 1 - self._turn
        device, pinned = self._device, self._pinned[turn][: len(part)]
        device.wait(self._free[turn], "the upload of weights")
        share = -(-len(part) // _COPY_THREADS)
        pieces = [slice(start, start + share) for start in range(0, len(part), share)]
        list(self._pool.map(lambda piece: np.copyto(pinned[piece], part[piece]), pieces))
        device.copy_in(self._raw[turn], pinned)
        self._function(f"dequantize_{kind.name}_{'f16' if half else 'f32'}")(
            (-(-count // _THREADS), 1), (_THREADS, 1, 1), self._raw[turn], out, count, self._bad
        )
        self._free[turn].record(device.stream)

    def _function(self, name: str) -> Function:
        if name not in self._functions:
            self._functions[name] = self._module.function(name, "PPqP")
        return self._functions[name]

    def fits_half(self) -> bool:
        """Wait for all that was queued; False where a weight stored as half was too large, or no number."""
        return not self._device.download(self._bad, 1, np.int32)[0]

    def close(self) -> None:
        """Give the staging memory back."""
        self._device.synchronize()
        self._pool.shutdown()
        for address in (*self._raw, self._bad):
            self._device.free(address)
        self._raw, self._pinned = [], []


def padded_vocab(spec: ModelSpec) -> int:
    """Rows of the LM head, and numbers in a row of logits: a multiple of 8.

    Of other sizes the library's algorithms for few rows and for many sum in different orders.
    """
    return -(-spec.vocab // 8) * 8


def weight_bytes(spec: ModelSpec) -> int:
    """Bytes that the weights take on the device."""
    return sum(aligned(_size(weight) + _padding(spec, role)) for role, weight in spec.all_weights())


def load_weights(
    device: Device, file: GgufFile, spec: ModelSpec, *, report: Callable[[str], None] = log.info
) -> Weights:
    """Upload all weights into one allocation of `weight_bytes(spec)`.

    Raises ModelFileError for a tensor type that is not supported and for weights beyond half's range,
    DeviceMemoryError where the device has no room.
    """
    for name in (name for _, weight in spec.all_weights() for name in weight.names):
        if (kind := file.tensors[name].kind) not in SUPPORTED:
            file.fail(
                f"tensor {name}: the type {kind.name} is not supported on the GPU; requantise the model"
            )
    arena = Arena(device, weight_bytes(spec), "the weights")
    dequantizer = Dequantizer(device)
    try:
        weights = _load(device, file, spec, arena, dequantizer)
        if not dequantizer.fits_half():
            raise ModelFileError(
                f"{file.path}: a weight is beyond 65504, the largest number of FP16, or is not a number; "
                "such a model runs only with --reference"
            )
    finally:
        dequantizer.close()
    report(f"weights: {arena.used:,} bytes on {device.name}")
    return weights


def _load(device: Device, file: GgufFile, spec: ModelSpec, arena: Arena, dequantizer: Dequantizer) -> Weights:
    def place(role: Role, weights: dict[Role, Weight]) -> int:
        """The address of a weight, or 0 where the model has none."""
        if (weight := weights.get(role)) is None:
            return 0
        padding = _padding(spec, role)
        start = address = arena.take(_size(weight) + padding)
        if padding:
            device.fill(start + _size(weight), 0, padding)
        for name, shape in weight.parts:
            dequantizer.load(file.raw(name), file.tensors[name].kind, address, half=weight.is_matrix)
            address += math.prod(shape) * _itemsize(weight)
        return start

    def layer(index: int) -> LayerWeights:
        weights = spec.layer_weights(index)
        return LayerWeights(
            attn_norm=place(Role.ATTN_NORM, weights),
            qkv=place(Role.QKV, weights),
            qkv_bias=place(Role.QKV_BIAS, weights),
            q_norm=place(Role.Q_NORM, weights),
            k_norm=place(Role.K_NORM, weights),
            attn_output=place(Role.ATTN_OUTPUT, weights),
            ffn_norm=place(Role.FFN_NORM, weights),
            gate_up=place(Role.GATE_UP, weights),
            ffn_down=place(Role.FFN_DOWN, weights),
        )

    weights = spec.weights()
    embedding = place(Role.EMBEDDING, weights)
    rope = spec.layers[0].attention.rope
    return Weights(
        embedding=embedding,
        layers=tuple(layer(index) for index in range(len(spec.layers))),
        output_norm=place(Role.OUTPUT_NORM, weights),
        head=embedding if spec.tied_head else place(Role.HEAD, weights),
        rope_frequencies=rope.frequencies(),
        rope_magnitude=rope.magnitude,
    )


def _padding(spec: ModelSpec, role: Role) -> int:
    """Bytes behind a weight: rows of the head that no token has."""
    head = Role.EMBEDDING if spec.tied_head else Role.HEAD
    return 2 * (padded_vocab(spec) - spec.vocab) * spec.width if role is head else 0


def _size(weight: Weight) -> int:
    """Bytes on the device: matrices are half, vectors float."""
    return math.prod(weight.shape) * _itemsize(weight)


def _itemsize(weight: Weight) -> int:
    return 2 if weight.is_matrix else 4
