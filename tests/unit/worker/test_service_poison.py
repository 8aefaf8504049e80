"""A shard of jobs of which some draw a token that the model cannot compute with."""

from collections.abc import Callable

import pytest

from nightmill.jobs.base.contract import JobState, StopReason
from tests.unit.engine.by_definition import expected
from tests.unit.engine.scripted import ScriptedRunner, make_request
from tests.unit.worker.bench import PROMPT, Bench, enqueue

POISON = 9


@pytest.mark.parametrize("depth", [1, 3])
def test_a_job_whose_output_is_not_a_number_fails_alone_and_at_once(
    build: Callable[..., Bench], depth: int
) -> None:
    bench = build(ScriptedRunner(poison=POISON, depth=depth), capacity=40)
    ids = enqueue(bench.client, 40, max_tokens=8)
    bench.service.run_shard(ids)
    assert not bench.fatal
    failed = 0
    for job_id in ids:
        job = bench.client.get(job_id)
        request = make_request(prompt=PROMPT, seed=job.seed or 0, max_tokens=8)
        tokens, text, reason = expected(request, 200, POISON)
        assert (job.text, job.stop_reason, job.completion_tokens) == (text, reason, len(tokens))
        assert job.attempt == 1
        assert (job.state is JobState.FAILED) == (reason is StopReason.ERROR)
        if reason is StopReason.ERROR:
            failed += 1
            assert job.error is not None
            assert "not a number" in job.error
            assert [entry["error"] for entry in job.errors] == [job.error]
    assert 0 < failed < 40
    bench.engine.check_integrity()


def test_a_job_that_failed_so_fails_again_when_it_is_retried(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner(poison=POISON), capacity=40)
    ids = enqueue(bench.client, 40, max_tokens=8)
    bench.service.run_shard(ids)
    bad = next(job_id for job_id in ids if bench.client.get(job_id).state is JobState.FAILED)
    before = bench.client.get(bad)
    good = enqueue(bench.client, 1, max_tokens=8, seed=bench.client.get(ids[0]).seed)
    bench.client.retry(bad)
    bench.service.run_shard([bad, *good])
    after = bench.client.get(bad)
    assert (after.state, after.text, after.error) == (JobState.FAILED, before.text, before.error)
    assert bench.client.get(good[0]).text == bench.client.get(ids[0]).text
    assert not bench.fatal
