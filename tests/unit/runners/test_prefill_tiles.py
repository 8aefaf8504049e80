"""How chunks of prompts are cut into tiles for prefill attention, and grouped where pages are widened."""

import numpy as np
import pytest

from nightmill.worker.runners.gpu.attention.prompts import wide_pages
from nightmill.worker.runners.gpu.attention.tiles import prefill_tiles


@pytest.mark.parametrize(("group", "rows"), [(7, 128), (7, 192), (1, 192), (128, 192)])
def test_every_token_of_a_prompt_is_in_one_tile(group: int, rows: int) -> None:
    lengths = np.array([1, 1, 5, 1, 300, 192, 193, 2], dtype=np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    covered = [np.zeros(length, dtype=int) for length in lengths]
    for sequence, piece in prefill_tiles(starts, group, lengths, rows, drawn=2):
        tokens = rows // group
        assert piece * tokens < lengths[sequence]
        covered[sequence][piece * tokens : (piece + 1) * tokens] += 1
    for chunk, counts in enumerate(covered):
        assert (counts == 1).all() == (chunk >= 2)
        assert (counts == 0).all() == (chunk < 2)


def test_tiles_that_see_most_keys_come_first() -> None:
    starts = np.array([0, 100, 140], dtype=np.int32)
    contexts = np.array([100, 2000], dtype=np.int32)
    tiles = prefill_tiles(starts, 4, contexts, 128)
    assert tiles.tolist() == [[1, 1], [1, 0], [0, 3], [0, 2], [0, 1], [0, 0]]
    assert prefill_tiles(starts, 4).tolist() == [[0, 3], [0, 2], [0, 1], [1, 1], [0, 0], [1, 0]]


def test_steps_of_drawn_tokens_have_no_tiles() -> None:
    assert prefill_tiles(np.array([0, 1, 2], dtype=np.int32), 7, drawn=2).shape == (0, 2)


@pytest.mark.parametrize(("room", "groups"), [(1000, 1), (90, 1), (89, 2), (60, 4)])
def test_each_page_that_prompts_see_is_widened_once_in_a_group_that_fits(room: int, groups: int) -> None:
    """Four prompts begin with the same 50 pages and have 10 of their own; before them is a drawn token."""
    rng = np.random.default_rng(room)
    pages = rng.permutation(5000).astype(np.int32)
    tables = np.full((5, 80), -1, dtype=np.int32)
    tables[0] = pages[-80:]
    for prompt in range(4):
        tables[1 + prompt, :60] = [*pages[:50], *pages[100 + 10 * prompt :][:10]]
    contexts = np.array([1280, 960, 945, 960, 950], dtype=np.int32)
    starts = np.cumsum([0, 1, 200, 100, 960, 1]).astype(np.int32)
    tiles = prefill_tiles(starts, 7, contexts, 192, drawn=1)
    plan = wide_pages(tables, contexts, tiles, room)
    assert len(plan.groups) == groups
    assert sorted(plan.tiles.tolist()) == sorted(tiles.tolist())
    ends = [0, 0]
    for first_page, count, first_tile, of_tiles in plan.groups:
        assert [first_page, first_tile] == ends
        ends = [first_page + count, first_tile + of_tiles]
        own = plan.pages[first_page : ends[0]]
        assert len(set(own.tolist())) == count <= room
        for chunk in plan.tiles[first_tile : ends[1], 0]:
            np.testing.assert_array_equal(own[plan.places[chunk, :60]], tables[chunk, :60])
        order = [tiles.tolist().index(tile) for tile in plan.tiles[first_tile : ends[1]].tolist()]
        assert order == sorted(order)
    assert ends == [len(plan.pages), len(tiles)]
