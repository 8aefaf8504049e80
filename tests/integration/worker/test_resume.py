"""Jobs that a worker leaves half done: the next goes on from their tokens, to the undisturbed text."""

import re
import signal
from pathlib import Path

import pytest

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql import partials
from tests.integration.worker.conftest import StartWorker
from tests.support.servers import LONG_TOKENS, wait_until

PATIENCE = 120.0
JOBS = 4
PROMPTS = [f"Write a haiku about the sea, number {n}" for n in range(JOBS)]
ENOUGH = LONG_TOKENS // 6  # tokens that each job shall have when its worker is stopped


def enqueue(client: Client) -> list[str]:
    return [
        client.enqueue(prompt, seed=seed, max_tokens=LONG_TOKENS, ignore_eos=True, temperature=0.8)
        for seed, prompt in enumerate(PROMPTS)
    ]


def texts(client: Client, ids: list[str]) -> list[tuple[str | None, int | None, int | None]]:
    client.wait(ids, timeout=PATIENCE)
    finished = [client.get(job_id) for job_id in ids]
    assert {job.state for job in finished} == {JobState.SUCCEEDED}
    return [(job.text, job.prompt_tokens, job.completion_tokens) for job in finished]


def saved_tokens(client: Client, ids: list[str]) -> dict[str, int]:
    with client.database.read() as connection:
        return {job: len(one.token_ids) for job, one in partials.find(connection, ids).items()}


@pytest.mark.parametrize(
    ("server_settings", "stop"),
    [
        pytest.param("sqlite", signal.SIGTERM, marks=pytest.mark.slow),  # the campaign drains workers, too
        ("postgresql", signal.SIGKILL),
    ],
    indirect=["server_settings"],
)
def test_interrupted_jobs_go_on_from_what_was_saved(
    jobs_client: Client, start_worker: StartWorker, tmp_path: Path, stop: signal.Signals
) -> None:
    undisturbed, ids = enqueue(jobs_client), []
    # A drained worker saves at its end; one that is killed has had to do so before.
    often = {"save_seconds": 0.1 if stop is signal.SIGKILL else 3600.0, "drain_seconds": 0.0}
    with start_worker("leaving", "--max-sequences", str(JOBS + 1), **often) as leaving:
        expected = texts(jobs_client, undisturbed)
        assert saved_tokens(jobs_client, undisturbed) == dict.fromkeys(undisturbed, LONG_TOKENS)  # cut
        ids = enqueue(jobs_client)
        if stop is signal.SIGKILL:
            wait_until(lambda: min(_counts(jobs_client, ids), default=0) >= ENOUGH, PATIENCE)
        else:
            first_done = jobs_client.enqueue("Go", max_tokens=ENOUGH, ignore_eos=True, interactive=True)
            jobs_client.wait(first_done, timeout=PATIENCE)
        leaving.send_signal(stop)
        leaving.wait(240)
    unfinished = [job for job in ids if not jobs_client.get(job).state.final]
    left = saved_tokens(jobs_client, unfinished)
    assert sum(left.values()) > 0
    with start_worker("next", "--max-sequences", str(JOBS)):
        assert texts(jobs_client, ids) == expected
    log = (tmp_path / "next.log").read_text()
    counted = re.search(r"stopped; (\d+) tokens drawn, (\d+) resumed", log)
    assert counted is not None, log
    drawn, resumed = map(int, counted.groups())
    assert resumed == sum(left.values())
    finished_before = [job for job in ids if jobs_client.get(job).attempt == 1]
    assert drawn + resumed == LONG_TOKENS * (JOBS - len(finished_before))
    assert "tokens that were saved" in log
    # They were cut, so that all could go on.
    assert saved_tokens(jobs_client, ids) == dict.fromkeys(ids, LONG_TOKENS)


def _counts(client: Client, ids: list[str]) -> list[int]:
    counts = saved_tokens(client, ids)
    return list(counts.values()) if len(counts) == JOBS else []
