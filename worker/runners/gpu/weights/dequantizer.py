"""Raw GGUF bytes to elements or float, on the GPU."""

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Function, Module
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.weights.grids import grid_of
from nightmill.worker.runners.gpu.weights.staging import Staging

__all__ = ["SUPPORTED", "Dequantizer"]

_Kind = GGMLQuantizationType
SUPPORTED = (
    _Kind.F32, _Kind.F16, _Kind.BF16, _Kind.Q8_0, _Kind.Q4_0, _Kind.Q4_1, _Kind.Q5_0, _Kind.Q5_1,
    _Kind.Q2_K, _Kind.Q3_K, _Kind.Q4_K, _Kind.Q5_K, _Kind.Q6_K, _Kind.IQ4_NL, _Kind.IQ4_XS,
    _Kind.IQ3_XXS, _Kind.IQ3_S, _Kind.IQ2_XXS, _Kind.IQ2_XS, _Kind.IQ2_S, _Kind.IQ1_S, _Kind.IQ1_M,
    _Kind.TQ1_0, _Kind.TQ2_0, _Kind.MXFP4,
)  # fmt: skip
"""The tensor types that `dequantize.cu` knows."""

_THREADS = 256


class Dequantizer:
    """Uploads tensors and dequantises them on the device's stream; launches `dequantize.cu`."""

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        return [source_of("dequantize")]

    def __init__(self, device: Device, staging: Staging) -> None:
        self._device = device
        self._staging = staging
        self._module = Module.of(device, source_of("dequantize"))
        self._functions: dict[str, Function] = {}
        self._grids: dict[GGMLQuantizationType, int] = {}  # addresses of their tables; 0 where there is none
        self._bad = device.upload(np.zeros(1, dtype=np.int32))

    def load(self, raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType, out: int, *, floats: bool) -> None:
        """Queue the tensor with these bytes to be written at `out` as floats, or else as elements."""
        block, size = GGML_QUANT_SIZES[kind]
        written = (FLOAT if floats else ELEMENT).itemsize
        function = self._function(f"dequantize_{kind.name}_{'f32' if floats else 'element'}")
        for address, start, taken in self._staging.parts(raw, size * 256):  # so that results are aligned
            count, place = taken // size * block, out + start // size * block * written
            function(
                (-(-count // _THREADS), 1),
                (_THREADS, 1, 1),
                address,
                place,
                count,
                self._grid(kind),
                self._bad,
            )

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
        """Give its memory back, when all is done."""
        for address in filter(None, (self._bad, *self._grids.values())):
            self._device.free(address)
