"""Tiles of the products of experts: how many positions blocks take at once, and what kernels they are of."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from nightmill.worker.runners.gpu.device.operands import PANEL_ROWS, Format
from nightmill.worker.runners.gpu.device.sources import Source, source_of

__all__ = [
    "GEMM_TILE", "ExpertTile", "Multiplier", "grouped_source", "grouped_sources",
    "multipliers", "tile_for", "tiles_for",
]  # fmt: skip

_PANELS = 2  # of a warp
_ALIGNMENT = 1024  # of a stage in shared memory
_WIDE_STEP = 256
_BOX = 64  # inputs
_CHUNK = 256  # inputs of a stage of packets
_GROUP = 32  # inputs with one scale
_FILLED = 0.75  # of a tile; so `expert_gemm.cu` has elements of experts that are sent more than 48 tokens
_STAYING = ((1.0, 16), (6.0, 8), (12.0, 16), (48.0, 64), (math.inf, 128))
"""Tokens that an expert is sent on average, up to which blocks that stay take tiles of so many rows.

As measured with 1, 64, 256 and 8,192 tokens of Qwen3-30B-A3B on an H200 (`benchmarks/history/speed.md`).
"""
_MOST_OF_64 = 160
"""Tokens that an expert is sent on average, up to which FP8 has tiles of 64 positions, and of 128 beyond.

As measured with 1,024 and 4,096 tokens of Qwen3-30B-A3B, 64 and 256 an expert, on an H200
(`benchmarks/history/speed.md`).
"""
_MOST_PACKETS = 4  # stages of packets


class Multiplier(Enum):
    """The file whose kernels multiply."""

    MMA = "grouped"
    WGMMA = "hopper_grouped"
    STAYING = "packed_experts"
    """The kernel of packed weights: blocks stay and take tile after tile; few positions go by mma.sync."""
    GEMM = "expert_gemm"
    """The kernel over whole operands: FP8 as it is, of any number of positions; elements of many."""


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """Positions that a block has at once, and the kernels that multiply them."""

    rows: int
    by: Multiplier = Multiplier.MMA

    def kernel(self, name: str) -> str:
        """The kernel that leaves `floats`, activations of `one` matrix, or of `two`."""
        if self.by is Multiplier.MMA:
            return f"experts_{name}_{self.rows // 16}"
        if self.by is Multiplier.GEMM:
            return f"gemm_{name}_{self.rows}"
        return f"{'hopper' if self.by is Multiplier.WGMMA else 'packed'}_{name}_{self.rows}"

    @property
    def stays(self) -> bool:
        """True if blocks take tile after tile, so that there are no more than run at once."""
        return self.by in (Multiplier.STAYING, Multiplier.GEMM)

    def warps(self, format_: Format) -> int:
        """Warps that multiply, with two panels of weights each, as the kernels' files say."""
        if self.by is Multiplier.MMA:
            return 4
        if self.by is Multiplier.GEMM:
            return self.rows // 16
        if self.by is Multiplier.STAYING:
            return 12 if self.rows == 128 else 8 if self.rows >= 64 else 4
        return 8 if self.rows < 128 else 16 if 2 * self._stage(format_, 16) <= self._room else 12

    def threads(self, format_: Format) -> int:
        """Threads of a block."""
        if self.by is Multiplier.GEMM:
            return 2 * self.rows + 128
        if self.by is not Multiplier.STAYING:
            return 32 * self.warps(format_)
        copying = 128 if self.rows >= 128 else 64
        return 32 * self.warps(format_) + copying

    def outputs(self, format_: Format, sides: int) -> int:
        """Outputs that a block has at once, if each has so many rows of the weight."""
        if self.by is Multiplier.GEMM:
            return self.columns(format_) // sides
        return self.warps(format_) * PANEL_ROWS * _PANELS // sides

    def columns(self, format_: Format) -> int:
        """Rows of the weight that a block of `expert_gemm.cu` has at once."""
        return 256 if not format_.scaled else 64 if self.rows == 64 else 192

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor holds, of those that stay."""
        return 1 if self.rows >= 128 else 2 if self.rows >= 64 else 3 if self.rows >= 16 else 4

    def shared(self, format_: Format) -> int:
        """Bytes of shared memory of a block."""
        if self.by is Multiplier.GEMM:
            stages = 4 if not format_.scaled else 6 if self.rows == 64 else 5
            return stages * (self.rows + self.columns(format_)) * 2 * _BOX + _ALIGNMENT
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


GEMM_TILE = ExpertTile(128, Multiplier.GEMM)
_FEW_OF_FP8 = ExpertTile(64, Multiplier.GEMM)


def tiles_for(formats: Collection[Format], *, hopper: bool) -> tuple[ExpertTile, ...]:
    """The tiles of products with matrices of these formats, the smallest first.

    FP8 has those of `expert_gemm.cu` alone, since its sums are others than those of elements.
    """
    if not hopper:
        return tuple(ExpertTile(rows) for rows in (16, 32, 64))
    if any(one.scaled for one in formats):
        return _FEW_OF_FP8, GEMM_TILE
    if all(one.packed for one in formats):
        return tuple(ExpertTile(rows, Multiplier.STAYING) for rows in (8, 16, 64, 128))
    many = GEMM_TILE if all(one.plain for one in formats) else ExpertTile(128, Multiplier.WGMMA)
    return (ExpertTile(16), ExpertTile(32, Multiplier.WGMMA), ExpertTile(64, Multiplier.WGMMA), many)


def tile_for(tiles: Sequence[ExpertTile], mean: float) -> ExpertTile:
    """The tile of these, the smallest first, that suits so many tokens of an expert on average."""
    if _FEW_OF_FP8 in tiles:
        return GEMM_TILE if GEMM_TILE in tiles and mean > _MOST_OF_64 else _FEW_OF_FP8
    for most, rows in _STAYING:
        staying = ExpertTile(rows, Multiplier.STAYING)
        if mean <= most and staying in tiles:
            return staying
    # Some experts are sent more.
    return next((tile for tile in tiles if mean <= tile.rows * _FILLED and not tile.stays), tiles[-1])


def multipliers(format_: Format, *, hopper: bool) -> tuple[Multiplier, ...]:
    """The files that have kernels of a format, on Hopper or on other GPUs."""
    if not hopper:
        return (Multiplier.MMA,)
    if format_.scaled:
        return (Multiplier.GEMM,)
    lacking = Multiplier.GEMM if format_.packed else Multiplier.STAYING
    return tuple(one for one in Multiplier if one is not lacking)


def grouped_sources(formats: Collection[Format], *, hopper: bool) -> list[Source]:
    """The files of the kernels of matrices of these formats."""
    files = dict.fromkeys(tile.by for tile in tiles_for(formats, hopper=hopper))
    return [grouped_source(format_, by) for format_ in sorted(formats, key=str) for by in files]


def grouped_source(format_: Format, by: Multiplier) -> Source:
    """The file of these kernels, for a format."""
    option = [f"-DFORMAT={format_.name}"] if format_.packed else ["-DFP8"] if format_.scaled else []
    return source_of(by.value, *option)
