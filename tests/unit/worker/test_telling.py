"""Log-probabilities, scores and echoes in a service, from the row to the row."""

import codecs
import math
from collections.abc import Callable
from typing import Any

import pytest

from nightmill.jobs.answers import answer_seed
from nightmill.jobs.contract import JobState, StopReason
from nightmill.jobs.job import Job
from nightmill.jobs.logprobs import TokenLogprob
from nightmill.worker.service.telling import MAX_JOB_LOGPROBS
from tests.unit.engine.scripted import EOS, PIECES, ScriptedRunner, expected, found_for, make_request, text_of
from tests.unit.worker.bench import PROMPT, Bench


def ended(bench: Bench, prompt: Any = "prompt", **settings: Any) -> Job:
    job_id = bench.client.enqueue(prompt, **settings)
    bench.service.run_shard([job_id])
    return bench.client.get(job_id)


def told(before: tuple[int, ...], tokens: tuple[int, ...], likely: int) -> list[Any]:
    """By definition, of tokens after others."""
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    found: list[Any] = []
    offset = 0
    for place, token in enumerate(tokens):
        one = found_for([*before, *tokens[:place]], token)
        top = list(zip(one["tokens"].tolist(), one["logprobs"].tolist(), strict=True))[:likely]
        first = not before and not place
        found.append((token, None if first else float(one["logprob"]), offset, [] if first else top))
        offset += len(decode(PIECES[token]))
    return found


def seen(tokens: tuple[TokenLogprob, ...] | None) -> list[Any]:
    assert tokens is not None
    for one in tokens:
        assert one.bytes == PIECES[one.id] and one.token == PIECES[one.id].decode(errors="replace")
        assert all(other.bytes == PIECES[other.id] for other in one.top)
    return [
        (one.id, one.logprob, one.offset, [(other.id, other.logprob) for other in one.top]) for one in tokens
    ]


@pytest.mark.parametrize("likely", [0, 3])
def test_each_answer_has_those_of_the_tokens_of_its_text(build: Callable[..., Bench], likely: int) -> None:
    bench = build(ScriptedRunner())
    asked: dict[str, Any] = {"max_tokens": 30, "stop": ("STOP", "b"), "min_tokens": 3}
    several = ended(bench, n=12, seed=5, logprobs=likely, **asked)
    reasons = set()
    for number, answer in enumerate(several.answers):
        tokens, text, reason = expected(make_request("j", PROMPT, seed=answer_seed(5, number), **asked), 200)
        reasons.add(reason)
        assert answer.text == text
        mine = seen(answer.logprobs)
        assert mine == told(PROMPT, tokens, likely)[: len(mine)]
        spelt = b"".join(PIECES[token] for token, *_ in mine).decode(errors="replace")
        assert spelt.startswith(text) and (not mine or mine[-1][2] < len(text))
    assert reasons >= {StopReason.EOS, StopReason.STOP_SEQUENCE}
    one = ended(bench, seed=5, logprobs=likely, **asked)
    assert one.logprobs == one.answers[0].logprobs == several.logprobs
    assert ended(bench, seed=5, **asked).logprobs is None


def test_a_text_that_is_scored_has_the_sum_of_its_tokens(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner())
    texts = ["yes", "no", "maybe not"]
    job = ended(bench, score=texts, logprobs=2, seed=3)
    ids = [tuple(ord(letter) % EOS for letter in text) for text in texts]
    assert job.scores is not None and [score.text for score in job.scores] == texts
    for score, tokens, answer in zip(job.scores, ids, job.answers, strict=True):
        assert seen(score.tokens) == told(PROMPT, tokens, 2)
        assert score.logprob == math.fsum(one.logprob or 0 for one in score.tokens)
        assert (answer.text, answer.stop_reason, answer.completion_tokens) == (score.text, "eos", len(tokens))
    best = max(job.scores, key=lambda score: score.logprob)
    assert job.scores.best == best and job.text == best.text
    assert (job.state, job.stop_reason) == (JobState.SUCCEEDED, StopReason.EOS)
    assert (job.prompt_tokens, job.completion_tokens) == (len(PROMPT), sum(map(len, ids)))
    alone = ended(bench, score="no")
    assert alone.scores is not None and alone.text == "no"
    assert alone.scores[0].logprob == job.scores[1].logprob


def test_an_echo_begins_with_the_prompt(build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = build(ScriptedRunner())
    plain = ended(bench, seed=4, max_tokens=9)
    echoed = ended(bench, seed=4, max_tokens=9, echo=True)
    assert echoed.text == f"prompt{plain.text}"
    spelt = ended(bench, list(PROMPT), seed=4, max_tokens=9, echo=True, logprobs=1)
    assert spelt.text == text_of(list(PROMPT)) + (plain.text or "")
    tokens, _, _ = expected(make_request("j", PROMPT, seed=4, max_tokens=9), 200)
    mine = seen(spelt.logprobs)
    assert mine == told((), PROMPT + tokens, 1)[: len(mine)] and len(mine) >= len(PROMPT) + len(tokens) - 1
    assert mine[0][1:] == (None, 0, [])
    monkeypatch.setattr("nightmill.worker.service.telling.MAX_JOB_LOGPROBS", 5)
    assert MAX_JOB_LOGPROBS > 5
    refused = ended(bench, list(PROMPT), echo=True, logprobs=1)
    assert refused.error is not None and refused.error.startswith(
        "echo: a prompt of 3 tokens with 1 logprobs in 1"
    )
