"""Products added to the residual stream by `hopper_split.cu`, where blocks share K: shapes and launches."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Function, Module
from nightmill.worker.runners.gpu.device.operands import Buffer, Matrix
from nightmill.worker.runners.gpu.device.sources import Source, instances, source_of
from nightmill.worker.runners.gpu.device.tensor_maps import TensorMaps
from nightmill.worker.runners.gpu.kinds import kinds_of
from nightmill.worker.runners.gpu.shapes import SUMMED, Candidate, Kernel, Kind, Shape, first_sum

__all__ = ["SPLIT_TILES", "SplitTile", "SplitTiles", "split_tiles"]

_BOX_COLUMNS = 64  # elements of K in a box
_WGMMA_ROWS = 64
_SHARED_ALIGNMENT = 1024
_FEW_ROWS, _MOST_ROWS = 256, 1024  # for tiles of 64 rows, and of more; above, blocks that stay win
_ONE_TILE = 64  # rows up to which each weight belongs to one tile only


@dataclass(frozen=True, slots=True)
class SplitTile:
    """A tile of `rows` by `columns` rows of the weight, of which a cluster has some.

    boxes   boxes of 64 elements of K in a step
    halves  2: a block for each of the two sums of a long K
    down    tiles of rows in a cluster, which share weights
    stages  steps that a block has copies of
    """

    rows: int
    columns: int
    boxes: int
    halves: int
    down: int
    stages: int

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        copies = self.stages * self.boxes * (self.rows + self.columns) * _BOX_COLUMNS * 2
        sums = self._computed * self.columns * 4 // 2 if self.halves > 1 else 0
        read_past = (self._computed - self.rows) * _BOX_COLUMNS * 2  # by wgmma
        return copies + sums + read_past + _SHARED_ALIGNMENT

    @property
    def threads(self) -> int:
        return self._computed // _WGMMA_ROWS * 128 + 32

    @property
    def arguments(self) -> tuple[int, ...]:
        """Arguments of the kernel template."""
        return self.rows, self.columns, self.boxes, self.halves, self.down, self.stages

    @property
    def name(self) -> str:
        """The end of the kernel's name."""
        return "_".join(map(str, self.arguments))

    @property
    def blocks(self) -> int:
        """In a cluster."""
        return self.halves * self.down

    @property
    def _computed(self) -> int:
        """Rows that wgmma computes."""
        return max(self.rows, _WGMMA_ROWS)

    def suits(self, outputs: int, inputs: int) -> bool:
        """Return whether the tile has the sums that a product of these sizes has."""
        return (self.halves > 1) == (first_sum(outputs, inputs) < inputs)


SPLIT_TILES = (
    SplitTile(16, 16, 4, 2, 1, 13),
    SplitTile(32, 16, 4, 2, 1, 9),
    SplitTile(64, 32, 2, 2, 1, 9),
    SplitTile(64, 64, 2, 2, 1, 6),
    SplitTile(128, 64, 2, 2, 1, 4),
    SplitTile(128, 128, 1, 2, 2, 6),
    SplitTile(16, 16, 4, 1, 1, 4),
    SplitTile(32, 16, 4, 1, 1, 4),
    SplitTile(64, 16, 4, 1, 1, 4),
    SplitTile(64, 32, 2, 1, 1, 9),
    SplitTile(64, 32, 2, 1, 2, 9),
    SplitTile(64, 64, 2, 1, 1, 7),
)


def split_tiles(rows: int, outputs: int, inputs: int) -> list[SplitTile]:
    """Return the tiles that are worth timing for so many rows."""
    height = min((tile.rows for tile in SPLIT_TILES if tile.rows >= rows), default=_WGMMA_ROWS)
    return [
        tile
        for tile in SPLIT_TILES
        if tile.suits(outputs, inputs) and (tile.down - 1) * tile.rows < rows
        and (
            (tile.rows == min(height, _WGMMA_ROWS) and rows <= _FEW_ROWS)
            or (tile.rows > _WGMMA_ROWS and _WGMMA_ROWS < rows <= _MOST_ROWS)
        )
    ]  # fmt: skip


class SplitTiles:
    """Launches `hopper_split.cu`, for weights that are elements: `HopperTiles`' sums, to the same bits.

    kinds  of products that there will be
    """

    def __init__(self, device: Device, kinds: Collection[Kind]) -> None:
        self._maps = TensorMaps(device)
        self._format = device.element.format
        self._functions = {
            kind: _load(Module.of(device, source), kind) for kind, source in _sources(kinds).items()
        }

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        return list(_sources(kinds_of(spec)).values()) if hopper else []

    def candidates(self, shape: Shape) -> list[Candidate]:
        """The tiles that are worth timing for a shape."""
        aligned = shape.inputs % 8 == 0 and shape.outputs % 8 == 0
        if shape.kind not in self._functions or not aligned or shape.format is not self._format:
            return []
        return [
            Candidate(f"split {tile.name}", partial(self.kernel, tile))
            for tile in split_tiles(shape.rows, shape.outputs, shape.inputs)
        ]

    def kernel(self, tile: SplitTile, shape: Shape) -> Kernel:
        """Bind a tile to a shape that it suits."""
        function, maps = self._functions[shape.kind][tile], self._maps
        rows, outputs, inputs = shape.rows, shape.outputs, shape.inputs
        clusters = -(-outputs // tile.columns) * -(-rows // (tile.rows * tile.down))
        grid, block, shared = (clusters * tile.blocks, 1), (tile.threads, 1, 1), tile.shared
        fetches = rows <= _ONE_TILE  # asked for by several tiles, more is lost than won
        first = first_sum(outputs, inputs)

        def kernel(x: Buffer, weight: Matrix, y: Buffer) -> None:
            function(
                grid, block, maps(x.address, rows, inputs, tile.rows),
                maps(weight.address, outputs, inputs, tile.columns), weight.address if fetches else 0,
                y.address, rows, outputs, inputs, first, shared=shared,
            )  # fmt: skip

        return kernel


def _load(module: Module, kind: Kind) -> dict[SplitTile, Function]:
    return {
        tile: module.function(
            f"{kind.value}_{tile.name}", "128s128sPPiiii", shared=tile.shared, dependent=True
        )
        for tile in SPLIT_TILES
    }


def _sources(kinds: Collection[Kind]) -> dict[Kind, Source]:
    """A file for each kind of product."""
    return {
        kind: source_of(
            "hopper_split",
            instances(
                "SPLIT_KERNEL",
                ((kind.value, int(kind is Kind.RESIDUAL), *tile.arguments) for tile in SPLIT_TILES),
            ),
        )
        for kind in SUMMED
        if kind in kinds
    }
