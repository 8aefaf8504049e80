"""Models that are loaded at once, as processes: rows of all, a broken file, a death, precedence, a pause."""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from sqlalchemy import func, select

from nightmill.jobs.base.contract import JobState, StopReason, WorkerState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.reply.job import Worker
from nightmill.jobs.sql.tables import JobRow, LoadRow
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.commands.process import WORKER_COMMAND
from tests.integration.worker.conftest import on_sqlite
from tests.integration.worker.models_in_turn import PATIENCE, PROMPTS, ask, loads, texts_alone
from tests.support.ggufs import write_model
from tests.support.servers import wait_until, worker_env


@pytest.fixture
def patient(quick: Settings) -> Iterator[Client]:
    """A client on settings by which a slow worker is not taken for a dead one: attempts are counted here."""
    with Client(quick.model_copy(update={"stale_seconds": 10.0})) as client:
        yield client


@contextmanager
def together(client: Client, log: Path, models: str, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """The command that loads these models at once, on NumPy; it is ended at the end, if it has not."""
    command = [*WORKER_COMMAND, "--models", models, "--together", "--reference", *arguments]
    with (
        log.open("wb") as output,
        subprocess.Popen(command, env=worker_env(client.settings), stdout=output, stderr=output) as process,
    ):
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(PATIENCE)


def in_state(client: Client, *states: WorkerState) -> dict[str, Worker]:
    """The workers in such a state, by model."""
    return {worker.model: worker for worker in client.workers() if worker.state in states}


def engine_of(worker: Worker) -> int:
    """The process id of a worker's engine."""
    (engine,) = (
        child.pid
        for child in psutil.Process(worker.pid).children()
        if "nightmill.worker.link.process" in child.cmdline()
    )
    return int(engine)


def lives(process: "psutil.Process") -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def descendants(pid: int) -> "list[psutil.Process]":
    return [one for one in psutil.Process(pid).children(recursive=True) if lives(one)]


@pytest.mark.slow
@on_sqlite
def test_rows_of_all_are_answered_without_a_swap_and_a_broken_model_fails_only_its_own(
    patient: Client, tmp_path: Path
) -> None:
    client, log = patient, tmp_path / "together.log"
    other, broken = write_model(tmp_path / "other.gguf"), tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF, or so it says")
    order = ["demo", "other", "demo", "broken"] * 3
    with Client(client.settings.model_copy(update={"max_attempts": 1})) as careful:
        ids = {
            (model, number): ask(careful, PROMPTS[number // 4], model, seed=number)
            for number, model in enumerate(order)
        }
    with together(client, log, f"demo={demo_model()},{other},{broken}") as process:
        wait_until(lambda: {*in_state(client, WorkerState.READY)} == {"demo", "other"}, PATIENCE)
        client.wait([*ids.values()], timeout=PATIENCE)
        ready = in_state(client, WorkerState.READY)
        assert {*ready} == {"demo", "other"}  # both at once; the third sleeps, and tries again
        assert len({worker.together for worker in client.workers()}) == 1 and len(client.workers()) == 3
        awaited = [
            client.enqueue("What is snow?", model=model, max_tokens=8, interactive=True) for model in ready
        ]
        client.wait(awaited, timeout=PATIENCE)
        assert {client.get(job_id).worker for job_id in awaited} == {one.id for one in ready.values()}
        assert [model for model, is_loaded in loads(client) if is_loaded].count("demo") == 1
        # Paused under the name of all, they leave no engine behind; resumed, one is loaded for the next row.
        group = ready["demo"].together
        assert group is not None and len(client.worker_store.pause([group])) == 3
        wait_until(lambda: len(in_state(client, WorkerState.SLEEPING)) == 3, PATIENCE)
        assert not any("link.process" in " ".join(one.cmdline()) for one in descendants(process.pid))
        client.worker_store.pause([group], paused=False)
        again = ask(client, PROMPTS[0], "demo", seed=0)
        client.wait(again, timeout=PATIENCE)
        processes = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    assert len(processes) >= 4  # three workers and an engine
    wait_until(lambda: not any(map(lives, processes)), PATIENCE)
    assert {worker.state for worker in client.workers()} == {WorkerState.STOPPED}

    found = {key: client.get(job_id) for key, job_id in ids.items()}
    done = {key: job for key, job in found.items() if key[0] != "broken"}
    assert {job.state for job in done.values()} == {JobState.SUCCEEDED}
    assert {job.attempt for job in done.values()} == {1}
    assert {(key[0], job.worker) for key, job in done.items()} == {(m, one.id) for m, one in ready.items()}
    assert all(job.gpu_seconds for job in done.values())
    failed = [job for key, job in found.items() if key[0] == "broken"]
    assert {(job.state, job.stop_reason) for job in failed} == {(JobState.FAILED, StopReason.ERROR)}
    assert all("'broken' could not be loaded, 1 times" in str(job.error) for job in failed)
    plain = {
        key: text
        for model, file in (("demo", demo_model()), ("other", other))
        for key, text in texts_alone(file, [key for key in done if key[0] == model]).items()
    }
    assert plain == {key: job.text for key, job in done.items()}
    assert client.get(again).text == plain["demo", 0]
    said = log.read_text()
    assert "Traceback" not in said and said.count("[demo] ") and said.count("[other] ")
    with client.database.read() as connection:
        rows = connection.execute(select(LoadRow.ended_at)).scalars().all()
    assert all(ended is not None for ended in rows)


@pytest.mark.slow
@on_sqlite
def test_a_model_gives_precedence_to_more_urgent_rows_and_a_death_costs_only_its_own(
    patient: Client, tmp_path: Path
) -> None:
    client, log = patient, tmp_path / "together.log"
    models = f"demo={demo_model()},{write_model(tmp_path / 'other.gguf')}"

    def held(worker: Worker) -> int:
        found = {one.id: one.stats or {} for one in client.workers()}
        return int(found[worker.id].get("in_flight", 0))

    def started(ids: Sequence[str]) -> int:
        query = select(func.count()).where(JobRow.id.in_(ids), JobRow.attempt > 0)
        with client.database.read() as connection:
            return int(connection.execute(query).scalar_one())

    with together(client, log, models, "--max-sequences", "2"):
        wait_until(lambda: len(in_state(client, WorkerState.READY)) == 2, PATIENCE)
        before = in_state(client, WorkerState.READY)
        engine = engine_of(before["demo"])
        os.kill(engine, signal.SIGSTOP)  # so that rows of its model wait
        urgent = client.enqueue_many(["rain"] * 10, model="demo", priority=8, max_tokens=8)
        wait_until(lambda: held(before["demo"]) > 2, PATIENCE)
        later = client.enqueue_many(
            ["snow"] * 40, model="other", max_tokens=100, ignore_eos=True, batch="later"
        )
        # Some are taken before it is seen that others wait. It ends these, and takes none of the rest.
        wait_until(lambda: started(later) and held(before["other"]) == 0, PATIENCE)
        some = started(later)
        awaited = client.enqueue("hail", model="other", max_tokens=4, interactive=True)
        client.wait(awaited, timeout=PATIENCE)
        assert some == started(later) < 40 and started(urgent) < 10
        os.kill(engine, signal.SIGKILL)
        client.wait(urgent, timeout=PATIENCE)
        wait_until(lambda: started(later) > some, PATIENCE)  # it goes on once no more urgent ones wait
        client.cancel_batch("later")
        client.wait(later, timeout=PATIENCE)
        wait_until(lambda: len(in_state(client, WorkerState.READY)) == 2, PATIENCE)
        after = in_state(client, WorkerState.READY)
        assert after["demo"].id != before["demo"].id and after["other"].id == before["other"].id
        assert after["demo"].together == before["demo"].together
    done, others = ([client.get(job_id) for job_id in ids] for ids in (urgent, later))
    assert {job.state for job in done} == {JobState.SUCCEEDED} and max(job.attempt for job in done) > 1
    assert sum(job.state is JobState.SUCCEEDED for job in others) >= some
    assert {job.attempt for job in others} <= {0, 1} and not any(job.failures for job in others)
