"""Answers that stand for others: which, what the row tells, and that nothing is computed for them."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.errors import DatabaseError
from nightmill.jobs.reply.job import Job
from nightmill.jobs.sql.deletion import delete_job
from nightmill.jobs.sql.tables import JobRow
from tests.support.servers import wait_until
from tests.unit.engine.by_definition import expected
from tests.unit.engine.scripted import ScriptedRunner, make_request
from tests.unit.worker.bench import PROMPT, Bench, Gated, ScriptedPrompting

EXACT: dict[str, Any] = {"reuse": "exact", "seed": 7, "max_tokens": 30, "ignore_eos": True}


def run(bench: Bench, *ids: str) -> list[Job]:
    bench.service.run_shard(list(ids))
    return [bench.client.get(job_id) for job_id in ids]


def drawn(bench: Bench) -> int:
    return bench.engine.stats.generated_tokens


def test_equal_rows_cost_one_and_tell_whose_text_they_have(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner(), capacity=500)
    ids = list(bench.client.enqueue_many(["prompt"] * 300, **EXACT))
    shards = [ids[start : start + 64] for start in range(0, 300, 64)]
    for thread in [bench.run(shard) for shard in shards]:
        thread.join(120)
    jobs = [bench.client.get(job_id) for job_id in ids]
    assert drawn(bench) == 30
    text = expected(make_request("j", PROMPT, seed=7, max_tokens=30, ignore_eos=True), 200)[1]
    (origin,) = [job for job in jobs if job.reused_from is None]
    for job in jobs:
        assert (job.state, job.text, job.stop_reason) == (JobState.SUCCEEDED, text, StopReason.LENGTH)
        assert (job.completion_tokens, job.seed, job.arithmetic, job.prompt_digest) == (
            *(30, 7, origin.arithmetic, origin.prompt_digest),
        )
        if job is not origin:
            assert (job.reused_from, job.reused_from_gone) == (origin.id, False)
            assert job.cached_tokens == job.prompt_tokens == 3
    later = run(bench, bench.client.enqueue("prompt", **EXACT))[0]
    assert (later.reused_from, later.text) == (origin.id, text)
    # The answer is there, though the job that it was computed for is not; the rows say so.
    delete_job(bench.client.database, origin.id)
    shown = bench.client.get(later.id)
    assert (shown.text, shown.reused_from, shown.reused_from_gone) == (text, origin.id, True)
    again = run(bench, bench.client.enqueue("prompt", **EXACT))[0]
    assert (again.reused_from, again.text, drawn(bench)) == (None, text, 60)


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 8},
        {"max_tokens": 31},
        {"temperature": 0.5},
        {"stop": "x"},
        {"prompt": "another"},
        {"choice": ["a", "b"], "ignore_eos": None},
        {"reuse": None},
        {"seed": None},
    ],
)
def test_what_a_text_depends_on_tells_rows_apart(build: Callable[..., Bench], other: dict[str, Any]) -> None:
    bench = build(ScriptedRunner())
    asked = EXACT | {"prompt": "prompt"} | other
    ids = [
        *bench.client.enqueue_many([{"prompt": "prompt"}], **EXACT),
        *bench.client.enqueue_many([{"prompt": asked.pop("prompt")}], **asked),
    ]
    first, second = (bench.client.store.get(job_id) for job_id in ids)
    with bench.client.database.read() as connection:
        keys = {row.id: row.content_key for row in connection.execute(select(JobRow.id, JobRow.content_key))}
    assert keys[first.id] is not None
    assert keys[first.id] != keys[second.id]
    if "choice" not in other:
        assert [job.reused_from for job in run(bench, *ids)] == [None, None]


def test_exact_needs_the_same_arithmetic_and_any_the_same_model(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner())
    greedy = {"temperature": 0.0, "max_tokens": 9}
    for mode in ("exact", "any"):
        run(bench, bench.client.enqueue(f"for {mode}", reuse=mode, **greedy))
    first, _ = bench.client.list_jobs()[::-1]
    for part, modes in (("device", {"any"}), ("model", set())):
        runner = ScriptedRunner()
        runner.arithmetic = replace(runner.arithmetic, **{part: f"another {part}"})
        other = build(runner, name=part[0])
        for mode in ("exact", "any"):
            (job,) = run(other, bench.client.enqueue(f"for {mode}", reuse=mode, **greedy))
            assert (job.reused_from is not None) is (mode in modes), (part, mode)
    (job,) = run(bench, bench.client.enqueue("for exact", reuse="exact", seed=99, **greedy))
    assert (job.reused_from, job.seed) == (first.id, 99)  # of greedy rows the seed does not matter


def test_any_takes_an_answer_of_another_seed_and_the_row_then_has_its_seed(
    build: Callable[..., Bench],
) -> None:
    bench = build(ScriptedRunner())
    asked: dict[str, Any] = {"reuse": "any", "max_tokens": 30}
    first, second = run(bench, *bench.client.enqueue_many(["prompt"] * 2, **asked))
    third = run(bench, bench.client.enqueue("prompt", seed=5, **asked))[0]
    assert second.reused_from == third.reused_from == first.id
    assert first.seed == second.seed == third.seed != 5
    text = expected(make_request("j", PROMPT, seed=first.seed, max_tokens=30), 200)[1]
    assert first.text == second.text == third.text == text


def test_another_prompt_of_the_same_messages_is_not_exact(
    build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a template shows the day."""
    bench = build(ScriptedRunner())
    run(bench, bench.client.enqueue("prompt", **EXACT))
    monkeypatch.setattr(ScriptedPrompting, "encode", staticmethod(lambda claim: (3, 2, 1)))
    assert run(bench, bench.client.enqueue("prompt", **EXACT))[0].reused_from is None


