"""No accepted parameter and no finite logit breaks sampling; a row that is not a number is told alone."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.runners.base import NOT_A_NUMBER
from nightmill.worker.runners.sampling import PARAMETERS, penalise, sample
from tests.unit.runners.test_sampling import rows

VOCAB = 13
LARGEST = float(np.finfo(np.float32).max)

# All that `GenerationParams` accepts, with the ends of each range and the smallest doubles and floats.
parameters = st.fixed_dictionaries(
    {
        "temperature": st.one_of(st.floats(0, 100), st.sampled_from([5e-324, 1e-46, 1e-45, 1e-38, 0.01])),
        "top_k": st.one_of(st.integers(0, 15), st.just(2**31 - 1)),
        "top_p": st.one_of(st.floats(0, 1, exclude_min=True), st.sampled_from([5e-324, 1e-46, 1e-45, 0.5])),
        "min_p": st.one_of(st.floats(0, 1), st.sampled_from([5e-324, 1e-46, 1e-45, 1.0])),
        "repetition_penalty": st.one_of(st.floats(0.01, 100), st.sampled_from([0.01, 1.0, 100.0])),
        "seed": st.integers(0, 2**63 - 1),
    }
)
finite = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-30, 30, width=32),
    st.sampled_from([0.0, -0.0, LARGEST, -LARGEST, 1e-45, -1e-45]),
)
logit_rows = st.lists(st.one_of(finite, st.just(-np.inf)), min_size=VOCAB, max_size=VOCAB).filter(
    lambda values: max(values) > -np.inf
)
cases = st.tuples(logit_rows, parameters, st.sets(st.integers(0, VOCAB - 1)), st.integers(0, 2**31 - 1))


def made(*drawn: tuple[dict[str, Any], set[int], int]) -> Any:
    """Rows of parameters as a runner keeps them."""
    filled = []
    for params, seen, position in drawn:
        checked = GenerationParams.parse(params)
        one = {name: getattr(checked, name) for name in PARAMETERS.names or ()}
        filled.append(one | {"seen": seen, "position": position})
    return rows(*filled, vocab=VOCAB)


@settings(deadline=None, max_examples=200)
@given(st.lists(cases, min_size=1, max_size=4))
def test_every_accepted_value_draws_a_possible_token_of_any_finite_logits(drawn: list[Any]) -> None:
    logits = np.array([values for values, *_ in drawn], dtype=np.float32)
    before = logits.copy()
    params = made(*(rest for _, *rest in drawn))
    tokens = sample(logits, params)
    np.testing.assert_array_equal(logits, before)
    for row, token in enumerate(tokens):
        assert 0 <= token < VOCAB
        assert logits[row, token] > -np.inf
    bounded = np.where(logits == -np.inf, logits, np.clip(logits, -1e30, 1e30)).astype(np.float32)
    penalised = penalise(bounded, params)
    assert not np.isnan(penalised).any()
    assert not (penalised == np.inf).any()
    for row, token in enumerate(tokens):
        if params.parameters["temperature"][row] == 0:
            assert token == penalised[row].argmax()
            continue
        with np.errstate(over="ignore"):
            scaled = (penalised[row] - penalised[row].max()) / params.parameters["temperature"][row]
        if (
            params.parameters["top_p"][row] < 1e-6
            or params.parameters["min_p"][row] == 1
            or params.parameters["top_k"][row] == 1
        ):
            assert scaled[token] == 0
        assert scaled[token] >= np.sort(scaled)[-max(1, min(params.parameters["top_k"][row] or VOCAB, VOCAB))]
        assert scaled[token] > -26  # what the largest noise lifts above the best with the smallest


@pytest.mark.parametrize("top_p", [5e-324, 1e-46, 1e-45, 1e-30])
@pytest.mark.parametrize("top_k", [0, 3])
def test_the_most_likely_token_survives_a_top_p_of_almost_nothing(top_p: float, top_k: int) -> None:
    """The filter is not switched off where float32 has no such number; equals stand together."""
    logits = np.zeros((50, VOCAB), dtype=np.float32)
    logits[:, 4] = logits[:, 9] = 0.25
    params = {"temperature": 1.0, "top_p": top_p, "top_k": top_k}
    tokens = sample(logits, made(*((params | {"seed": seed}, set(), 1) for seed in range(50))))
    assert set(tokens.tolist()) == {4, 9}


def test_a_penalty_of_finite_logits_is_finite() -> None:
    logits = np.full((2, VOCAB), LARGEST, dtype=np.float32)
    logits[1] *= -1
    for penalty in (0.01, 100.0):
        for temperature in (0.0, 1e-45, 0.01, 100.0):
            params = {"repetition_penalty": penalty, "temperature": temperature, "seed": 1}
            tokens = sample(logits, made(*[(params, set(range(VOCAB)), 1)] * 2))
            assert (tokens >= 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, "nothing"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_row_that_is_not_a_number_is_told_and_changes_no_other(bad: Any, temperature: float) -> None:
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((6, VOCAB)).astype(np.float32)
    logits[2, 5] = -np.inf  # a token that cannot be drawn is none of that
    params = [
        ({"temperature": temperature, "top_k": n % 3 * 4, "repetition_penalty": 1 + n % 2, "seed": n}, {1}, n)
        for n in range(6)
    ]
    clean = sample(logits, made(*params))
    assert (clean >= 0).all()
    for row in (0, 3, 5):
        spoilt = logits.copy()
        if bad == "nothing":
            spoilt[row] = -np.inf
        else:
            spoilt[row, 7] = bad
        drawn = sample(spoilt, made(*params))
        assert drawn[row] == NOT_A_NUMBER
        np.testing.assert_array_equal(np.delete(drawn, row), np.delete(clean, row))
    nothing = sample(np.full((6, VOCAB), np.nan, dtype=np.float32), made(*params))
    assert (nothing == NOT_A_NUMBER).all()


def test_what_is_not_a_number_does_not_hide_behind_a_penalty() -> None:
    """What is not a number is looked for before the penalty is applied."""
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, 3] = np.nan
    params = {"repetition_penalty": 100.0, "temperature": 0.0, "seed": 1}
    assert sample(logits, made((params, {3}, 1))).tolist() == [NOT_A_NUMBER]
