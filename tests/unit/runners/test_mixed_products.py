"""Kernels multiply a matrix whose parts have different types only if they may take one after the other."""

from typing import Any

import pytest

from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.products.packed.packed_few import PackedFew, _kernels
from nightmill.worker.runners.gpu.products.packed.packed_gemm import PACKED_TILES, PackedTiles
from nightmill.worker.runners.gpu.shapes import Kind, Shape

FORMATS = (Format.Q4_K, Format.Q6_K)
ROWS = (1, 8, 9, 16, 17, 64)


def launchers(kind: Kind) -> list[Any]:
    """Those of packed products, with kernels that are only looked up."""
    few: Any = object.__new__(PackedFew)
    few._multiprocessors = 132
    few._kernels = {(kind, kept): dict.fromkeys(_kernels(kind)) for kept in FORMATS}
    tiles: Any = object.__new__(PackedTiles)
    tiles._kernels = {(kind, kept): dict.fromkeys(PACKED_TILES[kind]) for kept in FORMATS}
    return [few, tiles]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", [Kind.SWIGLU, Kind.GEGLU], ids=str)
def test_a_gate_and_what_it_multiplies_are_not_taken_part_by_part(kind: Kind, rows: int) -> None:
    """Each part would be read as if it held both, and its results written as if they were all."""
    for launcher in launchers(kind):
        assert launcher.candidates(Shape(rows, 1024, 768, kind, Format.MIXED)) == []
        if rows <= 8:
            assert launcher.candidates(Shape(rows, 1024, 768, kind, Format.Q4_K))


@pytest.mark.parametrize("rows", [1, 8])
def test_runs_of_outputs_are(rows: int) -> None:
    for launcher in launchers(Kind.PLAIN):
        assert launcher.candidates(Shape(rows, 1024, 768, Kind.PLAIN, Format.MIXED))
