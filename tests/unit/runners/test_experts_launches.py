"""The launches of models with mixtures of experts, on a driver that computes nothing."""

import json
import runpy
import sys
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
from tests.support.driving import Chunk, Pages
from tests.support.expert_cases import GPU_EXPERT_FILES
from tests.support.expert_shapes import EXPERT_SHAPES
from tests.support.family_cases import file_of
from tests.support.quantised_models import write
from tests.support.thinning import thinned
from tests.tiny import unpacked
from tests.unit.runners.recorded_cuda import RecordedDriver

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
    tokens, pages = [1] * CONTEXT, Pages(2, CONTEXT // 16)
    steps = [
        [Chunk(0, tokens, 0, 64), Chunk(1, tokens, 0, 9)],
        [Chunk(1, tokens, 9, 1, 1, True), Chunk(0, tokens, 64, 30)],
        [Chunk(1, tokens, 10, 1, 1, True), Chunk(0, tokens, 94, 1, 1, True)],
    ]
    options = {"slots": 2, "context": CONTEXT, "kv_pages": 32, "max_tokens": 128}
    runner = cuda_runner(file, read_spec(file), precision=Precision(weights=weights), **options)
    with closing(runner):
        for step in steps:
            runner.launch(pages.batch(step, admit=step is steps[0], kinds=runner.page_kinds))
            assert runner.collect() is not None
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
    """Routers are elements in any."""
    found = launch(GgufFile.open(unpacked(name, tmp_path)), weights)
    kept = Format.FP8 if weights is WeightsFormat.FP8 else Format.Q8_0
    assert found["experts"] == {kept}
    assert found["shared"] == ({kept} if "35" in name else set())
    assert found["routers"] == {Format.F16}
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
    report = tmp_path / "report.json"
    asked = ["--context", "64", "--batch", "4", "--prefill", "2048", "--weights", "file"]
    monkeypatch.setattr(sys, "argv", ["budget", path, *asked, "--json", str(report)])
    runpy.run_module("benchmarks.budget", run_name="__main__")
    lines = json.loads(report.read_text())
    for step, touched in (("decode 4", 1 - 0.75**4), ("prefill", 1.0)):
        found = {line["operation"]: line for line in lines[step]}
        assert {"router", "route", "experts gate_up", "experts down", "combine"} <= found.keys()
        packed = 8 * 8 * 256 * 512 // 256 * 144
        assert found["experts gate_up"]["bytes"] >= touched * packed
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["engine", path, "single", "prefill128", "--quick", "--repeat", "1"])
    runpy.run_module("benchmarks.engine", run_name="__main__")
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["workload"] for one in printed] == ["single", "prefill128"]
    assert all(one["weights"] == "file" and one["of_limit"] > 0 for one in printed)
