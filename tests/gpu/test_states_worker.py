"""Models whose layers hold states, from a file of rows to results: whole processes, one of them killed."""

import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import func, select

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql.tables import JobRow, PartialRow
from nightmill.worker.commands.process import running_worker
from tests.support.cuda_runners import ON_GPU
from tests.support.file_runs import answered
from tests.support.servers import wait_until
from tests.tiny import FILES, expected, unpacked

PATIENCE = 240.0
QUICK = {"heartbeat_seconds": 0.2, "stale_seconds": 1.5, "resend_seconds": 2.0, "save_seconds": 0.02}
JOBS = 200


@pytest.mark.parametrize("name", FILES)
def test_rows_of_a_file_become_the_tokens_of_two_engines(
    name: str, sqlite_settings: Settings, tmp_path: Path
) -> None:
    """All prompts in company, three at once, so that pieces of prompts and drawn tokens share steps.

    In F16, which holds these weights exactly: in BF16, which a worker takes for files in BF16, numbers have
    three bits less, and one of the tokens of `lfm2` is as near to another as that.
    """
    chosen = ON_GPU | {"dtype": "f16", "model": unpacked(name, tmp_path)}
    settings = sqlite_settings.model_copy(update=chosen)
    prompts = expected(name)["prompts"]
    asked = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    rows = answered([{"prompt": one["prompt"]} | asked for one in prompts], settings, tmp_path)
    drawn = [[token["id"] for token in row["answers"][0]["logprobs"]] for row in rows]
    assert drawn == [one["greedy"] for one in prompts]


def jobs() -> list[dict[str, object]]:
    """Prompts of up to 300 tokens, some of which begin alike, and answers of up to 400."""
    rng = np.random.default_rng(1)
    beginning = rng.integers(0, 256, 150).tolist()
    return [
        {
            "prompt": beginning[: (0, 64, 100, 150)[n % 4]] + rng.integers(0, 256, 1 + n % 150).tolist(),
            "max_tokens": 300 + n % 100,
            "seed": n,
        }
        for n in range(JOBS)
    ]


def texts(client: Client, ids: list[str]) -> list[tuple[str | None, int | None]]:
    client.wait(ids, timeout=PATIENCE)
    found = {job.id: job for job in client.results(ids)}
    assert {job.state for job in found.values()} == {JobState.SUCCEEDED}
    return [(found[one].text, found[one].completion_tokens) for one in ids]


def stopped_with_saved_tokens(process: "subprocess.Popen[bytes]", client: Client) -> bool:
    """True if the process has stopped while tokens of unfinished texts are saved; else it goes on.

    A text of such a small model takes hardly longer than the time between two saves.
    """
    process.send_signal(signal.SIGSTOP)
    with client.database.read() as connection:
        running = select(JobRow.id).where(JobRow.state == JobState.RUNNING)
        saved = connection.scalar(select(func.count()).where(PartialRow.job_id.in_(running)))
    if not saved:
        process.send_signal(signal.SIGCONT)
    return bool(saved)


@pytest.mark.parametrize("name", ["qwen35-q8_0", "lfm2-bf16"])
def test_after_a_kill_texts_go_on_to_what_they_are_undisturbed(
    name: str, sqlite_settings: Settings, tmp_path: Path
) -> None:
    """Few at once, and a worker that is killed amid them; then many at once: weights as in the file."""
    chosen = {"gpu_memory": 0.2, "weights": "file", "model": unpacked(name, tmp_path)}
    settings = sqlite_settings.model_copy(update=QUICK | ON_GPU | chosen)
    asked = {"temperature": 0.8, "ignore_eos": True}
    with Client(settings) as client:
        with running_worker(client, tmp_path / "plain.log", ["--max-sequences", "64"]):
            undisturbed = texts(client, list(client.enqueue_many(jobs(), **asked)))  # type: ignore[arg-type]
        ids = list(client.enqueue_many(jobs(), **asked))  # type: ignore[arg-type]

        def done() -> int:
            return len(client.list_jobs(state=JobState.SUCCEEDED, limit=3 * JOBS)) - JOBS

        with running_worker(client, tmp_path / "killed.log", ["--max-sequences", "3"]) as process:
            wait_until(lambda: done() >= JOBS // 4, PATIENCE)
            wait_until(lambda: stopped_with_saved_tokens(process, client), PATIENCE)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert done() < JOBS, "killed too late to disturb anybody"
        with running_worker(client, tmp_path / "next.log", ["--max-sequences", "40"]):
            assert texts(client, ids) == undisturbed
        assert "tokens that were saved" in (tmp_path / "next.log").read_text()
