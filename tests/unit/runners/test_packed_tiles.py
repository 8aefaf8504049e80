"""Which shapes tiles of packed products take: relays, only those whose turns stay in order."""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import chain

import pytest

from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.products.packed_qkv import PACKED_QKV_TILES
from nightmill.worker.runners.gpu.products.packed_tiles import PACKED_TILES, PackedTile
from nightmill.worker.runners.gpu.products.shapes import Kind, Shape

TILES = list(dict.fromkeys([*PACKED_QKV_TILES, *chain.from_iterable(PACKED_TILES.values())]))
RELAYS = [tile for tile in TILES if tile.relay]
EACH_RELAY = pytest.mark.parametrize("tile", RELAYS, ids=lambda tile: tile.name)
TURNS_OF_A_TILE = (1, 2, 3, 4, 7)
SCHEDULES = 60


@EACH_RELAY
def test_a_relay_takes_only_what_has_a_turn_for_each_group(tile: PackedTile) -> None:
    least = 256 * tile.turn * (tile.groups - 1)  # inputs of one turn less
    for inputs, enough in ((64, False), (least, False), (least + 64, True), (3584, True)):
        assert tile.takes(inputs) is enough
        assert tile.suits(Shape(1, 512, inputs, Kind.PLAIN, Format.Q8_0)) is enough


@pytest.mark.parametrize("tile", [tile for tile in TILES if not tile.relay], ids=lambda tile: tile.name)
def test_other_tiles_take_any_number_of_inputs(tile: PackedTile) -> None:
    assert all(tile.takes(inputs) for inputs in (64, 256, 512, 3584))


@EACH_RELAY
def test_turns_of_what_a_relay_takes_come_in_order_however_its_groups_are_scheduled(tile: PackedTile) -> None:
    for turns in TURNS_OF_A_TILE:
        if tile.takes(256 * tile.turn * turns):
            for seed in range(SCHEDULES):
                assert taken(tile.groups, turns, 5, random.Random(seed)) == list(range(5 * turns))


@pytest.mark.parametrize(("groups", "turns"), [(2, 1), (3, 1), (3, 2), (4, 2), (4, 3)])
def test_with_fewer_turns_than_groups_they_may_not(groups: int, turns: int) -> None:
    found = (taken(groups, turns, 5, random.Random(seed)) for seed in range(SCHEDULES))
    assert any(order != list(range(5 * turns)) for order in found)


def taken(groups: int, turns: int, tiles: int, rng: random.Random) -> list[int]:
    """The turns that were taken, as they came, at so many tiles: a model of a relay's named barriers.

    Groups run one at a time, some of them much more often than others, till all have ended or wait. A barrier
    opens when two have come, whoever they are, as those of a GPU do. `packed_product.cuh` has the original.
    """
    come: Counter[str] = Counter()
    order: list[int] = []

    def wait(barrier: str) -> Iterator[bool]:
        """False as long as it has to."""
        opened = come[barrier] // 2
        come[barrier] += 1
        while come[barrier] // 2 == opened:
            yield False

    def turns_of(group: int) -> Iterator[bool]:
        for turn in range(group, tiles * turns, groups):
            yield True  # makes elements, as long as it takes
            if turn % turns:
                yield from wait(f"sums for {group}")
            elif turn:
                yield from wait("taken")
            order.append(turn)
            yield True
            if (turn + 1) % turns:
                come[f"sums for {(group + 1) % groups}"] += 1
            elif turn + 1 < tiles * turns:
                come["taken"] += 1

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


def came_to_more(come: Counter[str], before: Counter[str]) -> bool:
    """Whether a barrier opened."""
    return any(count // 2 > before[barrier] // 2 for barrier, count in come.items())
