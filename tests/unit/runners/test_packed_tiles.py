"""Which shapes tiles of packed products take."""

from itertools import chain

import pytest

from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.products.packed_qkv import PACKED_QKV_TILES
from nightmill.worker.runners.gpu.products.packed_tiles import PACKED_TILES, PackedTile
from nightmill.worker.runners.gpu.products.shapes import Kind, Shape

TILES = list(dict.fromkeys([*PACKED_QKV_TILES, *chain.from_iterable(PACKED_TILES.values())]))


@pytest.mark.parametrize("tile", [tile for tile in TILES if tile.relay], ids=lambda tile: tile.name)
def test_a_relay_takes_only_what_has_several_turns(tile: PackedTile) -> None:
    one_turn = 256 * tile.turn
    for inputs, several in ((one_turn - 64, False), (one_turn, False), (one_turn + 64, True), (3584, True)):
        assert tile.takes(inputs) is several
        assert tile.suits(Shape(1, 512, inputs, Kind.PLAIN, Format.Q8_0)) is several


@pytest.mark.parametrize("tile", [tile for tile in TILES if not tile.relay], ids=lambda tile: tile.name)
def test_other_tiles_take_any_number_of_inputs(tile: PackedTile) -> None:
    assert all(tile.takes(inputs) for inputs in (64, 256, 512, 3584))
