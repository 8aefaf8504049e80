"""Which shapes tiles of packed products take, and in which order turns of a relay come."""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import chain

import pytest

from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.products.packed.packed_gemm import PACKED_TILES, PackedTile
from nightmill.worker.runners.gpu.products.packed.packed_qkv import PACKED_QKV_TILES
from nightmill.worker.runners.gpu.shapes import Kind, Shape

TILES = list(dict.fromkeys([*PACKED_QKV_TILES, *chain.from_iterable(PACKED_TILES.values())]))
RELAYS = [tile for tile in TILES if tile.relay]
EACH_RELAY = pytest.mark.parametrize("tile", RELAYS, ids=lambda tile: tile.name)
GROUPS = sorted({tile.groups for tile in RELAYS})
SCHEDULES = 60


@EACH_RELAY
def test_a_relay_takes_only_what_has_several_turns(tile: PackedTile) -> None:
    one_turn = 256 * tile.turn
    for inputs, several in ((one_turn - 64, False), (one_turn, False), (one_turn + 64, True), (3584, True)):
        assert tile.takes(inputs) is several
        assert tile.suits(Shape(1, 512, inputs, Kind.PLAIN, Format.Q8_0)) is several


@pytest.mark.parametrize("tile", [tile for tile in TILES if not tile.relay], ids=lambda tile: tile.name)
def test_other_tiles_take_any_number_of_inputs(tile: PackedTile) -> None:
    assert all(tile.takes(inputs) for inputs in (64, 256, 512, 3584))


@pytest.mark.parametrize("turns", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("groups", GROUPS)
def test_turns_of_a_relay_come_in_order_however_its_groups_are_scheduled(groups: int, turns: int) -> None:
    """Also where a tile has fewer turns than there are groups."""
    for seed in range(SCHEDULES):
        assert taken(groups, turns, 5, random.Random(seed)) == list(range(5 * turns))


def taken(groups: int, turns: int, tiles: int, rng: random.Random) -> list[int]:
    """The turns that were taken, as they came, at so many tiles: a model of a relay's named barriers.

    Groups run one at a time, some of them much more often than others, till all have ended or wait. A barrier
    opens when two have come, whoever they are, as those of a GPU do. `packed_product.cuh` has the original:
    at the end of a tile the sums are handed on before the group has multiplied, so it may be late.
    """
    come: Counter[int] = Counter()
    order: list[int] = []

    def wait(barrier: int) -> Iterator[bool]:
        """False as long as it has to."""
        opened = come[barrier] // 2
        come[barrier] += 1
        while come[barrier] // 2 == opened:
            yield False

    def turns_of(group: int) -> Iterator[bool]:
        for turn in range(group, tiles * turns, groups):
            yield True  # makes elements, as long as it takes
            if turn > 0:
                yield from wait(group)
            order.append(turn)
            yield True
            if turn + 1 < tiles * turns:
                come[(group + 1) % groups] += 1
            yield True  # stores results, if it was the last of its tile

    running = {group: turns_of(group) for group in range(groups)}
    often = [rng.choice((1, 1, 30)) for _ in range(groups)]
    waiting: set[int] = set()
    while len(waiting) < len(running):
        able = [group for group in running if group not in waiting]
        group = rng.choices(able, [often[one] for one in able])[0]
        before = come.copy()
        went_on = next(running[group], None)
        if went_on is None:
            del running[group]
        elif not went_on:
            waiting.add(group)
        if came_to_more(come, before):
            waiting.clear()
    return order


def came_to_more(come: Counter[int], before: Counter[int]) -> bool:
    """Whether a barrier opened."""
    return any(count // 2 > before[barrier] // 2 for barrier, count in come.items())
