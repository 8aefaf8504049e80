"""The sampling kernels draw the tokens that `worker.runners.sampling` draws (`sampling_trials`)."""

import numpy as np
import pytest

from nightmill.worker.runners.base import NOT_A_NUMBER
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.sampling.sampler import SLOT
from nightmill.worker.runners.sampling import SamplingRows, penalise, sample
from tests.gpu.sampling_trials import (
    Change,
    check,
    draw,
    everything,
    greedy,
    make_rows,
    make_sampler,
    min_p,
    penalise_some,
    plain,
    random_logits,
    top_k,
    top_p,
)
from tests.support.operands import buffer, fetched

SIZES = [(1, 1000), (7, 1003), (63, 513), (65, 4096), (1000, 1001), (1, 151_936), (7, 151_936), (600, 32_001)]


@pytest.mark.parametrize(("count", "vocab"), SIZES)
@pytest.mark.parametrize("temperature", [0.0, 0.05, 0.6, 1.0, 2.5])
def test_greedy_and_temperature(device: Device, count: int, vocab: int, temperature: float) -> None:
    rng = np.random.default_rng(vocab + count)
    rows = make_rows(rng, count)
    rows.parameters["temperature"] = temperature
    check(device, make_sampler(device, vocab), random_logits(rng, count, vocab), rows)


def test_equal_logits_are_drawn_fairly_and_greedily_the_first(device: Device) -> None:
    sampler = make_sampler(device, 1000)
    rng = np.random.default_rng(4)
    logits = np.full((64, 1000), 3.25, dtype=np.float32)
    rows = make_rows(rng, 64)
    rows.parameters["temperature"][:32] = 0
    check(device, sampler, logits, rows)


@pytest.mark.parametrize(("count", "vocab"), SIZES)
@pytest.mark.parametrize("change", [top_k, top_p, min_p, everything])
def test_filters(device: Device, count: int, vocab: int, change: Change) -> None:
    rng = np.random.default_rng(vocab + count)
    rows = make_rows(rng, count)
    rows.parameters["temperature"] = rng.choice([0.0, 0.3, 0.7, 1.0, 1.5], count)
    if count == 1:
        rows.parameters["temperature"] = 0.7
    change(rng, rows)
    check(device, make_sampler(device, vocab), random_logits(rng, count, vocab), rows)


@pytest.mark.parametrize("vocab", [1003, 151_936])
def test_penalties_with_everything(device: Device, vocab: int) -> None:
    rng = np.random.default_rng(7)
    count = 33
    sampler = make_sampler(device, vocab)
    for change in (lambda *_: None, everything):
        rows = make_rows(rng, count)
        rows.parameters["temperature"] = rng.choice([0.0, 0.7, 1.0], count)
        change(rng, rows)
        penalise_some(rng, rows, vocab)
        check(device, sampler, random_logits(rng, count, vocab), rows)


def test_distributions_that_do_not_fit_the_histogram(device: Device) -> None:
    rng = np.random.default_rng(8)
    vocab = 20_000
    sampler = make_sampler(device, vocab)
    equal = np.full(vocab, -3.0)
    wide = rng.standard_normal(vocab) * 500  # the k-th largest is below -32
    coarse = np.round(rng.standard_normal(vocab) * 2) / 4  # thousands of equals
    narrow = rng.standard_normal(vocab) * 1e-3  # all in a bin
    masked = np.where(rng.random(vocab) < 0.999, -np.inf, rng.standard_normal(vocab))
    one = np.where(np.arange(vocab) == 777, 5.0, -np.inf)
    kinds = [equal, wide, coarse, narrow, masked, one]
    for change in (top_k, top_p, everything):
        rows = make_rows(rng, len(kinds) * 8)
        change(rng, rows)
        logits = np.repeat(np.array(kinds, dtype=np.float32), 8, axis=0)
        check(device, sampler, logits, rows)


def test_more_filtered_rows_than_blocks(device: Device) -> None:
    rng = np.random.default_rng(7)
    count = 3 * device.multiprocessors + 5
    rows = make_rows(rng, count)
    everything(rng, rows)
    rows.parameters["temperature"] = rng.choice([0.0, 0.7, 1.0], count)
    for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0)):
        rows.parameters[name][::3] = off  # rows in between that have no filter
    check(device, make_sampler(device, 5003), random_logits(rng, count, 5003), rows)


def test_temperatures_near_zero(device: Device) -> None:
    rng = np.random.default_rng(9)
    sampler = make_sampler(device, 5000)
    rows = make_rows(rng, 20)
    rows.parameters["temperature"] = np.repeat(
        np.array([1e-30, 1e-6, 0.001, 0.00999, 0.0101], dtype=np.float32), 4
    )
    logits = random_logits(rng, 20, 5000)
    logits[::2] = np.round(logits[::2])  # several best
    check(device, sampler, logits, rows)


