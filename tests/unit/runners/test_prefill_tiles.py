"""How chunks of prompts are cut into tiles for prefill attention."""

import numpy as np
import pytest

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
