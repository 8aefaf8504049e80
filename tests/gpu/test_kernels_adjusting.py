"""`adjust` changes logits as `worker.runners.adjusting` defines it, to the bit, and no others."""

import numpy as np
import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.runners.adjusting import adjustment_of, ban
from nightmill.worker.runners.base import DRAW, Admission, make_draws
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.kv_cache import PAGE
from nightmill.worker.runners.gpu.sampling.sampler import ChunkPages, Sampler
from nightmill.worker.runners.gpu.sampling.slots import SlotTable
from nightmill.worker.runners.sampling import PARAMETERS, SamplingRows, parameters_of, penalise
from tests.support.operands import buffer, fetched

POISON = 1 << 30  # a token of pages that nobody has


def a_sequence(rng: np.random.Generator, slot: int, vocab: int, longest: int) -> Admission:
    """With wishes of some kind, or none; few tokens again and again, so that counts differ."""
    kind = slot % 6
    few = rng.integers(0, vocab, 40)
    tokens = tuple(rng.choice(few, int(rng.integers(1, longest))).tolist())
    answered = int(rng.integers(0, len(tokens) + 1))
    biased = rng.choice(vocab, min(vocab, int(rng.integers(1, 1025))), replace=False)
    words = [(*tokens[-int(rng.integers(1, 4)) :], int(token)) for token in few[:20]]
    params = GenerationParams(
        repetition_penalty=1.0 if kind in (0, 1, 2) else float(rng.uniform(0.5, 2)),
        presence_penalty=float(rng.uniform(-2, 2)) if kind in (1, 5) else 0.0,
        frequency_penalty=float(rng.uniform(-2, 2)) if kind in (2, 5) else 0.0,
        logit_bias=dict(zip(biased.tolist(), rng.uniform(-100, 100, len(biased)).tolist(), strict=True))
        if kind in (3, 5)
        else {},
    )
    banned = (*words, (1, 2, 3, 4, 5), (int(few[30]),)) if kind in (4, 5) else ()
    return Admission(slot, tokens, params, slot, answered, banned)


@pytest.mark.parametrize(("count", "vocab", "longest"), [(13, 67, 90), (40, 8193, 3000), (64, 151_936, 2500)])
def test_logits_become_what_the_definition_makes_of_them(
    device: Device, count: int, vocab: int, longest: int
) -> None:
    rng = np.random.default_rng(vocab)
    sampler = Sampler(device, vocab, max_rows=count)
    table = SlotTable(device, sampler, slots=count, vocab=vocab, depth=1)
    admitted = [a_sequence(rng, slot, vocab, longest) for slot in rng.permutation(count).tolist()]
    table.admit(admitted, 0)
    # Some prompts of other sequences come before, between and after, in one step with these.
    width = -(-longest // PAGE)
    pages = rng.permutation(count * width).reshape(count, width)
    history = np.full((count * width, PAGE), POISON, dtype=np.int32)
    for row, one in enumerate(admitted):
        for place, token in enumerate(one.token_ids):
            history[pages[row, place // PAGE], place % PAGE] = token
    lengths = rng.integers(1, 5, count)
    chunks = np.concatenate([[3], *([length, 2] for length in lengths)])  # every second one is not drawn from
    starts = np.concatenate([[0], np.cumsum(chunks)]).astype(np.int32)
    tables = np.full((len(chunks), width), -1, dtype=np.int32)
    tables[1::2] = pages
    rows = starts[2::2] - 1
    slots = np.array([one.slot for one in admitted], dtype=np.int32)
    positions = np.array([len(one.token_ids) for one in admitted], dtype=np.int32)
    draws = np.append(make_draws(rows, slots, positions), np.zeros(1, dtype=DRAW))
    draws["slot"][-1] = -1
    logits = np.full((count + 1, -(-vocab // 8) * 8), np.nan, dtype=np.float32)
    logits[:, :vocab] = rng.standard_normal((count + 1, vocab)) * rng.uniform(0.1, 30, (count + 1, 1))
    logits[rng.random(logits.shape) < 0.01] = -np.inf
    logits[::7, : vocab // 3] = 3e38
    logits[:, vocab:] = np.nan
    on_device = buffer(device, logits)
    pages_of_chunks = ChunkPages(device.upload(tables), width, device.upload(starts), len(chunks))
    sampler.adjust(
        on_device, count + 1, device.upload(draws), table.address, buffer(device, history), pages_of_chunks
    )
    got = fetched(device, on_device)

    adjusted = {row: by for row, one in enumerate(admitted) if (by := adjustment_of(one)) is not None}
    seen = []
    for one in admitted:
        mask = np.zeros(vocab, dtype=np.bool_)
        mask[list(one.token_ids)] = True
        seen.append(mask if one.params.repetition_penalty != 1.0 else None)
    parameters = np.array([parameters_of(one) for one in admitted], dtype=PARAMETERS)
    expected = logits[:count, :vocab].copy()
    for row, by in adjusted.items():
        ban(expected[row], by)
    bounded = np.where(expected == -np.inf, expected, np.clip(expected, -1e30, 1e30)).astype(np.float32)
    penalised = penalise(bounded, SamplingRows(parameters, positions.astype(np.int64), seen, adjusted))
    assert table.adjusts(draws[:-1])
    for row in range(count):
        if row not in adjusted:
            np.testing.assert_array_equal(got[row, :vocab], logits[row, :vocab])  # by `sample`, not here
        else:  # what is not touched is bounded when it is drawn from
            bounds = np.where(got[row] == -np.inf, got[row], np.clip(got[row], -1e30, 1e30))
            np.testing.assert_array_equal(bounds[:vocab], penalised[row])
    np.testing.assert_array_equal(got[-1], logits[-1])
    assert len(adjusted) > count // 2
