"""What of the GPU runner needs no GPU: sizes of launches, and what is said where its packages are missing."""

import sys

import pytest

from worker.runners.gpu.device import NoDeviceError
from worker.runners.gpu.functions import bindings
from worker.runners.gpu.gemm import MANY_ROWS, padded_rows
from worker.runners.gpu.hopper import TILES, Kind

SHARED_OF_A_BLOCK = 227 << 10  # on Hopper


def test_missing_bindings_name_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(NoDeviceError, match=r"cuda\.bindings cannot be imported.*nightmill\[cuda\]"):
        bindings()


@pytest.mark.parametrize("kind", list(Kind))
def test_every_tile_fits_a_block_and_the_swizzle(kind: Kind) -> None:
    for tile in TILES[kind]:
        assert tile.shared <= SHARED_OF_A_BLOCK
        assert (
            tile.columns // 2 % 8 == 0
        )  # both halves of a tile of weights begin where 8 rows of 128 bytes do
        assert tile.threads == 32 * (4 * tile.groups + 1)


def test_rows_are_padded_to_few_sizes_and_never_by_more_than_a_step() -> None:
    padded = [padded_rows(rows) for rows in range(1, 4097)]
    assert all(0 <= size - rows < 128 for rows, size in enumerate(padded, start=1))
    assert padded == sorted(padded)
    assert len({size for size in padded if size <= MANY_ROWS}) == 16 + 30 + 24
