"""What a worker that stops or dies leaves half done, another goes on with."""

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.sql.sweep import Sweep
from tests.support.servers import Clock, wait_until
from tests.unit.engine.by_definition import expected
from tests.unit.engine.scripted import ScriptedRunner, make_request
from tests.unit.worker.bench import Bench, Pausing, ScriptedPrompting, these
from tests.unit.worker.interrupted import LONG, drain_in_the_middle, undisturbed


def test_a_drained_workers_jobs_go_on_from_their_tokens_elsewhere(build: Callable[..., Bench]) -> None:
    leaving = build(Pausing())
    ids = [leaving.client.enqueue("prompt", seed=seed, **LONG) for seed in range(5)]
    drain_in_the_middle(leaving, ids)
    assert {job.state for job in leaving.client.store.find(these(ids))} == {JobState.QUEUED}
    taking_over = build(ScriptedRunner(), name="b")
    taking_over.service.run_shard(ids)
    for seed, job_id in enumerate(ids):
        job = leaving.client.get(job_id)
        assert (job.text, job.completion_tokens, job.prompt_tokens) == (undisturbed(seed)[1], 120, 3)
    before, after = leaving.engine.stats, taking_over.engine.stats
    assert after.resumed_tokens == before.generated_tokens >= 39
    assert after.generated_tokens + after.resumed_tokens == 5 * 120  # nothing was drawn twice


@pytest.mark.parametrize("changed", ["model", "device", "weights", "kernels", "prompt"])
def test_tokens_of_another_model_arithmetic_or_prompt_are_not_gone_on_from(
    build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    leaving = build(Pausing())
    job_id = leaving.client.enqueue("prompt", seed=7, **LONG)
    drain_in_the_middle(leaving, [job_id])
    text = undisturbed(7)[1]
    if changed != "prompt":
        runner = ScriptedRunner()
        runner.arithmetic = replace(runner.arithmetic, **{changed: "another"})
        other = build(runner, name="b")
    else:
        monkeypatch.setattr(ScriptedPrompting, "encode", staticmethod(lambda claim: (3, 2, 1)))
        other = build(ScriptedRunner(), name="b")
        text = expected(make_request("j", (3, 2, 1), seed=7, **LONG), 200)[1]
    other.service.run_shard([job_id])
    assert leaving.client.get(job_id).text == text
    assert other.engine.stats.resumed_tokens == 0
    assert other.engine.stats.generated_tokens == 120


def test_what_is_saved_on_the_way_outlives_a_worker_that_dies(
    build: Callable[..., Bench], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    doomed = build(ScriptedRunner())
    engine, saved = doomed.engine, []
    step, save = engine.step, doomed.claims.save

    def until_it_dies() -> Any:
        return [] if engine.stats.generated_tokens == 30 else step()

    def watched(group: Any) -> int:
        saved.append([(one.job_id, len(one.token_ids)) for one in group])
        return save(group)

    monkeypatch.setattr(engine, "step", until_it_dies)
    monkeypatch.setattr(doomed.claims, "save", watched)
    job_id = doomed.client.enqueue("prompt", seed=7, **LONG)
    doomed.run([job_id])
    wait_until(lambda: engine.stats.generated_tokens == 30)
    doomed.service.save_partials()
    doomed.service.save_partials()  # it has not grown since
    assert saved == [[(job_id, 30)]]
    clock.advance(3600)
    other = build(ScriptedRunner(), name="b")
    assert Sweep(other.claims.database).rescue(timedelta(seconds=30)) == [job_id]
    other.suspects.look()
    assert other.client.get(job_id).text == undisturbed(7)[1]
    assert other.engine.stats.resumed_tokens == 30
    assert other.engine.stats.generated_tokens == 90


def test_a_database_that_is_slow_to_save_holds_up_no_token(
    build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = build(Pausing())
    released, written = threading.Event(), []
    save = bench.claims.save

    def slow(group: Any) -> int:
        assert released.wait(240)
        written.append(save(group))
        return written[0]

    monkeypatch.setattr(bench.claims, "save", slow)
    job_id = bench.client.enqueue("prompt", seed=7, **LONG)
    thread = bench.run([job_id])
    wait_until(lambda: len(bench.runner.batches) == 40)
    saver = threading.Thread(target=bench.service.save_partials)
    saver.start()
    wait_until(lambda: bench.service.engine._question == 1)  # it has asked
    bench.runner.gate.set()
    thread.join(120)
    assert not thread.is_alive()
    assert bench.client.get(job_id).text == undisturbed(7)[1]
    released.set()
    saver.join(120)
    assert written == [0]  # too late: the job has ended
