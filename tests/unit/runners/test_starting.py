"""The steps in which a runner on a GPU starts are reported before they begin."""

from collections.abc import Iterator
from contextlib import closing
from itertools import groupby
from pathlib import Path

import pytest

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.gpu.device import compiler
from nightmill.worker.runners.gpu.numbers import Numbers, WeightNumbers
from nightmill.worker.runners.gpu.runner import CudaRunner
from nightmill.worker.runners.starting import StartStep
from tests.unit.runners.recorded_cuda import RecordedDriver

MODEL = Path(__file__).parents[3] / "models" / "nightmill-demo.gguf"
HOPPER = (9, 0)
IN_FILE = Numbers(weights=WeightNumbers.FILE)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RecordedDriver]:
    """CUDA that computes nothing, and kernels that nobody compiles."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recorded = RecordedDriver(HOPPER)
    recorded.install(monkeypatch)
    monkeypatch.setattr(compiler, "find_nvcc", lambda: "")
    monkeypatch.setattr(compiler, "compiler_version", lambda nvcc: "")
    yield recorded


@pytest.mark.usefixtures("driver")
def test_each_step_of_a_start_is_reported_before_it_begins() -> None:
    told: list[tuple[StartStep, str]] = []
    file = GgufFile.open(MODEL)
    runner = CudaRunner(
        file, read_spec(file), slots=8, context=128, kv_blocks=64, max_tokens=2048, numbers=IN_FILE,
        progress=lambda step, news: told.append((step, news)),
    )  # fmt: skip
    runner.close()
    steps = [step for step, _ in groupby(step for step, _ in told)]
    first = [StartStep.COMPILING, StartStep.STARTING, StartStep.LOADING, StartStep.STARTING]
    assert steps[: len(first)] == first
    assert steps[len(first) : len(first) + 3] == [StartStep.TUNING, StartStep.CAPTURING, StartStep.TUNING]
    assert (StartStep.TUNING, "2,048 rows") in told
    for size in (1, 2, 4, 8):
        assert (StartStep.TUNING, f"{size} rows") in told
        assert (StartStep.CAPTURING, f"{size} sequences") in told
    compiled = [news for step, news in told if step is StartStep.COMPILING and news]
    assert any("packed_gemm.cu" in news for news in compiled)


@pytest.mark.usefixtures("driver")
def test_nobody_has_to_listen() -> None:
    file = GgufFile.open(MODEL)
    options = {"slots": 4, "context": 128, "kv_blocks": 64, "tune": False, "graphs": False}
    with closing(CudaRunner(file, read_spec(file), **options)) as runner:  # type: ignore[arg-type]
        assert runner.max_tokens