@pytest.mark.parametrize(("count", "vocab"), [(1, 1003), (5, 151_936), (300, 4100), (700, 1000)])
@pytest.mark.parametrize("change", [greedy, plain, everything])
def test_masked_rows_draw_what_is_allowed_and_others_keep_their_bits(
    device: Device, count: int, vocab: int, change: Change
) -> None:
    rng = np.random.default_rng(vocab + count)
    sampler = make_sampler(device, vocab)
    rows = make_rows(rng, count)
    change(rng, rows)
    penalise_some(rng, rows, vocab)
    logits = random_logits(rng, count, vocab)
    free = draw(device, sampler, logits, rows)
    masks = {row: rng.random(vocab) < rng.choice([0.001, 0.5, 0.999]) for row in range(0, count, 3)}
    for row, mask in masks.items():
        mask[rng.integers(vocab)] = True
        mask[: 5 * row % 200] = False
        mask[vocab - 1] = row % 2
        mask[vocab // 2] = True
    check(device, sampler, logits, rows, masks)
    masked = draw(device, sampler, logits, rows, masks)
    assert all(mask[masked[row]] for row, mask in masks.items())
    others = np.setdiff1d(np.arange(count), list(masks))
    np.testing.assert_array_equal(masked[others], free[others])
    everything = {row: np.full(vocab, True) for row in masks}
    np.testing.assert_array_equal(draw(device, sampler, logits, rows, everything), free)
    nothing = {row: np.full(vocab, False) for row in masks}
    stuck = draw(device, sampler, logits, rows, nothing)
    assert (stuck[list(masks)] == NOT_A_NUMBER).all()
    np.testing.assert_array_equal(stuck[others], free[others])


def test_sequences_that_take_slots_change_no_other_slot(device: Device) -> None:
    sampler = make_sampler(device, 1000)
    rng = np.random.default_rng(12)
    table = np.frombuffer(rng.bytes(3000 * SLOT.itemsize), dtype=SLOT).copy()
    address = device.upload(table)
    for count in (1, 255, 257, 2500):
        rows = np.frombuffer(rng.bytes(count * SLOT.itemsize), dtype=SLOT)
        places = rng.permutation(3000)[:count].astype(np.int32)
        sampler.admit(device.upload(rows), device.upload(places), address, count)
        table[places] = rows
        assert device.download(address, 3000, SLOT).tobytes() == table.tobytes()


def test_unknown_tokens_come_from_their_slots(device: Device) -> None:
    sampler = make_sampler(device, 1000)
    rng = np.random.default_rng(2)
    table = np.frombuffer(rng.bytes(50 * SLOT.itemsize), dtype=SLOT)
    for count in (1, 2, 255, 257, 3000):
        tokens = rng.integers(-1, 3, count, dtype=np.int32)
        slots = rng.integers(0, 50, count, dtype=np.int32)
        places = rng.permutation(4000)[:count].astype(np.int32)
        places[::7] = -1  # not in the cache
        out, history = (buffer(device, np.full(size, -7, dtype=np.int32)) for size in (count, 4000))
        inputs = (device.upload(array) for array in (tokens, slots, table, places))
        sampler.gather_tokens(*inputs, history, out, count)
        expected = np.where(tokens < 0, table["last_token"][slots], tokens)
        np.testing.assert_array_equal(fetched(device, out), expected)
        kept = np.full(4000, -7, dtype=np.int32)
        kept[places[places >= 0]] = expected[places >= 0]
        np.testing.assert_array_equal(fetched(device, history), kept)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("penalties", [False, True])
@pytest.mark.parametrize("change", [greedy, plain, everything])
@pytest.mark.parametrize(("count", "vocab"), [(5, 3001), (6, 151_936), (700, 1003), (700, 4096)])
def test_a_row_that_is_not_a_number_is_told_and_changes_no_other(
    device: Device, poison: float, penalties: bool, change: Change, count: int, vocab: int
) -> None:
    """One bad logit anywhere, in a block of the row or another; all of -inf, of which one is no fault."""
    rng = np.random.default_rng(10)
    sampler = make_sampler(device, vocab)
    rows = make_rows(rng, count)
    rows.parameters["temperature"] = 0.9
    change(rng, rows)
    if penalties:
        penalise_some(rng, rows, vocab)
        rows.seen[0][:] = True  # type: ignore[index]  # also where all of a row are seen
        rows.parameters["repetition_penalty"][0] = 100.0
    logits = random_logits(rng, count, vocab)
    clean = draw(device, sampler, logits, rows)
    assert (clean >= 0).all()
    bad = np.unique([0, 1, count // 2, count - 1])
    for place in (0, 2047, vocab // 2, vocab - 1):
        spoilt = logits.copy()
        if poison == -np.inf:
            spoilt[bad] = -np.inf
        else:
            spoilt[bad, min(place, vocab - 1)] = poison
        drawn = draw(device, sampler, spoilt, rows)
        assert (drawn[bad] == NOT_A_NUMBER).all()
        np.testing.assert_array_equal(np.delete(drawn, bad), np.delete(clean, bad))
        np.testing.assert_array_equal(drawn == NOT_A_NUMBER, sample(spoilt, rows) == NOT_A_NUMBER)
    np.testing.assert_array_equal(draw(device, sampler, logits, rows), clean)  # nothing is left behind


def test_a_token_of_minus_infinity_is_never_drawn_and_no_fault(device: Device) -> None:
    rng = np.random.default_rng(21)
    vocab = 5003
    sampler = make_sampler(device, vocab)
    for change in (greedy, plain, everything):
        rows = make_rows(rng, 64)
        change(rng, rows)
        penalise_some(rng, rows, vocab)
        logits = random_logits(rng, 64, vocab)
        logits[rng.random(logits.shape) < 0.9] = -np.inf
        check(device, sampler, logits, rows)


# All that `GenerationParams` accepts, to its ends and to what float32 has no number for.
_EXTREMES: dict[str, list[float]] = {
    "temperature": [0.0, 5e-324, 1e-45, 1e-38, 1e-3, 0.00999, 0.01, 1.0, 100.0],
    "top_k": [0, 1, 2, 50, 2**31 - 1],
    "top_p": [5e-324, 1e-46, 1e-45, 1e-38, 1e-6, 0.5, 1.0],
    "min_p": [0.0, 5e-324, 1e-45, 1e-38, 0.5, 1.0],
    "repetition_penalty": [0.01, 1.0, 100.0],
}


def _extreme(rng: np.random.Generator, rows: SamplingRows, vocab: int) -> None:
    for name, values in _EXTREMES.items():
        column = rows.parameters[name]
        column[:] = rng.choice(values, len(column)).astype(column.dtype)
    for row, penalty in enumerate(rows.parameters["repetition_penalty"]):
        rows.seen[row] = rng.random(vocab) < 0.3 if penalty != 1.0 else None


@pytest.mark.parametrize("vocab", [67, 1003, 4096, 151_936])
def test_every_accepted_value_draws_what_the_definition_draws(device: Device, vocab: int) -> None:
    rng = np.random.default_rng(22)
    count = 40 if vocab > 100_000 else 600
    rows = make_rows(rng, count)
    _extreme(rng, rows, vocab)
    check(device, make_sampler(device, vocab), random_logits(rng, count, vocab), rows)


@pytest.mark.parametrize("vocab", [67, 1003, 4096, 151_936])
def test_every_accepted_value_draws_a_possible_token_of_any_finite_logits(device: Device, vocab: int) -> None:
    """Up to the largest and down to the smallest of float32; a sum of such logits is far beyond it."""
    rng = np.random.default_rng(23)
    count = 40 if vocab > 100_000 else 600
    rows = make_rows(rng, count)
    _extreme(rng, rows, vocab)
    largest = np.finfo(np.float32).max
    logits = random_logits(rng, count, vocab)
    kinds = np.arange(count) % 8
    logits[kinds == 0] = rng.choice([largest, -largest], (int((kinds == 0).sum()), vocab))
    logits[kinds == 1] = largest
    logits[kinds == 2] = -largest
    logits[kinds == 3] *= np.float32(1e36)
    logits[kinds == 4] = rng.choice([1e-45, -1e-45, 0.0, -0.0], (int((kinds == 4).sum()), vocab))
    one = np.flatnonzero(kinds == 5)
    logits[one] = -np.inf
    logits[one, rng.integers(0, vocab, len(one))] = -largest
    some = np.flatnonzero(kinds == 6)
    logits[some[:, None], rng.integers(0, vocab, (len(some), 9))] = largest
    tokens = draw(device, make_sampler(device, vocab), logits, rows)
    expected = sample(logits, rows)
    bounded = np.where(logits == -np.inf, logits, np.clip(logits, -1e30, 1e30)).astype(np.float32)
    penalised = penalise(bounded, rows)
    for row, token in enumerate(tokens):
        assert 0 <= token < vocab, row
        assert logits[row, token] > -np.inf, row
        if rows.parameters["temperature"][row] == 0:
            assert token == expected[row], row
            continue
        with np.errstate(over="ignore"):
            scaled = (penalised[row] - penalised[row].max()) / rows.parameters["temperature"][row]
        assert scaled[token] > -26.5, row
        if (
            rows.parameters["top_p"][row] < 1e-6
            or rows.parameters["min_p"][row] == 1
            or rows.parameters["top_k"][row] == 1
        ):
            assert scaled[token] == 0, row


def test_frequencies_follow_the_probabilities(device: Device) -> None:
    rng = np.random.default_rng(11)
    sampler = make_sampler(device, 64)
    count = 2000
    logits = np.repeat(rng.standard_normal((1, 64)).astype(np.float32) * 2, count, axis=0)
    rows = make_rows(rng, count)
    counts = np.zeros(64)
    for start in range(1, 10):
        rows.positions[:] = start * 10_000 + np.arange(count)
        tokens = draw(device, sampler, logits, rows)
        counts += np.bincount(tokens, minlength=64)
    expected = np.exp(logits[0].astype(np.float64))
    expected *= counts.sum() / expected.sum()
    chi_square = (np.square(counts - expected) / expected).sum()
    assert chi_square < 63 + 5 * np.sqrt(2 * 63)  # five standard deviations
