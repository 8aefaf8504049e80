"""Rows that were cut continue from the tokens that were kept of them, to the bit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.reply.history import begins_with
from tests.unit.engine.by_definition import expected
from tests.unit.engine.scripted import ScriptedRunner, make_request
from tests.unit.worker.bench import PROMPT, Bench, Pausing, these
from tests.unit.worker.interrupted import drain_in_the_middle

ROWS = 8


def whole(seed: int, **params: Any) -> tuple[tuple[int, ...], str, StopReason]:
    """Tokens, text and stop reason of a row that is computed in one go."""
    return expected(make_request("j", PROMPT, seed=seed, **params), 200)


def cut(bench: Bench, **settings: Any) -> tuple[Batch, list[str]]:
    """A batch of rows, of which some are cut after 20 tokens."""
    items = [{"prompt": "prompt", "seed": seed} for seed in range(ROWS)]
    batch = bench.client.submit_batch(items, name="rows", **{"max_tokens": 20} | settings)
    ids = [job.id for job in bench.client.list_jobs(batch="rows", limit=ROWS)][::-1]
    bench.service.run_shard(ids)
    return batch, ids


def test_extended_rows_are_those_of_one_go_and_tell_what_they_were(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner())
    batch, ids = cut(bench)
    before = {job.id: job for job in bench.client.store.find(these(ids))}
    limited = [job_id for job_id in ids if before[job_id].stop_reason is StopReason.LENGTH]
    assert 0 < len(limited) < ROWS
    drawn = bench.engine.stats.generated_tokens

    assert batch.extend(20).rows == 0  # their limit is as large
    assert batch.extend(90).rows == len(limited)
    waiting = bench.client.get(limited[0])
    assert (waiting.state, waiting.text) == (JobState.QUEUED, before[limited[0]].text)
    bench.service.run_shard(ids)
    assert bench.engine.stats.resumed_tokens == 20 * len(limited)
    for seed, job_id in enumerate(ids):
        job, (tokens, text, reason) = bench.client.get(job_id), whole(seed, max_tokens=90)
        assert (job.text, job.completion_tokens, job.stop_reason) == (text, len(tokens), reason)
        if job_id not in limited:
            assert job == before[job_id]
            continue
        (entry,) = job.history
        assert (entry["change"], entry["params"], entry["stop_reason"]) == (
            *("extend", {"max_tokens": 20}, "length"),
        )
        assert (entry["completion_tokens"], entry["arithmetic"], entry["attempt"]) == (
            *(20, job.arithmetic, 1),
        )
        assert begins_with(job.text, entry) is (text.startswith(before[job_id].text or ""))
        assert begins_with("x" + str(job.text), entry) is False
        assert job.params.max_tokens == 90
    assert bench.engine.stats.generated_tokens - drawn == sum(
        len(whole(seed, max_tokens=90)[0]) - 20 for seed, job_id in enumerate(ids) if job_id in limited
    )
    again = [job for job in bench.client.store.find(these(ids)) if job.stop_reason is StopReason.LENGTH]
    assert batch.extend(120).rows == len(again)  # as often as one likes
    bench.service.run_shard(ids)
    assert all(bench.client.get(job.id).text == whole(ids.index(job.id), max_tokens=120)[1] for job in again)


def test_of_several_answers_the_cut_ones_continue(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner(), capacity=32)
    batch, ids = cut(bench, n=3)
    before = {job_id: bench.client.get(job_id) for job_id in ids}
    assert {len({answer.stop_reason for answer in job.answers}) for job in before.values()} == {1, 2}
    limited = [
        job_id for job_id, job in before.items() if any(a.stop_reason == "length" for a in job.answers)
    ]
    assert any(before[job_id].stop_reason is not StopReason.LENGTH for job_id in limited)
    assert batch.extend(60).rows == len(limited)
    drawn = bench.engine.stats.generated_tokens
    bench.service.run_shard(ids)
    new = 0
    for job_id in limited:
        for was, answer in zip(before[job_id].answers, bench.client.get(job_id).answers, strict=True):
            tokens, text, reason = whole(answer.seed, max_tokens=60)
            assert (answer.text, answer.stop_reason, answer.completion_tokens) == (text, reason, len(tokens))
            new += len(tokens) - was.completion_tokens
    assert bench.engine.stats.generated_tokens - drawn == new


def test_an_extension_that_is_interrupted_goes_on_and_one_that_is_given_up_leaves_the_text(
    build: Callable[..., Bench],
) -> None:
    runner = Pausing()
    runner.pause_at = 60
    leaving = build(runner)
    batch, ids = cut(leaving, ignore_eos=True)
    assert batch.extend(120).rows == ROWS
    drain_in_the_middle(leaving, ids)
    assert {job.state for job in leaving.client.store.find(these(ids))} == {JobState.QUEUED}
    leaving.client.cancel(ids[0])
    cancelled, short = leaving.client.get(ids[0]), whole(0, max_tokens=20, ignore_eos=True)
    assert (cancelled.state, cancelled.text) == (JobState.CANCELLED, short[1])
    taking_over = build(ScriptedRunner(), name="b")
    taking_over.service.run_shard(ids)
    for seed, job_id in enumerate(ids[1:], 1):
        assert leaving.client.get(job_id).text == whole(seed, max_tokens=120, ignore_eos=True)[1]
    assert taking_over.engine.stats.resumed_tokens > 20 * (ROWS - 1)


def test_another_arithmetic_begins_afresh_and_the_row_tells_of_both(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner())
    batch, ids = cut(bench)
    runner = ScriptedRunner()
    runner.arithmetic = replace(runner.arithmetic, device="another")
    other = build(runner, name="b")
    assert batch.extend(90).rows > 0
    other.service.run_shard(ids)
    assert other.engine.stats.resumed_tokens == 0
    job = next(job for job in other.client.store.find(these(ids)) if job.history)
    assert "device=another" in str(job.arithmetic)
    assert "device=none" in job.history[0]["arithmetic"]


def test_failed_rows_are_retried_with_other_parameters_from_a_list(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner())
    items = [{"prompt": "unspeakable", "n": 2}, {"prompt": "prompt"}, {"prompt": "unspeakable"}]
    batch = bench.client.submit_batch(items, name="rows", max_tokens=20)
    ids = [job.id for job in bench.client.list_jobs(batch="rows")][::-1]
    bench.service.run_shard(ids)
    before = [bench.client.get(job_id) for job_id in ids]
    assert [job.state for job in before] == ["failed", "succeeded", "failed"]
    for wrong, said in (
        ({"n": 3}, "n: is not supported: may not change when rows are queued again; max_tokens, "),
        ({"temprature": 1}, "temprature: is not supported: did you mean temperature"),
        ({"temperature": -1}, "temperature: must be at least 0"),
        ({"where": {"state": "succeeded"}}, "state must be failed or cancelled \\(got 'succeeded'\\)"),
        ({"where": {"text": "x"}}, "rows cannot be chosen by 'text'; use state, stop_reason, code"),
    ):
        with pytest.raises(InvalidParameterError, match=said):
            batch.retry(**wrong)
    with pytest.raises(InvalidParameterError, match="max_tokens: must be at least 1"):
        batch.extend(0)
    assert batch.retry(where={"code": "cancelled"}, temperature=0.2).rows == 0
    refused = batch.retry(where={"state": "failed", "code": ["error"]}, max_tokens=10**6, new_seeds=True)
    assert (refused.rows, refused.refused) == (1, 1)  # two answers of so many tokens are too many
    assert str(refused.reason).startswith("row 1: n: so many answers of up to 1,000,000 tokens")
    left, good, queued = (bench.client.get(job_id) for job_id in ids)
    assert [left, good] == before[:2]
    assert (queued.state, queued.params.max_tokens, queued.seed != before[2].seed) == ("queued", 10**6, True)
    (entry,) = queued.history
    assert (entry["change"], entry["params"], entry["seed"]) == (
        *("retry", {"max_tokens": 20}, before[2].seed),
    )
