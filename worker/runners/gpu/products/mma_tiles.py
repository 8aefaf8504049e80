"""Tiles of products by mma.sync (`cuda/products/mma_tile.cuh`), whatever the weights are."""

from dataclasses import dataclass

from nightmill.worker.runners.gpu.shapes import Kind

__all__ = ["MMA_TILES", "REFERENCE", "MmaTile", "mma_tiles"]

_LINE = 128  # bytes of a row in a stage
_MANY_ROWS = 512  # from here on only tiles of 128 rows


@dataclass(frozen=True, slots=True)
class MmaTile:
    """A tile of `rows` by `columns` rows of the weight, of `down` x `across` warps; `stages` of copies."""

    rows: int
    columns: int
    down: int
    across: int
    stages: int

    @property
    def arguments(self) -> tuple[int, ...]:
        """Arguments of the kernel template, which are also in the names of kernels."""
        return self.rows, self.columns, self.down, self.across, self.stages

    @property
    def name(self) -> str:
        """The end of the kernel's name."""
        return "_".join(map(str, self.arguments))

    @property
    def threads(self) -> int:
        return 32 * self.down * self.across

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.stages * (self.rows + self.columns) * _LINE

    def takes(self, kind: Kind) -> bool:
        """Return whether it computes that kind: with a gate, a warp has two tiles of 8 outputs at least."""
        return kind.activation is None or self.columns // self.across >= 16


MMA_TILES = (
    MmaTile(128, 128, 2, 4, 3),
    MmaTile(64, 128, 2, 4, 3),
    MmaTile(64, 64, 2, 2, 3),
    MmaTile(32, 64, 1, 4, 5),
    MmaTile(16, 64, 1, 4, 6),
    MmaTile(16, 32, 1, 4, 8),
)
"""All tiles, those with more rows first; none takes more shared memory than a block has on any GPU."""
REFERENCE = MMA_TILES[2]
"""The tile of elements that other kernels are held against."""


def mma_tiles(kind: Kind, rows: int) -> list[MmaTile]:
    """Return the tiles that are worth timing for so many rows, the best guess first."""
    least = min((tile.rows for tile in MMA_TILES if tile.rows >= rows), default=64)
    heights = {least} if rows <= 64 else {64, 128}
    if rows > _MANY_ROWS:
        heights.discard(64)
    return [tile for tile in MMA_TILES if tile.rows in heights and tile.takes(kind)]
