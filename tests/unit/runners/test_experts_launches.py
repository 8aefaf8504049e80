"""The launches of models with mixtures of experts, on a driver that computes nothing."""

from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import Experts
from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from tests.support.cuda_runners import cuda_runner
from tests.support.driving import Pages
from tests.support.expert_cases import GPU_EXPERT_FILES
from tests.support.expert_shapes import EXPERT_SHAPES
from tests.support.family_cases import file_of
from tests.support.quantised_models import write
from tests.support.thinning import thinned
from tests.tiny import unpacked
from tests.unit.runners.recorded_cuda import RecordedDriver
from tests.unit.runners.recorded_steps import benchmarked, take_steps, two_sequences

pytestmark = pytest.mark.heavy  # kernels are compiled where nvcc is

CONTEXT = 256
FAMILIES = [
    name
    for name in ("qwen3moe", "granitemoe", "nemotron_h_moe", "gpt-oss", "deepseek2", "gemma4, with experts")
    if name in GPU_EXPERT_FILES
]
"""Those that differ in what is launched around experts."""


def launch(file: GgufFile, weights: WeightsFormat) -> dict[str, set[Format]]:
    """Steps of prompts and of drawn tokens; the formats of matrices of experts, and of shared ones."""
    options = {"slots": 2, "context": CONTEXT, "kv_pages": 32, "max_tokens": 128}
    runner = cuda_runner(file, read_spec(file), precision=Precision(weights=weights), **options)
    with closing(runner):
        take_steps(runner, Pages(2, CONTEXT // 16), two_sequences(CONTEXT, 64))
        own = [one.weights.experts for one in runner._model.layers if one.weights.experts is not None]
        return {
            "experts": {one.format for mixture in own for one in (mixture.gate_up, mixture.down)},
            "shared": {mixture.shared_down.format for mixture in own if mixture.shared_down.rows},
            "routers": {mixture.router.format for mixture in own},
        }


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_launched_as_it_was_compiled(
    driver: RecordedDriver, name: str, tmp_path: Path
) -> None:
    launch(file_of(tmp_path, *GPU_EXPERT_FILES[name]), WeightsFormat.ELEMENT)
    assert driver.launches.keys() - {"library"} <= driver.checked
    assert driver.launches.keys() >= {"route_few", "experts_floats_1", "combine_1"}
    layers = GPU_EXPERT_FILES[name][1].layers[:-1]  # the last one has the rows that draw alone
    if any(isinstance(layer.feed_forward, Experts) for layer in layers):
        assert driver.launches.keys() >= {"choose", "place_tokens"}


@pytest.mark.parametrize(
    ("name", "weights"),
    thinned(product(("qwen3moe-q8_0", "qwen35moe-q8_0"), (WeightsFormat.FP8, WeightsFormat.FILE)), 3),
)
def test_weights_in_all_formats_are_launched_as_they_were_compiled(
    hopper: RecordedDriver, name: str, weights: WeightsFormat, tmp_path: Path
) -> None:
    """Routers are elements in any; FP8 is multiplied as it is."""
    found = launch(GgufFile.open(unpacked(name, tmp_path)), weights)
    kept = Format.FP8 if weights is WeightsFormat.FP8 else Format.Q8_0
    assert found["experts"] == {kept}
    assert found["shared"] == ({kept} if "35" in name else set())
    assert found["routers"] == {Format.F16}
    native = {f"gemm_{product}_64" for product in ("two", "floats")}
    assert hopper.launches.keys() & native == (native if kept is Format.FP8 else set())
    assert not any(launched.startswith(("hopper_floats", "experts_")) for launched in hopper.launches)
    assert hopper.launches.keys() - {"library"} <= hopper.checked


@pytest.mark.slow  # takes its turn: one commit of four
def test_benchmarks_count_experts(
    hopper: RecordedDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Nothing is computed, but all operations have a line, and those of experts their bytes."""
    shape = replace(
        EXPERT_SHAPES["qwen3-30b-a3b"], layers=8, width=256, vocab=512, heads=(4, 2, 64), experts=(8, 2, 256),
        context=2048,
    )  # fmt: skip
    path = str(write(tmp_path / "m.gguf", shape, "Q4_K_M", pool_bytes=1 << 19))
    options = ("--weights", "file")
    steps, printed = benchmarked(path, tmp_path / "report.json", monkeypatch, capsys, *options)
    for step, touched in (("decode 4", 1 - 0.75**4), ("prefill", 1.0)):
        found = steps[step]
        assert {"router", "route", "experts gate_up", "experts down", "combine"} <= found.keys()
        packed = 8 * 8 * 256 * 512 // 256 * 144
        assert found["experts gate_up"]["bytes"] >= touched * packed
    assert {one["weights"] for one in printed} == {"file"}
