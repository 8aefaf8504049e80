"""Models in turn on a GPU: memory before, in and after each, the time of a swap, energy against the counter.

NIGHTMILL_TEST_TURNS=a.gguf,b.gguf names two models to swap; else they are the bundled one and a random one.
"""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from sqlalchemy import select

from nightmill.jobs.base.contract import JobState, WorkerState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql.tables import LoadRow
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.commands.process import running_worker
from nightmill.worker.runners.gpu.device.nvml import GpuProbe
from tests.support.cuda_runners import ON_GPU
from tests.support.ggufs import write_model
from tests.support.servers import wait_until

PATIENCE = 200.0
MIB = 1 << 20
SLACK = 64 * MIB  # of other programs' memory, and of the driver's own


def two_models(folder: Path) -> dict[str, Path]:
    if named := os.environ.get("NIGHTMILL_TEST_TURNS"):
        return dict(zip("ab", map(Path, named.split(",")), strict=True))
    return {"a": demo_model(), "b": write_model(folder / "b.gguf", width=256, ffn=640, kv_heads=4)}


def say(line: str) -> None:
    """Show a line of results, with `-s`."""
    sys.stdout.write(f"\n{line}")


def memory(probe: GpuProbe) -> float:
    return probe.read()["memory_used"]


def test_two_models_in_turn_leave_no_memory_behind_and_their_rows_have_the_energy(
    sqlite_settings: Settings, tmp_path: Path
) -> None:
    probe = GpuProbe(0)
    assert "memory_used" in probe.read(), "NVML tells nothing of this GPU"
    models = two_models(tmp_path)
    settings = sqlite_settings.model_copy(update=ON_GPU | {"max_attempts": 1})
    listed = ",".join(f"{name}={path}" for name, path in models.items())
    before = memory(probe)
    in_use: dict[str, float] = {}
    between: list[float] = []
    with Client(settings) as client:
        rows_of_a = client.enqueue_many(
            ["Write a haiku about rain"] * 1500 + ["Describe a quiet harbor in winter"] * 1500,
            model="a", max_tokens=200, ignore_eos=True,
        )  # fmt: skip
        rows_of_b = client.enqueue_many(["What is snow?"] * 600, model="b", max_tokens=200, ignore_eos=True)
        ids = [*rows_of_a, *rows_of_b]
        arguments = ["--models", listed, "--stay", "1h", "--idle-seconds", "5"]
        with running_worker(client, tmp_path / "turns.log", arguments) as process:
            give_up_at = time.monotonic() + PATIENCE
            while client.stats()["state"].get("succeeded", 0) < len(ids):
                assert time.monotonic() < give_up_at, (tmp_path / "turns.log").read_text()[-3000:]
                (worker,) = client.workers()
                used = memory(probe)
                if worker.state is WorkerState.READY:
                    in_use[worker.model] = max(used, in_use.get(worker.model, 0.0))
                elif worker.state is WorkerState.SLEEPING:
                    between.append(used)
                time.sleep(0.1)
            wait_until(lambda: client.workers()[0].state is WorkerState.SLEEPING, 60.0)
            after = memory(probe)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        rows = [client.get(job_id) for job_id in ids]
        with client.database.read() as connection:
            loads = connection.execute(select(LoadRow.__table__).order_by(LoadRow.id)).all()
    assert [row.model for row in loads] == ["a", "b"] and all(row.error is None for row in loads)
    assert {job.state for job in rows} == {JobState.SUCCEEDED} and {job.attempt for job in rows} == {1}
    assert set(in_use) == {"a", "b"} and min(in_use.values()) > before + 256 * MIB
    assert between and min(between) <= before + SLACK and after <= before + SLACK
    swap = (loads[1].ready_at - loads[0].ended_at).total_seconds()
    joules = {name: sum(job.energy_joules or 0.0 for job in rows if job.model == name) for name in models}
    seconds = {name: sum(job.gpu_seconds or 0.0 for job in rows if job.model == name) for name in models}
    mib = {name: round(used / MIB) for name, used in in_use.items()}
    least, watts = min(between), {name: round(joules[name] / seconds[name]) for name in models}
    took = [round((row.ready_at - row.began_at).total_seconds(), 1) for row in loads]
    say(f"MiB before {before / MIB:.0f}, in {mib}, between {least / MIB:.0f}, after {after / MIB:.0f}")
    say(f"loads {took} s, swap {swap:.1f} s; joules {joules}, GPU seconds {seconds}, watts {watts}")
    assert all(value > 0 for value in joules.values())


def test_the_energy_of_rows_is_that_of_the_counter(sqlite_settings: Settings, tmp_path: Path) -> None:
    """One model, and some tens of seconds of work; what the GPU takes beside that is not the rows'."""
    probe = GpuProbe(0)
    assert probe.joules() is not None, "NVML does not count the energy of this GPU"
    path = next(iter(two_models(tmp_path).values()))
    settings = sqlite_settings.model_copy(update=ON_GPU | {"model": path})
    with Client(settings) as client, running_worker(client, tmp_path / "energy.log"):
        warm = client.enqueue_many(["Write a haiku about rain"] * 64, max_tokens=64, ignore_eos=True)
        client.wait(warm, timeout=PATIENCE)
        time.sleep(1.0)
        began, counted = time.monotonic(), probe.joules()
        asked = [f"Write a haiku about rain {number}" for number in range(6000)]
        ids = client.enqueue_many(asked, max_tokens=400, ignore_eos=True)
        client.wait(ids, timeout=PATIENCE)
        seconds, ended = time.monotonic() - began, probe.joules()
        idle_from = probe.joules()
        time.sleep(5.0)
        idle_watts = ((probe.joules() or 0.0) - (idle_from or 0.0)) / 5.0
        rows = [client.get(job_id) for job_id in ids]
    assert counted is not None and ended is not None
    charged = sum(job.energy_joules or 0.0 for job in rows)
    busy = sum(job.gpu_seconds or 0.0 for job in rows)
    idle = max(0.0, seconds - busy) * idle_watts  # before the first step, and after the last
    tokens = sum(job.completion_tokens or 0 for job in rows)
    say(f"counter {ended - counted:.0f} J in {seconds:.1f} s; rows {charged:.0f} J in {busy:.1f} s")
    say(f"idle {idle:.0f} J at {idle_watts:.0f} W; {charged / tokens:.4f} J a token")
    assert busy == pytest.approx(seconds, rel=0.1) and busy <= seconds
    assert charged == pytest.approx(ended - counted - idle, rel=0.02)
