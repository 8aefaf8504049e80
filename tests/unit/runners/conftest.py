"""Drivers that record launches (`recorded_cuda`), with the bundled model's kernels compiled once."""

import fcntl
from pathlib import Path

import pytest

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.gpu.catalogue import sources_for
from nightmill.worker.runners.gpu.device.compiler import compile_all
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.precision import HALF
from tests.unit.runners.recorded_cuda import AMPERE, HOPPER, RecordedDriver, record
from tests.unit.runners.recorded_kernels import nvcc_is_there
from tests.unit.runners.reference_bench import MakeBench, bench_maker

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def cubins() -> Path:
    """With the bundled model's kernels in it: those of `make check`, or one test process compiles them."""
    directory = ROOT / "build" / "kernels"
    directory.mkdir(parents=True, exist_ok=True)
    if nvcc_is_there():
        spec = read_spec(GgufFile.open(ROOT / "models" / "nightmill-demo.gguf"))
        with (directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for capability in (HOPPER, AMPERE):
                with pytest.MonkeyPatch.context() as patch:
                    record(capability, patch, directory)
                    with Device() as device:
                        compile_all(
                            sources_for(spec, HALF, hopper=capability == HOPPER),
                            device.architecture,
                        )
    return directory


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, cubins: Path) -> RecordedDriver:
    return record(HOPPER, monkeypatch, cubins)


@pytest.fixture(params=[HOPPER, AMPERE], ids=["hopper", "ampere"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, cubins: Path) -> RecordedDriver:
    return record(request.param, monkeypatch, cubins)


@pytest.fixture
def make_bench(tmp_path: Path) -> MakeBench:
    return bench_maker(tmp_path)
