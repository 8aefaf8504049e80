"""Tiles of the products of experts: how many positions blocks take at once, and what kernels they are of."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from nightmill.worker.runners.gpu.device.operands import PANEL_ROWS, Format
from nightmill.worker.runners.gpu.device.sources import Source, source_of

__all__ = ["ExpertTile", "Multiplier", "grouped_source", "grouped_sources", "tile_for", "tiles_for"]

_PANELS = 2  # of a warp
_ALIGNMENT = 1024  # of a stage in shared memory
_WIDE_STEP = 256
_BOX = 64  # inputs
_CHUNK = 256  # inputs of a stage of packets
_GROUP = 32  # inputs with one scale
_FILLED = 0.75  # of a tile
_STAYING = ((1.0, 16), (6.0, 8), (12.0, 16), (48.0, 64), (math.inf, 128))
"""Tokens that an expert is sent on average, up to which blocks that stay take tiles of so many rows.

As measured with 1, 64, 256 and 8,192 tokens of Qwen3-30B-A3B on an H200 (`benchmarks/history/speed.md`).
"""
_MOST_PACKETS = 4  # stages of packets


class Multiplier(Enum):
    """The file whose kernels multiply."""

    MMA = "grouped"
    WGMMA = "hopper_grouped"
    STAYING = "packed_experts"
    """The kernel of packed weights: blocks stay and take tile after tile; few positions go by mma.sync."""


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """Positions that a block has at once, and the kernels that multiply them."""

    rows: int
    by: Multiplier = Multiplier.MMA

    def kernel(self, name: str) -> str:
        """The kernel that leaves `floats`, activations of `one` matrix, or of `two`."""
        if self.by is Multiplier.MMA:
            return f"experts_{name}_{self.rows // 16}"
        return f"{'hopper' if self.by is Multiplier.WGMMA else 'packed'}_{name}_{self.rows}"

    def warps(self, format_: Format) -> int:
        """Warps that multiply, with two panels of weights each, as the kernels' files say."""
        if self.by is Multiplier.MMA:
            return 4
        if self.by is Multiplier.STAYING:
            return 12 if self.rows == 128 else 8 if self.rows >= 64 else 4
        return 8 if self.rows < 128 else 16 if 2 * self._stage(format_, 16) <= self._room else 12

    def threads(self, format_: Format) -> int:
        """Threads of a block."""
        if self.by is not Multiplier.STAYING:
            return 32 * self.warps(format_)
        copying = 128 if self.rows >= 128 else 64
        return 32 * self.warps(format_) + copying

    def outputs(self, format_: Format, sides: int) -> int:
        """Outputs that a block has at once, if each has so many rows of the weight."""
        return self.warps(format_) * PANEL_ROWS * _PANELS // sides

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor holds, of those that stay."""
        return 1 if self.rows >= 128 else 2 if self.rows >= 64 else 3 if self.rows >= 16 else 4

    def shared(self, format_: Format) -> int:
        """Bytes of shared memory of a block."""
        if self.by is Multiplier.STAYING:
            return self._staying(format_)
        stage = self._stage(format_, self.warps(format_))
        if self.by is Multiplier.MMA:
            return (3 if self.rows < 64 else 2) * stage
        return min(max(self._room // stage, 2), 4) * stage + _ALIGNMENT

    def _stage(self, format_: Format, warps: int) -> int:
        depth = _WIDE_STEP if format_.step == _WIDE_STEP else 128
        size = 1 if format_.scaled else 2
        panel = depth // format_.step * format_.packet if format_.packed else PANEL_ROWS * (depth * size + 16)
        weights = _PANELS * warps * panel
        if self.by is Multiplier.MMA:
            return self.rows * (depth * size + 16) + weights
        return -(-(2 * depth * self.rows + weights) // _ALIGNMENT) * _ALIGNMENT

    @property
    def _room(self) -> int:
        """Bytes of shared memory for stages: a multiprocessor holds one block, or two."""
        return 222 << 10 if self.rows >= 128 else 110 << 10

    def _staying(self, format_: Format) -> int:
        """Bytes of stages of x, of computed scales and of stages of packets."""
        panels, rows = _PANELS * self.warps(format_), self.rows
        boxes = 1 if rows >= 64 else 4
        stages = {128: 5, 64: 4}.get(rows, 3)
        kept = stages * boxes * rows * 2 * _BOX
        kept += panels * PANEL_ROWS * (_CHUNK // _GROUP) * format_.computed
        packets = panels * _CHUNK // format_.step * format_.packet
        room = {1: 224, 2: 110, 3: 74, 4: 55}[self.blocks] << 10
        return kept + min((room - _ALIGNMENT - kept) // packets, _MOST_PACKETS) * packets + _ALIGNMENT


def tiles_for(*, hopper: bool, packed: bool) -> tuple[ExpertTile, ...]:
    """The tiles of products, the smallest first; packed: all matrices are."""
    if not hopper:
        return tuple(ExpertTile(rows) for rows in (16, 32, 64))
    if packed:
        return tuple(ExpertTile(rows, Multiplier.STAYING) for rows in (8, 16, 64, 128))
    return (ExpertTile(16), *(ExpertTile(rows, Multiplier.WGMMA) for rows in (32, 64, 128)))


def tile_for(tiles: Sequence[ExpertTile], mean: float) -> ExpertTile:
    """The tile of these, the smallest first, that suits so many tokens of an expert on average."""
    for most, rows in _STAYING:
        staying = ExpertTile(rows, Multiplier.STAYING)
        if mean <= most and staying in tiles:
            return staying
    others = (tile for tile in tiles if tile.by is not Multiplier.STAYING)  # some experts are sent more
    return next((tile for tile in others if mean <= tile.rows * _FILLED), tiles[-1])


def grouped_sources(format_: Format, *, hopper: bool, packed: bool) -> list[Source]:
    """The files of a format's kernels; packed: those of all matrices are."""
    files = dict.fromkeys(tile.by for tile in tiles_for(hopper=hopper, packed=packed))
    return [grouped_source(format_, by) for by in files]


def grouped_source(format_: Format, by: Multiplier) -> Source:
    """The file of these kernels, for a format."""
    option = [f"-DFORMAT={format_.name}"] if format_.packed else ["-DFP8"] if format_.scaled else []
    return source_of(by.value, *option)
