"""What of the GPU runner needs no GPU: sizes of launches, and what is said where its packages are missing."""

import sys

import pytest

from nightmill.worker.runners.gpu.device import NoDeviceError
from nightmill.worker.runners.gpu.functions import bindings
from nightmill.worker.runners.gpu.gemm import MANY_ROWS, Shortlist, nearest, padded_rows
from nightmill.worker.runners.gpu.graphs import buckets
from nightmill.worker.runners.gpu.hopper import QKV_TILES, TILES, Kind, Tile, first_sum
from nightmill.worker.runners.gpu.split import SPLIT_TILES, SplitTile, split_tiles

SHARED_OF_A_BLOCK = 227 << 10  # on Hopper


def test_missing_bindings_name_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(NoDeviceError, match=r"cuda\.bindings cannot be imported.*nightmill\[cuda\]"):
        bindings()


@pytest.mark.parametrize("tiles", [*TILES.values(), QKV_TILES])
def test_every_tile_fits_a_block_and_the_swizzle(tiles: tuple[Tile, ...]) -> None:
    for tile in tiles:
        assert tile.shared <= SHARED_OF_A_BLOCK
        assert (
            tile.columns // 2 % 8 == 0
        )  # both halves of a tile of weights begin where 8 rows of 128 bytes do
        assert tile.threads == 32 * (4 * tile.groups + 1)


@pytest.mark.parametrize(("kind", "row_bytes"), [(Kind.SWIGLU, 2), (Kind.RESIDUAL, 4)])
def test_results_of_a_tile_fill_its_buffers_a_whole_number_of_times(kind: Kind, row_bytes: int) -> None:
    for tile in TILES[kind]:
        results = tile.columns // 2 if kind is Kind.SWIGLU else tile.columns
        assert not tile.buffers or results * row_bytes % (128 * tile.buffers) == 0


def test_a_shortlist_holds_the_best_few_for_sizes_between_the_same_powers_of_two() -> None:
    shortlist: Shortlist[int] = Shortlist()
    assert shortlist.of(300) == []
    shortlist.learn(300, range(20, 0, -1))
    assert shortlist.of(300) == shortlist.of(257) == shortlist.of(512) == [20, 19, 18, 17, 16, 15]
    assert shortlist.of(256) == shortlist.of(513) == []


def test_what_was_timed_at_the_start_tells_how_to_multiply_any_number_of_rows() -> None:
    """So nothing has to be asked of the library, or loaded, in the middle of a night."""
    slots, most = 2048, 16384
    timed = {padded_rows(size) for size in buckets(slots)} | {most >> turn for turn in range(4)}
    for rows in sorted({padded_rows(rows) for rows in range(1, most + 1)}):
        found = nearest(timed, rows)
        assert found is not None
        assert max(found, rows) / min(found, rows) <= (1.5 if rows > MANY_ROWS else 1.25)


def test_far_numbers_of_rows_tell_nothing_of_fewer_and_many_have_each_other() -> None:
    assert nearest([64, 256, 2048], 512) is None
    assert nearest([64, 256, 2048], 320) == 256
    assert nearest([64, 256, 2048], 16384) == 2048
    assert nearest([1024], 1152) is None
    assert nearest([], 8) is None


@pytest.mark.parametrize("tile", SPLIT_TILES, ids=lambda tile: tile.name)
def test_a_tile_whose_k_is_shared_fits_a_block_and_its_copies_are_aligned(tile: SplitTile) -> None:
    assert tile.shared <= SHARED_OF_A_BLOCK
    assert tile.boxes * (tile.rows + tile.columns) * 128 % 1024 == 0
    assert tile.rows * 128 % 1024 == 0
    assert tile.columns // 8 % tile.halves == 0
    assert tile.blocks in (1, 2, 4)


@pytest.mark.parametrize("inputs", [896, 4864, 18_944])
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 256])
def test_tiles_whose_k_is_shared_are_offered_for_few_rows_and_cover_them(rows: int, inputs: int) -> None:
    offered = split_tiles(rows, 896, inputs)
    assert offered
    assert all(tile.rows >= min(rows, 64) and tile.suits(896, inputs) for tile in offered)


def test_tiles_of_many_rows_whose_k_is_shared_are_offered_where_k_is_long() -> None:
    assert {tile.rows for tile in split_tiles(1024, 896, 4864)} == {128}
    assert not split_tiles(1024, 896, 896)
    assert not split_tiles(1025, 896, 4864)


def test_a_long_sum_is_cut_in_the_middle_at_a_whole_stage() -> None:
    assert [first_sum(896, inputs) for inputs in (8, 896, 4095)] == [8, 896, 4095]
    assert first_sum(2048, 8192) == 8192
    for inputs in (4096, 4104, 4864, 8192, 14_336, 18_944, 29_568):
        assert first_sum(1536, inputs) % 64 == 0
        assert 0 <= 2 * first_sum(1536, inputs) - inputs < 128


def test_rows_are_padded_to_few_sizes_and_never_by_more_than_a_step() -> None:
    padded = [padded_rows(rows) for rows in range(1, 4097)]
    assert all(0 <= size - rows < 128 for rows, size in enumerate(padded, start=1))
    assert padded == sorted(padded)
    assert len({size for size in padded if size <= MANY_ROWS}) == 16 + 30 + 24
