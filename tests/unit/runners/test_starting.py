"""The steps in which a runner on a GPU starts are reported before they begin."""

import re
import sys
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from nightmill.worker.assembly.engine import import_gpu_runner
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.gpu import arithmetic, self_test
from nightmill.worker.runners.gpu.device.functions import bindings
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.self_test import CheckedProduct
from nightmill.worker.runners.starting import SelfTestError, StartStep
from tests.support.cuda_runners import cuda_runner
from tests.unit.runners.recorded_cuda import RecordedDriver, install_uncompiled

MODEL = Path(__file__).parents[3] / "models" / "nightmill-demo.gguf"
HOPPER = (9, 0)
IN_FILE = Precision(weights=WeightsFormat.FILE)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RecordedDriver:
    """CUDA that computes nothing, and kernels that nobody compiles."""
    return install_uncompiled(monkeypatch, tmp_path, HOPPER)


@pytest.mark.usefixtures("driver")
def test_each_step_of_a_start_is_reported_before_it_begins() -> None:
    told: list[tuple[StartStep, str]] = []
    file = GgufFile.open(MODEL)
    runner = cuda_runner(
        file, read_spec(file), slots=8, context=128, kv_pages=64, max_tokens=2048, precision=IN_FILE,
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
def test_what_is_done_ahead_of_a_start_takes_nothing_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(arithmetic, "compiler_release", lambda: asked.append("nvcc") or "13")
    monkeypatch.setattr(arithmetic, "library_release", lambda: asked.append("cuBLASLt") or "1")
    for module in ("pycuda.driver", "cuda.bindings.driver", "nvmath.bindings.cublasLt"):
        for name in list(vars(sys.modules[module])):
            if not name.startswith("__"):
                monkeypatch.delattr(sys.modules[module], name)
    import_gpu_runner()
    assert asked == ["nvcc", "cuBLASLt"]
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)  # where it is not installed
    import_gpu_runner()
    assert len(asked) == 2


@pytest.mark.usefixtures("driver")
def test_nobody_has_to_listen() -> None:
    file = GgufFile.open(MODEL)
    options = {"slots": 4, "context": 128, "kv_pages": 64, "tune": False, "graphs": False}
    with closing(cuda_runner(file, read_spec(file), **options)) as runner:  # type: ignore[arg-type]
        assert runner.max_tokens


@pytest.mark.parametrize("loads", [True, False])
def test_a_step_of_each_size_is_run_before_its_graphs_and_loads_what_they_need(
    driver: RecordedDriver, monkeypatch: pytest.MonkeyPatch, loads: bool
) -> None:
    if not loads:  # a driver that cannot be asked to
        monkeypatch.setattr(bindings(), "cuFuncLoad", too_old)
    file = GgufFile.open(MODEL)
    options: dict[str, Any] = {"context": 4096, "kv_pages": 64, "max_tokens": 2048, "tune": False}
    with closing(cuda_runner(file, read_spec(file), slots=64, **options)) as runner:
        assert runner._graphs is not None
        graphs, sizes = runner._graphs.usual, {size for size, _ in runner._graphs.usual}
        assert len(graphs) > len(sizes) > 10
        assert driver.opened["sample"] == len(sizes if loads else graphs)
        assert driver.launches["sample"] == driver.opened["sample"] + len(graphs)
        assert driver.unloaded == set()


def too_old(kernel: Any) -> None:
    """What the bindings do if the driver lacks a function."""
    raise RuntimeError('Function "cuFuncLoad" not found')


def started(driver: RecordedDriver, precision: Precision) -> list[str]:
    """Names of the kernels that a start launches, its news of the self-test before them."""
    told: list[str] = []
    file = GgufFile.open(MODEL)
    runner = cuda_runner(
        file, read_spec(file), slots=8, context=128, kv_pages=64, max_tokens=512, precision=precision,
        progress=lambda step, news: told.append(news) if step is StartStep.SELF_TEST else None,
    )  # fmt: skip
    runner.close()
    return [*filter(None, told), *driver.launches]


def test_products_that_take_packed_or_fp8_weights_are_tested(driver: RecordedDriver) -> None:
    for precision in (IN_FILE, Precision(weights=WeightsFormat.FP8)):
        told = [line for line in started(driver, precision) if line.endswith(" rows")]
        parts = ("qkv", "attn_output", "gate_up", "ffn_down")
        tested = parts if precision.weights is WeightsFormat.FP8 else (*parts, "head")
        for part in tested:
            assert any(line.startswith(part) and line.endswith(", 1 rows") for line in told), part
        fused = [line for line in told if line.startswith("rotated qkv")]
        assert bool(fused) == (precision.weights is WeightsFormat.FILE)
    assert not [line for line in started(driver, Precision()) if line.endswith(" rows")]


def test_plain_products_launch_no_kernel_that_takes_packed_weights(driver: RecordedDriver) -> None:
    plain = replace(IN_FILE, plain_products=True)
    names = started(driver, plain)
    packed = re.compile(r"^(product|float|swiglu|residual|qkv)(_\d+){3,}$")
    by_elements = {name for name in driver.launches if name.startswith("unpack_")}
    assert by_elements == {"unpack_Q8_0"}
    tiles_of_elements = re.compile(r"^(product|swiglu|residual|qkv)(_\d+){5,6}$")
    assert {name for name in driver.launches if packed.search(name)} <= {
        name for name in driver.launches if tiles_of_elements.search(name)
    }
    assert not [name for name in driver.launches if name.startswith("packed_")]
    assert any(line.startswith("qkv of layer 0") for line in names)
    assert not any(line.startswith("rotated") for line in names)
    assert plain.weights_name == IN_FILE.weights_name, "they have the same bits"
    assert "plain products" in plain.words


def test_a_runner_whose_products_are_wrong_is_not_built(
    driver: RecordedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(one: CheckedProduct, rows: int, *results: Any) -> None:
        raise SelfTestError(f"{one.name} is wrong for {rows} rows")

    monkeypatch.setattr(self_test, "_compare", wrong)
    with pytest.raises(SelfTestError, match=r"qkv of layer 0.* is wrong for 1 rows"):
        started(driver, IN_FILE)
    assert started(driver, Precision())
