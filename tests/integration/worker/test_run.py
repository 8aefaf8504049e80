"""`nightmill run` with real workers: killed at any moment, interrupted, beside others, without Redis."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from click.testing import CliRunner

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.worker.assembly.model import demo_model
from tests.integration.worker.conftest import StartWorker, on_postgresql, on_sqlite
from tests.support.receiver import receiving
from tests.support.servers import RedisServer, wait_until, worker_env
from tests.support.small_hub import SmallHub, serving

PATIENCE = 120.0
MODEL = "nightmill-demo"
ROWS = 40
BAD = {5: "{broken", 20: '{"prompt": "x", "prompts": []}'}
LEAST = 6  # tokens of an answer, to which the number of its row is added: a second for all


@pytest.fixture
def quick(quick: Settings) -> Settings:
    """With the reference runner on the demo model, whatever others use: a GPU is done before it is killed."""
    return quick.model_copy(update={"reference": True, "model": demo_model()})


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Rows of some length with fixed seeds, two of them bad."""
    path = tmp_path / "prompts.jsonl"
    with path.open("w") as file:
        for number in range(1, ROWS + 1):
            row = {"prompt": f"Write a haiku about rain and {number}", "seed": number, "temperature": 0.9}
            file.write(
                BAD.get(number) or json.dumps(row | {"max_tokens": LEAST + number, "ignore_eos": True})
            )
            file.write("\n")
    return path


