"""Products with packed weights by `packed_gemm.cu`, which makes them elements as it multiplies.

They have the sums of tiles of elements, and so the bits of a product over the dequantised matrix.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from nightmill.worker.model.spec import Experts, ModelSpec, Role
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Function, Module
from nightmill.worker.runners.gpu.device.operands import ELEMENT, GROUP, PANEL_ROWS, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import Source, instances, source_of
from nightmill.worker.runners.gpu.device.tensor_maps import TensorMaps
from nightmill.worker.runners.gpu.kinds import gate_up_kind, layer_kinds
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.shapes import DEPTH, Candidate, Kernel, Kind, Shape, first_sum
from nightmill.worker.runners.gpu.weights.layout import formats_in

__all__ = ["PACKED_TILES", "PackedProduct", "PackedTile", "PackedTiles", "packed_products"]

_SHARED = 225 << 10  # bytes of dynamic shared memory that the blocks of a multiprocessor divide
_DECLARED = 2048  # bytes of a block that the kernel declares, and that CUDA takes
_ALIGNMENT = 1024
_SIDE_ALIGNMENT = 128  # of a box in shared memory
_IN_FLIGHT = 56 << 10
"""Bytes of packets that a multiprocessor asks for ahead: its share of what memory takes to answer."""
_MOST_STAGES = 16
_CHUNK = 256  # inputs in a stage of packets
_SUMS = 128  # bytes of sums that are handed on, for each row of a tile and panel of a warp
_MANY_RESULTS = 128  # rows of a tile, from which a warpgroup copies, and gives its registers away
_MANY_GROUPS = 4  # warpgroups, from more of which on too
_SHARED_ROWS = 32  # of a tile, from which four of them may make the same elements, side by side
_SMALL = 16  # rows of a tile, up to which memory is not scarce
_PAIR = 128  # inputs that a first sum must be a multiple of

PackedProduct = tuple[Kind, Format]


@dataclass(frozen=True, slots=True)
class PackedTile:
    """A tile of 64 `groups` outputs by `rows` rows of x; if it is a relay, of 32 `relay` outputs.

    groups   warpgroups
    boxes    x comes in so many times 64 inputs
    cluster  blocks that fetch x together
    blocks   that a multiprocessor is to hold, whose memory they share
    relay    panels of each warp, 1 or 2, where the warpgroups take turns along the inputs; else 0
    turn     times 256 inputs that a turn takes
    """

    groups: int
    rows: int
    boxes: int = 1
    cluster: int = 1
    blocks: int = 1
    relay: int = 0
    turn: int = 1

    @property
    def threads(self) -> int:
        shares = self.rows >= _MANY_RESULTS or self.relay > 0 or self.groups > _MANY_GROUPS
        return 128 * self.groups + (128 if shares else 64)

    def outputs(self, sides: int) -> int:
        """Return the outputs of a tile, if each has so many rows of the weight."""
        return (32 * self.relay or 64 * self.groups) // sides

    def arguments(self, format_: Format, sides: int) -> tuple[int, ...]:
        """Return the arguments of the kernel template, which are also in the names of kernels."""
        stages, packets = self.stages(format_, sides)
        return (
            self.groups, self.rows, self.boxes, stages, packets, self.cluster, self.blocks, self.relay,
            self.turn,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """Name of the tile for a person."""
        form = f"{self.outputs(1)}_{self.rows}_{self.groups}_{self.cluster}_{self.blocks}"
        return f"{form} relay" if self.relay else form

    def shared(self, format_: Format, sides: int) -> int:
        """Bytes of dynamic shared memory."""
        stages, packets = self.stages(format_, sides)
        return stages * self._stage + packets * self._raw_stage(format_, sides) + self._beside(format_)

    def fits(self, format_: Format, sides: int) -> bool:
        """Return whether there is memory for two stages at least, or for a round of turns."""
        least = self._in_chunk * self.groups * self.turn if self.relay else 2
        return self.stages(format_, sides)[0] >= least

    def suits(self, shape: Shape) -> bool:
        """Return whether it computes a shape."""
        sums = first_sum(shape.outputs, shape.inputs) if shape.kind is not Kind.FLOAT else shape.inputs
        return self.takes(shape.inputs) and (sums == shape.inputs or (sums % _PAIR == 0 and not self.relay))

    def takes(self, inputs: int) -> bool:
        """Return whether it goes through so many inputs.

        Turns of a relay come in order for any number of them. A single one has no sums to hand on, so that a
        relay would only be a smaller tile.
        """
        return not self.relay or inputs > _CHUNK * self.turn

    def worthwhile(self, rows: int) -> bool:
        """Return whether it may be the fastest for so many rows."""
        most = self.rows * (4 if self.rows >= _SHARED_ROWS else 1)
        return self.rows < 2 * max(rows, 8) and (rows <= most or self.rows >= _MANY_RESULTS)

    def needed(self, rows: int, outputs: int, sides: int) -> int:
        """Blocks of a launch in which each has one tile."""
        columns = self.outputs(sides) * self.cluster
        return -(-rows // self.rows) * -(-outputs // columns) * self.cluster

    def loaded(
        self, module: Module, device: Device, name: str, arguments: str, shared: int
    ) -> tuple[Function, int, int]:
        """A kernel, how many of its blocks run at once, whole clusters, and their shared memory."""
        function = module.function(name, arguments, shared=shared, dependent=True)
        at_once = function.blocks_at_once(self.threads, shared) * device.multiprocessors
        return function, max(1, at_once // self.cluster) * self.cluster, shared

    @property
    def box(self) -> int:
        """Rows of x that a block fetches at once."""
        return self.rows // self.cluster

    @property
    def _stage(self) -> int:
        """Bytes of x in a stage."""
        return self.boxes * self.rows * DEPTH * ELEMENT.itemsize

    def _beside(self, format_: Format) -> int:
        """Bytes for sums that are handed on, for scales, and lost to alignment."""
        sums = self.rows * self.relay * _SUMS
        panels = 4 * self.groups * (self.relay or 2)
        return sums + panels * PANEL_ROWS * _CHUNK // GROUP * format_.computed + _ALIGNMENT

    def _raw_stage(self, format_: Format, sides: int) -> int:
        """Bytes of a stage of packets."""
        side = self.outputs(sides) // PANEL_ROWS * format_.packet
        return _CHUNK // format_.step * sides * -(-side // _SIDE_ALIGNMENT) * _SIDE_ALIGNMENT

    def stages(self, format_: Format, sides: int) -> tuple[int, int]:
        """Return the number of stages of x, and of packets."""
        room, raw = (
            _SHARED // self.blocks - _DECLARED - self._beside(format_),
            self._raw_stage(format_, sides),
        )
        packets = max(2, min(_MOST_STAGES, _IN_FLIGHT // self.blocks // raw))
        while packets > 2 and room - packets * raw < self._least * self._stage:
            packets -= 1
        if self.relay:
            turns = self.groups * self.turn
            packets = max(turns, packets // turns * turns)
        stages, rounds = min(_MOST_STAGES, (room - packets * raw) // self._stage), self._rounds
        return stages // rounds * rounds, packets

    @property
    def _least(self) -> int:
        """Stages of x that there are to be."""
        return 2 * self._in_chunk if self.relay else 4

    @property
    def _rounds(self) -> int:
        """Stages of x are a multiple of this: in a relay a stage is always one group's, if x is small."""
        if not self.relay:
            return 1
        return self._in_chunk * (1 if self.rows > _SMALL else self.groups * self.turn)

    @property
    def _in_chunk(self) -> int:
        return _CHUNK // DEPTH // self.boxes


