"""Sums of hidden states, of which embeddings are made, to the bit."""

from typing import Any

import numpy as np
import numpy.typing as npt

from nightmill.worker.runners.base import POOL
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.rows.pooling import PooledSums
from tests.support.elements import BOTH_ELEMENTS, rounded
from tests.support.operands import elements, poisoned
from tests.support.specs import dense_spec

Array = npt.NDArray[Any]


@BOTH_ELEMENTS
def test_hidden_states_are_added_to_the_sums_of_slots_in_their_order(device: Device) -> None:
    """Of texts in pieces; complete sums come in the order of pools, with the bits of one addition each."""
    spec = dense_spec(width=520)
    sums = PooledSums(device, spec, slots=6, depth=2)
    rng = np.random.default_rng(11)
    states = [rounded(rng.standard_normal((count, 520)) * 30, device.element) for count in (1, 9, 700, 40)]
    cuts = [[1], [4, 5], [300, 1, 399], [40]]  # of each text
    slots = (5, 0, 3, 1)
    wanted = [np.zeros(520, dtype=np.float32)] * 4
    for text, rows in enumerate(states):
        for row in rows.astype(np.float32):
            wanted[text] = wanted[text] + row
    found: dict[int, Array] = {}
    done = [0] * 4
    for turn, step in enumerate([(2, 1), (0, 2), (3, 2, 1)]):
        pools = np.zeros(len(step), dtype=POOL)
        parts = [np.full((3, 520), np.nan)]  # rows that draw
        for place, text in enumerate(step):
            count = cuts[text].pop(0)
            parts.append(states[text][done[text] : done[text] + count])
            begins, done[text] = done[text] == 0, done[text] + count
            pools[place] = (-1, count, slots[text], begins, not cuts[text])
        x = elements(device, np.concatenate(parts))
        ended = [text for text in step if not cuts[text]]
        complete = poisoned(device, (6, 520), np.float32)
        sums.add(turn % 2, pools, x, 3, complete)
        sums.tell(turn % 2, len(ended), complete)
        device.synchronize()
        told = sums.told(turn % 2, len(ended))
        found |= dict(zip(ended, () if told is None else told, strict=True))
    assert sorted(found) == [0, 1, 2, 3]
    for text in range(4):
        np.testing.assert_array_equal(found[text], wanted[text])
