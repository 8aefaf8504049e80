"""Log-probabilities by definition, and what the reference runner tells of prompts and answers."""

import numpy as np

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.adjusting import Adjustment
from nightmill.worker.runners.base import FOUND, NOT_A_NUMBER, NOT_GIVEN, Admission, StepBatch, make_draws
from nightmill.worker.runners.reference import ReferenceRunner
from nightmill.worker.runners.sampling import PARAMETERS, SamplingRows, log_probabilities

NONE = np.full(20, -1)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(wide - wide.max()) / np.exp(wide - wide.max()).sum())


def test_they_are_of_what_masks_biases_and_penalties_leave() -> None:
    logits = np.array(
        [
            [1.0, 3.0, 3.0, -2.0],
            [1.0, 3.0, -np.inf, -2.0],
            [1.0, 3.0, 3.0, -2.0],
            [1.0, 3.0, 3.0, -2.0],
            [np.nan, 0, 0, 0],
        ],
        dtype=np.float32,
    )
    parameters = np.zeros(5, dtype=PARAMETERS)
    parameters["temperature"], parameters["top_k"], parameters["repetition_penalty"] = 0.1, 1, [1, 1, 2, 1, 1]
    seen = [None, None, np.array([False, True, False, True]), None, None]
    biased = Adjustment(np.array([0]), np.array([5], dtype=np.float32), ((2,),), [1, 1], 0.5, 1.0)
    rows = SamplingRows(parameters, np.zeros(5, dtype=np.int64), seen, {3: biased})
    tokens = np.array([2, 0, 1, 0, NOT_A_NUMBER], dtype=np.int32)
    found = log_probabilities(logits, rows, tokens, np.array([3, 20, 2, 2, 2]))
    meant = np.array([[1, 3, 3, -2], [1, 3, -np.inf, -2], [1, 1.5, 3, -4], [6, 0.5, -np.inf, -2]])
    order = [[1, 2, 0], [1, 0, 3], [2, 1], [0, 1]]  # equals by their ids, and nothing that is ruled out
    for row, values in enumerate(map(log_softmax, meant)):
        np.testing.assert_allclose(found["logprob"][row], values[tokens[row]], rtol=1e-6)
        likely = [*order[row], *NONE][:20]
        np.testing.assert_array_equal(found["tokens"][row], likely)
        np.testing.assert_allclose(found["logprobs"][row][: len(order[row])], values[order[row]], rtol=1e-6)
    assert np.isnan(found["logprob"][4]) and (found["tokens"][4] == -1).all()


def test_a_prompts_tokens_are_told_beside_the_token_that_is_drawn() -> None:
    file = GgufFile.open(demo_model())
    runner = ReferenceRunner(file, read_spec(file), kv_pages=4, slots=1)
    prompt = np.array([5, 90, 17, 300], dtype=np.int32)
    drawn = make_draws(*(np.array([n], dtype=np.int32) for n in (3, 0, 4)))
    given = make_draws(np.arange(3, dtype=np.int32), np.full(3, -1, dtype=np.int32), np.array([1, 2, 3]))
    draws = np.concatenate([drawn, given])
    draws["given"] = [NOT_GIVEN, *prompt[1:]]
    draws["likely"] = [0, 1, 2, 20]
    positions = np.arange(4, dtype=np.int32)
    params = GenerationParams(temperature=0.0)
    batch = StepBatch(
        prompt, positions, positions, np.array([0, 4], dtype=np.int32), np.array([4], dtype=np.int32),
        np.array([[0]], dtype=np.int32), np.zeros(1, dtype=np.int32), draws, drawn=0,
        admissions=(Admission(0, tuple(prompt.tolist()), params, 1),),
    )  # fmt: skip
    runner.launch(batch)
    together = runner.collect()
    assert together is not None and together.found is not None and together.found.dtype == FOUND
    assert together.tokens[1:].tolist() == prompt[1:].tolist()
    for place in range(1, 4):  # each as if it were to be drawn
        alone = make_draws(*(np.array([n], dtype=np.int32) for n in (place - 1, 0, place)))
        alone["likely"] = 20
        runner.launch(
            StepBatch(
                prompt[:place], positions[:place], positions[:place], np.array([0, place], dtype=np.int32),
                np.array([place], dtype=np.int32), batch.page_tables, batch.slots, alone, drawn=0,
                admissions=batch.admissions,
            )
        )  # fmt: skip
        one = runner.collect()
        assert one is not None and one.found is not None
        told, likely = together.found[place], draws["likely"][place]
        np.testing.assert_array_equal(told["tokens"][:likely], one.found["tokens"][0][:likely])
        np.testing.assert_allclose(told["logprobs"][:likely], one.found["logprobs"][0][:likely], atol=1e-5)
        assert one.found["logprob"][0] == one.found["logprobs"][0][0]
    runner.close()
