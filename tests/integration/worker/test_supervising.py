"""Two workers under one supervisor, as processes: one queue, one log, one page, a restart, one end."""

import io
import os
import signal
import threading

import psutil  # type: ignore[import-untyped]
import pytest

from nightmill.jobs.base.contract import JobState, WorkerState
from nightmill.jobs.client.client import Client
from nightmill.worker.commands.process import WORKER_COMMAND
from nightmill.worker.commands.supervising import MergedMetrics, Supervisor, commands_of, read_pages
from tests.integration.worker.conftest import on_sqlite
from tests.support.servers import free_port, wait_until, worker_env

PATIENCE = 120.0


@pytest.mark.slow
@on_sqlite
def test_two_workers_answer_one_queue_and_one_that_is_killed_comes_again(
    jobs_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    for name, value in worker_env(jobs_client.settings).items():
        monkeypatch.setenv(name, value)
    ports = {name: free_port() for name in ("0", "1")}
    commands = {
        name: [*WORKER_COMMAND, "--reference", "--max-sequences", "4", "--metrics-port", str(port)]
        for name, port in ports.items()
    }
    output = io.BytesIO()
    supervisor = Supervisor(commands, 60.0, output=output)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(supervisor.run()), daemon=True)
    thread.start()

    def ready() -> list[int]:
        return [one.pid for one in jobs_client.workers() if one.state is WorkerState.READY]

    try:
        wait_until(lambda: len(ready()) == 2, PATIENCE)
        ids = jobs_client.enqueue_many(["Write a haiku about rain"] * 60, max_tokens=24, ignore_eos=True)
        done = wait_until(lambda: jobs_client.list_jobs(state=JobState.SUCCEEDED), PATIENCE)
        (doomed,) = [one.pid for one in jobs_client.workers() if one.id == done[0].worker]
        os.kill(doomed, signal.SIGKILL)
        jobs_client.wait(ids, timeout=PATIENCE)
        done = list(jobs_client.results(ids))
        assert {job.state for job in done} == {JobState.SUCCEEDED} and len({job.worker for job in done}) >= 2
        wait_until(lambda: len({*ready()} - {doomed}) == 2, PATIENCE)
        registry = CollectorRegistry()
        registry.register(MergedMetrics(lambda: read_pages(ports)))  # type: ignore[arg-type]
        page = generate_latest(registry).decode()
        assert page.count("# TYPE nightmill_worker_generated_tokens_total counter") == 1
        for name in ports:
            assert f'nightmill_worker_model_loaded{{gpu="{name}",model="nightmill-demo"}} 1.0' in page
    finally:
        last = ready()
        supervisor.tell(signal.SIGTERM)
        thread.join(PATIENCE)
    assert codes == [0] and not any(map(psutil.pid_exists, last))
    said = output.getvalue().decode()
    assert "[GPU 0] " in said and "[GPU 1] " in said and said.count("ready: nightmill-demo") == 3


def test_the_commands_differ_in_gpu_and_port_alone() -> None:
    made = commands_of([*WORKER_COMMAND, "--model", "m.gguf", "--gpu", "all"], range(2), 9000)
    assert [one for one in zip(*made.values(), strict=True) if one[0] != one[1]] == [
        ("0", "1"), ("9001", "9002"),
    ]  # fmt: skip
