"""Launchers of products without a GPU, a compiler or CUDA: what they would launch is recorded and checked.

A launch is held against the operands that it was given: it reads weights of one part of the matrix, as many
rows as that has, and writes each number of the result once, and nothing beside.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT, PANEL_ROWS, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.products.packed import packed_few, packed_gemm, unpack
from nightmill.worker.runners.gpu.products.packed.packed_few import PackedFew
from nightmill.worker.runners.gpu.products.packed.packed_gemm import PACKED_TILES, PackedTile, PackedTiles
from nightmill.worker.runners.gpu.products.packed.unpack import Unpacked
from nightmill.worker.runners.gpu.shapes import SUMMED, Candidate, Kind, Shape, padded_rows
from tests.support.real_products import RealProduct

MULTIPROCESSORS = 132  # of an H100 or H200
CHUNK = 256  # inputs in a stage of packets
MOST_SHARED = 227 << 10  # bytes of shared memory that a block of Hopper may have
MOST_FEW_THREADS = 640  # of a block, as packed_few.cu is compiled
PACKED = tuple(kept for kept in Format if kept.packed)
X, Y = 1 << 40, 2 << 40  # addresses of operands
_WEIGHTS = 3 << 40


@dataclass(frozen=True, slots=True)
class PackedMap:
    """A tensor map of a packed matrix."""

    address: int
    rows: int
    columns: int
    format: Format
    panels: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel's launch as its launcher asked for it."""

    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: tuple[Any, ...]
    shared: int


class _Maps:
    """Tensor maps that say what they are of."""

    def __init__(self, device: object) -> None:
        pass

    def __call__(self, address: int, rows: int, columns: int, box: int) -> tuple[int, int, int, int]:
        assert 1 <= box <= 256
        return address, rows, columns, box

    def of_packed(self, address: int, rows: int, columns: int, kept: Format, panels: int) -> PackedMap:
        assert 1 <= panels <= 256
        return PackedMap(address, rows, columns, kept, panels)


class RecordedLaunchers:
    """The launchers of products with packed weights on Hopper, for all kinds and formats."""

    def __init__(self, launches: list[Launch]) -> None:
        self.launches = launches
        device: Any = SimpleNamespace(
            multiprocessors=MULTIPROCESSORS, hopper=True, element=Element.F16,
            allocate=lambda size, purpose="": _WEIGHTS,
        )  # fmt: skip
        pairs = [(kind, kept) for kind in PACKED_TILES for kept in PACKED]
        self._few, self._tiles = PackedFew(device, pairs), PackedTiles(device, pairs)
        self._device = device

    def candidates(self, shape: Shape) -> list[Candidate]:
        """Those that make elements as they multiply."""
        return self._few.candidates(shape) + self._tiles.candidates(shape)

    def by_elements(self, shape: Shape, size: int) -> list[list[Shape]]:
        """Per candidate that makes elements first, in so much memory: the products that it is."""
        asked: list[Shape] = []

        def kernel(one: Shape) -> Any:
            asked.append(one)
            return lambda x, weight, y: None

        ways = Unpacked(self._device, size, lambda one: [Candidate("elements", kernel)])
        found = []
        for candidate in ways.candidates(shape):
            asked.clear()
            candidate.kernel(shape)
            found.append(list(asked))
        return found


class _Function:
    """A kernel that notes its launches; a multiprocessor holds one of its blocks."""

    def __init__(self, name: str, most_shared: int, launches: list[Launch]) -> None:
        self._name, self._most_shared, self._launches = name, most_shared, launches

    def blocks_at_once(self, threads: int, shared: int) -> int:
        assert threads <= 1024
        return 1

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], *arguments: Any, shared: int) -> None:
        assert shared <= self._most_shared, f"{self._name}: {shared:,} bytes of {self._most_shared:,}"
        self._launches.append(Launch(self._name, grid, block, arguments, shared))


@contextmanager
def recorded_launchers() -> Iterator[RecordedLaunchers]:
    """Launchers whose modules and tensor maps are stubs."""
    launches: list[Launch] = []

    def function(name: str, arguments: str, *, shared: int = 0, dependent: bool = False) -> _Function:
        assert shared <= MOST_SHARED, f"{name}: {shared:,} bytes of shared memory"
        return _Function(name, shared, launches)

    stub = SimpleNamespace(of=lambda device, source: SimpleNamespace(function=function))
    with pytest.MonkeyPatch.context() as patch:
        for module in (packed_few, packed_gemm, unpack):
            patch.setattr(module, "Module", stub)
        patch.setattr(packed_gemm, "TensorMaps", _Maps)
        yield RecordedLaunchers(launches)


def operands_of(product: RealProduct, rows: int) -> tuple[Buffer, Matrix, Buffer, Shape]:
    """x, the weight, y and the shape of a product."""
    shape = Shape(padded_rows(rows), product.outputs, product.inputs, Kind(product.kind), product.format)
    address, parts = _WEIGHTS, []
    for part in product.parts:
        parts.append(Matrix(address, part.rows, product.inputs, Format[part.format]))
        address += parts[-1].bytes + 4096 & ~255
    total = sum(part.rows for part in parts)
    whole = Matrix(_WEIGHTS, total, product.inputs, Format.MIXED, parts=tuple(parts))
    floats = shape.kind in (Kind.FLOAT, *SUMMED)
    y = Buffer(Y, (shape.rows, product.outputs), FLOAT if floats else ELEMENT)
    x = Buffer(X, (shape.rows, product.inputs), ELEMENT)
    return x, whole if len(parts) > 1 else parts[0], y, shape


