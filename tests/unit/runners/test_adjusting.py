"""Bans, biases and penalties by count, held against the definition written out token by token."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.runners.adjusting import adjustment_of
from nightmill.worker.runners.base import NOT_A_NUMBER, Admission
from nightmill.worker.runners.sampling import PARAMETERS, SamplingRows, parameters_of, sample

VOCAB = 50
WISHES = GenerationParams(
    temperature=0.0, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=-0.4,
    logit_bias={3: 5.0, 9: -100.0, 40: 1.5},
)  # fmt: skip


def drawn(logits: np.ndarray, *admissions: Admission) -> list[int]:
    """What greedy rows (R, V) of these sequences draw."""
    parameters = np.array([parameters_of(one) for one in admissions], dtype=PARAMETERS)
    seen = []
    for one in admissions:
        mask = np.zeros(VOCAB, dtype=np.bool_)
        mask[list(one.token_ids)] = True
        seen.append(mask if one.params.repetition_penalty != 1.0 else None)
    adjusted = {row: by for row, one in enumerate(admissions) if (by := adjustment_of(one)) is not None}
    rows = SamplingRows(parameters, np.full(len(admissions), 7), seen, adjusted)
    return sample(logits.astype(np.float32), rows).tolist()


def written_out(logits: np.ndarray, one: Admission) -> np.ndarray:
    """One row's adjusted logits, in float64, token by token."""
    params, answer = one.params, one.token_ids[len(one.token_ids) - one.answered :]
    times = Counter(answer)
    result = np.array(logits, dtype=np.float64)
    for token in range(VOCAB):
        value = result[token] + params.logit_bias.get(token, 0.0)
        if token in one.token_ids:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        if token in times:
            value -= params.frequency_penalty * times[token] + params.presence_penalty
        result[token] = value
    for *before, last in one.banned:
        if not before or answer[-len(before) :] == tuple(before):
            result[last] = -np.inf
    return result


def test_rows_draw_the_best_of_what_the_definition_leaves() -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((300, VOCAB)) * 3
    admissions = []
    for row in range(300):
        tokens = tuple(rng.integers(0, 12, rng.integers(1, 40)).tolist())
        answered = int(rng.integers(0, len(tokens) + 1))
        tail = tokens[-2:] if answered >= 2 else (5,)
        banned = ((7,), (*tail, 11), (*tail[-1:], int(logits[row].argmax())), (1, 2, 3))
        admissions.append(Admission(row, tokens, WISHES, 1, answered, banned if row % 3 else ()))
    expected = [int(written_out(row, one).argmax()) for row, one in zip(logits, admissions, strict=True)]
    assert drawn(logits, *admissions) == expected
    plain = [replace(one, params=GenerationParams(temperature=0.0), banned=()) for one in admissions]
    assert sum(a != b for a, b in zip(drawn(logits, *plain), expected, strict=True)) > 100


def test_a_word_whose_beginning_is_the_prompts_is_not_banned() -> None:
    logits = np.arange(VOCAB, dtype=np.float64)[None]
    of_prompt = Admission(0, (4, 5), GenerationParams(temperature=0.0), 1, 0, ((5, 49),))
    assert drawn(logits, of_prompt) == [49]
    assert drawn(logits, replace(of_prompt, answered=1)) == [48]
    assert drawn(logits, replace(of_prompt, answered=2, banned=((3, 4, 5, 49), (4, 5, 49)))) == [48]


@pytest.mark.parametrize("logit", [np.nan, np.inf])
def test_what_is_not_a_number_is_told_whatever_is_done_to_it(logit: float) -> None:
    logits = np.zeros((2, VOCAB))
    logits[0, 9] = logit
    one = Admission(0, (9,), replace_params(logit_bias={9: -100.0}), 1, 1)
    assert drawn(logits, one, one)[0] == NOT_A_NUMBER
    assert drawn(logits, one, one)[1] != NOT_A_NUMBER


def test_a_row_of_which_everything_is_banned_says_so() -> None:
    banned = tuple((token,) for token in range(VOCAB))
    assert drawn(np.zeros((1, VOCAB)), Admission(0, (1,), WISHES, 1, 0, banned)) == [NOT_A_NUMBER]


def test_the_largest_logits_stay_numbers() -> None:
    logits = np.full((1, VOCAB), np.finfo(np.float32).max)
    one = Admission(0, (9, 9), replace_params(repetition_penalty=0.01, frequency_penalty=-2.0), 1, 2)
    assert drawn(logits, one) != [NOT_A_NUMBER]


def replace_params(**changed: object) -> GenerationParams:
    return GenerationParams.model_validate({**WISHES.model_dump(), **changed})
