"""What of the GPU runner needs no GPU: sizes of launches, and what is said where its packages are missing."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from nightmill.worker.runners.gpu.device.device import Device, NoDeviceError, cuda_driver, device_count
from nightmill.worker.runners.gpu.device.functions import bindings
from nightmill.worker.runners.gpu.device.graphs import buckets
from nightmill.worker.runners.gpu.products import clock as products_clock
from nightmill.worker.runners.gpu.products.clock import Choices, KernelClock, nearest
from nightmill.worker.runners.gpu.products.elements.hopper_gemm import TILES, Tile
from nightmill.worker.runners.gpu.products.elements.hopper_qkv import QKV_TILES
from nightmill.worker.runners.gpu.products.elements.hopper_split import SPLIT_TILES, SplitTile, split_tiles
from nightmill.worker.runners.gpu.products.remembered import RememberedChoices
from nightmill.worker.runners.gpu.shapes import MANY_ROWS, Kind, first_sum, padded_rows
from tests.unit.runners.recorded_cuda import DriverError, RecordedDriver

SHARED_OF_A_BLOCK = 227 << 10  # on Hopper


def test_a_driver_that_shows_no_gpu_is_as_good_as_none(
    hopper: RecordedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with an empty CUDA_VISIBLE_DEVICES: PyCUDA's errors are none of Python's own."""
    assert device_count() == 1

    def refuse() -> None:
        raise DriverError("cuInit failed: no CUDA-capable device is detected")

    monkeypatch.setattr(cuda_driver(), "init", refuse)
    assert device_count() == 0
    with pytest.raises(NoDeviceError, match="GPU 0 cannot be used: cuInit failed"):
        Device()


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


class NumbersClock:
    """Of ways that are numbers, the largest is the fastest; notes what is timed."""

    def __init__(self, remembered: RememberedChoices | None = None, *, steady: bool = True) -> None:
        self.timed: list[list[int]] = []
        self.remembered = remembered or RememberedChoices()
        self.steady = steady

    def ranked(
        self, ways: Sequence[Callable[[int], None]], beside: Callable[[], None], *, loaded: bool = False
    ) -> list[int]:
        self.timed.append([way(0) for way in ways])  # type: ignore[func-returns-value]
        return sorted(range(len(ways)), key=lambda index: -self.timed[-1][index])


def tune(choices: Choices[int], rows: int) -> bool:
    return choices.tune(rows, lambda way: lambda turn: way, lambda: None)  # type: ignore[arg-type, return-value]


def test_of_all_ways_the_best_few_are_tried_at_other_sizes_between_the_same_powers_of_two() -> None:
    clock: Any = NumbersClock()
    everything = list(range(1, 21))
    suits: Callable[[int, int], bool] = lambda way, rows: way != 19 or rows < 500  # noqa: E731
    choices: Choices[int] = Choices(clock, lambda rows: everything, suits)
    assert [tune(choices, rows) for rows in (300, 300, 257, 512, 256)] == [True, False, True, True, True]
    best = [20, 19, 18, 17, 16, 15]
    assert clock.timed == [everything, best, [20, *best[2:]], everything]
    assert choices.best(300) == 20
    assert choices.best(8) == 1  # nothing near was tried: the first guess


class WarmingDevice:
    """Time goes on by what is queued; work is slower when there has been work for 0.1 s without a pause.

    A way has two durations, of a device at rest and of one that is warm.
    """

    WARM_AFTER = 0.1
    stream = None

    def __init__(self) -> None:
        self.now = 0.0
        self.recorded: list[tuple[float, float]] = []

    def event(self, *, timing: bool) -> "WarmingDevice.Event":
        assert timing
        return WarmingDevice.Event(self)

    def fill(self, address: int, value: int, size: int) -> None:
        self.now += 1e-5

    def wait(self, event: "WarmingDevice.Event", what: str) -> None:
        assert event.at == self.now

    class Event:
        def __init__(self, device: "WarmingDevice") -> None:
            self.device, self.at = device, 0.0

        def record(self, stream: None) -> None:
            self.at = self.device.now

        def time_till(self, other: "WarmingDevice.Event") -> float:
            return 1e3 * (other.at - self.at)

    class Graph:
        def __init__(self, device: "WarmingDevice", record: Callable[[], None]) -> None:
            device.recorded.clear()  # what was run in the open
            record()
            self.device, self.ways = device, list(device.recorded)

        def launch(self) -> None:
            for at_rest, warm in self.ways:
                self.device.now += at_rest if self.device.now < self.device.WARM_AFTER else warm

        def close(self) -> None: ...


@pytest.mark.parametrize(("rows", "lasting"), [(64, False), (MANY_ROWS, False), (2048, True), (16384, True)])
def test_what_multiplies_many_rows_is_what_is_fastest_on_a_gpu_at_work(
    monkeypatch: pytest.MonkeyPatch, rows: int, lasting: bool
) -> None:
    """Steps of few rows leave a GPU at rest now and then: there a short run tells what is fastest."""
    monkeypatch.setattr(products_clock, "Graph", WarmingDevice.Graph)
    device: Any = WarmingDevice()
    quick_at_rest, quick_when_warm = (6e-4, 8e-4), (6.5e-4, 7e-4)

    def run(way: tuple[float, float], turn: int) -> None:
        device.recorded.append(way)

    ways = [(1e-3, 1e-3), quick_at_rest, (7.5e-4, 7.6e-4), quick_when_warm]
    choices = Choices(KernelClock(device, 0, 32 << 20), lambda rows: ways)
    assert choices.tune(rows, lambda way: partial(run, way), lambda: None)
    assert choices.best(rows) == (quick_when_warm if lasting else quick_at_rest)


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
