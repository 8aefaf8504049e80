"""Raw GGUF bytes to packed matrices, on the GPU: the same bits, as `cuda/common/packed.cuh` says."""

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Function, Module, blocks_for
from nightmill.worker.runners.gpu.device.operands import PANEL_ROWS, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.weights.layout import keeps_packed
from nightmill.worker.runners.gpu.weights.staging import Staging

__all__ = ["Repacker"]

_GROUP = 32  # weights a thread


class Repacker:
    """Uploads rows of matrices and repacks them on the device's stream; launches `repack.cu`."""

    @staticmethod
    def sources(spec: ModelSpec, precision: Precision, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        return [source_of("repack")] if keeps_packed(spec, precision) else []

    def __init__(self, device: Device, staging: Staging) -> None:
        self._device = device
        self._staging = staging
        self._module = Module.of(device, source_of("repack"))
        self._functions: dict[Format, Function] = {}
        self._bad = device.upload(np.zeros(1, dtype=np.int32))

    def clear(self, matrix: Matrix, rows: int) -> None:
        """Queue zeros for what a matrix, of which so many rows will come, has beside them in its packets."""
        if rows < matrix.rows or rows % PANEL_ROWS or matrix.columns % matrix.format.step:
            self._device.fill(matrix.address, 0, matrix.bytes)

    def load(self, raw: npt.NDArray[np.uint8], matrix: Matrix, first: int) -> None:
        """Queue the rows with these bytes to become the matrix's from row `first` on."""
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[matrix.format.name]]
        row = matrix.columns // block * size
        for address, start, taken in self._staging.parts(raw, row):
            rows = taken // row
            self._function(matrix.format)(
                blocks_for(rows * matrix.columns // _GROUP), (256, 1, 1), address, matrix.address,
                first + start // row, rows, matrix.columns, self._bad,
            )  # fmt: skip

    def _function(self, format_: Format) -> Function:
        if format_ not in self._functions:
            self._functions[format_] = self._module.function(f"repack_{format_.name}", "PPqqiP")
        return self._functions[format_]

    def fits(self) -> bool:
        """Wait for all that was queued; False if a weight does not fit an element, or is not a number."""
        return not self._device.download(self._bad, 1, np.int32)[0]

    def close(self) -> None:
        """Give its memory back, when all is done."""
        self._device.free(self._bad)
