"""A worker that serves several models in turn, as processes: loads, swaps, texts, and a broken file."""

import signal
from pathlib import Path

import pytest
from sqlalchemy import select

from nightmill.jobs.base.contract import JobState, StopReason, WorkerState
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql.tables import LoadRow
from nightmill.worker.assembly.model import demo_model
from tests.integration.worker.conftest import StartWorker, on_sqlite
from tests.integration.worker.models_in_turn import PATIENCE, PROMPTS, ask, loads, texts_alone
from tests.support.ggufs import write_model
from tests.support.servers import wait_until


@pytest.mark.slow  # takes its turn: one commit of four
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
    # What each cost: its time, and no joules, of which NumPy knows nothing.
    assert all(job.gpu_seconds and job.energy_joules is None for job in done.values())
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

    plain = {
        key: text
        for model, file in (("demo", demo_model()), ("other", other))
        for key, text in texts_alone(file, [key for key in done if key[0] == model]).items()
    }
    assert plain == {key: job.text for key, job in done.items()}
    assert client.get(again).text == plain["demo", 0]
    log = (tmp_path / "turns.log").read_text()
    assert "Traceback" not in log and log.count("ready: ") == 3
    # A model that is loaded gives way to the next without a sleep in between.
    assert log.count("swaps to ") == log.count(" is next: ") > 0


@pytest.mark.slow
@on_sqlite
def test_somebody_who_waits_has_his_model_loaded_and_the_rows_of_the_other_go_on_later(
    jobs_client: Client, start_worker: StartWorker, tmp_path: Path
) -> None:
    client, other = jobs_client, write_model(tmp_path / "other.gguf")
    rows = client.enqueue_many(
        [f"Write a haiku about rain {number}" for number in range(60)],
        model="demo", max_tokens=400, ignore_eos=True, batch="night",
    )  # fmt: skip
    arguments = [
        "--models",
        f"demo={demo_model()},{other}",
        "--swap-for-interactive",
        "--drain-seconds",
        "0.5",
    ]
    with start_worker("turns", *arguments, model=None):
        wait_until(lambda: client.workers()[0].state is WorkerState.READY, PATIENCE)
        (before,) = client.workers()
        awaited = client.enqueue("What is snow?", model="other", max_tokens=8, interactive=True)
        client.wait(awaited, timeout=PATIENCE)
        assert client.get(awaited).state is JobState.SUCCEEDED and client.workers()[0].pid == before.pid
        handed_back = [job for job in map(client.get, rows) if job.state is JobState.QUEUED and job.attempt]
        assert any(job.gpu_seconds for job in handed_back) and not any(job.failures for job in handed_back)
        # Its queue is drained again, by the other model: each row goes on from its tokens.
        wait_until(lambda: client.get(handed_back[0].id).attempt == 2, PATIENCE)
        client.cancel_batch("night")
    assert [model for model, ready in loads(client) if ready] == ["demo", "other", "demo"]
    said = (tmp_path / "turns.log").read_text()
    assert "other is next: an interactive job asks for other" in said and "Traceback" not in said
    assert "demo is next: " in said and said.count("swaps to ") == said.count(" is next: ") == 2