def check_launches(launches: list[Launch], x: Buffer, weight: Matrix, y: Buffer, shape: Shape) -> None:
    """Raise AssertionError unless the launches compute each result of the product once, from its weights."""
    sides = 2 if shape.kind.activation else 1
    parts = list(weight.parts or (weight,))
    written = np.zeros(shape.outputs, dtype=np.int32)
    for launch in launches:
        few = not isinstance(launch.arguments[1], PackedMap)
        place, rows, outputs, inputs, first, pitch = launch.arguments[2:8]
        address = launch.arguments[1] if few else launch.arguments[1].address
        (part,) = [one for one in parts if one.address == address]
        assert (rows, inputs) == (shape.rows, shape.inputs)
        assert pitch == (shape.pitch or shape.outputs)
        assert 0 < first <= inputs
        assert outputs % PANEL_ROWS == 0
        assert sides * outputs == part.rows, (
            f"{launch.name} reads {sides * outputs:,} rows of weights that have {part.rows:,}"
        )
        column, rest = divmod(place - y.address, y.dtype.itemsize)
        assert rest == 0 and column >= 0 and column + outputs <= shape.outputs, (
            f"{launch.name} writes columns {column:,} to {column + outputs:,} of {shape.outputs:,}"
        )
        written[column : column + outputs] += 1
        if few:
            _check_few(launch, part, shape, sides)
        else:
            _check_tile(launch, x, part, shape)
    assert (written == 1).all(), f"{np.count_nonzero(written != 1):,} results are not written just once"


def _check_few(launch: Launch, part: Matrix, shape: Shape, sides: int) -> None:
    """Of a launch of `packed_few.cu`: KIND_PANELS_TILES_SUMS."""
    _, panels, tiles, sums = launch.name.rsplit("_", 3)
    assert launch.arguments[0] == X
    outputs, inputs, first = (launch.arguments[at] for at in (4, 5, 6))
    window, stages = launch.arguments[8:10]
    warps = launch.block[0] // 32
    assert shape.rows <= 8 * int(tiles)
    assert launch.block[0] <= MOST_FEW_THREADS and warps % int(sums) == 0
    assert 0 < launch.grid[0] <= MULTIPROCESSORS
    own = int(panels) // sides  # panels of results of a warp
    assert own * PANEL_ROWS <= outputs, "a warp has more outputs than there are"
    if int(sums) == 2:  # two warps meet at their sums: all tasks run at once, with all of x
        tasks = -(-outputs // (own * PANEL_ROWS))
        assert launch.grid[0] * warps >= 2 * tasks
        assert window >= inputs > first
    else:
        assert first == inputs
    assert window % CHUNK == 0 and window > 0
    assert stages >= 2
    packets = warps * stages * int(panels) * (CHUNK // part.format.step) * part.format.packet
    windows = min(2, -(-inputs // window))
    x = windows * shape.rows * window * ELEMENT.itemsize
    assert packets + x < launch.shared <= MOST_SHARED


def _check_tile(launch: Launch, x: Buffer, part: Matrix, shape: Shape) -> None:
    """Of a launch of `packed_gemm.cu`: KIND and the arguments of the template."""
    kind, *numbers = launch.name.split("_")
    groups, rows, boxes, stages, packets, cluster, blocks, relay, turn = map(int, numbers)
    tile = PackedTile(groups, rows, boxes, cluster, blocks, relay, turn)
    assert kind == shape.kind.value and tile in PACKED_TILES[shape.kind]
    assert launch.arguments[0] == (x.address, shape.rows, shape.inputs, rows // cluster)
    weights: PackedMap = launch.arguments[1]
    assert (weights.rows, weights.columns, weights.format) == (part.rows, part.columns, part.format)
    assert launch.block[0] == tile.threads
    assert 0 < launch.grid[0] <= max(MULTIPROCESSORS, cluster) and launch.grid[0] % cluster == 0
    outputs, first = launch.arguments[4], launch.arguments[6]
    sides = 2 if shape.kind.activation else 1
    assert weights.panels * PANEL_ROWS == tile.outputs(sides)
    tiles = -(-shape.rows // rows) * -(-outputs // (tile.outputs(sides) * cluster)) * cluster
    assert launch.grid[0] <= tiles, "some blocks have no tile"
    if shape.kind in SUMMED:  # other kernels have one sum, whatever they are given
        assert first == shape.inputs or (first % 128 == 0 and not relay)
    assert stages >= 2 and packets >= 2
    memory = stages * boxes * rows * 128 + packets * (CHUNK // part.format.step) * sides * (
        weights.panels * part.format.packet
    )
    assert memory <= launch.shared <= MOST_SHARED // blocks
