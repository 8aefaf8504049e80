"""Models at once on a GPU: shares of its memory, both at work, energy and time of rows against the counter.

NIGHTMILL_TEST_TURNS=a.gguf,b.gguf names two models to load; else they are the bundled one and a random one.
"""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from nightmill.jobs.base.contract import JobState, WorkerState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.worker.assembly.fetching import with_models
from nightmill.worker.assembly.forecast import card_here
from nightmill.worker.assembly.together import ENGINE_BYTES
from nightmill.worker.commands.process import WORKER_COMMAND
from nightmill.worker.commands.together import fit_together
from nightmill.worker.runners.gpu.device.nvml import GpuProbe
from tests.gpu.test_turns import MIB, PATIENCE, SLACK, memory, say, two_models
from tests.support.cuda_runners import ON_GPU
from tests.support.servers import wait_until, worker_env


def test_two_models_share_the_gpu_and_their_rows_have_its_energy_and_time(
    sqlite_settings: Settings, tmp_path: Path
) -> None:
    probe = GpuProbe(0)
    assert probe.joules() is not None, "NVML does not count the energy of this GPU"
    models = two_models(tmp_path)
    listed = ",".join(f"{name}={path}" for name, path in models.items())
    settings = sqlite_settings.model_copy(update=ON_GPU | {"models": listed, "gpu_memory": 0.6})
    card = card_here(0)
    assert card is not None
    fit = fit_together(with_models(settings), card)
    assert fit.fits, fit.refusal
    before, log = memory(probe), tmp_path / "together.log"
    with Client(settings) as client, log.open("wb") as output:
        command = [*WORKER_COMMAND, "--together"]
        process = subprocess.Popen(command, env=worker_env(settings), stdout=output, stderr=output)
        try:
            wait_until(lambda: sum(one.state is WorkerState.READY for one in client.workers()) == 2, PATIENCE)
            loaded = memory(probe)
            warm = [
                job_id
                for name in models
                for job_id in client.enqueue_many(["rain"] * 64, model=name, max_tokens=64, ignore_eos=True)
            ]
            client.wait(warm, timeout=PATIENCE)
            time.sleep(1.0)
            began, counted = time.monotonic(), probe.joules()
            ids = {
                name: client.enqueue_many(
                    [f"Write a haiku about rain {number}" for number in range(9000)],
                    model=name, max_tokens=300, ignore_eos=True,
                )
                for name in models
            }  # fmt: skip
            client.wait([job_id for listed_ids in ids.values() for job_id in listed_ids], timeout=PATIENCE)
            time.sleep(0.5)  # the counter is behind by up to a tenth of a second
            seconds, ended = time.monotonic() - began, probe.joules()
            time.sleep(5.0)
            idle_watts = ((probe.joules() or 0.0) - (ended or 0.0)) / 5.0
            rows = {name: [client.get(job_id) for job_id in own] for name, own in ids.items()}
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
    assert counted is not None and ended is not None
    joules = {name: sum(job.energy_joules or 0.0 for job in own) for name, own in rows.items()}
    busy = {name: sum(job.gpu_seconds or 0.0 for job in own) for name, own in rows.items()}
    first = {name: min(job.started_at for job in own if job.started_at) for name, own in rows.items()}
    last = {name: max(job.finished_at for job in own if job.finished_at) for name, own in rows.items()}
    charged, idle = sum(joules.values()), max(0.0, seconds - sum(busy.values())) * idle_watts
    shares = {name: round(share.bytes / MIB) for name, share in fit.shares.items()}
    beside = (loaded - before) / MIB - sum(shares.values())
    say(
        f"MiB before {before / MIB:.0f}, loaded {loaded / MIB:.0f}, shares {shares}, beside them {beside:.0f}"
    )
    say(f"counter {ended - counted:.0f} J in {seconds:.1f} s, idle {idle:.0f} J at {idle_watts:.0f} W")
    say(f"rows {joules} J, {busy} s; from {first} to {last}")
    assert {job.state for own in rows.values() for job in own} == {JobState.SUCCEEDED}
    assert max(first.values()) < min(last.values()), "they did not compute at once"
    # What two processes take beside their shares is what is set aside for one, and the tenth for the other.
    assert beside * MIB < 2 * ENGINE_BYTES
    assert sum(busy.values()) <= seconds
    assert charged == pytest.approx(ended - counted - idle, rel=0.03)
    assert memory(probe) <= before + SLACK
