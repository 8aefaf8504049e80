"""Products with packed weights by `hopper_gemm.cu`, which makes them elements as it multiplies.

They have the sums of tiles of elements, and so the bits of a product over the dequantised matrix.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from nightmill.worker.model.spec import ModelSpec, Role
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Function, Module
from nightmill.worker.runners.gpu.device.operands import ELEMENT, PANEL_ROWS, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import Source, instances, source_of
from nightmill.worker.runners.gpu.device.tensor_maps import NO_MAP, TensorMaps
from nightmill.worker.runners.gpu.numbers import Numbers
from nightmill.worker.runners.gpu.products.kinds import layer_kinds
from nightmill.worker.runners.gpu.products.shapes import DEPTH, Candidate, Kind, Shape, Way, first_sum
from nightmill.worker.runners.gpu.weights.layout import formats_in

__all__ = ["PACKED_TILES", "PackedProduct", "PackedTile", "PackedTiles", "packed_products"]

_SHARED = 225 << 10  # bytes of dynamic shared memory that the blocks of a multiprocessor divide
_DECLARED = 2048  # bytes of a block that the kernel declares, and that CUDA takes
_ALIGNMENT = 1024
_SIDE_ALIGNMENT = 128  # of a box in shared memory
_IN_FLIGHT = (
    44 << 10
)  # bytes of packets that a multiprocessor asks for ahead: its share of what memory takes to answer
_MOST_STAGES = 16
_WGMMA_ROWS = 64
_MOST_ROWS = 512  # above, products over elements win by more than dequantising a matrix takes

PackedProduct = tuple[Kind, Format]


@dataclass(frozen=True, slots=True)
class PackedTile:
    """A tile of `rows` by `columns` rows of the weight.

    boxes   steps are of so many times 64 inputs
    warps   that dequantise
    blocks  that a multiprocessor is to hold, whose memory they share
    """

    rows: int
    columns: int
    boxes: int
    warps: int
    blocks: int = 1

    @property
    def threads(self) -> int:
        groups = -(-self.rows // _WGMMA_ROWS)
        shares = groups * self.columns > 128 and self.warps % 4 == 0  # registers, between whole warpgroups
        return 128 * groups + 32 * self.warps + (128 if shares else 64)

    def arguments(self, kept: Format, sides: int) -> tuple[int, ...]:
        """Of the kernel template, and in the names of kernels."""
        stages, packets = self._stages(kept, sides)
        return self.rows, self.columns, self.boxes, stages, packets, self.warps, 0

    @property
    def name(self) -> str:
        """For a person."""
        return f"{self.rows}_{self.columns}_{self.boxes}_{self.warps}_{self.blocks}"

    def shared(self, kept: Format, sides: int) -> int:
        """Bytes of dynamic shared memory."""
        stages, packets = self._stages(kept, sides)
        return stages * self._stage + packets * self._raw_stage(kept, sides) + _ALIGNMENT

    def fits(self, kept: Format, sides: int) -> bool:
        """Whether there is memory for two stages at least."""
        return self._stages(kept, sides)[0] > 1

    def suits(self, shape: Shape) -> bool:
        """Whether it computes a shape."""
        sums = first_sum(shape.outputs, shape.inputs) if shape.kind is not Kind.FLOAT else shape.inputs
        whole = sums == shape.inputs or sums % (DEPTH * self.boxes) == 0
        return whole and (shape.rows <= self.rows or self.rows >= _WGMMA_ROWS)

    def worthwhile(self, rows: int) -> bool:
        """Whether it may be the fastest for so many rows."""
        if self.rows < _WGMMA_ROWS:
            return rows <= self.rows
        return (
            4 < rows <= 4 * _WGMMA_ROWS if self.rows == _WGMMA_ROWS else _WGMMA_ROWS // 2 < rows <= _MOST_ROWS
        )

    @property
    def _stage(self) -> int:
        """Bytes of a step's elements."""
        return self.boxes * (self.rows + self.columns) * DEPTH * ELEMENT.itemsize

    def _raw_stage(self, kept: Format, sides: int) -> int:
        """Bytes of a step's packets."""
        side = self.columns // PANEL_ROWS // sides * kept.packet
        packets = max(1, self.boxes * DEPTH // kept.step)
        return packets * sides * -(-side // _SIDE_ALIGNMENT) * _SIDE_ALIGNMENT

    def _stages(self, kept: Format, sides: int) -> tuple[int, int]:
        """Stages of elements, and of packets."""
        room, raw = _SHARED // self.blocks - _DECLARED, self._raw_stage(kept, sides)
        packets = max(2, min(_MOST_STAGES, _IN_FLIGHT // self.blocks // raw))
        while packets > 2 and room - packets * raw < 3 * self._stage:
            packets -= 1
        return min(_MOST_STAGES, (room - packets * raw) // self._stage), packets


_PLAIN = (
    PackedTile(16, 32, 4, 16),
    PackedTile(16, 64, 2, 16),
    PackedTile(64, 32, 4, 16),
    PackedTile(64, 64, 2, 16),
    PackedTile(64, 64, 1, 8, 2),
    PackedTile(128, 64, 1, 8),
    PackedTile(128, 128, 1, 8),
)
_GATED = (
    PackedTile(16, 32, 4, 16),
    PackedTile(16, 64, 2, 16),
    PackedTile(64, 64, 2, 16),
    PackedTile(64, 96, 2, 12),
    PackedTile(128, 96, 1, 12),
    PackedTile(128, 192, 1, 12),
)
PACKED_TILES = {
    Kind.PLAIN: _PLAIN,
    Kind.FLOAT: _PLAIN,
    Kind.SWIGLU: _GATED,
    Kind.GEGLU: _GATED,
    Kind.RESIDUAL: _PLAIN,
    Kind.ADDEND: _PLAIN,
}


def packed_products(spec: ModelSpec, numbers: Numbers) -> set[PackedProduct]:
    """The kinds and formats of a model's products with packed weights."""
    by_role: dict[Role, set[Kind]] = {}
    for layer in spec.layers:
        kinds = layer_kinds(layer)
        used = {
            Role.QKV: Kind.PLAIN,
            Role.ATTN_OUTPUT: kinds.output,
            Role.GATE_UP: kinds.gate_up,
            Role.FFN_DOWN: kinds.down,
        }
        for role, kind in used.items():
            by_role.setdefault(role, set()).add(kind)
    by_role[Role.EMBEDDING if spec.tied_head else Role.HEAD] = {Kind.FLOAT}
    return {
        (kind, kept)
        for role, kinds in by_role.items()
        for kept in formats_in(spec, numbers, role)
        if kept.packed
        for kind in kinds
    }


class PackedTiles:
    """Launches `hopper_gemm.cu` with packed weights, for these products."""

    def __init__(self, device: Device, products: Collection[PackedProduct]) -> None:
        self._maps = TensorMaps(device)
        self._kernels = {
            (kind, kept): _load(Module.of(device, _source(kind, kept)), device, kind, kept)
            for kind, kept in products
        }

    @staticmethod
    def sources(spec: ModelSpec, numbers: Numbers, *, hopper: bool) -> list[Source]:
        """What it is compiled from."""
        return PackedTiles.files(packed_products(spec, numbers)) if hopper else []

    @staticmethod
    def files(products: Collection[PackedProduct]) -> list[Source]:
        """A file for each kind of product and format."""
        return [_source(kind, kept) for kind, kept in sorted(products, key=str)]

    def candidates(self, shape: Shape) -> list[Candidate]:
        """The tiles that are worth timing for a shape."""
        aligned = shape.inputs % 8 == 0 and shape.outputs % 8 == 0
        if not aligned:
            return []
        if shape.format is Format.MIXED:
            known = [tiles for (kind, _), tiles in self._kernels.items() if kind is shape.kind is Kind.PLAIN]
        else:
            known = [self._kernels.get((shape.kind, shape.format), {})]
        found = [tile for tile in PACKED_TILES[shape.kind] if known and all(tile in tiles for tiles in known)]
        return [
            Candidate(f"packed tile {tile.name}", partial(self.way, tile), tile.suits)
            for tile in found
            if tile.suits(shape) and tile.worthwhile(shape.rows)
        ]

    def way(self, tile: PackedTile, shape: Shape) -> Way:
        """How a tile computes a shape that it suits."""

        def way(x: Buffer, weight: Matrix, y: Buffer) -> None:
            address, pitch = y.address, shape.pitch or shape.outputs
            for part in weight.parts or (weight,):
                outputs = part.rows if weight.parts else shape.outputs
                self._launch(tile, shape, x, part, address, outputs, pitch)
                address += outputs * ELEMENT.itemsize

        return way

    def _launch(
        self, tile: PackedTile, shape: Shape, x: Buffer, weight: Matrix, y: int, outputs: int, pitch: int
    ) -> None:
        """Queue the product with a matrix whose results begin at `y`, rows `pitch` numbers apart."""
        kind, kept, rows, inputs, maps = shape.kind, weight.format, shape.rows, shape.inputs, self._maps
        sides, (function, at_once) = _sides(kind), self._kernels[kind, kept][tile]
        box, panels = min(rows, tile.rows), tile.columns // PANEL_ROWS // sides
        tiles = -(-rows // tile.rows) * -(-outputs // (tile.columns // sides))
        first = inputs if kind is Kind.FLOAT else first_sum(outputs, inputs)
        function(
            (min(tiles, at_once), 1), (tile.threads, 1, 1), maps(x.address, rows, inputs, box),
            maps.of_packed(weight.address, weight.rows, inputs, kept, panels), NO_MAP, y, rows, outputs,
            inputs, first, box, pitch, shared=tile.shared(kept, sides),
        )  # fmt: skip


def _sides(kind: Kind) -> int:
    """Runs of rows of the weight in a tile: of gate and of up, or one."""
    return 1 if kind.activation is None else 2


def _tiles(kind: Kind, kept: Format) -> list[PackedTile]:
    return [tile for tile in PACKED_TILES[kind] if tile.fits(kept, _sides(kind))]


def _load(module: Module, device: Device, kind: Kind, kept: Format) -> dict[PackedTile, tuple[Function, int]]:
    """The kernels of tiles, and how many blocks of each the device holds."""
    found, sides = {}, _sides(kind)
    for tile in _tiles(kind, kept):
        shared, name = (
            tile.shared(kept, sides),
            "_".join(map(str, (kind.value, *tile.arguments(kept, sides)))),
        )
        function = module.function(name, "128s128s128sPiiiiii", shared=shared, dependent=True)
        found[tile] = function, function.blocks_at_once(tile.threads, shared) * device.multiprocessors
    return found


def _source(kind: Kind, kept: Format) -> Source:
    tiles = ((kind.value, kind.name, *tile.arguments(kept, _sides(kind))) for tile in _tiles(kind, kept))
    return source_of("hopper_gemm", f"-DFORMAT={kept.name}", instances("PACKED_KERNEL", tiles))
