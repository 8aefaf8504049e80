"""One job of many kills the engine's process: it fails alone, once workers have been started often enough."""

import time
from pathlib import Path

import pytest

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.client.client import Client
from nightmill.worker.commands.process import WorkerProcess
from tests.integration.worker.conftest import on_postgresql
from tests.support.poisoned_worker import COMMAND, POISON, TOKENS

PATIENCE = 120.0


@pytest.mark.slow  # tests/unit/worker/test_suspects.py finds the job that kills
@on_postgresql
def test_the_job_that_kills_the_engine_fails_and_no_other(jobs_client: Client, tmp_path: Path) -> None:
    settings = {"max_tokens": TOKENS, "ignore_eos": True, "max_attempts": 1}
    innocent = list(jobs_client.enqueue_many(["Count from 1 to 3"] * 3, **settings))
    guilty = jobs_client.enqueue("Count from 1 to 3", seed=POISON, **settings)
    starts = 0
    while any(job.state in (JobState.QUEUED, JobState.RUNNING) for job in jobs_client.list_jobs(limit=100)):
        starts += 1
        assert starts <= 2 + 1 + 1  # halves of 4 until it is alone, its attempt, and the rest
        worker = WorkerProcess(jobs_client, tmp_path / f"{starts}.log", command=COMMAND)
        while worker.exit_code is None and not all(
            job.state.final for job in jobs_client.list_jobs(limit=100)
        ):
            time.sleep(0.1)
        worker.close()
    failed = jobs_client.get(guilty)
    assert (failed.state, failed.failures) == (JobState.FAILED, 1)
    assert failed.error is not None and "its process ended without a word" in failed.error
    for job in map(jobs_client.get, innocent):
        assert (job.state, job.completion_tokens) == (JobState.SUCCEEDED, TOKENS)
        assert (job.failures, job.errors) == (0, [])
