"""A worker's real processes: awake, asleep without an engine, awake again under the same ids."""

import signal
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from nightmill.jobs.base.contract import JobState, WorkerState
from nightmill.jobs.client.client import Client
from tests.integration.worker.conftest import StartWorker, on_sqlite
from tests.support.servers import ENDLESS_TOKENS, wait_until

PATIENCE = 120.0


def engines(worker: psutil.Process) -> list[psutil.Process]:
    """The process of its engine, if it has one."""
    found = []
    for child in worker.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "nightmill.worker.link.process" in child.cmdline():
                found.append(child)
    return found


@on_sqlite
def test_a_worker_sleeps_when_idle_and_when_paused_and_serves_again(
    jobs_client: Client, start_worker: StartWorker, tmp_path: Path
) -> None:
    def state() -> WorkerState:
        (worker,) = jobs_client.workers()  # one row, however often it slept
        return worker.state

    # While that is not done, no idle second can pass in which a busy machine lets the test wait.
    long = jobs_client.enqueue("Write a haiku", max_tokens=ENDLESS_TOKENS, ignore_eos=True)
    with start_worker("night", "--idle-seconds", "1") as process:
        worker = psutil.Process(process.pid)
        assert engines(worker)
        first = jobs_client.enqueue("Write a haiku about rain", seed=1, max_tokens=8)
        jobs_client.wait(first, timeout=PATIENCE)
        jobs_client.cancel(long)
        wait_until(lambda: state() is WorkerState.SLEEPING, PATIENCE)
        assert not engines(worker), "it is shown as sleeping while its engine still has a GPU"
        wait_until(lambda: "nightmill.worker.service.sleeping" in worker.cmdline(), PATIENCE)
        wait_until(lambda: not worker.children(recursive=True), PATIENCE)  # no engine, no renderer

        again = jobs_client.enqueue("Write a haiku about rain", seed=1, max_tokens=8)
        jobs_client.wait(again, timeout=PATIENCE)
        assert jobs_client.get(again).text == jobs_client.get(first).text
        assert worker.is_running() and process.poll() is None

        # Kept from falling asleep as idle until it is told to pause; then it may be silent for long, if busy.
        kept = jobs_client.enqueue("Write a haiku", max_tokens=ENDLESS_TOKENS, ignore_eos=True)
        wait_until(lambda: jobs_client.get(kept).state is JobState.RUNNING, PATIENCE)
        (paused,) = wait_until(jobs_client.worker_store.pause, PATIENCE)
        wait_until(lambda: state() is not WorkerState.READY, PATIENCE)
        jobs_client.cancel(kept)
        wait_until(lambda: "nightmill.worker.service.sleeping" in worker.cmdline(), PATIENCE)
        waiting = jobs_client.enqueue("Write a haiku about snow", max_tokens=8)
        wait_until(lambda: jobs_client.workers()[0].detail == "paused, until it is resumed", PATIENCE)
        assert jobs_client.get(waiting).state is JobState.QUEUED
        assert [one.id for one in jobs_client.worker_store.pause(paused=False)] == [paused.id]
        jobs_client.wait(waiting, timeout=PATIENCE)

        wait_until(lambda: "nightmill.worker.service.sleeping" in worker.cmdline(), PATIENCE)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    assert state() is WorkerState.STOPPED
    said = (tmp_path / "night.log").read_text()
    assert said.count("going to sleep: idle, until there are jobs") >= 2 and "Traceback" not in said
    assert "going to sleep: paused, until it is resumed" in said and "stopped while asleep" in said
