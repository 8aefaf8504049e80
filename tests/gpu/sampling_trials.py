"""Draws by the sampling kernels, held to those that `worker.runners.sampling` makes of the same logits.

Where a kernel's token differs, its noisy score must be within NEAR_TIE of the best: both are right then.
"""

import warnings
from collections.abc import Callable

import numpy as np

from nightmill.worker.runners.base import DRAW, NOT_A_NUMBER, UNMASKED, mask_words
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.sampling.sampler import SLOT, Sampler
from nightmill.worker.runners.sampling import PARAMETERS, SamplingRows, sample
from tests.gpu.oracles import NEAR_TIE, noisy_scores
from tests.support.operands import buffer, fetched

Change = Callable[[np.random.Generator, SamplingRows], None]
Masks = dict[int, np.ndarray] | None


def make_rows(rng: np.random.Generator, count: int) -> SamplingRows:
    """Plain temperature 1; tests change what they are about."""
    parameters = np.zeros(count, dtype=PARAMETERS)
    for name in ("temperature", "top_p", "repetition_penalty"):
        parameters[name] = 1
    parameters["seed"] = rng.integers(0, 1 << 64, count, dtype=np.uint64)
    return SamplingRows(parameters, rng.integers(1, 30_000, count), [None] * count)


def penalise_some(rng: np.random.Generator, rows: SamplingRows, vocab: int) -> None:
    for row in range(0, len(rows.seen), 2):
        rows.parameters["repetition_penalty"][row] = rng.uniform(1.05, 1.8)
        rows.seen[row] = rng.random(vocab) < 0.3


def draw(
    device: Device, sampler: Sampler, logits: np.ndarray, rows: SamplingRows, masks: Masks = None
) -> np.ndarray:
    """The kernels' tokens; checks what they leave in the slots.

    masks  bool (V,) of what a row may draw, by row
    """
    count, vocab = logits.shape
    slots, words = count + 3, mask_words(vocab)
    order = np.random.default_rng(count).permutation(slots)[:count].astype(np.int32)  # row r's slot
    seen = np.full((slots, words * 32), True)
    for row, mask in enumerate(rows.seen):
        if mask is not None:
            seen[order[row]] = False
            seen[order[row], :vocab] = mask
    bitmaps = device.upload(np.packbits(seen, axis=1, bitorder="little").view(np.uint32))
    table = np.frombuffer(b"\xff" * slots * SLOT.itemsize, dtype=SLOT).copy()  # other slots hold NaN
    for name in PARAMETERS.names or ():
        table[name][order] = rows.parameters[name]
    table["last_token"], table["adjusted"][order] = -9, 0
    penalised = np.array([mask is not None for mask in rows.seen])
    table["seen"][order] = np.where(penalised, bitmaps + 4 * words * order.astype(np.uint64), 0)
    address = device.upload(table)
    # One row more, which pads: slot -1. Its logits do not exist.
    draws = np.zeros(count + 1, dtype=DRAW)
    draws["slot"], draws["mask"], draws["position"] = np.append(order, -1), UNMASKED, -100
    draws["position"][:count] = rows.positions
    out = buffer(device, np.full(count + 1, -7, dtype=np.int32))
    padded = np.full((count, -(-vocab // 8) * 8), np.nan, dtype=np.float32)  # what pads a row is not read
    padded[:, :vocab] = logits
    on_device = buffer(device, padded)
    if masks:
        draws["mask"][sorted(masks)] = np.arange(len(masks)) + 5  # numbers of an earlier part of the step
        allowed = np.ones((len(masks), words * 32), dtype=np.bool_)  # behind the vocabulary all is allowed
        allowed[:, :vocab] = [masks[row] for row in sorted(masks)]
        bits = device.upload(np.packbits(allowed, axis=1, bitorder="little"))
        sampler.apply_masks(on_device, count, device.upload(draws), bits, 5)
    sampler.sample(on_device, count + 1, device.upload(draws), address, out)
    tokens = fetched(device, out)
    assert tokens[-1] == -7
    last = device.download(address, slots, SLOT)
    drawn = tokens[:-1]
    table["last_token"][order] = np.where(drawn == NOT_A_NUMBER, 0, drawn)
    assert last.tobytes() == table.tobytes()
    after = np.unpackbits(
        device.download(bitmaps, (slots, words), np.uint32).view(np.uint8), axis=1, bitorder="little"
    ).astype(bool)
    for row, mask in enumerate(rows.seen):
        if mask is not None and tokens[row] != NOT_A_NUMBER:
            seen[order[row], tokens[row]] = True
    np.testing.assert_array_equal(after, seen)
    return drawn


def check(
    device: Device, sampler: Sampler, logits: np.ndarray, rows: SamplingRows, masks: Masks = None
) -> int:
    """Compare with the definition; returns the number of near-ties."""
    tokens = draw(device, sampler, logits, rows, masks)
    for row, allowed in (masks or {}).items():
        logits = logits.copy()
        logits[row, ~allowed] = -np.inf
    assert ((tokens >= 0) & (tokens < logits.shape[1])).all()
    expected = sample(logits, rows)
    ties = 0
    for row in np.flatnonzero(tokens != expected):
        scores = noisy_scores(logits, rows, int(row))
        gap = float(scores[expected[row]] - scores[tokens[row]])
        assert gap < NEAR_TIE, f"row {row}: {tokens[row]} drawn, {expected[row]} is better by {gap:.3g}"
        warnings.warn(f"near-tie: row {row}, {expected[row]} by {gap:.3g} over {tokens[row]}", stacklevel=2)
        ties += 1
    assert ties <= 1 + len(tokens) // 1000
    return ties


def make_sampler(device: Device, vocab: int) -> Sampler:
    return Sampler(device, vocab, max_rows=2048)


def random_logits(rng: np.random.Generator, count: int, vocab: int) -> np.ndarray:
    spread = rng.uniform(0.3, 6, (count, 1))
    return (rng.standard_normal((count, vocab)) * spread + rng.uniform(-30, 30, (count, 1))).astype(
        np.float32
    )


def top_k(rng: np.random.Generator, rows: SamplingRows) -> None:
    rows.parameters["top_k"] = rng.choice([1, 2, 20, 50, 500, 999, 100_000], len(rows.parameters))


def top_p(rng: np.random.Generator, rows: SamplingRows) -> None:
    rows.parameters["top_p"] = rng.choice([1e-6, 0.1, 0.5, 0.9, 0.95, 0.999], len(rows.parameters))


def min_p(rng: np.random.Generator, rows: SamplingRows) -> None:
    rows.parameters["min_p"] = rng.choice([0.001, 0.05, 0.3, 1.0], len(rows.parameters))


def greedy(rng: np.random.Generator, rows: SamplingRows) -> None:
    rows.parameters["temperature"] = 0


def plain(rng: np.random.Generator, rows: SamplingRows) -> None:
    rows.parameters["temperature"] = 0.9


def everything(rng: np.random.Generator, rows: SamplingRows) -> None:
    for change in (top_k, top_p, min_p):
        change(rng, rows)
