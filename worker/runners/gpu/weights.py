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
from nightmill.worker.model.config import ModelConfig, expected_tensors, rope_frequencies
from nightmill.worker.model.gguf_file import GgufFile
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


def padded_vocab(config: ModelConfig) -> int:
    """Rows of the LM head, and numbers in a row of logits: a multiple of 8.

    Of other sizes the library's algorithms for few rows and for many sum in different orders.
    """
    return -(-config.vocab // 8) * 8


def weight_bytes(config: ModelConfig) -> int:
    """Bytes that the weights take on the device."""
    return sum(
        aligned(_size(shape) + _padding(config, name)) for name, shape in expected_tensors(config).items()
    )


def load_weights(
    device: Device, file: GgufFile, config: ModelConfig, *, report: Callable[[str], None] = log.info
) -> Weights:
    """Upload all weights into one allocation of `weight_bytes(config)`.

    Raises ModelFileError for a tensor type that is not supported and for weights beyond half's range,
    DeviceMemoryError where the device has no room.
    """
    for name in expected_tensors(config):
        if (kind := file.tensors[name].kind) not in SUPPORTED:
            file.fail(
                f"tensor {name}: the type {kind.name} is not supported on the GPU; requantise the model"
            )
    arena = Arena(device, weight_bytes(config), "the weights")
    dequantizer = Dequantizer(device)
    try:
        weights = _load(device, file, config, arena, dequantizer)
        if not dequantizer.fits_half():
            raise ModelFileError(
                f"{file.path}: a weight is beyond 65504, the largest number of FP16, or is not a number; "
                "such a model runs only with --reference"
            )
    finally:
        dequantizer.close()
    report(f"weights: {arena.used:,} bytes on {device.name}")
    return weights


def _load(
    device: Device, file: GgufFile, config: ModelConfig, arena: Arena, dequantizer: Dequantizer
) -> Weights:
    def place(*names: str) -> int:
        """The address of tensors that follow each other, or 0 where the file has none of them."""
        present = [name for name in names if name in file.tensors]
        infos = [file.tensors[name] for name in present]
        if not infos:
            return 0
        half = len(infos[0].shape) == 2
        sizes = [_size(info.shape) for info in infos]
        padding = _padding(config, *present)
        start = address = arena.take(sum(sizes) + padding)
        if padding:
            device.fill(start + sum(sizes), 0, padding)
        for name, info, size in zip(present, infos, sizes, strict=True):
            dequantizer.load(file.raw(name), info.kind, address, half=half)
            address += size
        return start

    def layer(index: int) -> LayerWeights:
        def block(*names: str) -> int:
            return place(*(f"blk.{index}.{name}" for name in names))

        return LayerWeights(
            attn_norm=block("attn_norm.weight"),
            qkv=block("attn_q.weight", "attn_k.weight", "attn_v.weight"),
            qkv_bias=block("attn_q.bias", "attn_k.bias", "attn_v.bias"),
            q_norm=block("attn_q_norm.weight"),
            k_norm=block("attn_k_norm.weight"),
            attn_output=block("attn_output.weight"),
            ffn_norm=block("ffn_norm.weight"),
            gate_up=block("ffn_gate.weight", "ffn_up.weight"),
            ffn_down=block("ffn_down.weight"),
        )

    embedding = place("token_embd.weight")
    layers = tuple(layer(index) for index in range(config.layers))
    divisors = file.array("rope_freqs.weight") if "rope_freqs.weight" in file.tensors else None
    frequencies, magnitude = rope_frequencies(config, divisors)
    return Weights(
        embedding=embedding,
        layers=layers,
        output_norm=place("output_norm.weight"),
        head=embedding if config.tied_head else place("output.weight"),
        rope_frequencies=frequencies,
        rope_magnitude=magnitude,
    )


def _padding(config: ModelConfig, *names: str) -> int:
    """Bytes behind tensors: rows of the head that no token has."""
    head = "token_embd.weight" if config.tied_head else "output.weight"
    return 2 * (padded_vocab(config) - config.vocab) * config.width if head in names else 0


def _size(shape: tuple[int, ...]) -> int:
    """Bytes on the device: matrices are half, vectors float."""
    return math.prod(shape) * (2 if len(shape) == 2 else 4)