def test_several_answers_log_probabilities_and_token_ids_come_along(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner(), capacity=32)
    asked = EXACT | {"n": 3, "logprobs": 2, "return_token_ids": True, "prompt_logprobs": 1}
    first, second = run(bench, *bench.client.enqueue_many(["prompt"] * 2, **asked))
    third = run(bench, bench.client.enqueue("prompt", **asked))[0]
    assert first.answers == second.answers == third.answers
    assert len(third.answers) == 3 and third.answers[2].logprobs and third.answers[2].token_ids
    assert first.prompt_logprobs == third.prompt_logprobs is not None
    assert first.prompt_token_ids == third.prompt_token_ids == PROMPT
    assert drawn(bench) == 90


def test_a_reused_answer_that_was_cut_can_be_extended(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner())
    batch = bench.client.submit_batch(["prompt"] * 3, name="rows", **EXACT)
    ids = [job.id for job in bench.client.list_jobs(batch="rows")]
    short = run(bench, *ids)[0].text or ""
    assert batch.extend(60).rows == 3
    jobs = run(bench, *ids)
    text = expected(make_request("j", PROMPT, seed=7, max_tokens=60, ignore_eos=True), 200)[1]
    assert {job.text for job in jobs} == {text}
    assert text.startswith(short[:-1])
    # Each has its tokens, and goes on from them by itself; its history names whose text it had.
    assert drawn(bench) == 30 + 3 * 30
    assert {job.reused_from for job in jobs} == {None}
    assert len({job.history[0].get("reused_from") for job in jobs}) == 2
    (late,) = run(bench, bench.client.enqueue("prompt", **EXACT | {"max_tokens": 60}))
    assert (late.reused_from in ids, late.text) == (True, text)
    (shorter,) = run(bench, bench.client.enqueue("prompt", **EXACT))
    assert (shorter.reused_from, shorter.text) == (None, short)  # none of that length is there any more


def test_where_the_first_ends_without_an_answer_the_next_is_computed(build: Callable[..., Bench]) -> None:
    gate = Gated()
    bench = build(gate)
    ids = list(bench.client.enqueue_many(["prompt"] * 4, **EXACT))
    thread = bench.run(ids)
    wait_until(lambda: bench.service._reusing._identities)
    leader = next(iter(bench.service._reusing._leaders.values()))
    wait_until(lambda: len(leader.twins) == 3)
    bench.client.cancel(leader.claim.job_id)
    bench.client.cancel(leader.twins[-1][0].job_id)
    cancelled = {leader.claim.job_id, leader.twins[-1][0].job_id}
    wait_until(lambda: bench.engine.has_work)  # before that it knows of no job to cancel
    bench.service.poll_cancellations()
    gate.gate.set()
    thread.join(120)
    jobs = {job_id: bench.client.get(job_id) for job_id in ids}
    assert {job_id for job_id, job in jobs.items() if job.state is JobState.CANCELLED} == cancelled
    left = [job for job_id, job in jobs.items() if job_id not in cancelled]
    text = expected(make_request("j", PROMPT, seed=7, max_tokens=30, ignore_eos=True), 200)[1]
    assert [job.text for job in left] == [text] * 2
    assert sorted(job.reused_from is None for job in left) == [False, True]
    assert bench.service._reusing._identities == bench.service._reusing._leaders == {}


def test_a_job_does_not_wait_for_a_less_urgent_one_or_one_with_another_deadline(
    build: Callable[..., Bench],
) -> None:
    gate = Gated()
    bench = build(gate)
    first = bench.client.enqueue("prompt", **EXACT)
    urgent = bench.client.enqueue("prompt", priority=9, **EXACT)
    due = bench.client.enqueue("prompt", deadline=timedelta(hours=1), **EXACT)
    thread = bench.run([first, urgent, due])
    wait_until(lambda: bench.service._reusing._identities)
    assert not any(leader.twins for leader in bench.service._reusing._leaders.values())
    gate.gate.set()
    thread.join(120)
    assert drawn(bench) == 90


def test_a_database_that_does_not_find_answers_keeps_nobody_from_computing(
    build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = build(ScriptedRunner())
    for error in (DatabaseError("away"), ValueError("a row that nobody can read")):

        def broken(wanted: Any, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(bench.service._reusing, "_find", broken)
        (job,) = run(bench, bench.client.enqueue("prompt", **EXACT))
        assert (job.state, job.reused_from) == (JobState.SUCCEEDED, None)
