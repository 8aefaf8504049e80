"""Raw GGUF bytes to elements or float, on the GPU.

The bytes travel from the mapped file through two pinned buffers: while the GPU fetches and dequantises one,
threads fill the other.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Function, Module
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.weights.grids import grid_of

__all__ = ["SUPPORTED", "Dequantizer"]

_Kind = GGMLQuantizationType
SUPPORTED = (
    _Kind.F32, _Kind.F16, _Kind.BF16, _Kind.Q8_0, _Kind.Q4_0, _Kind.Q4_1, _Kind.Q5_0, _Kind.Q5_1,
    _Kind.Q2_K, _Kind.Q3_K, _Kind.Q4_K, _Kind.Q5_K, _Kind.Q6_K, _Kind.IQ4_NL, _Kind.IQ4_XS,
    _Kind.IQ3_XXS, _Kind.IQ3_S, _Kind.IQ2_XXS, _Kind.IQ2_XS, _Kind.IQ2_S, _Kind.IQ1_S, _Kind.IQ1_M,
    _Kind.TQ1_0, _Kind.TQ2_0, _Kind.MXFP4,
)  # fmt: skip
"""The tensor types that `dequantize.cu` knows."""

STAGING_BYTES = 32 << 20
_COPY_THREADS = 4
_THREADS = 256


class Dequantizer:
    """Uploads tensors and dequantises them on the device's stream.

    staging  bytes of each of the two pinned buffers, and of their twins on the device
    """

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """What it is compiled from."""
        return [source_of("dequantize")]

    def __init__(self, device: Device, *, staging: int = STAGING_BYTES) -> None:
        self._device = device
        self._module = Module.of(device, source_of("dequantize"))
        self._functions: dict[str, Function] = {}
        self._grids: dict[GGMLQuantizationType, int] = {}  # addresses of their tables; 0 where there is none
        self._pinned = [device.pinned(staging, np.uint8) for _ in range(2)]
        self._raw = [device.allocate(staging, "staged weights") for _ in range(2)]
        self._free = [device.event() for _ in range(2)]
        self._bad = device.upload(np.zeros(1, dtype=np.int32))
        self._turn = 0
        self._staging = staging
        self._pool = ThreadPoolExecutor(_COPY_THREADS, "weights")

    def load(self, raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType, out: int, *, floats: bool) -> None:
        """Queue the tensor with these bytes to be written at `out` as floats, or else as elements."""
        block, size = GGML_QUANT_SIZES[kind]
        step = self._staging // (size * 256) * size * 256  # whole blocks, and aligned results
        written = (FLOAT if floats else ELEMENT).itemsize
        for start in range(0, len(raw), step):
            part = raw[start : start + step]
            count = len(part) // size * block
            self._load_part(part, kind, out + start // size * block * written, count, floats)

    def _load_part(
        self, part: npt.NDArray[np.uint8], kind: GGMLQuantizationType, out: int, count: int, floats: bool
    ) -> None:
        turn, self._turn = self._turn, 1 - self._turn
        device, pinned = self._device, self._pinned[turn][: len(part)]
        device.wait(self._free[turn], "the upload of weights")
        share = -(-len(part) // _COPY_THREADS)
        pieces = [slice(start, start + share) for start in range(0, len(part), share)]
        list(self._pool.map(lambda piece: np.copyto(pinned[piece], part[piece]), pieces))
        device.copy_in(self._raw[turn], pinned)
        self._function(f"dequantize_{kind.name}_{'f32' if floats else 'element'}")(
            (-(-count // _THREADS), 1),
            (_THREADS, 1, 1),
            self._raw[turn],
            out,
            count,
            self._grid(kind),
            self._bad,
        )
        self._free[turn].record(device.stream)

    def _grid(self, kind: GGMLQuantizationType) -> int:
        if kind not in self._grids:
            grid = grid_of(kind)
            self._grids[kind] = 0 if grid is None else self._device.upload(grid, f"the table of {kind.name}")
        return self._grids[kind]

    def _function(self, name: str) -> Function:
        if name not in self._functions:
            self._functions[name] = self._module.function(name, "PPqPP")
        return self._functions[name]

    def fits(self) -> bool:
        """Wait for all that was queued; False where what became an element was too large, or no number."""
        return not self._device.download(self._bad, 1, np.int32)[0]

    def close(self) -> None:
        """Give the staging memory back."""
        self._device.synchronize()
        self._pool.shutdown()
        for address in filter(None, (*self._raw, self._bad, *self._grids.values())):
            self._device.free(address)
        self._raw, self._pinned = [], []
