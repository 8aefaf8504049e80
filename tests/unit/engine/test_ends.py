"""What ends a text beside the model's own end: tokens that stop it, and how many come at the least."""

from collections.abc import Sequence

import numpy as np
import pytest

from nightmill.jobs.base.contract import StopReason
from nightmill.worker.engine.masking import everything, spare
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.runners.base import mask_words
from tests.unit.engine.by_definition import EOS, VOCAB
from tests.unit.engine.scripted import ScriptedRunner, make_engine, make_request, run

A, B, AB, SPACE = 0, 1, 2, 4  # of PIECES
PROMPT = (0, 1, 2)


def scripted(script: list[int], **params: object) -> Completion:
    """The answer of a runner that draws this script, whatever it is told."""
    engine = make_engine(ScriptedRunner(script=script))
    engine.submit(make_request("j", PROMPT, seed=len(PROMPT), **params))
    (one,) = run(engine)
    return one


@pytest.mark.parametrize("stop", [(), ("STOP",)])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_a_text_ends_before_a_token_that_stops_it(stop: Sequence[str], ignore_eos: bool) -> None:
    one = scripted([A, B, SPACE, A, A], stop_token_ids=[SPACE], stop=list(stop), ignore_eos=ignore_eos)
    assert (one.text, one.stop_reason) == ("ab", StopReason.STOP_SEQUENCE)
    assert one.token_ids == (A, B, SPACE)


def test_the_end_of_text_may_stop_a_text_that_ignores_it() -> None:
    one = scripted([A, EOS, A], stop_token_ids=[EOS], ignore_eos=True)
    assert (one.text, one.stop_reason) == ("a", StopReason.STOP_SEQUENCE)
    assert scripted([A, EOS, A], stop_token_ids=[EOS]).stop_reason is StopReason.EOS


@pytest.mark.parametrize(
    ("fewest", "tokens", "text"),
    [
        (0, 1, ""),  # "ab" is there with the first token
        (1, 4, "ab "),
        (3, 4, "ab "),
        (4, 6, "ab ab "),  # the second "ab" ends with the fourth token, which is one too early
    ],
)
def test_a_stop_string_that_is_complete_too_early_counts_for_nothing(
    fewest: int, tokens: int, text: str
) -> None:
    one = scripted([AB, SPACE, A, B, SPACE, AB], stop=["ab", "longer"], min_tokens=fewest, max_tokens=6)
    assert one.stop_reason is StopReason.STOP_SEQUENCE
    assert (len(one.token_ids), one.text) == (tokens, text)


def answers(requests: Sequence[Request], depth: int = 1) -> tuple[dict[str, Completion], int]:
    engine = make_engine(ScriptedRunner(depth=depth, kv_pages=256))
    for request in requests:
        engine.submit(request)
    return {one.job_id: one for one in run(engine)}, engine.stats.steps


def test_no_token_ends_a_text_that_is_too_short() -> None:
    asked = {"stop_token_ids": [A, B], "max_tokens": 30}
    short, _ = answers([make_request(f"j{n}", seed=n, **asked) for n in range(50)])
    long, _ = answers([make_request(f"j{n}", seed=n, min_tokens=9, **asked) for n in range(50)])
    assert min(len(one.token_ids) for one in short.values()) == 1
    assert min(len(one.token_ids) for one in long.values()) == 10  # and the one that ends it
    for one in long.values():
        assert {A, B, EOS}.isdisjoint(one.token_ids[:9])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_text_runs_ahead_again_once_it_is_long_enough(depth: int) -> None:
    asked = {"seed": 5, "max_tokens": 30, "stop_token_ids": [A, EOS], "ignore_eos": True}
    found, steps = answers([make_request(**asked, min_tokens=29)], depth)
    assert len(found["j"].token_ids) == 30
    _, some = answers([make_request(**asked, min_tokens=2)], 1)
    _, ahead = answers([make_request(**asked, min_tokens=2)], depth)
    assert steps >= 30
    assert ahead <= some + depth  # what ran ahead of the end, and is dropped


def test_an_answer_that_its_rule_lets_only_end_does_end() -> None:
    mask = np.zeros(mask_words(VOCAB), dtype=np.int32)
    mask[0] = 1 << EOS | 1 << A
    spare(mask, {EOS})
    assert mask.tolist() == [1 << A]
    spare(mask, {A})
    assert mask.tolist() == [1 << A]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_everything_is_every_token_and_no_other(vocab: int) -> None:
    mask = everything(vocab)
    assert mask.shape == (mask_words(vocab),) and mask.dtype == np.int32
    assert np.unpackbits(mask.view(np.uint8), bitorder="little").sum() == vocab
    spare(mask, {vocab - 1})
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert bits.sum() == max(vocab - 1, 1) and (vocab == 1 or not bits[vocab - 1])
