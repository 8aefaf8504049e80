"""Products by `mma_gemm.cu` on every GPU, whose tiles all have the same sums, and so the same bits."""

from collections.abc import Collection, Sequence
from functools import partial

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Function, Module
from nightmill.worker.runners.gpu.device.operands import Buffer, Matrix
from nightmill.worker.runners.gpu.device.sources import Source, instances, source_of
from nightmill.worker.runners.gpu.kinds import kinds_of
from nightmill.worker.runners.gpu.products.mma_tiles import MMA_TILES, REFERENCE, MmaTile, mma_tiles
from nightmill.worker.runners.gpu.shapes import SUMMED, Candidate, Kernel, Kind, Shape, first_sum

__all__ = ["MmaTiles"]


class MmaTiles:
    """Launches `mma_gemm.cu`, for weights that are elements; a kind's kernels are loaded when it first comes.

    alone  these are the tiles that products are computed by; else there is one, which others are held against
    """

    def __init__(self, device: Device, *, alone: bool) -> None:
        self._device = device
        self._format = device.element.format
        self._two_sums = device.hopper
        self._tiles = MMA_TILES if alone else (REFERENCE,)
        self._kernels: dict[Kind, dict[MmaTile, Function]] = {}

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files: one for each kind of product, so that they are compiled at once."""
        return list(_sources(kinds_of(spec), (REFERENCE,) if hopper else MMA_TILES).values())

    def candidates(self, shape: Shape) -> list[Candidate]:
        """The tiles that are worth timing for a shape."""
        if not self._takes(shape):
            return []
        return [self._candidate(tile) for tile in self._worthwhile(shape)]

    def reference(self, shape: Shape) -> Candidate | None:
        """The tile whose bits are those that a product of this shape has; None if there are none."""
        return self._candidate(REFERENCE) if self._takes(shape) else None

    def kernel(self, tile: MmaTile, shape: Shape) -> Kernel:
        """Bind a tile to a shape."""
        function = self._functions(shape.kind)[tile]
        rows, outputs, inputs = shape.rows, shape.outputs, shape.inputs
        results = tile.columns if shape.kind.activation is None else tile.columns // 2
        grid = -(-rows // tile.rows) * -(-outputs // results), 1
        block, shared, pitch = (tile.threads, 1, 1), tile.shared, shape.pitch or outputs
        first = first_sum(outputs, inputs) if self._two_sums and shape.kind in SUMMED else inputs

        def kernel(x: Buffer, weight: Matrix, y: Buffer) -> None:
            function(
                grid, block, x.address, weight.address, y.address, rows, outputs, inputs, pitch, first,
                shared=shared,
            )  # fmt: skip

        return kernel

    def _candidate(self, tile: MmaTile) -> Candidate:
        def suits(shape: Shape) -> bool:
            return tile in self._worthwhile(shape)

        return Candidate(f"mma {tile.name}", partial(self.kernel, tile), suits)

    def _worthwhile(self, shape: Shape) -> Sequence[MmaTile]:
        return mma_tiles(shape.kind, shape.rows) if len(self._tiles) > 1 else self._tiles

    def _takes(self, shape: Shape) -> bool:
        pitch = shape.pitch or shape.outputs
        whole = shape.inputs % 8 == 0 and shape.outputs % 8 == 0 and pitch % 8 == 0
        return whole and shape.format is self._format

    def _functions(self, kind: Kind) -> dict[MmaTile, Function]:
        if kind not in self._kernels:
            module = Module.of(self._device, _sources((kind,), self._tiles)[kind])
            self._kernels[kind] = {
                tile: module.function(
                    f"mma_{kind.value}_{tile.name}", "PPPiiiii", shared=tile.shared, dependent=True
                )
                for tile in self._tiles
                if tile.takes(kind)
            }
        return self._kernels[kind]


def _sources(kinds: Collection[Kind], tiles: tuple[MmaTile, ...]) -> dict[Kind, Source]:
    return {
        kind: source_of(
            "mma_gemm",
            instances(
                "MMA_KERNEL",
                ((kind.value, kind.name, *tile.arguments) for tile in tiles if tile.takes(kind)),
            ),
        )
        for kind in Kind
        if kind in kinds
    }
