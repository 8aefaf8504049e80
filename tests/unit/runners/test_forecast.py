"""The forecast of memory and speed: the same from every command, and what a runner on a GPU takes."""

import json
import re
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.commands.main import main
from nightmill.worker.assembly.engine import build_engine
from nightmill.worker.assembly.model import demo_model, open_model
from nightmill.worker.assembly.sizes import GPU
from nightmill.worker.model.hub import cached
from nightmill.worker.model.hub.cached import CachedModel
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.kv_cache import PAGE, page_bytes
from nightmill.worker.runners.gpu.runner import CudaRunner
from tests.support.family_cases import file_of
from tests.support.hybrid_cases import GPU_HYBRID_FILES
from tests.unit.runners.recorded_cuda import RecordedDriver

MIB = 1 << 20
PIECES = MIB
"""Bytes by which a list of pieces of contexts may differ from what is forecast."""

pytestmark = pytest.mark.heavy  # kernels are compiled where nvcc is


def invoked(*command: str) -> list[Any]:
    """What a command says as JSON, an item a line."""
    done = CliRunner().invoke(main, [*command, "--json"])
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def numbers(text: str) -> list[int]:
    """The numbers of sequences in a sentence, their lengths, and the rate."""
    said = text[re.search(r"(?<=for )[\d,]+ sequences of", text).start() :]  # type: ignore[union-attr]
    return [int(one.replace(",", "")) for one in re.findall(r"\d[\d,]*\d|\d", said)]


def allocations(patch: pytest.MonkeyPatch) -> dict[int, int]:
    """Bytes that devices hold from now on, by their addresses."""
    held: dict[int, int] = {}
    allocate, free = Device.allocate, Device.free

    def noted(device: Device, size: int, purpose: str = "a buffer") -> int:
        address = allocate(device, size, purpose)
        held[address] = size
        return address

    def freed(device: Device, address: int) -> None:
        del held[address]
        free(device, address)

    patch.setattr(Device, "allocate", noted)
    patch.setattr(Device, "free", freed)
    return held


@pytest.mark.parametrize(("states", "free"), [(False, 500), (True, 200)], ids=["attention", "states"])
def test_all_commands_and_the_log_say_what_a_runner_takes(
    driver: RecordedDriver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    states: bool,
    free: int,
) -> None:
    """On GPUs so small that there are fewer pages, and fewer states, than all sequences could have."""
    monkeypatch.setattr(sys.modules["pycuda.driver"], "mem_get_info", lambda: (free * MIB, 8 << 30))
    path = demo_model()
    if states:
        (path,) = file_of(tmp_path, *GPU_HYBRID_FILES["qwen35"]).paths
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "The sea is"}\n')
    monkeypatch.setenv("NIGHTMILL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("NIGHTMILL_GPU", "0")
    monkeypatch.setenv("NIGHTMILL_WEIGHTS", "16bit")
    monkeypatch.setattr(cached, "cached_models", lambda: [CachedModel("m", (path,))])

    findings = invoked("check", str(path), "--no-generate")[0]
    (checked,) = (one for one in findings if one["part"] == "memory")
    (planned,) = invoked("plan", str(rows), "--model", str(path), "--no-measure")
    (listed,) = invoked("models")
    settings = Settings(model=path, gpu=0, weights="16bit")
    held = allocations(monkeypatch)
    with caplog.at_level("INFO"):
        engine = build_engine(settings, open_model(settings))
    with closing(engine):
        runner = engine._runner
        assert isinstance(runner, CudaRunner)
        memory, slots, stats, taken = runner.memory, runner.slots, engine.stats, sum(held.values())

    said = planned["memory"]
    assert {name: checked[name] for name in said} == said
    shared = ("weights", "weights_in", "cache_tokens", "sequences", "rate")
    assert [listed[name] for name in shared] == [said[name] for name in shared]
    assert (said["weights"], said["states"], said["slots"]) == (memory.weights, memory.states.bytes, slots)
    assert (stats.sequences, stats.pages) == (slots, memory.kv_pages)
    assert (slots < GPU.sequences, said["states"] > 0) == (states, states)
    assert states or memory.kv_pages * PAGE < slots * stats.context
    assert abs(memory.workspace - said["workspace"]) < PIECES
    page = page_bytes(open_model(settings).spec)
    cache = said["cache_tokens"] // PAGE * page
    assert abs(said["weights"] + said["workspace"] + said["states"] + cache - taken) < PIECES
    assert abs(said["cache_tokens"] // PAGE - memory.kv_pages) <= -(-PIECES // page)
    (logged,) = (text for one in caplog.records if "has room for" in (text := one.getMessage()))
    assert numbers(logged) == pytest.approx(numbers(checked["found"]), rel=0.03)