@pytest.fixture
def own_settings(quick: Settings, redis_server: RedisServer) -> Settings:
    """As `quick`, with a Redis that a test may empty."""
    return quick.model_copy(update={"broker_url": redis_server.url})


Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run(quick: Settings, tmp_path: Path) -> Iterator[Run]:
    """Start `nightmill run` as a process; whatever it started is gone at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def start(
        prompts: Path | str, *arguments: str, settings: Settings = quick, stdin: IO[str] | None = None
    ) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "nightmill", "run", str(prompts), "-o", str(tmp_path / "out.jsonl")]
        chosen = worker_env(settings) | {"NIGHTMILL_MAX_SEQUENCES": "8"}
        process = subprocess.Popen(
            [*command, *arguments],
            env=chosen,
            text=True,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def as_json(line: str) -> Any:
    """The value of a line; one that is not JSON stays as it is."""
    return json.loads(line) if line.startswith("{") else line


def worker_pids(client: Client) -> list[int]:
    """Processes of workers that say that they live, and do."""
    live = [row.pid for row in client.workers() if row.state in ("starting", "ready", "draining")]
    return [pid for pid in live if psutil.pid_exists(pid)]


def batches(client: Client) -> list[Batch]:
    return client.list_batches()


def done(client: Client) -> int:
    """Rows of the only batch that are done."""
    return sum(batch.status(errors=False).done for batch in batches(client))


@on_sqlite
def test_a_second_run_does_nothing_twice_and_says_the_same(
    jobs_client: Client, run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "p.csv"
    path.write_text("prompt,max_tokens\n" + "Count from 1 to 3,3\n" * 3)
    piped = ("-", "-o", "-", "--format", "csv")
    with path.open() as stdin, receiving() as receiver:
        allowed = {"webhook_urls": receiver.url, "webhook_private": True}
        allowed["webhook_secret"] = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
        settings = jobs_client.settings.model_copy(update=allowed)
        first = run(*piped, "--webhook", f"{receiver.url}/night", stdin=stdin, settings=settings)
        results, said = first.communicate(timeout=PATIENCE)
    assert (first.returncode, [one.path for one in receiver.received]) == (0, ["/night"]), said
    assert [row["custom_id"] for row in csv.DictReader(io.StringIO(results))] == ["row-1", "row-2", "row-3"]
    assert "3 succeeded" in said and "Results: standard output; errors: nightmill batch errors stdin-" in said
    told = tmp_path / "told.json"
    told_by = f"{sys.executable} -c \"import os, sys; open(sys.argv[1], 'w').write(sys.stdin.read()); "
    at_end = f"{told_by} print('end of', os.environ['NIGHTMILL_END_BATCH']); sys.exit(7)\" '{told}'"
    with path.open() as stdin:
        again = run(*piped, "--json", "--log-format", "json", "--on-end", at_end, stdin=stdin)
        same, said = again.communicate(timeout=PATIENCE)
    assert (again.returncode, same) == (0, results), said
    *logged, printed, complaint, summary = map(as_json, said.splitlines())
    status = json.loads(told.read_text())
    assert (status["state"], status["succeeded"], status["row_count"]) == ("completed", 3, 3)
    assert summary == status | {"on_end": {"exit_code": 7}}
    assert printed == f"end of {status['name']}"
    assert complaint["message"] == f"--on-end: {sys.executable} exited with 7"
    assert [(line["level"], line["done"], line["state"]) for line in logged] == [("info", 3, "completed")]
    assert not list(tmp_path.glob("out*"))
    assert [job.attempt for job in jobs_client.list_jobs()] == [1, 1, 1]
    assert len(jobs_client.workers()) == 1  # nothing was left to do, so no second one was started


def kill(client: Client, process: "subprocess.Popen[str]") -> None:
    """End a run and its worker at once, neither of which can do anything about it."""
    for pid in worker_pids(client):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()


@pytest.mark.slow  # the campaign kills runs of files at random moments
@on_sqlite  # killed at random moments, and more of it, the command is a part of the campaign
def test_results_are_on_disk_while_it_runs_and_a_torn_line_is_repaired(
    own_settings: Settings, run: Run, redis_server: RedisServer, prompts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    process = run(prompts, settings=own_settings)
    wait_until(lambda: output.exists() and len(output.read_bytes().splitlines()) >= 3, PATIENCE)
    with Client(own_settings) as client:
        kill(client, process)
    there = [line for line in output.read_text().splitlines(keepends=True) if line.endswith("\n")]
    output.write_text("".join(there) + '{"custom_id": "row-9", "te')
    redis_server.stop()
    redis_server.start()
    redis_server.flush()
    process = run(prompts, settings=own_settings)
    wait_until(lambda: len(output.read_text().splitlines()) > len(there) + 3, PATIENCE)
    assert len({row["id"] for row in rows(output)}) == len(rows(output))
    assert output.read_text().startswith("".join(there))
    assert process.wait(PATIENCE) == 3
    assert len(rows(output)) == ROWS - len(BAD)


@on_postgresql
def test_a_worker_ends_with_the_run_that_started_it_and_hands_its_rows_back(
    quick: Settings, jobs_client: Client, run: Run, prompts: Path
) -> None:
    process = run(prompts, settings=quick.model_copy(update={"drain_seconds": 0.2}))
    wait_until(lambda: done(jobs_client) > len(BAD), PATIENCE)
    process.kill()
    wait_until(lambda: not worker_pids(jobs_client), PATIENCE)
    assert [worker.state for worker in jobs_client.workers()] == ["stopped"]
    (batch,) = batches(jobs_client)
    status = batch.status()
    assert status.state == "queued"
    assert all(job.failures == 0 for job in jobs_client.list_jobs(batch=batch.name, limit=ROWS))


@on_sqlite
def test_a_file_becomes_results_and_errors_in_its_order_though_ctrl_c_has_drained_the_first_run(
    jobs_client: Client, quick: Settings, run: Run, prompts: Path, tmp_path: Path
) -> None:
    process = run(prompts, settings=quick.model_copy(update={"drain_seconds": 0.2}))
    wait_until(lambda: done(jobs_client) > len(BAD), PATIENCE)
    process.send_signal(signal.SIGINT)
    _said, progress = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "the worker finishes what it can in 0 s and hands the rest back; the same command" in progress
    assert worker_pids(jobs_client) == []
    (batch,) = batches(jobs_client)
    finished = {job.id: job.attempt for job in batch.results()}
    assert len(rows(tmp_path / "out.jsonl")) == len(finished) < ROWS
    again = run(prompts)
    said, progress = again.communicate(timeout=PATIENCE)
    assert again.returncode == 3, progress
    after = {job.id: job.attempt for job in batch.results()}
    assert {job_id: after[job_id] for job_id in finished} == finished
    assert len(after) == ROWS - len(BAD)
    results, errors = rows(tmp_path / "out.jsonl"), rows(tmp_path / "out.errors.jsonl")
    good = [number for number in range(1, ROWS + 1) if number not in BAD]
    assert [row["custom_id"] for row in results] == [f"row-{number}" for number in good]
    assert [(row["completion_tokens"], row["seed"]) for row in results] == [(LEAST + n, n) for n in good]
    assert [(row["line"], row["error"]["code"]) for row in errors] == [
        (5, "invalid_json"),
        (20, "unsupported_field"),
    ]
    assert "completed_with_errors" in said and "2 failed" in said
    assert f"{ROWS} of {ROWS} rows" in progress  # a log has lines, not a bar
    assert worker_pids(jobs_client) == []
    assert [worker.state for worker in jobs_client.workers()] == ["stopped"] * 2


@pytest.mark.slow  # tests/integration/worker/test_lifecycle.py hands jobs back at a signal
@on_sqlite
def test_ctrl_c_twice_hands_everything_back_at_once(jobs_client: Client, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text('{"prompt": "Write a haiku", "max_tokens": 450, "ignore_eos": true}\n' * 8)
    process = run(path)  # would drain for 20 seconds
    wait_until(lambda: jobs_client.list_jobs(state=JobState.RUNNING), PATIENCE)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.7)
    _, progress = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "the worker hands its rows back to the queue" in progress
    states = {job.state for job in jobs_client.list_jobs(limit=100)}
    assert states == {JobState.QUEUED}


@pytest.mark.slow  # the campaign kills workers of runs
@on_sqlite
def test_a_worker_that_dies_in_the_middle_is_replaced(
    jobs_client: Client, run: Run, start_worker: StartWorker, prompts: Path
) -> None:
    with start_worker("doomed") as worker:
        process = run(prompts)
        wait_until(lambda: done(jobs_client) > len(BAD), PATIENCE)
        worker.kill()
        worker.wait()
    assert process.wait(PATIENCE) == 3
    assert len(jobs_client.workers()) == 2


@on_sqlite
def test_what_cannot_work_is_one_line_and_nothing_is_queued(
    quick: Settings, jobs_client: Client, prompts: Path, tmp_path: Path
) -> None:
    broken, output = tmp_path / "broken.gguf", tmp_path / "out.jsonl"
    broken.write_bytes(b"no model")
    output.write_text('{"id": "somebody", "custom_id": "else"}\n')

    def refused(path: Path, *arguments: str, settings: Settings = quick) -> str:
        """What `nightmill run` says, in this process."""
        command = ["run", str(path), "-o", str(output), *arguments]
        done = CliRunner().invoke(main, command, env=worker_env(settings))
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1
        return done.stderr

    no_model = quick.model_copy(update={"model": None})
    assert "nothing.jsonl: there is no such file" in refused(tmp_path / "nothing.jsonl")
    assert "broken.gguf" in refused(prompts, "--model", str(broken))
    assert "no model file is named: give --model FILE or set NIGHTMILL_MODEL" in refused(
        prompts, settings=no_model
    )
    assert "--deadline: 'soon' is not a time" in refused(prompts, "--deadline", "soon")
    assert batches(jobs_client) == []
    said = refused(prompts)
    assert "out.jsonl: is there already, and is not of batch" in said and "--overwrite" in said
    assert output.read_text() == '{"id": "somebody", "custom_id": "else"}\n'
    assert jobs_client.workers() == []


@pytest.mark.slow  # test_lifecycle.py and jobs/batches/test_ending.py end rows at a deadline
@on_postgresql
def test_the_deadline_ends_a_run_with_partial_texts_and_a_code_of_its_own(
    jobs_client: Client, start_worker: StartWorker, run: Run, tmp_path: Path
) -> None:
    """A worker that serves the model is used, and left alone; it does not hear of options."""
    path = tmp_path / "long.jsonl"
    path.write_text('{"prompt": "Write a haiku", "max_tokens": 450, "ignore_eos": true}\n' * 300)
    with start_worker("there") as worker:  # starting one could take until the deadline
        process = run(path, "--deadline", "4s", "--context", "500")
        said, progress = process.communicate(timeout=PATIENCE)
        assert worker.poll() is None
        assert len(jobs_client.workers()) == 1
    assert process.returncode == 5, progress
    assert "there already" in progress and "command starts are --context 500\n" in progress
    assert "expired" in said
    codes = [row["error"]["code"] for row in rows(tmp_path / "out.errors.jsonl")]
    assert set(codes) == {"deadline"}
    assert any(row.get("text") for row in rows(tmp_path / "out.errors.jsonl"))


@pytest.mark.slow  # jobs/batches/test_limits.py meets and raises budgets in SQL
@on_sqlite
def test_a_run_ends_at_its_budget_and_goes_on_with_a_larger_one(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text('{"prompt": "Write a haiku", "max_tokens": 40, "ignore_eos": true}\n' * 40)
    process = run(path, "--budget", "500-tokens")
    said, progress = process.communicate(timeout=PATIENCE)
    assert process.returncode == 5, progress
    assert "of 500 tokens" in said and "its budget of 500 tokens is used up" in said
    done, left = rows(tmp_path / "out.jsonl"), rows(tmp_path / "out.errors.jsonl")
    assert {row["error"]["code"] for row in left} == {"budget"} and len(done) + len(left) == 40
    # Eight run at once, and no more are begun: what exceeds the budget was in flight.
    spent = sum(row["prompt_tokens"] + row["completion_tokens"] for row in done)
    assert 500 <= spent <= 500 + 2 * 8 * (40 + done[0]["prompt_tokens"])
    process = run(path, "--budget", "none")
    said, progress = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, progress
    assert len(rows(tmp_path / "out.jsonl")) == 40 and not rows(tmp_path / "out.errors.jsonl")


@pytest.mark.slow  # tests/unit/hub fetches models
@on_sqlite
def test_a_model_may_be_named_and_is_fetched_before_anything_is_queued(
    quick: Settings, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "few.jsonl"
    prompts.write_text('{"prompt": "Write a haiku about rain", "max_tokens": 4}\n' * 3)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with serving(SmallHub(repos={"owner/repo": {"haiku-Q8_0.gguf": demo_model().read_bytes()}})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        misspelt = run(prompts, settings=quick.model_copy(update={"model": "hf:owner/repo:q4_0"}))
        assert "owner/repo has no q4_0; there is Q8_0" in misspelt.communicate(timeout=PATIENCE)[1]
        done = run(prompts, settings=quick.model_copy(update={"model": "hf:owner/repo:q8_0"}))
        said, progress = done.communicate(timeout=PATIENCE)
    assert done.returncode == 0, progress
    assert "model haiku-Q8_0" in said and "3 succeeded" in said
    assert "fetching owner/repo/haiku-Q8_0.gguf" in progress
