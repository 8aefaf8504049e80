"""The engine's process beside the worker's: neither outlives the other; signals are the worker's to take."""

import signal
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.base.last_resort import END_SECONDS
from nightmill.jobs.client.client import Client
from tests.integration.worker.conftest import SLOW, StartWorker, on_postgresql, on_sqlite
from tests.support import paced_worker
from tests.support.servers import LONG_TOKENS, wait_until

LONG: dict[str, Any] = {"max_tokens": LONG_TOKENS, "ignore_eos": True, "temperature": 0.8}
SHORT = LONG | {"max_tokens": LONG_TOKENS // 3}  # for those that are waited for: still seconds
PATIENCE = 120.0


def engine_of(pid: int) -> psutil.Process:
    """The engine's process of a worker."""
    modules = {"nightmill.worker.link.process", paced_worker.NAME}
    (child,) = [p for p in psutil.Process(pid).children() if modules.intersection(p.cmdline())]
    return child


def all_run(client: Client, count: int) -> None:
    """Return once so many jobs run; each does so for seconds."""
    wait_until(lambda: len(client.list_jobs(state=JobState.RUNNING)) == count, PATIENCE)


@on_postgresql
def test_killed_engine_gives_its_jobs_back_and_signals_to_every_process_drain_in_order(
    jobs_client: Client, start_worker: StartWorker, tmp_path: Path
) -> None:
    """The signals are those of a supervisor that tells a whole control group."""
    with start_worker("doomed", command=SLOW) as process:
        ids = jobs_client.enqueue_many(["Write a haiku about rain"] * 8, **SHORT)
        all_run(jobs_client, 8)
        engine_of(process.pid).kill()
        assert process.wait(PATIENCE) == 1
    said = (tmp_path / "doomed.log").read_text()
    assert "the engine failed: its process ended without a word" in said
    jobs = jobs_client.list_jobs(limit=100)
    assert {job.state for job in jobs} == {JobState.QUEUED} and {job.failures for job in jobs} == {0}
    with start_worker("sound", command=SLOW) as process:
        jobs_client.wait(ids, timeout=PATIENCE)
        last = jobs_client.enqueue_many(["Write a haiku about rain"] * 4, **SHORT)
        all_run(jobs_client, 4)
        engine_of(process.pid).send_signal(signal.SIGTERM)
        engine_of(process.pid).send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    assert {job.stop_reason for job in jobs_client.results(ids)} == {StopReason.LENGTH}
    drained = list(jobs_client.results(last, wait=False))
    assert {(job.state, job.attempt) for job in drained} == {(JobState.SUCCEEDED, 1)}
    assert {job.completion_tokens for job in drained} == {SHORT["max_tokens"]}


@on_sqlite
def test_engine_that_hangs_ends_with_its_worker_even_if_that_is_killed(
    jobs_client: Client, start_worker: StartWorker
) -> None:
    with start_worker("doomed", command=SLOW) as process:
        jobs_client.enqueue_many(["Write a haiku about rain"] * 8, **LONG)
        all_run(jobs_client, 8)
        engine = engine_of(process.pid)
        engine.suspend()  # it cannot see that the pipe is closed
        process.kill()
        process.wait()
        engine.wait(PATIENCE)  # raises where it lives on
    assert not engine.is_running()


@on_sqlite
def test_engine_that_hangs_is_killed_and_ends_the_worker(
    jobs_client: Client, start_worker: StartWorker, tmp_path: Path
) -> None:
    with start_worker("doomed", command=SLOW, hang_seconds=2.0) as process:
        jobs_client.enqueue_many(["Write a haiku about rain"] * 8, **LONG)
        all_run(jobs_client, 8)
        engine = engine_of(process.pid)
        engine.suspend()
        assert process.wait(PATIENCE) == 1
    assert not engine.is_running()
    said = (tmp_path / "doomed.log").read_text()
    assert "the engine failed: it has not answered for 2 s: a step hangs" in said
    assert {job.state for job in jobs_client.list_jobs(limit=100)} == {JobState.QUEUED}


@on_sqlite
def test_sigterm_ends_a_worker_whose_engine_hangs(jobs_client: Client, start_worker: StartWorker) -> None:
    with start_worker(
        "doomed", command=SLOW, drain_seconds=0.5
    ) as process:  # which would find out only after ten minutes
        jobs_client.enqueue_many(["Write a haiku about rain"] * 8, **LONG)
        all_run(jobs_client, 8)
        engine = engine_of(process.pid)
        engine.suspend()
        process.send_signal(signal.SIGTERM)
        assert process.wait(0.5 + END_SECONDS) == 0
    assert not engine.is_running()
    jobs = jobs_client.list_jobs(limit=100)
    assert {(job.state, job.failures) for job in jobs} == {(JobState.QUEUED, 0)}
    assert [worker.state for worker in jobs_client.workers()] == ["stopped"]
