"""Products of many rows with packed weights by `packed_mma.cu`, on GPUs that have no faster kernels."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Module
from nightmill.worker.runners.gpu.device.operands import Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import Source, instances, source_of
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.products.packed.portable import RESULTS, PortablePacked, sources_of
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.shapes import Candidate, Shape

__all__ = ["PACKED_MMA_TILES", "PackedMma", "PackedMmaTile"]

_LINE, _STAGES = 128, 3  # bytes of a row of x in a step, and steps that are copied
_LEAST_DEPTH = 128  # elements of K that weights are copied by, unless a packet has more
_PANEL = 8
_MANY_ROWS = 512  # from here on only tiles of 128 rows
_FEWEST_ROWS = 17  # up to which a tile of 64 rows would mostly multiply nothing


@dataclass(frozen=True, slots=True)
class PackedMmaTile:
    """A tile of `rows` by `columns` outputs, of which each of `warps` has a part of all rows."""

    rows: int
    columns: int
    warps: int

    @property
    def arguments(self) -> tuple[int, ...]:
        """Arguments of the kernel template, which are also in the names of kernels."""
        return self.rows, self.columns, self.warps

    @property
    def name(self) -> str:
        """The end of the kernel's name."""
        return "_".join(map(str, self.arguments))

    def shared(self, format_: Format) -> int:
        """Bytes of dynamic shared memory, as packed_mma.cu says."""
        packets = max(1, _LEAST_DEPTH // format_.step)
        return _STAGES * self.rows * _LINE + 2 * self.columns // _PANEL * packets * format_.packet


PACKED_MMA_TILES = (
    PackedMmaTile(128, 128, 8),
    PackedMmaTile(128, 64, 8),
    PackedMmaTile(64, 128, 8),
    PackedMmaTile(64, 64, 8),
)


class PackedMma(PortablePacked[PackedMmaTile]):
    """Launches `packed_mma.cu` for matrices of these formats.

    activate, gate_up  activations by themselves, and room for what they read, elements (rows, 2 F)
    """

    def __init__(
        self, device: Device, formats: Collection[Format], activate: Activate, gate_up: Buffer
    ) -> None:
        super().__init__(activate, gate_up)
        self._most_shared = device.features.block_shared
        modules = {format_: Module.of(device, _source(format_)) for format_ in formats}
        self._kernels = {
            (format_, name, tile): module.function(
                f"packed_mma_{name}_{tile.name}", "PPPiiii", shared=tile.shared(format_), dependent=True
            )
            for format_, module in modules.items()
            for name in RESULTS
            for tile in PACKED_MMA_TILES
            if tile.shared(format_) <= self._most_shared
        }

    @staticmethod
    def sources(spec: ModelSpec, precision: Precision, *, hopper: bool) -> list[Source]:
        """List the kernel files: one for each format."""
        return sources_of(_source, spec, precision, hopper=hopper)

    def candidates(self, shape: Shape) -> list[Candidate]:
        """The tiles that are worth timing for a shape, of formats that they fit a block with."""
        if not (shape.format.packed or shape.format is Format.MIXED) or shape.rows < _FEWEST_ROWS:
            return []
        return [
            Candidate(f"packed mma {tile.name}", partial(self.kernel, tile), partial(self._suits, tile))
            for tile in PACKED_MMA_TILES
            if self._suits(tile, shape)
        ]

    def _suits(self, tile: PackedMmaTile, shape: Shape) -> bool:
        formats = (
            {format_ for format_, _, _ in self._kernels} if shape.format is Format.MIXED else {shape.format}
        )
        fits = all(tile.shared(format_) <= self._most_shared for format_ in formats)
        heights = {64} if shape.rows <= 64 else {64, 128} if shape.rows <= _MANY_ROWS else {128}
        return fits and tile.rows in heights

    def _launch(
        self, tile: PackedMmaTile, result: str, part: Matrix, x: int, y: int, rows: int, pitch: int
    ) -> None:
        blocks = -(-rows // tile.rows) * -(-part.rows // tile.columns)
        self._kernels[part.format, result, tile](
            (blocks, 1), (32 * tile.warps, 1, 1), x, part.address, y, rows, part.rows, part.columns, pitch,
            shared=tile.shared(part.format),
        )  # fmt: skip


def _source(format_: Format) -> Source:
    return source_of(
        "packed_mma",
        f"-DFORMAT={format_.name}",
        instances("PACKED_MMAS", (tile.arguments for tile in PACKED_MMA_TILES)),
    )