_PLAIN = (
    PackedTile(3, 8, 4, relay=1, turn=2),
    PackedTile(1, 8, 2, 1, 2),
    PackedTile(4, 16, 4, relay=1),
    PackedTile(1, 16, 2, 1, 2),
    PackedTile(2, 32, 4, relay=1, turn=2),
    PackedTile(3, 32, 4, relay=2),
    PackedTile(1, 32, 2, 1, 2),
    PackedTile(2, 64, 4, relay=1, turn=2),
    PackedTile(3, 64, 4, relay=2),
    PackedTile(1, 64, 1, 1, 2),
    PackedTile(1, 128, 1, 2),
    PackedTile(3, 128, 2),
    PackedTile(1, 256, 1, 2),
    PackedTile(2, 256, 1, 2),
)
_GATED = (*(tile for tile in _PLAIN if not tile.relay), PackedTile(5, 32, 2), PackedTile(5, 64, 2))
PACKED_TILES = {
    Kind.PLAIN: _PLAIN,
    Kind.FLOAT: _PLAIN,
    Kind.SWIGLU: _GATED,
    Kind.GEGLU: _GATED,
    Kind.RESIDUAL: _PLAIN,
    Kind.ADDEND: _PLAIN,
}


def packed_products(spec: ModelSpec, precision: Precision) -> set[PackedProduct]:
    """The kinds and formats of a model's products with packed weights; none if its products are plain."""
    if precision.plain_products:
        return set()
    by_role: dict[Role, set[Kind]] = {}
    for layer in spec.layers:
        kinds = layer_kinds(layer)
        used: dict[Role, Kind | None] = {
            Role.QKV: Kind.PLAIN,
            Role.ATTN_GATE: Kind.PLAIN,
            Role.MIXER_INPUT: Kind.PLAIN,
            Role.Q_DOWN: Kind.PLAIN,
            Role.Q_UP: Kind.PLAIN,
            Role.KV_DOWN: Kind.PLAIN,
            Role.ATTN_OUTPUT: kinds.output,
            Role.MIXER_OUTPUT: kinds.output,
            Role.GATE_UP: kinds.gate_up,
            Role.FFN_DOWN: kinds.down,
        }
        if isinstance(experts := layer.feed_forward, Experts):
            shared = None if experts.shared is None else gate_up_kind(experts.shared)
            used |= {Role.LATENT_DOWN: Kind.PLAIN, Role.LATENT_UP: Kind.ADDEND}
            used |= {Role.SHARED_GATE_UP: shared, Role.SHARED_DOWN: Kind.ADDEND}
        for role, kind in used.items():
            by_role.setdefault(role, set()).update([] if kind is None else [kind])
    by_role[Role.EMBEDDING if spec.tied_head else Role.HEAD] = {Kind.FLOAT}
    return {
        (kind, format_)
        for role, kinds in by_role.items()
        for format_ in formats_in(spec, precision, role)
        if format_.packed
        for kind in kinds
    }


