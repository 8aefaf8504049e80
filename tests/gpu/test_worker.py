"""A worker process on the GPU: what users see, and what becomes of their jobs when the GPU fails."""

from pathlib import Path

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.commands.process import running_worker
from tests.gpu import faulty_worker
from tests.support.cuda_runners import ON_GPU
from tests.support.servers import wait_until

PATIENCE = 180.0


def test_fault_of_the_gpu_hands_the_jobs_back_and_ends_the_process(
    sqlite_settings: Settings, tmp_path: Path
) -> None:
    settings = sqlite_settings.model_copy(update=ON_GPU | {"model": demo_model()})
    with Client(settings) as client:
        with running_worker(client, tmp_path / "faulty.log", command=faulty_worker.COMMAND) as process:
            ids = client.enqueue_many(["Write a haiku about rain"] * 40, max_tokens=200, ignore_eos=True)
            assert process.wait(PATIENCE) == 1
        said = (tmp_path / "faulty.log").read_text()
        assert "the engine failed: " in said and "this worker ends" in said
        assert client.list_jobs(state=JobState.RUNNING) == []
        struck = [job for job in client.list_jobs(state=JobState.QUEUED, limit=100) if job.attempt]
        assert struck and all(job.failures == 0 for job in struck)  # it may have been any of them
        with running_worker(client, tmp_path / "sound.log"):
            client.wait(ids, timeout=PATIENCE)
        for job in client.results(ids):
            assert (job.state, job.stop_reason) == (JobState.SUCCEEDED, StopReason.LENGTH)
            assert job.completion_tokens == 200 and job.failures == 0


def test_two_workers_share_one_queue(sqlite_settings: Settings, tmp_path: Path) -> None:
    """On one GPU here, with a part of its memory each; `--gpu 0` and `--gpu 1` is the same with two."""
    settings = sqlite_settings.model_copy(update=ON_GPU | {"model": demo_model(), "gpu_memory": 0.2})
    arguments = ["--max-sequences", "16"]
    with (
        Client(settings) as client,
        running_worker(client, tmp_path / "a.log", arguments),
        running_worker(client, tmp_path / "b.log", arguments),
    ):
        ids = client.enqueue_many(["Write a haiku about snow"] * 2000, max_tokens=100, ignore_eos=True)
        client.wait(ids, timeout=PATIENCE)
        wait_until(lambda: client.broker.queue_length(None) == 0, PATIENCE)
        found = list(client.results(ids))
    assert {job.state for job in found} == {JobState.SUCCEEDED} and {job.attempt for job in found} == {1}
    assert len({job.worker for job in found}) == 2
