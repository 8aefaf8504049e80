"""The kernel of log-probabilities against float64 log softmax, at any vocabulary and with any kind of row."""

import numpy as np
import pytest

from nightmill.worker.runners.base import (
    DRAW,
    FOUND,
    MOST_LIKELY,
    NO_LOGPROBS,
    NOT_A_NUMBER,
    NOT_GIVEN,
    UNMASKED,
)
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.sampling.sampler import Sampler
from nightmill.worker.runners.sampling import PARAMETERS, SamplingRows, log_probabilities
from tests.support.operands import buffer, fetched


def random_rows(rng: np.random.Generator, count: int, vocab: int) -> np.ndarray:
    """Of many kinds: smooth, all equal, coarse with thousands of equals, few that are finite, huge."""
    logits = rng.standard_normal((count, vocab)) * rng.uniform(0.2, 9, (count, 1)) + rng.uniform(-40, 40)
    kinds = rng.permutation(count) % 7
    logits[kinds == 1] = 3.25
    logits[kinds == 2] = np.round(logits[kinds == 2]) / 4
    logits[(kinds == 3)[:, None] & (rng.random(logits.shape) < 0.999)] = -np.inf
    logits[kinds == 4] *= 1e36
    few = np.flatnonzero(kinds == 5)
    logits[few] = -np.inf
    logits[few[:, None], rng.integers(0, vocab, (len(few), 3))] = [-3e38, 2.0, 2.0]
    logits[:, rng.integers(vocab)] = 1.5  # of each row at least one is finite
    return np.clip(logits, -3e38, 3e38, out=logits, where=np.isfinite(logits)).astype(np.float32)


@pytest.mark.parametrize(
    ("count", "vocab"), [(1, 5), (3, 67), (40, 1003), (300, 4097), (33, 151_936), (9, 262_145)]
)
def test_they_are_the_log_softmax_and_the_likeliest_in_order(device: Device, count: int, vocab: int) -> None:
    rng = np.random.default_rng([vocab, count])
    sampler = Sampler(device, vocab, max_rows=512)
    logits = random_rows(rng, count, vocab)
    likely = rng.integers(NO_LOGPROBS, MOST_LIKELY + 1, count).astype(np.int32)
    likely[0] = MOST_LIKELY
    tokens = np.array([rng.choice(np.flatnonzero(np.isfinite(row))) for row in logits], dtype=np.int32)
    bad = np.flatnonzero(rng.random(count) < 0.1)[1:]
    logits[bad, rng.integers(0, vocab, len(bad))] = np.where(bad % 2, np.nan, np.inf)
    logits[bad[::3]] = -np.inf
    given = rng.random(count) < 0.5
    draws = np.zeros(count + 1, dtype=DRAW)  # the last one pads
    draws["mask"], draws["given"], draws["likely"] = UNMASKED, NOT_GIVEN, NO_LOGPROBS
    draws["slot"][:count] = np.where(given, -1, 0)
    draws["given"][:count] = np.where(given, tokens, NOT_GIVEN)
    draws["likely"][:count] = likely
    drawn = np.where(given | (likely == NO_LOGPROBS), -7, tokens)
    drawn[bad] = np.where(given[bad], -7, NOT_A_NUMBER)
    padded = np.full((count, -(-vocab // 8) * 8), np.nan, dtype=np.float32)
    padded[:, :vocab] = logits
    out = buffer(device, np.append(drawn, -7).astype(np.int32))
    poison = np.full((count + 1, FOUND.itemsize), 0xFF, dtype=np.uint8)
    records = buffer(device, poison)
    arguments = buffer(device, padded), count + 1, device.upload(draws), out, records
    sampler.log_probabilities(*arguments)
    told = fetched(device, records)
    tokens[bad] = NOT_A_NUMBER
    asked = likely != NO_LOGPROBS
    expected_out = np.where(given & asked, tokens, drawn)
    np.testing.assert_array_equal(fetched(device, out), np.append(expected_out, -7))
    np.testing.assert_array_equal(told[:count][~asked], poison[:count][~asked])
    np.testing.assert_array_equal(told[count], poison[count])

    found = told[:count].copy().view(FOUND)[:, 0]
    rows = SamplingRows(np.zeros(count, dtype=PARAMETERS), np.zeros(count, dtype=np.int64), [None] * count)
    expected = log_probabilities(logits, rows, tokens, np.maximum(likely, 0))
    largest = np.abs(expected["logprob"][asked])
    np.testing.assert_allclose(found["logprob"][asked], expected["logprob"][asked], rtol=2e-6, atol=2e-6)
    assert np.isnan(found["logprob"][bad][asked[bad]]).all() and not np.isnan(largest).all()
    for row in np.flatnonzero(asked):
        first = slice(likely[row])
        np.testing.assert_array_equal(found["tokens"][row, first], expected["tokens"][row, first])
        held = found["tokens"][row, first] >= 0
        np.testing.assert_allclose(
            found["logprobs"][row, first][held], expected["logprobs"][row, first][held], rtol=2e-6, atol=2e-6
        )

    sampler.log_probabilities(*arguments)  # the list in shared memory has no order of its own
    np.testing.assert_array_equal(fetched(device, records), told)
