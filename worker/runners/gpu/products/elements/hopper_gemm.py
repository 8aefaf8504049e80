"""Products by `hopper_gemm.cu`, whose tiles all have the same sums, so that they give the same bits."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Function, Module
from nightmill.worker.runners.gpu.device.operands import Buffer, Matrix
from nightmill.worker.runners.gpu.device.sources import Source, instances, source_of
from nightmill.worker.runners.gpu.device.tensor_maps import NO_MAP, PIECE_BYTES, PIECE_ROWS, TensorMaps
from nightmill.worker.runners.gpu.kinds import kinds_of
from nightmill.worker.runners.gpu.shapes import DEPTH, SUMMED, Candidate, Kernel, Kind, Shape, first_sum

__all__ = ["TILES", "HopperTiles", "Tile", "load_tiles"]

_SHARED_ALIGNMENT = 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of 64 `groups` rows by `columns` rows of the weight, `stages` copies ahead.

    The blocks of a `cluster` share weights. `buffers`: pieces of 64 rows by 128 bytes that 64 rows have in
    shared memory for results, which bulk copies take to memory; 0: results go there from registers.
    """

    groups: int
    columns: int
    stages: int
    cluster: int = 1
    buffers: int = 0

    @property
    def arguments(self) -> tuple[int, ...]:
        """Arguments of the kernel template, which are also in the names of kernels."""
        return self.groups, self.columns, self.stages, self.cluster, self.buffers

    @property
    def name(self) -> str:
        """The end of the kernel's name."""
        return "_".join(map(str, self.arguments))

    @property
    def rows(self) -> int:
        return 64 * self.groups

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        stage = (self.rows + self.columns) * DEPTH * 2
        pieces = self.groups * self.buffers
        return self.stages * stage + pieces * PIECE_ROWS * PIECE_BYTES + _SHARED_ALIGNMENT

    @property
    def threads(self) -> int:
        return 128 * self.groups + 32

    def grid(self, rows: int, column_tiles: int, at_once: int) -> tuple[int, int]:
        """No more blocks than the device holds `at_once`, which go on to the next tile."""
        tiles = -(-rows // (self.rows * self.cluster)) * column_tiles
        return min(tiles * self.cluster, at_once), 1


# The best for many rows first.
_GATED = (
    Tile(2, 256, 4, 2, 2),
    Tile(2, 256, 4, 1, 2),
    Tile(2, 224, 5),
    Tile(2, 160, 5, 2),
    Tile(2, 160, 5),
    Tile(1, 160, 7, 2),
    Tile(1, 160, 7),
    Tile(1, 128, 8),
    Tile(1, 128, 4),
    Tile(1, 64, 13),
    Tile(1, 64, 6),
)
_SUMMED = (
    Tile(2, 256, 4, 2, 2),
    Tile(2, 128, 5, 1, 4),
    Tile(2, 64, 8),
    Tile(1, 64, 12),
    Tile(1, 64, 6),
    Tile(1, 32, 8),
)
TILES = {
    Kind.PLAIN: (Tile(1, 64, 12), Tile(1, 32, 14), Tile(1, 32, 8)),
    Kind.SWIGLU: _GATED,
    Kind.GEGLU: _GATED,
    Kind.RESIDUAL: _SUMMED,
    Kind.ADDEND: _SUMMED,
}


class HopperTiles:
    """Launches `hopper_gemm.cu`, for weights that are elements; `kinds`: of products that there will be."""

    def __init__(self, device: Device, kinds: Collection[Kind]) -> None:
        self._maps = TensorMaps(device)
        self._format = device.element.format
        arguments = "128s128s128sPiiii"
        self._kernels = {
            kind: load_tiles(Module.of(device, source), device, f"{kind.value}_", arguments, TILES[kind])
            for kind, source in _sources(kinds).items()
        }

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files: one for each kind of product, so that they are compiled at once."""
        return list(reversed(_sources(kinds_of(spec)).values())) if hopper else []

    def candidates(self, shape: Shape) -> list[Candidate]:
        """The tiles for a shape."""
        aligned = shape.inputs % 8 == 0 and shape.outputs % 8 == 0
        tiles = self._kernels.get(shape.kind, ()) if aligned and shape.format is self._format else ()
        return [Candidate(f"tile {tile.name}", partial(self.kernel, tile)) for tile in tiles]

    def kernel(self, tile: Tile, shape: Shape) -> Kernel:
        """Bind a tile to a shape."""
        function, at_once = self._kernels[shape.kind][tile]
        maps, rows, outputs, inputs = self._maps, shape.rows, shape.outputs, shape.inputs
        fused, floats = shape.kind.activation is not None, shape.kind in SUMMED
        results = tile.columns // 2 if fused else tile.columns
        weight_rows = 2 * outputs if fused else outputs
        grid, block = tile.grid(rows, -(-outputs // results), at_once), (tile.threads, 1, 1)
        x_box, weight_box, shared, buffered = tile.rows, tile.columns // 2, tile.shared, tile.buffers > 0
        first = first_sum(outputs, inputs)

        def kernel(x: Buffer, weight: Matrix, y: Buffer) -> None:
            y_map = maps.of_results(y.address, rows, outputs, floats=floats) if buffered else NO_MAP
            function(
                grid, block, maps(x.address, rows, inputs, x_box),
                maps(weight.address, weight_rows, inputs, weight_box), y_map, y.address, rows, outputs,
                inputs, first, shared=shared,
            )  # fmt: skip

        return kernel


def load_tiles(
    module: Module, device: Device, prefix: str, arguments: str, tiles: tuple[Tile, ...]
) -> dict[Tile, tuple[Function, int]]:
    """The kernels of tiles, and how many blocks of each the device holds, in whole clusters."""
    found = {}
    for tile in tiles:
        function = module.function(prefix + tile.name, arguments, shared=tile.shared, dependent=True)
        held = function.blocks_at_once(tile.threads, tile.shared) * device.multiprocessors
        found[tile] = function, held // tile.cluster * tile.cluster
    return found


def _sources(kinds: Collection[Kind]) -> dict[Kind, Source]:
    return {
        kind: source_of(
            "hopper_gemm",
            instances("GEMM_KERNEL", ((kind.value, kind.name, *tile.arguments) for tile in tiles)),
        )
        for kind, tiles in TILES.items()
        if kind in kinds
    }