class PackedTiles:
    """Launches `packed_gemm.cu`, for these products."""

    def __init__(self, device: Device, products: Collection[PackedProduct]) -> None:
        self._maps = TensorMaps(device)
        self._kernels = {
            (kind, format_): _load(Module.of(device, _source(kind, format_)), device, kind, format_)
            for kind, format_ in products
        }

    @staticmethod
    def sources(spec: ModelSpec, precision: Precision, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        return PackedTiles.files(packed_products(spec, precision)) if hopper else []

    @staticmethod
    def files(products: Collection[PackedProduct]) -> list[Source]:
        """A file for each kind of product and format."""
        return [_source(kind, format_) for kind, format_ in sorted(products, key=str)]

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
            Candidate(f"packed tile {tile.name}", partial(self.kernel, tile), tile.suits)
            for tile in found
            if tile.suits(shape) and tile.worthwhile(shape.rows)
        ]

    def kernel(self, tile: PackedTile, shape: Shape) -> Kernel:
        """Bind a tile to a shape that it suits."""

        def kernel(x: Buffer, weight: Matrix, y: Buffer) -> None:
            address, pitch = y.address, shape.pitch or shape.outputs
            for part in weight.parts or (weight,):
                outputs = part.rows if weight.parts else shape.outputs
                self._launch(tile, shape, x, part, address, outputs, pitch)
                address += outputs * ELEMENT.itemsize

        return kernel

    def _launch(
        self, tile: PackedTile, shape: Shape, x: Buffer, weight: Matrix, y: int, outputs: int, pitch: int
    ) -> None:
        """Queue the product with a matrix whose results begin at `y`, rows `pitch` numbers apart."""
        kind, format_, rows, inputs, maps = shape.kind, weight.format, shape.rows, shape.inputs, self._maps
        sides, (function, at_once, shared) = _sides(kind), self._kernels[kind, format_][tile]
        panels = tile.outputs(sides) // PANEL_ROWS
        first = inputs if kind is Kind.FLOAT else first_sum(outputs, inputs)
        function(
            (min(tile.needed(rows, outputs, sides), at_once), 1), (tile.threads, 1, 1),
            maps(x.address, rows, inputs, tile.box),
            maps.of_packed(weight.address, weight.rows, inputs, format_, panels), y, rows, outputs, inputs,
            first, pitch, shared=shared,
        )  # fmt: skip


def _sides(kind: Kind) -> int:
    """Runs of rows of the weight in a tile: of gate and of up, or one."""
    return 1 if kind.activation is None else 2


def _tiles(kind: Kind, format_: Format) -> list[PackedTile]:
    return [tile for tile in PACKED_TILES[kind] if tile.fits(format_, _sides(kind))]


def _load(
    module: Module, device: Device, kind: Kind, format_: Format
) -> dict[PackedTile, tuple[Function, int, int]]:
    """The kernels of tiles, as `PackedTile.loaded` gives them."""
    found, sides = {}, _sides(kind)
    for tile in _tiles(kind, format_):
        name = "_".join(map(str, (kind.value, *tile.arguments(format_, sides))))
        found[tile] = tile.loaded(module, device, name, "128s128sPiiiii", tile.shared(format_, sides))
    return found


def _source(kind: Kind, format_: Format) -> Source:
    tiles = (
        (kind.value, kind.name, *tile.arguments(format_, _sides(kind))) for tile in _tiles(kind, format_)
    )
    return source_of("packed_gemm", f"-DFORMAT={format_.name}", instances("PACKED_KERNEL", tiles))
