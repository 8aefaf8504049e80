"""Products with FP8 weights by `mma_fp8.cu`, on GPUs before and after Hopper that multiply FP8."""

from collections.abc import Collection
from functools import partial

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Function, Module
from nightmill.worker.runners.gpu.device.operands import FP8, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import Source, instances, source_of
from nightmill.worker.runners.gpu.kinds import kinds_of
from nightmill.worker.runners.gpu.products.fp8.quantise import Quantise
from nightmill.worker.runners.gpu.products.mma_tiles import MMA_TILES, MmaTile, mma_tiles
from nightmill.worker.runners.gpu.shapes import Candidate, Kernel, Kind, Shape

__all__ = ["MmaFp8"]

_ALIGNMENT = 16  # inputs that are copied at once


class MmaFp8:
    """Launches `mma_fp8.cu`.

    kinds      of products that there will be
    quantised  room for what enters a product as elements
    """

    def __init__(self, device: Device, kinds: Collection[Kind], quantised: Buffer) -> None:
        self._quantise = Quantise(device)
        self._quantised = quantised
        self._kernels = {kind: _load(device, source, kind) for kind, source in _sources(kinds).items()}

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files: one for each kind of product, so that they are compiled at once."""
        return [] if hopper else list(_sources(kinds_of(spec)).values())

    def candidates(self, shape: Shape) -> list[Candidate]:
        """The tiles that are worth timing for a shape."""
        aligned = shape.inputs % _ALIGNMENT == 0 and shape.outputs % 8 == 0 and shape.pitch is None
        if shape.kind not in self._kernels or shape.format is not Format.FP8 or not aligned:
            return []
        return [
            Candidate(f"fp8 mma {tile.name}", partial(self.kernel, tile), partial(_suits, tile))
            for tile in mma_tiles(shape.kind, shape.rows)
        ]

    def kernel(self, tile: MmaTile, shape: Shape) -> Kernel:
        """Bind a tile to a shape; rows of elements are quantised first."""
        function = self._kernels[shape.kind][tile]
        rows, outputs, inputs = shape.rows, shape.outputs, shape.inputs
        results = tile.columns if shape.kind.activation is None else tile.columns // 2
        grid, block = (-(-rows // tile.rows) * -(-outputs // results), 1), (tile.threads, 1, 1)
        quantise, room, shared = self._quantise, self._quantised, tile.shared

        def kernel(x: Buffer, weight: Matrix, y: Buffer) -> None:
            if x.dtype != FP8:
                quantise(x.address, room.address, room.scales, rows, inputs)
                x = room
            function(
                grid, block, x.address, x.scales, weight.address, weight.scales, y.address, rows, outputs,
                inputs, shared=shared,
            )  # fmt: skip

        return kernel


def _suits(tile: MmaTile, shape: Shape) -> bool:
    return tile in mma_tiles(shape.kind, shape.rows)


def _load(device: Device, source: Source, kind: Kind) -> dict[MmaTile, Function]:
    module = Module.of(device, source)
    return {
        tile: module.function(
            f"mma_fp8_{kind.value}_{tile.name}", "PPPPPiii", shared=tile.shared, dependent=True
        )
        for tile in MMA_TILES
        if tile.takes(kind)
    }


def _sources(kinds: Collection[Kind]) -> dict[Kind, Source]:
    return {
        kind: source_of(
            "mma_fp8",
            instances(
                "MMA_KERNEL",
                ((kind.value, kind.name, *tile.arguments) for tile in MMA_TILES if tile.takes(kind)),
            ),
        )
        for kind in Kind
        if kind in kinds and kind is not Kind.FLOAT  # the head is of elements
    }
