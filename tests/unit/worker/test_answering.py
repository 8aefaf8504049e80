"""Jobs with several answers in a service, on an engine whose runner does as the test says."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.reply.answers import answer_id, answer_seed
from nightmill.jobs.reply.job import Job
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.request import Completion, DrawnTokens, Request
from nightmill.worker.service.answering import Answering
from nightmill.worker.service.in_flight import InFlight
from nightmill.worker.service.outcomes import pack, unpack
from tests.support.servers import wait_until
from tests.unit.engine.by_definition import expected
from tests.unit.engine.scripted import ScriptedRunner, make_request
from tests.unit.worker.bench import Bench, Gated, Pausing, ScriptedPrompting, stop

PROMPT = tuple(n % 11 for n in range(22))  # five pages and a half
ASKED: dict[str, Any] = {"max_tokens": 30, "stop": ("STOP",), "min_tokens": 4}


@pytest.fixture(autouse=True)
def long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedPrompting, "encode", staticmethod(lambda claim: PROMPT))


def alone(seed: int, number: int, **params: Any) -> tuple[str, StopReason, int]:
    """What a job of its own with the seed of this answer has."""
    request = make_request("j", PROMPT, seed=answer_seed(seed, number), **params)
    tokens, text, reason = expected(request, 200)
    return text, reason, len(tokens)


def told(job: Job) -> list[tuple[str, StopReason, int]]:
    return [(answer.text, answer.stop_reason, answer.completion_tokens) for answer in job.answers]


def test_each_answer_is_that_of_a_job_with_its_seed_and_the_prompt_is_computed_once(
    build: Callable[..., Bench],
) -> None:
    bench = build(ScriptedRunner())
    client = bench.client
    job_id = client.enqueue("prompt", n=20, seed=5, **ASKED)
    bench.service.run_shard([job_id])
    stats = bench.engine.stats
    assert stats.prompt_tokens == 22 + 19 * 2  # of the others only what fills no page
    job = client.get(job_id)
    assert told(job) == [alone(5, number, **ASKED) for number in range(20)]
    assert len({answer.text for answer in job.answers}) > 15
    again = [client.enqueue("prompt", seed=answer.seed, **ASKED) for answer in job.answers]
    bench.service.run_shard(again)
    assert [client.get(one).text for one in again] == [answer.text for answer in job.answers]
    assert (job.state, job.text, job.prompt_tokens) == (JobState.SUCCEEDED, job.answers[0].text, 22)
    assert job.completion_tokens == sum(answer.completion_tokens for answer in job.answers)
    assert job.stop_reason is job.answers[0].stop_reason
    assert job.cached_tokens == 0  # of its prompt, which counts once
    assert {client.get(one).cached_tokens for one in again} == {20}
    assert bench.service.in_flight.idle
    bench.engine.check_integrity()


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_a_job_that_is_stopped_keeps_what_its_answers_had(build: Callable[..., Bench], how: str) -> None:
    runner = Pausing(slots=4)
    runner.pause_at = 20
    bench = build(runner)
    job_id = bench.client.enqueue("prompt", n=8, seed=3, max_tokens=120)
    thread = bench.run([job_id])
    wait_until(lambda: len(runner.batches) == runner.pause_at)
    if how == "cancelled":
        bench.client.cancel(job_id)
        bench.service.poll_cancellations()
    else:
        for sequence in bench.engine._live:
            bench.engine._live._deadlines.append((0.0, sequence.order, sequence))
    runner.gate.set()
    thread.join(120)
    job = bench.client.get(job_id)
    whole = [alone(3, number, max_tokens=120) for number in range(8)]
    reason = StopReason(how)
    assert (job.state, job.stop_reason) == (reason.state, reason)
    ended = [one for one in told(job) if one[1] is not reason]
    assert ended and set(ended) <= set(whole)
    for (text, why, _), (all_of_it, _, _) in zip(told(job), whole, strict=True):
        if why is reason:
            assert all_of_it.startswith(text.rstrip("\ufffd"))
    assert any(why is reason and text for text, why, _ in told(job))
    assert job.text == job.answers[0].text
    bench.client.retry(job_id)
    assert bench.client.get(job_id).answers == ()
    bench.service.run_shard([job_id])
    assert told(bench.client.get(job_id)) == whole


def test_another_worker_goes_on_from_the_tokens_of_each_answer(build: Callable[..., Bench]) -> None:
    runner = Pausing(slots=4)
    runner.pause_at = 20
    leaving = build(runner)
    job_id = leaving.client.enqueue("prompt", n=8, seed=3, max_tokens=120)
    thread = leaving.run([job_id])
    wait_until(lambda: len(runner.batches) == runner.pause_at)
    draining = threading.Thread(target=stop, args=(leaving,))
    draining.start()
    wait_until(lambda: leaving.service.draining)
    runner.gate.set()
    draining.join(120)
    thread.join(120)
    assert leaving.client.get(job_id).state is JobState.QUEUED
    other = build(ScriptedRunner(), name="b")
    other.service.run_shard([job_id])
    job = other.client.get(job_id)
    assert told(job) == [alone(3, number, max_tokens=120) for number in range(8)]
    before, after = leaving.engine.stats, other.engine.stats
    assert after.resumed_tokens == before.generated_tokens > 40
    assert after.generated_tokens + after.resumed_tokens == job.completion_tokens


def test_the_whole_text_of_an_answer_is_read_while_others_are_generated(
    build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = build(ScriptedRunner(slots=4))
    stops = ("!aSTOP",)  # what may begin it is held back until the text ends
    texts = [alone(3, number, max_tokens=15, stop=stops)[0] for number in range(8)]
    job_id = bench.client.enqueue("prompt", n=8, seed=3, max_tokens=15, stop=stops)
    engine, step = bench.engine, bench.engine.step
    ended: list[str] = []
    go_on = threading.Event()

    def held() -> list[Completion]:
        """Nothing before the texts are followed, nor between the end of answer 1 and the event."""
        followed = engine._followed_texts._known.keys() >= {answer_id(job_id, answer) for answer in read}
        if (not followed and not ended) or (answer_id(job_id, 1) in ended and not go_on.is_set()):
            return []
        done = step()
        ended.extend(completion.job_id for completion in done)
        return done

    monkeypatch.setattr(engine, "step", held)
    read = {1: "", 7: ""}

    def follow(answer: int) -> None:
        for piece in bench.client.stream(job_id, answer=answer, timeout=240):
            read[answer] += piece

    threads = [threading.Thread(target=follow, args=(answer,), daemon=True) for answer in read]
    threads.append(bench.run([job_id]))
    for thread in threads[:2]:
        thread.start()
    wait_until(lambda: read[1] == texts[1])
    assert bench.client.get(job_id).state is JobState.RUNNING
    go_on.set()
    for thread in threads:
        thread.join(240)
    assert read == {1: texts[1], 7: texts[7]}
    with pytest.raises(InvalidParameterError, match="answer: the job has 8 answers, counted from 0"):
        list(bench.client.stream(job_id, answer=8))


def test_a_job_with_many_answers_keeps_out_none_with_one(
    build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Gated()
    bench = build(runner, capacity=8)
    ended: list[str] = []
    step = bench.engine.step

    def watched() -> list[Completion]:
        done = step()
        ended.extend(completion.job_id for completion in done)
        return done

    monkeypatch.setattr(bench.engine, "step", watched)
    submitted: list[int] = []
    submit = bench.service.engine.submit
    monkeypatch.setattr(
        bench.service.engine, "submit", lambda requests: submit(requests) or submitted.append(len(requests))
    )
    many = bench.client.enqueue("prompt", n=128, max_tokens=20, ignore_eos=True)
    threads = [bench.run([many])]
    wait_until(lambda: bench.client.get(many).state is JobState.RUNNING)
    wait_until(lambda: bench.service.in_flight.room == 4)
    others = [bench.client.enqueue("prompt", max_tokens=20, ignore_eos=True) for _ in range(4)]
    threads.append(bench.run(others))
    wait_until(lambda: len(submitted) == 2)
    runner.gate.set()
    for thread in threads:
        thread.join(240)
    assert len(ended) == 132
    # Eight run at once: the others are among the second eight.
    assert {ended.index(job_id) // 8 for job_id in others} == {1}
    assert [bench.client.get(job_id).state for job_id in (many, *others)] == [JobState.SUCCEEDED] * 5


def test_no_more_jobs_with_several_answers_are_claimed_than_there_is_room_for(
    build: Callable[..., Bench],
) -> None:
    runner = Gated()
    bench = build(runner, capacity=8)
    ids = list(bench.client.enqueue_many(["prompt"] * 12, n=3, max_tokens=5))
    thread = bench.run(ids)
    wait_until(lambda: len(bench.service.in_flight.keys()) == 3)
    wait_until(lambda: bench.service.in_flight.room == -1)  # the third takes what is left, and begins
    assert len(bench.client.list_jobs(state="running", limit=100)) == 3
    runner.gate.set()
    thread.join(240)
    assert bench.client.stats()["state"] == {"succeeded": 12}
    assert bench.service.in_flight.room == 8


def test_a_job_fails_with_the_answer_that_failed_and_keeps_the_others(build: Callable[..., Bench]) -> None:
    answering = Answering(InFlight(8), lambda token: (b"x", "x"))
    request = Request("a" * 32, 1, (1,), GenerationParams(n=3), seed=1)
    answering.split(request)
    done = Completion("a" * 32, 1, (5,), "one", StopReason.EOS, 1, 1)
    assert answering.completed(done, "x") is None
    failed = replace(done, job_id=answer_id("a" * 32, 2), stop_reason=StopReason.ERROR, text="", error="NaN")
    assert answering.completed(failed, "x") is None
    late = replace(done, job_id=answer_id("a" * 32, 1), stop_reason=StopReason.DEADLINE, text="on")
    outcome = answering.completed(late, "x")
    assert outcome is not None
    assert (outcome.stop_reason, outcome.error, outcome.text) == (StopReason.ERROR, "answer 2: NaN", "one")
    assert [answer.text for answer in outcome.answers] == ["one", "on", ""]
    assert answering.completed(late, "x") is None  # the job is over


def test_tokens_are_reported_job_by_job_and_no_more_than_once() -> None:
    answering = Answering(InFlight(8), lambda token: (b"x", "x"))
    answering.split(Request("a" * 32, 1, (1,), GenerationParams(n=2), seed=1))
    assert answering.names([("a" * 32, 1), ("b" * 32, 4)]) == ["a" * 32, f"{'a' * 32}.1", "b" * 32]
    reports = [DrawnTokens(f"{'a' * 32}.1", 1, (7, 8)), DrawnTokens("b" * 32, 4, (9,))]
    assert answering.gather(reports) == [
        DrawnTokens("b" * 32, 4, (9,)),
        DrawnTokens("a" * 32, 1, (0, 2, 7, 8)),
    ]
    assert answering.gather([]) == []
    answering.completed(Completion("a" * 32, 1, (1, 2, 3), "x", StopReason.EOS, 1, 3), "x")
    assert answering.gather([]) == [DrawnTokens("a" * 32, 1, (3, 1, 2, 3, 2, 7, 8))]


@pytest.mark.parametrize("packed", [(), (1,), (2, 5), (0,), (0, 0, 0), (-1, 0), (1, 5, 7, 0), (3, 1, 2)])
def test_tokens_that_are_not_those_of_so_many_answers_are_not_gone_on_from(packed: tuple[int, ...]) -> None:
    assert unpack(packed, 2) == [(), ()]
    assert unpack(pack([(5, 6), ()]), 2) == [(5, 6), ()]
