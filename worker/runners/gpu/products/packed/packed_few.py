"""Products of few rows with packed weights by `packed_few.cu`, on Hopper.

They have the sums of other products, and so the bits of one over the dequantised matrix.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache, partial

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Function, Module
from nightmill.worker.runners.gpu.device.operands import (
    ELEMENT,
    FLOAT,
    GROUP,
    PANEL_ROWS,
    Buffer,
    Format,
    Matrix,
)
from nightmill.worker.runners.gpu.device.sources import Source, instances, source_of
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.products.packed.packed_gemm import PackedProduct, packed_products
from nightmill.worker.runners.gpu.shapes import SUMMED, Candidate, Kernel, Kind, Shape, first_sum

__all__ = ["PackedFew"]

_SHARED = 226 << 10  # bytes of shared memory of a multiprocessor
_CHUNK = 256  # inputs in a stage of packets
_ZEROS = _CHUNK * ELEMENT.itemsize  # bytes of a row that there is not
_PADDING = 16  # bytes behind a row of x
_BARRIER = 8
_IN_FLIGHT = 48 << 10  # bytes of packets that a multiprocessor asks for ahead
_MOST_STAGES = 16
_MOST_WARPS = 20
_ROWS = 8  # of a tile
_MOST_TILES = 2


@dataclass(frozen=True, slots=True)
class _Few:
    """A kernel: a warp has so many panels, tiles of 8 rows, and one of so many sums."""

    panels: int
    tiles: int
    sums: int

    def outputs(self, kind: Kind) -> int:
        """Return the outputs of a warp."""
        return PANEL_ROWS * (1 if kind.activation else self.panels)

    def name(self, kind: Kind) -> str:
        return "_".join(map(str, (kind.value, self.panels, self.tiles, self.sums)))


@dataclass(frozen=True, slots=True)
class _FewLaunch:
    """Launch parameters for a shape.

    window  inputs of x that a block has at once
    stages  chunks that a warp asks for ahead
    shared  bytes of shared memory
    rounds  items that a warp computes, at most
    """

    blocks: int
    warps: int
    window: int
    stages: int
    shared: int
    rounds: int


class PackedFew:
    """Launches `packed_few.cu`, for these products."""

    def __init__(self, device: Device, products: Collection[PackedProduct]) -> None:
        self._multiprocessors = device.multiprocessors
        self._kernels: dict[tuple[Kind, Format], dict[_Few, Function]] = {}
        for kind, format_ in products:
            module = Module.of(device, _source(kind, format_))
            self._kernels[kind, format_] = {
                few: module.function(few.name(kind), "PPPiiiiiii", shared=_SHARED, dependent=True)
                for few in _kernels(kind)
            }

    @staticmethod
    def sources(spec: ModelSpec, precision: Precision, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        return PackedFew.files(packed_products(spec, precision)) if hopper else []

    @staticmethod
    def files(products: Collection[PackedProduct]) -> list[Source]:
        """A file for each kind of product and format."""
        return [_source(kind, format_) for kind, format_ in sorted(products, key=str)]

    def candidates(self, shape: Shape) -> list[Candidate]:
        """The kernels for so few rows."""
        if shape.rows > _ROWS * _MOST_TILES or shape.outputs % PANEL_ROWS or shape.inputs % 32:
            return []
        if shape.format is Format.MIXED:
            known = [
                kernels for (kind, _), kernels in self._kernels.items() if kind is shape.kind is Kind.PLAIN
            ]  # parts of a gate and what it is multiplied with are no runs of outputs
        else:
            known = [self._kernels.get((shape.kind, shape.format), {})]
        if not known or not all(known):
            return []
        return [
            Candidate(
                f"packed few {few.panels}_{few.tiles}", partial(self._kernel, few), partial(self._suits, few)
            )
            for few in known[0]
            if self._suits(few, shape)
        ]

    def _suits(self, few: _Few, shape: Shape) -> bool:
        """Return whether a kernel computes a shape, and is not made for more rows."""
        two = shape.kind in SUMMED and first_sum(shape.outputs, shape.inputs) < shape.inputs
        if shape.outputs < few.outputs(shape.kind) or few.sums != 1 + two:
            return False
        if not _ROWS * (few.tiles - 1) < shape.rows <= _ROWS * few.tiles:
            return False
        if not two:
            return True
        launch = _launch(
            few, shape.kind, shape.format, shape.rows, shape.outputs, shape.inputs, self._multiprocessors
        )
        return launch.window >= shape.inputs and launch.rounds == 1

    def _kernel(self, few: _Few, shape: Shape) -> Kernel:
        pitch, kind = shape.pitch or shape.outputs, shape.kind
        size = (FLOAT if kind in (Kind.FLOAT, *SUMMED) else ELEMENT).itemsize

        def kernel(x: Buffer, weight: Matrix, y: Buffer) -> None:
            address = y.address
            for part in weight.parts or (weight,):
                outputs = part.rows if weight.parts else shape.outputs
                first = first_sum(outputs, shape.inputs) if kind in SUMMED else shape.inputs
                launch = _launch(
                    few, kind, part.format, shape.rows, outputs, shape.inputs, self._multiprocessors
                )
                self._kernels[kind, part.format][few](
                    (launch.blocks, 1), (32 * launch.warps, 1, 1), x.address, part.address, address,
                    shape.rows, outputs, shape.inputs, first, pitch, launch.window, launch.stages,
                    shared=launch.shared,
                )  # fmt: skip
                address += outputs * size

        return kernel


def _kernels(kind: Kind) -> list[_Few]:
    """List the kernels that were the fastest somewhere: from 9 rows on, only those of gates."""
    panels = 2 if kind.activation or kind is Kind.FLOAT else 1
    tiles = range(1, _MOST_TILES + 1) if kind.activation else (1,)
    return [_Few(panels, t, s) for s in ((1, 2) if kind in SUMMED else (1,)) for t in tiles]


@cache
def _launch(
    few: _Few, kind: Kind, format_: Format, rows: int, outputs: int, inputs: int, multiprocessors: int
) -> _FewLaunch:
    items = -(-outputs // few.outputs(kind)) * few.sums
    each = -(-items // multiprocessors)
    rounds = -(-each // _MOST_WARPS)
    each_round = -(-each // rounds)
    warps = -(-each_round // few.sums) * few.sums
    stage = few.panels * (_CHUNK // format_.step) * format_.packet
    scales = 2 * few.panels * PANEL_ROWS * _CHUNK // GROUP * format_.computed
    beside = _ZEROS + 2 * _BARRIER + warps * scales
    stages = max(2, min(_MOST_STAGES, _IN_FLIGHT // (warps * stage)))
    whole = -(-inputs // _CHUNK) * _CHUNK

    def shared(window: int, stages: int) -> int:
        buffers = min(2, -(-inputs // window))
        x = buffers * rows * (window * ELEMENT.itemsize + _PADDING)
        return beside + x + warps * stages * (stage + _BARRIER)

    window = whole
    while shared(window, 2) > _SHARED:
        window = -(-window // (2 * _CHUNK)) * _CHUNK
    while shared(window, stages) > _SHARED:
        stages -= 1
    blocks = min(multiprocessors, -(-items // warps))
    return _FewLaunch(blocks, warps, window, stages, shared(window, stages), rounds)


def _source(kind: Kind, format_: Format) -> Source:
    kernels = ((kind.value, kind.name, few.panels, few.tiles, few.sums) for few in _kernels(kind))
    return source_of("packed_few", f"-DFORMAT={format_.name}", instances("PACKED_FEW", kernels))
