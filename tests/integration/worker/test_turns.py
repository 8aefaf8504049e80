"""A worker that serves several models in turn, as processes: loads, swaps, texts, and a file that is broken."""

import signal
from pathlib import Path

from sqlalchemy import select

from nightmill.jobs.base.contract import JobState, StopReason, WorkerState
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql.tables import LoadRow
from nightmill.worker.assembly.model import demo_model
from tests.integration.worker.conftest import StartWorker, on_sqlite
from tests.support.ggufs import write_model
from tests.support.servers import wait_until

PATIENCE = 120.0
PROMPTS = ("Write a haiku about rain", "Describe a quiet harbor", "What is snow?")


def loads(client: Client) -> list[tuple[str, bool]]:
    """Return every load, in order: the model, and whether it became ready."""
    query = select(LoadRow.model, LoadRow.ready_at).order_by(LoadRow.id)
    with client.database.read() as connection:
        return [(model, ready is not None) for model, ready in connection.execute(query)]


def ask(client: Client, prompt: str, model: str, seed: int) -> str:
    return client.enqueue(prompt, model=model, seed=seed, max_tokens=12, ignore_eos=True)


@on_sqlite
def test_interleaved_rows_load_each_model_once_and_a_broken_one_fails_only_its_own(
    jobs_client: Client, start_worker: StartWorker, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other.gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF, or so it says")
    order = ["demo", "other", "demo", "broken"] * 3
    with Client(jobs_client.settings.model_copy(update={"max_attempts": 2})) as client:
        ids = {
            (model, number): ask(client, PROMPTS[number // 4], model, seed=number)
            for number, model in enumerate(order)
        }
    client = jobs_client
    models = f"demo={demo_model()},{other},{broken}"
    with start_worker("turns", "--models", models, "--stay", "1h", model=None) as process:
        wait_until(lambda: all(client.get(job_id).finished_at for job_id in ids.values()), PATIENCE)
        (worker,) = client.workers()
        assert worker.models == ["demo", "other", "broken"] and worker.pid == process.pid
        found = {key: client.get(job_id) for key, job_id in ids.items()}
        # Nothing is loaded now; the next row wakes the same worker.
        wait_until(lambda: client.workers()[0].wakes_for_jobs, PATIENCE)
        again = ask(client, PROMPTS[0], "demo", seed=0)
        client.wait(again, timeout=PATIENCE)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0

    assert [one.state for one in client.workers()] == [WorkerState.STOPPED]
    done = {key: job for key, job in found.items() if key[0] != "broken"}
    assert {job.state for job in done.values()} == {JobState.SUCCEEDED}
    assert {job.worker for job in done.values()} == {worker.id}
    assert {job.attempt for job in done.values()} == {1}
    failed = [job for key, job in found.items() if key[0] == "broken"]
    assert {(job.state, job.stop_reason) for job in failed} == {(JobState.FAILED, StopReason.ERROR)}
    (said,) = {job.error for job in failed}
    assert said is not None and said.startswith("the model 'broken' could not be loaded, 2 times; the last: ")
    assert "broken.gguf" in said

    # The most rows first; the broken one, tried between and after the others, costs nobody a second load.
    assert [model for model, ready in loads(client) if ready] == ["demo", "other", "demo"]
    assert [model for model, ready in loads(client) if not ready] == ["broken", "broken"]
    with client.database.read() as connection:
        rows = connection.execute(select(LoadRow.ended_at, LoadRow.ready_at, LoadRow.error)).all()
    assert all(row.ended_at is not None and (row.ready_at is None) == (row.error is not None) for row in rows)

    plain: dict[tuple[str, int], str | None] = {}
    for model, file in (("demo", demo_model()), ("other", other)):
        with start_worker(f"plain-{model}", "--name", model, model=file):
            asked = {key: ask(client, PROMPTS[key[1] // 4], model, key[1]) for key in done if key[0] == model}
            for key, job_id in asked.items():
                client.wait(job_id, timeout=PATIENCE)
                plain[key] = client.get(job_id).text
    assert plain == {key: job.text for key, job in done.items()}
    assert client.get(again).text == plain["demo", 0]
    log = (tmp_path / "turns.log").read_text()
    assert "Traceback" not in log and log.count("ready: ") == 3
