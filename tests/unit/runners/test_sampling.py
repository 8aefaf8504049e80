"""Sampling against its definition in plain Python, and against the distribution it promises."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightmill.worker.runners.base import NOT_A_NUMBER, IntArray, make_draws, mask_words
from nightmill.worker.runners.philox import token_words, uniform
from nightmill.worker.runners.sampling import (
    PARAMETERS,
    SamplingRows,
    apply_masks,
    filter_rows,
    gumbel,
    penalise,
    sample,
)

NEUTRAL = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": 0,
    "position": 5,
}


def rows(*params: dict[str, Any], vocab: int) -> SamplingRows:
    filled = [NEUTRAL | {"seen": ()} | one for one in params]
    masks: list[npt.NDArray[np.bool_] | None] = []
    for one in filled:
        mask = np.zeros(vocab, dtype=np.bool_)
        mask[list(one["seen"])] = True
        masks.append(mask if one["repetition_penalty"] != 1.0 else None)
    parameters = np.zeros(len(filled), dtype=PARAMETERS)
    for name in PARAMETERS.names or ():
        parameters[name] = [one[name] for one in filled]
    return SamplingRows(parameters, np.array([one["position"] for one in filled], dtype=np.int64), masks)


def survivors(logits: list[float], p: dict[str, Any]) -> dict[int, float]:
    """The filtered distribution by definition, in float64: probabilities of the tokens that are left."""
    values = [
        (value / p["repetition_penalty"] if value > 0 else value * p["repetition_penalty"])
        if token in p["seen"]
        else value
        for token, value in enumerate(logits)
    ]
    values = [(value - max(values)) / p["temperature"] for value in values]
    left = dict(enumerate(values))
    if p["top_k"]:
        limit = sorted(values, reverse=True)[: p["top_k"]][-1]
        left = {token: value for token, value in left.items() if value >= limit}
    total = sum(math.exp(value) for value in left.values())
    if p["top_p"] < 1:
        left = {
            token: value
            for token, value in left.items()
            if sum(math.exp(other) for other in left.values() if other > value) / total < p["top_p"]
        }
    if p["min_p"]:
        left = {token: value for token, value in left.items() if math.exp(value) >= p["min_p"] * (1 - 1e-7)}
    total = sum(math.exp(value) for value in left.values())
    return {token: math.exp(value) / total for token, value in left.items()}


params_strategy = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.25, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 2, 3, 7, 100]),
        "top_p": st.sampled_from([0.05, 0.3, 0.62, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.013, 0.21, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.25, 2.0]),
        "seen": st.sets(st.integers(0, 6), max_size=4),
        "seed": st.integers(0, 2**63 - 1),
        "position": st.integers(0, 2**31),
    }
)


@settings(deadline=None, max_examples=150)
@given(
    # Halves, so that ties happen and float32 is exact.
    st.integers(7, 13).flatmap(
        lambda vocab: st.lists(
            st.tuples(
                st.lists(st.integers(-12, 12).map(lambda n: n / 2), min_size=vocab, max_size=vocab),
                params_strategy,
            ),
            min_size=1,
            max_size=5,
        )
    )
)
def test_filters_keep_what_their_definition_keeps_and_the_draw_is_among_it(
    cases: list[tuple[list[float], dict[str, Any]]],
) -> None:
    logits = np.array([values for values, _ in cases], dtype=np.float32)
    made = rows(*(params for _, params in cases), vocab=logits.shape[1])
    scaled = penalise(logits, made).copy()
    scaled -= scaled.max(axis=1, keepdims=True)
    scaled /= made.parameters["temperature"][:, None]
    filter_rows(scaled, *(made.parameters[name] for name in ("top_k", "top_p", "min_p")))
    drawn = sample(logits, made)
    for row, (values, params) in enumerate(cases):
        left = survivors(values, params)
        assert set(np.flatnonzero(np.isfinite(scaled[row]))) == set(left)
        assert drawn[row] == draw_by_definition(scaled[row], params)
        assert drawn[row] in left


def draw_by_definition(scaled: npt.NDArray[np.float32], params: dict[str, Any]) -> int:
    scores = {}
    for token in np.flatnonzero(np.isfinite(scaled)):
        words = token_words(
            np.array([params["seed"]], np.uint64),
            np.array([params["position"]], np.uint32),
            np.array([token // 4], np.uint32),
        )
        scores[int(token)] = scaled[token] + gumbel(uniform(words))[0, token % 4]
    return max(scores, key=lambda token: (scores[token], -token))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {
            "temperature": 1.3,
            "top_k": 6,
            "top_p": 0.9,
            "min_p": 0.02,
            "repetition_penalty": 1.5,
            "seen": {0, 3},
        },
    ],
    ids=str,
)
def test_draws_follow_the_filtered_distribution(params: dict[str, Any]) -> None:
    logits = [1.0, 0.2, -0.5, 2.0, 1.4, -1.0, 0.0, 0.7, -3.0, 1.9]
    draws = 20_000
    one = NEUTRAL | {"seen": ()} | params
    made = rows(*({**params, "position": place, "seed": 99} for place in range(draws)), vocab=len(logits))
    tokens = sample(np.tile(np.array(logits, dtype=np.float32), (draws, 1)), made)
    counts = np.bincount(tokens, minlength=len(logits))
    left = survivors(logits, one)
    assert set(np.flatnonzero(counts)) == {token for token, share in left.items() if share * draws > 1}
    chi_square = sum((counts[token] - draws * share) ** 2 / (draws * share) for token, share in left.items())
    assert chi_square < 35  # at most 9 degrees of freedom: exceeded by chance in 6e-5 of cases


def test_draws_of_different_seeds_follow_the_distribution_too() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    made = rows(*({"seed": seed} for seed in range(20_000)), vocab=4)
    counts = np.bincount(sample(np.tile(logits, (20_000, 1)), made), minlength=4)
    np.testing.assert_allclose(counts / 20_000, [0.5, 0.3, 0.15, 0.05], atol=0.012)


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = np.array([[0, 3, 3, 1], [2, 2, 2, 2], [-1, -2, -1, -3]], dtype=np.float32)
    made = rows(*[{"temperature": 0.0, "top_k": 2, "top_p": 0.1, "min_p": 1.0}] * 3, vocab=4)
    assert sample(logits, made).tolist() == [1, 0, 0]


@pytest.mark.parametrize("temperature", [1e-30, 1e-44, 1e-60])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = np.array([[1.0, 1.0001, -5.0, 1.00005]], dtype=np.float32)
    assert sample(
        logits, rows({"temperature": temperature, "top_p": 0.5, "min_p": 0.1}, vocab=4)
    ).tolist() == [1]


def test_a_huge_temperature_draws_evenly() -> None:
    logits = np.tile(np.array([9.0, -9.0, 0.0], dtype=np.float32), (3000, 1))
    made = rows(*({"temperature": 100.0, "seed": seed} for seed in range(3000)), vocab=3)
    assert np.bincount(sample(logits, made), minlength=3).min() > 800


def test_penalty_pushes_seen_tokens_down_whatever_their_sign() -> None:
    logits = np.array([[2.0, -2.0, 1.0, 0.0]], dtype=np.float32)
    made = rows({"repetition_penalty": 2.0, "seen": {0, 1, 3}}, vocab=4)
    assert penalise(logits, made).tolist() == [[1.0, -4.0, 1.0, 0.0]]
    assert logits.tolist() == [[2.0, -2.0, 1.0, 0.0]]


def test_ties_stand_or_fall_together() -> None:
    scaled = np.array([[0.0, -1.0, -1.0, -1.0, -2.0]] * 2, dtype=np.float32)
    one = np.ones(2, np.float32)
    filter_rows(scaled, np.array([2, 0], np.int32), one * np.float32([1.0, 0.5]), one * 0)
    assert np.isfinite(scaled).tolist() == [[True, True, True, True, False]] * 2


def test_a_row_depends_on_nothing_but_itself() -> None:
    rng = np.random.default_rng(0)
    vocab = 333
    logits = rng.standard_normal((24, vocab)).astype(np.float32) * 3
    params = [
        {
            "temperature": float(rng.choice([0.0, 0.7, 1.0, 1.6])), "top_k": int(rng.choice([0, 5, 50])),
            "top_p": float(rng.choice([0.7, 1.0])), "min_p": float(rng.choice([0.0, 0.05])),
            "repetition_penalty": float(rng.choice([1.0, 1.3])),
            "seen": set(rng.integers(0, vocab, 20).tolist()), "seed": n * 7919, "position": n + 3,
        }
        for n in range(24)
    ]  # fmt: skip
    together = sample(logits, rows(*params, vocab=vocab))
    order = rng.permutation(24)
    assert (
        sample(logits[order], rows(*(params[n] for n in order), vocab=vocab)).tolist()
        == together[order].tolist()
    )
    for n in range(24):
        assert sample(logits[n : n + 1], rows(params[n], vocab=vocab))[0] == together[n]


def test_seed_and_position_change_the_draw() -> None:
    flat = np.zeros((64, 1000), dtype=np.float32)
    by_seed = sample(flat, rows(*({"seed": seed << 32} for seed in range(64)), vocab=1000))
    by_position = sample(flat, rows(*({"position": place} for place in range(64)), vocab=1000))
    assert len(set(by_seed.tolist())) > 55
    assert len(set(by_position.tolist())) > 55


def masks_of(allowed: list[set[int]], vocab: int) -> IntArray:
    """Masks as runners take them; what lies behind the vocabulary is set, which must not matter."""
    bits = np.ones((len(allowed), 32 * mask_words(vocab)), dtype=np.bool_)
    for row, tokens in enumerate(allowed):
        bits[row, sorted(set(range(vocab)) - tokens)] = False
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.none() | st.sets(st.integers(0, 69)), params_strategy), min_size=1, max_size=6))
def test_a_mask_leaves_what_it_allows_and_touches_no_other_row(
    cases: list[tuple[set[int] | None, dict[str, Any]]],
) -> None:
    """Each draws as if the logits of what is not allowed were -inf: by hand here, by its mask there."""
    vocab, count = 70, len(cases)
    logits = np.random.default_rng(count).standard_normal((count, vocab)).astype(np.float32) * 3
    logits[0, 3] = np.nan
    before = logits.copy()
    draws = make_draws(*(np.arange(count, dtype=np.int32),) * 3)
    masked = [row for row, (allowed, _) in enumerate(cases) if allowed is not None]
    draws["mask"][masked] = np.arange(len(masked))
    masks = masks_of([allowed for allowed, _ in cases if allowed is not None], vocab)
    by_hand = logits.copy()
    for row, (allowed, _) in enumerate(cases):
        if allowed is not None:
            by_hand[row, sorted(set(range(vocab)) - allowed)] = -np.inf
    left = apply_masks(logits, draws, masks)
    np.testing.assert_array_equal(left, by_hand)
    np.testing.assert_array_equal(logits, before)
    made = rows(*(params for _, params in cases), vocab=vocab)
    tokens = sample(left, made)
    for row, (allowed, _) in enumerate(cases):
        if (allowed is not None and not allowed) or (row == 0 and (allowed is None or 3 in allowed)):
            assert tokens[row] == NOT_A_NUMBER
        else:
            assert allowed is None or int(tokens[row]) in allowed
    free = [row for row, (allowed, _) in enumerate(cases) if allowed is None]
    np.testing.assert_array_equal(tokens[free], sample(before, made)[free])
