"""Products of few rows with packed weights by `packed_rows.cu`, on GPUs that have no faster kernels."""

from collections.abc import Collection
from functools import partial

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Module
from nightmill.worker.runners.gpu.device.operands import PANEL_ROWS, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.products.packed.portable import RESULTS, PortablePacked, sources_of
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.shapes import Candidate, Shape

__all__ = ["PackedRows"]

_WARPS = 4
_DEPTH, _PITCH = 256, 528  # inputs of a step, and bytes that a row of x has of them in shared memory
_TILES = (1, 2, 4)  # of 16 rows


class PackedRows(PortablePacked[int]):
    """Launches `packed_rows.cu` for matrices of these formats, in tiles of 16, 32 and 64 rows.

    activate, gate_up  activations by themselves, and room for what they read, elements (rows, 2 F)
    """

    def __init__(
        self, device: Device, formats: Collection[Format], activate: Activate, gate_up: Buffer
    ) -> None:
        super().__init__(activate, gate_up)
        modules = {format_: Module.of(device, _source(format_)) for format_ in formats}
        self._kernels = {
            (format_, name, tiles): module.function(
                f"packed_{name}_{tiles}", "PPPiiii", shared=_shared(format_, tiles), dependent=True
            )
            for format_, module in modules.items()
            for name in RESULTS
            for tiles in _TILES
        }

    @staticmethod
    def sources(spec: ModelSpec, precision: Precision, *, hopper: bool) -> list[Source]:
        """List the kernel files: one for each format."""
        return sources_of(_source, spec, precision, hopper=hopper)

    def candidates(self, shape: Shape) -> list[Candidate]:
        """The kernel for so many rows."""
        packed = shape.format.packed or shape.format is Format.MIXED
        tiles = next((tiles for tiles in _TILES if shape.rows <= 16 * tiles), None)
        if not packed or tiles is None:
            return []
        return [
            Candidate(f"packed rows {tiles}", partial(self.kernel, tiles), lambda to: to.rows <= 16 * tiles)
        ]

    def _launch(self, tile: int, result: str, part: Matrix, x: int, y: int, rows: int, pitch: int) -> None:
        panels = -(-part.rows // PANEL_ROWS)
        self._kernels[part.format, result, tile](
            (-(-panels // _WARPS), 1), (32 * _WARPS, 1, 1), x, part.address, y, rows, part.rows, part.columns,
            pitch, shared=_shared(part.format, tile),
        )  # fmt: skip


def _shared(format_: Format, tiles: int) -> int:
    """Bytes of shared memory of a block, as packed_rows.cu says."""
    stages = 3 if tiles < 4 else 2
    return stages * (16 * tiles * _PITCH + _WARPS * (_DEPTH // format_.step) * format_.packet)


def _source(format_: Format) -> Source:
    return source_of("packed_rows", f"-DFORMAT={format_.name}")
