"""What a worker says of itself, and how that is shown."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nightmill.jobs.base.contract import WorkerState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.reply.job import Worker
from nightmill.worker.commands.check import _serving
from nightmill.worker.engine.stats import EngineStats
from nightmill.worker.runners.gpu.device.nvml import GpuProbe
from nightmill.worker.service.load import Load
from tests.unit.engine.scripted import ARITHMETIC

PLAIN = "plain products, slower than usual: the product qkv is wrong"


def read(note: str, stats: EngineStats) -> dict[str, Any]:
    engine = SimpleNamespace(stats=stats, note=note, arithmetic=ARITHMETIC)
    service: Any = SimpleNamespace(engine=engine, in_flight={})
    return Load(service, GpuProbe(None), Settings(model="models/a.gguf")).read()


@pytest.fixture
def stats() -> EngineStats:
    return EngineStats(**dict.fromkeys(EngineStats.__dataclass_fields__, 0))  # type: ignore[arg-type]


def worker(detail: str | None, stats: dict[str, Any] | None) -> Worker:
    now = datetime.now(UTC)
    return Worker("id", "host", 1, None, "model", WorkerState.READY, now, now, detail, stats)


def test_an_engine_that_does_not_run_as_usual_is_noted(stats: EngineStats) -> None:
    assert "note" not in read("", stats)
    assert read("", stats)["arithmetic"] == str(ARITHMETIC)
    told = read(PLAIN, stats)
    assert told["note"] == PLAIN
    assert worker(None, told).note == PLAIN
    assert _serving(worker(None, told)) == f"model ({PLAIN})"


def test_it_says_what_it_serves(stats: EngineStats) -> None:
    serving = worker(None, read("", replace(stats, context=512)))
    assert (serving.context_length, serving.arithmetic) == (512, str(ARITHMETIC))
    assert serving.model_file == str(Path("models/a.gguf").absolute())
    assert serving.tool_format == "auto"
    older = worker(None, {"context": True, "model_file": 5})  # another version's, or not understood
    assert older.context_length is older.arithmetic is older.model_file is None


def test_what_a_worker_does_goes_before_its_note() -> None:
    assert worker("loading the model", {"note": PLAIN}).note == "loading the model"
    assert worker(None, None).note is worker(None, {}).note is None
    assert _serving(worker(None, {})) == "model"
