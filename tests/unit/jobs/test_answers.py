"""Seeds and names of answers, and how many a job may have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightmill.jobs.base.contract import Constrained, ConstraintKind, StopReason
from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.reply.answers import answer_id, answer_seed, split_answer_id
from nightmill.jobs.reply.job import Answer
from nightmill.jobs.request.parameters import MAX_ANSWERS, MAX_SEED, GenerationParams
from nightmill.jobs.request.stored_parameters import stored
from tests.unit.formats.files import job

SEEDS = st.integers(0, MAX_SEED)
NUMBERS = st.integers(0, MAX_ANSWERS - 1)


@given(seed=SEEDS)
def test_every_answer_has_a_seed_that_a_job_may_have_and_no_other_answer_has(seed: int) -> None:
    seeds = [answer_seed(seed, number) for number in range(MAX_ANSWERS)]
    assert seeds[0] == seed
    assert len(set(seeds)) == MAX_ANSWERS
    assert GenerationParams(seed=min(seeds)) and GenerationParams(seed=max(seeds))


@given(seed=SEEDS, number=NUMBERS)
def test_seeds_are_those_that_the_formula_of_the_page_gives(seed: int, number: int) -> None:
    assert answer_seed(seed, number) == (seed + number * 2177342782468422677) % 2**63


@given(number=NUMBERS)
def test_an_answers_name_tells_its_job_and_number(number: int) -> None:
    assert split_answer_id(answer_id("f" * 32, number)) == ("f" * 32, number)
    assert answer_id("f" * 32, 0) == "f" * 32


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"n": 0}, "n: must be at least 1 (got 0)"),
        ({"n": 129}, "n: must be at most 128 (got 129)"),
        ({"n": 2.0}, "n: must be a whole number (got 2.0)"),
        (
            {"n": 128, "max_tokens": 8193},
            "n: so many answers of up to 8,193 tokens may have more than 1,048,576",
        ),
    ],
)
def test_answers_of_a_job_are_bounded(asked: dict[str, int], said: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        GenerationParams.parse(asked)
    assert str(caught.value).startswith(said)
    assert stored(GenerationParams.parse({"n": 128, "max_tokens": 8192}))["n"] == 128


def test_a_job_has_its_answers_in_any_case_and_their_values_if_they_are_json() -> None:
    alone = job()
    assert alone.answers == (Answer("upon a time", StopReason.EOS, 4, 7),)
    asked = Constrained(ConstraintKind.JSON_SCHEMA, "{}")
    several = (Answer("[1]", StopReason.EOS, 3, 7), Answer("[", StopReason.LENGTH, 1, 8))
    made = job(text="[1]", constrained=asked, several=several)
    assert (made.parsed, made.parsed_answers) == ([1], [[1], None])
    assert job(text=None, stop_reason=None).answers == ()
