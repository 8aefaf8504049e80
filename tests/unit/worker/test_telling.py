"""Log-probabilities, scores and echoes in a service, from the row to the row."""

import codecs
import math
from collections.abc import Callable
from typing import Any

import pytest

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.formats.results import answer_values, completion_body
from nightmill.jobs.reply.answers import answer_seed
from nightmill.jobs.reply.job import Job
from nightmill.jobs.reply.logprobs import TokenLogprob
from nightmill.jobs.request.parameters import MAX_JOB_LOGPROBS
from tests.unit.engine.by_definition import EOS, PIECES, expected, found_for, text_of
from tests.unit.engine.scripted import ScriptedRunner, make_request
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


@pytest.mark.parametrize(
    "limit", [{}, {"stop": "a"}, {"stop_token_ids": [1, 2, 3, 4, 5]}, {"ignore_eos": True}]
)
def test_a_text_that_is_scored_as_openais_clients_do_has_the_score_of_ours(
    build: Callable[..., Bench], limit: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By lm-eval's arithmetic: `echo`, one token more, and all but the last of what follows the context."""
    bench = build(ScriptedRunner())
    monkeypatch.setattr(
        bench.prompting,
        "tokenize_all",
        lambda claims: [tuple(claim.prompt_ids or PROMPT) for claim in claims],
    )
    texts = [f"{letter}{rest}" for letter in "abcdefghijklmnopqrstuvwxyz" for rest in ("", "es")]
    scores = ended(bench, list(PROMPT), score=texts, logprobs=1).scores
    assert scores is not None
    reasons = set()
    for text, score in zip(texts, scores, strict=True):
        ids = [ord(letter) % EOS for letter in text]
        job = ended(
            bench, [*PROMPT, *ids], max_tokens=1, temperature=0, logprobs=1, echo=True, seed=3, **limit
        )
        told = completion_body(job, "m")["choices"][0]["logprobs"]
        assert len(told["token_logprobs"]) == len(PROMPT) + len(ids) + 1
        assert math.fsum(told["token_logprobs"][len(PROMPT) : -1]) == score.logprob
        tops = told["top_logprobs"][len(PROMPT) : -1]
        assert tops == [
            {one.token: one.logprob} | {one.top[0].token: one.top[0].logprob} for one in score.tokens
        ]
        reasons.add(job.stop_reason)
    assert StopReason.LENGTH in reasons
    assert "ignore_eos" in limit or StopReason.EOS in reasons
    assert "stop" not in str(limit) or StopReason.STOP_SEQUENCE in reasons


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("likely", [None, 2])
def test_an_echo_alone_is_the_prompt_and_nothing_is_generated(
    build: Callable[..., Bench], n: int, likely: int | None
) -> None:
    bench = build(ScriptedRunner())
    job = ended(bench, list(PROMPT), max_tokens=0, echo=True, logprobs=likely, n=n, seed=3)
    assert (job.state, job.stop_reason, job.text) == (JobState.SUCCEEDED, "length", text_of(list(PROMPT)))
    assert (job.prompt_tokens, job.completion_tokens) == (len(PROMPT), 0)
    assert [answer.seed for answer in job.answers] == [answer_seed(3, number) for number in range(n)]
    for answer in job.answers:
        assert (answer.text, answer.stop_reason, answer.completion_tokens) == (job.text, "length", 0)
        assert (
            answer.logprobs is None if likely is None else seen(answer.logprobs) == told((), PROMPT, likely)
        )
    body = completion_body(job, "m")
    counted = {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    assert {name: body["usage"][name] for name in counted} == counted
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}


def test_what_stopped_a_text_is_its_end_if_that_is_asked_for(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner())
    ends = set()
    for seed in range(20):
        limit: dict[str, Any] = {
            "seed": seed,
            "max_tokens": 60,
            "stop": ("STOP", "bb"),
            "stop_token_ids": [4, 7],
        }
        cut = ended(bench, **limit)
        whole = ended(bench, **limit, include_stop_str_in_output=True, logprobs=0)
        tokens, _, reason = expected(make_request("j", PROMPT, **limit), 200)
        assert cut.text is not None and whole.text is not None and whole.text.startswith(cut.text)
        assert (whole.stop_reason, whole.completion_tokens) == (
            cut.stop_reason,
            len(tokens),
        ) and reason == cut.stop_reason
        rest = whole.text.removeprefix(cut.text)
        if reason is not StopReason.STOP_SEQUENCE:
            assert rest == ""
            continue
        by_token = tokens[-1] in (4, 7)
        assert whole.text == text_of(list(tokens)) if by_token else rest in ("STOP", "bb")
        ends.add(rest if not by_token else tokens[-1])
        assert (
            "".join(one.token for one in whole.logprobs or ()).startswith(whole.text)
            or "\ufffd" in whole.text
        )
    assert len(ends) >= 3


def test_an_echo_begins_with_the_prompt(build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = build(ScriptedRunner())
    plain = ended(bench, seed=4, max_tokens=9)
    echoed = ended(bench, seed=4, max_tokens=9, echo=True)
    assert echoed.text == f"prompt{plain.text}"
    spelt = ended(bench, list(PROMPT), seed=4, max_tokens=9, echo=True, logprobs=1)
    assert spelt.text == text_of(list(PROMPT)) + (plain.text or "")
    tokens, _, _ = expected(make_request("j", PROMPT, seed=4, max_tokens=9), 200)
    mine = seen(spelt.logprobs)
    assert mine == told((), PROMPT + tokens, 1)
    assert mine[0][1:] == (None, 0, [])
    monkeypatch.setattr("nightmill.worker.service.logprobs.MAX_JOB_LOGPROBS", 5)
    assert MAX_JOB_LOGPROBS > 5
    refused = ended(bench, list(PROMPT), echo=True, logprobs=1)
    assert refused.error is not None and refused.error.startswith(
        "echo: a prompt of 3 tokens with 1 logprobs in 1"
    )


@pytest.mark.parametrize(("likely", "of_prompt"), [(None, 0), (None, 3), (0, 2), (4, 1), (2, 2)])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("echo", [False, True])
def test_of_the_prompt_is_told_what_an_echo_would_tell(
    build: Callable[..., Bench], likely: int | None, of_prompt: int, n: int, echo: bool
) -> None:
    bench = build(ScriptedRunner())
    asked: dict[str, Any] = {"seed": 4, "max_tokens": 9, "n": n, "echo": echo, "logprobs": likely}
    before, plain = list(PROMPT), ended(bench, list(PROMPT), **asked)
    job = ended(bench, before, **asked, prompt_logprobs=of_prompt, return_token_ids=True)
    assert seen(job.prompt_logprobs) == told((), PROMPT, of_prompt)
    assert job.prompt_logprobs is not None and job.prompt_logprobs[0].logprob is None
    # Nothing else is another for it.
    assert [(one.text, one.stop_reason, one.completion_tokens, one.seed) for one in job.answers] == [
        (one.text, one.stop_reason, one.completion_tokens, one.seed) for one in plain.answers
    ]
    assert [one.logprobs for one in job.answers] == [one.logprobs for one in plain.answers]
    assert (job.text, job.prompt_tokens, job.completion_tokens, job.stop_reason) == (
        plain.text, plain.prompt_tokens, plain.completion_tokens, plain.stop_reason
    )  # fmt: skip
    assert job.prompt_token_ids == PROMPT
    for number, answer in enumerate(job.answers):
        seed = answer_seed(4, number)
        tokens, _, _ = expected(make_request("j", PROMPT, seed=seed, max_tokens=9), 200)
        assert answer.token_ids == tokens and len(tokens) == answer.completion_tokens
    assert plain.prompt_logprobs is None and plain.prompt_token_ids is None
    assert {one.token_ids for one in plain.answers} == {None}


def test_an_echo_alone_tells_of_its_prompt_once_more(build: Callable[..., Bench]) -> None:
    job = ended(
        build(ScriptedRunner()),
        list(PROMPT),
        max_tokens=0,
        echo=True,
        prompt_logprobs=2,
        return_token_ids=True,
    )
    assert seen(job.prompt_logprobs) == told((), PROMPT, 2)
    assert (job.text, job.logprobs) == (text_of(list(PROMPT)), None)
    assert (job.prompt_token_ids, [one.token_ids for one in job.answers]) == (PROMPT, [()])


def test_rows_of_files_have_vllms_shapes_and_ours(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner())
    asked: dict[str, Any] = {"max_tokens": 5, "prompt_logprobs": 2, "return_token_ids": True, "n": 2}
    job = ended(bench, list(PROMPT), seed=4, **asked)
    first, *others = told((), PROMPT, 2)
    shown: list[Any] = [None]
    for token, logprob, _, top in others:
        ranks = {other: rank for rank, (other, _) in enumerate(top, 1)}
        by_id = {str(token): logprob} | {str(one): value for one, value in top if one != token}
        shown.append({name: (value, ranks.get(int(name))) for name, value in by_id.items()})
    choices = completion_body(job, "m")["choices"]
    for choice, answer in zip(choices, job.answers, strict=True):
        assert choice["prompt_token_ids"] == list(PROMPT) and choice["token_ids"] == list(
            answer.token_ids or ()
        )
        assert [
            None if one is None else {name: (said["logprob"], said["rank"]) for name, said in one.items()}
            for one in choice["prompt_logprobs"]
        ] == shown
        assert next(iter(choice["prompt_logprobs"][1])) == str(PROMPT[1])
    ours = answer_values(job)
    assert [sorted(one.keys() & {"prompt_logprobs", "prompt_token_ids", "token_ids"}) for one in ours] == [
        ["prompt_logprobs", "prompt_token_ids", "token_ids"], ["token_ids"]
    ]  # fmt: skip
    assert [one["id"] for one in ours[0]["prompt_logprobs"]] == list(PROMPT)
    assert first[1] is None


def test_a_prompt_of_which_too_much_would_be_told_is_refused(
    build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = build(ScriptedRunner())
    monkeypatch.setattr("nightmill.worker.service.logprobs.MAX_JOB_LOGPROBS", 5)
    refused = ended(bench, list(PROMPT), prompt_logprobs=1)
    assert (refused.error or "").startswith("prompt_logprobs: 1 of them for a prompt of 3 tokens are 6")
    assert ended(bench, list(PROMPT), prompt_logprobs=0).error is None


def test_another_attempt_tells_the_same(build: Callable[..., Bench]) -> None:
    """Saved tokens come without what was told of them, so such a job begins afresh."""
    bench = build(ScriptedRunner())
    asked: dict[str, Any] = {"seed": 4, "max_tokens": 9, "prompt_logprobs": 1, "return_token_ids": True}
    first = ended(bench, list(PROMPT), **asked)
    failing = bench.client.enqueue(list(PROMPT), **asked)
    bench.client.cancel(failing)
    bench.client.retry(failing)
    bench.service.run_shard([failing])
    again = bench.client.get(failing)
    assert again.prompt_logprobs == first.prompt_logprobs and again.answers == first.answers
