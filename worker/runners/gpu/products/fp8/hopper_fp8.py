"""Products with FP8 weights by `hopper_fp8.cu`, whose tiles all have the same sums, and so the same bits."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from nightmill.worker.model.spec import Attention, Experts, FeedForward, LatentAttention, ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Function, Module
from nightmill.worker.runners.gpu.device.operands import FP8, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import Source, instances, source_of
from nightmill.worker.runners.gpu.device.tensor_maps import NO_MAP, PIECE_BYTES, PIECE_ROWS, TensorMaps
from nightmill.worker.runners.gpu.kinds import kinds_of, mixer_sizes
from nightmill.worker.runners.gpu.products.fp8.quantise import MOST_INPUTS, Quantise
from nightmill.worker.runners.gpu.shapes import SUMMED, Candidate, Kernel, Kind, Shape

__all__ = ["FP8_TILES", "Fp8Tile", "HopperFp8", "fp8_tiles"]

_LINE = 128  # elements of K, and bytes, in a row of a box
_WGMMA_ROWS = 64
_SHARED_ALIGNMENT = 1024
_ALIGNMENT = 16  # bytes between rows, for tensor maps
_MANY_ROWS = 512  # from here on only tiles of 128 rows


@dataclass(frozen=True, slots=True)
class Fp8Tile:
    """A tile of `rows` by `columns` rows of the weight.

    boxes    boxes of 128 elements of K in a step
    stages   steps that a block has copies of
    cluster  blocks with tiles of rows below each other, which share weights
    buffers  pieces of 64 rows by 128 bytes that 64 rows have in shared memory for results, as `Tile` has them
    """

    rows: int
    columns: int
    boxes: int
    stages: int
    cluster: int = 1
    buffers: int = 0

    @property
    def arguments(self) -> tuple[int, ...]:
        """Arguments of the kernel template, which are also in the names of kernels."""
        return self.rows, self.columns, self.boxes, self.stages, self.cluster, self.buffers

    @property
    def name(self) -> str:
        """The end of the kernel's name."""
        return "_".join(map(str, self.arguments))

    @property
    def groups(self) -> int:
        """Warpgroups that multiply."""
        return -(-self.rows // _WGMMA_ROWS)

    @property
    def threads(self) -> int:
        """Threads of a block and its copying warp: a warpgroup if it gives registers away."""
        return 128 * self.groups + (128 if self.groups > 1 else 32)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        copies = self.stages * self.boxes * (self.rows + self.columns) * _LINE
        results = self.groups * self.buffers * PIECE_ROWS * PIECE_BYTES
        read_past = (self.groups * _WGMMA_ROWS - self.rows) * _LINE  # by wgmma
        return copies + results + read_past + _SHARED_ALIGNMENT

    def grid(self, rows: int, column_tiles: int, at_once: int) -> tuple[int, int]:
        """No more blocks than the device holds `at_once`, which go on to the next tile."""
        tiles = -(-rows // (self.rows * self.cluster)) * column_tiles
        return min(tiles * self.cluster, at_once), 1


# The best for many rows first.
_PLAIN = (
    Fp8Tile(128, 192, 1, 4, 2, 3),
    Fp8Tile(128, 160, 1, 5),
    Fp8Tile(128, 96, 1, 7),
    Fp8Tile(128, 64, 2, 4, 1, 1),
    Fp8Tile(64, 96, 2, 5),
    Fp8Tile(64, 48, 4, 3),
    Fp8Tile(64, 32, 2, 8),
    Fp8Tile(32, 64, 2, 4),
    Fp8Tile(16, 64, 2, 4),
    Fp8Tile(16, 32, 4, 4),
    Fp8Tile(8, 48, 4, 4),
    Fp8Tile(8, 32, 4, 4),
)
_GATED = (
    Fp8Tile(128, 192, 1, 5, 2),
    Fp8Tile(128, 160, 1, 5),
    Fp8Tile(64, 96, 2, 5),
    Fp8Tile(64, 64, 4, 3),
    Fp8Tile(32, 64, 4, 3),
    Fp8Tile(16, 64, 4, 4),
    Fp8Tile(16, 32, 4, 4),
    Fp8Tile(8, 64, 4, 4),
    Fp8Tile(8, 32, 4, 4),
)
_SUMMED = (
    Fp8Tile(128, 192, 1, 4, 2, 2),
    Fp8Tile(128, 128, 1, 5, 1, 4),
    Fp8Tile(128, 64, 2, 4, 1, 2),
    Fp8Tile(64, 64, 2, 5, 1, 2),
    Fp8Tile(64, 32, 4, 4),
    Fp8Tile(64, 16, 4, 4),
    Fp8Tile(32, 32, 4, 6),
    Fp8Tile(32, 32, 4, 3),
    Fp8Tile(16, 32, 4, 8),
    Fp8Tile(16, 32, 4, 4),
    Fp8Tile(16, 16, 4, 8),
    Fp8Tile(8, 32, 8, 4),
    Fp8Tile(8, 32, 4, 4),
    Fp8Tile(8, 16, 4, 8),
)
FP8_TILES = {
    Kind.PLAIN: _PLAIN,
    Kind.SWIGLU: _GATED,
    Kind.GEGLU: _GATED,
    Kind.RESIDUAL: _SUMMED,
    Kind.ADDEND: _SUMMED,
}


def fp8_tiles(kind: Kind, rows: int) -> list[Fp8Tile]:
    """Return the tiles that are worth timing for so many rows."""
    tiles = FP8_TILES[kind]
    least = min((tile.rows for tile in tiles if tile.rows >= rows), default=_WGMMA_ROWS)
    heights = {least} if rows <= _WGMMA_ROWS else {_WGMMA_ROWS, 2 * _WGMMA_ROWS}
    if rows > _MANY_ROWS:
        heights.discard(_WGMMA_ROWS)
    return [tile for tile in tiles if tile.rows in heights and (tile.cluster - 1) * tile.rows < rows]


class HopperFp8:
    """Launches `hopper_fp8.cu`.

    kinds      of products that there will be
    quantised  room for what enters a product as elements
    """

    def __init__(self, device: Device, kinds: Collection[Kind], quantised: Buffer) -> None:
        self._maps = TensorMaps(device)
        self._quantise = Quantise(device)
        self._quantised = quantised
        self._kernels = {kind: _load(device, source, kind) for kind, source in _sources(kinds).items()}

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files: one for each kind of product, so that they are compiled at once."""
        return list(_sources(kinds_of(spec)).values()) if hopper else []

    @staticmethod
    def refusal(spec: ModelSpec) -> str | None:
        """Return the size of a model that it does not take, or None."""
        for layer in spec.layers:
            mixer = (
                "query heads with a sum" if isinstance(layer.mixer, Attention) else "a mixer with an output"
            )
            query_latent = layer.mixer.query_latent if isinstance(layer.mixer, LatentAttention) else 0
            for what, inputs in (
                ("a width", spec.width),
                (mixer, mixer_sizes(layer.mixer).outputs),
                ("an FFN width", layer.feed_forward.width),
                *_of_experts(layer.feed_forward),
                ("a latent of queries", query_latent or 0),
            ):
                if inputs % _ALIGNMENT or inputs > MOST_INPUTS:
                    return f"{what} of {inputs} (multiples of {_ALIGNMENT}, up to {MOST_INPUTS:,})"
        return None

    def candidates(self, shape: Shape) -> list[Candidate]:
        """The tiles that are worth timing for a shape."""
        aligned = shape.inputs % _ALIGNMENT == 0 and shape.outputs % 8 == 0
        if shape.kind not in self._kernels or shape.format is not Format.FP8 or not aligned:
            return []
        return [
            Candidate(f"fp8 {tile.name}", partial(self.kernel, tile), partial(_suits, tile))
            for tile in fp8_tiles(shape.kind, shape.rows)
        ]

    def kernel(self, tile: Fp8Tile, shape: Shape) -> Kernel:
        """Bind a tile to a shape; rows of elements are quantised first."""
        function, at_once = self._kernels[shape.kind][tile]
        maps, rows, outputs, inputs = self._maps, shape.rows, shape.outputs, shape.inputs
        gated, floats = shape.kind.activation is not None, shape.kind in SUMMED
        results = tile.columns // 2 if gated else tile.columns
        weight_rows = 2 * outputs if gated else outputs
        grid, block = tile.grid(rows, -(-outputs // results), at_once), (tile.threads, 1, 1)
        weight_box = tile.columns // 2 if gated or tile.cluster > 1 else tile.columns
        quantise, room, shared, buffered = self._quantise, self._quantised, tile.shared, tile.buffers > 0

        def kernel(x: Buffer, weight: Matrix, y: Buffer) -> None:
            if x.dtype != FP8:
                quantise(x.address, room.address, room.scales, rows, inputs)
                x = room
            y_map = maps.of_results(y.address, rows, outputs, floats=floats) if buffered else NO_MAP
            function(
                grid, block, maps.of_fp8(x.address, rows, inputs, tile.rows),
                maps.of_fp8(weight.address, weight_rows, inputs, weight_box), y_map, x.scales, weight.scales,
                y.address, rows, outputs, inputs, shared=shared,
            )  # fmt: skip

        return kernel


def _suits(tile: Fp8Tile, shape: Shape) -> bool:
    return tile in fp8_tiles(shape.kind, shape.rows)


def _load(device: Device, source: Source, kind: Kind) -> dict[Fp8Tile, tuple[Function, int]]:
    """The kernels of a kind, and how many blocks of each the device holds, in whole clusters."""
    module = Module.of(device, source)
    found = {}
    for tile in FP8_TILES[kind]:
        name = f"{kind.value}_{tile.name}"
        function = module.function(name, "128s128s128sPPPiii", shared=tile.shared, dependent=True)
        held = function.blocks_at_once(tile.threads, tile.shared) * device.multiprocessors
        found[tile] = function, held // tile.cluster * tile.cluster
    return found


def _sources(kinds: Collection[Kind]) -> dict[Kind, Source]:
    return {
        kind: source_of(
            "hopper_fp8",
            instances("FP8_KERNEL", ((kind.value, kind.name, *tile.arguments) for tile in tiles)),
        )
        for kind, tiles in FP8_TILES.items()
        if kind in kinds
    }


def _of_experts(network: FeedForward | Experts) -> list[tuple[str, int]]:
    """List what products read around experts, and in experts, with their sizes."""
    if not isinstance(network, Experts):
        return []
    shared = [] if network.shared is None else [("a shared expert", network.shared.width)]
    return [*shared, *([] if network.latent is None else [("a latent", network.latent)])]
