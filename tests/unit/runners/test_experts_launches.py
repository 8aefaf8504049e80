"""The launches of models with mixtures of experts, on a driver that computes nothing."""

from contextlib import closing
from pathlib import Path

import pytest

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from tests.support.cuda_runners import cuda_runner
from tests.support.driving import Chunk, Pages
from tests.support.expert_cases import GPU_EXPERT_FILES
from tests.support.family_cases import file_of
from tests.tiny import unpacked
from tests.unit.runners.recorded_cuda import RecordedDriver

pytestmark = pytest.mark.heavy  # kernels are compiled where nvcc is

CONTEXT = 256
FAMILIES = ["qwen3moe", "granitemoe", "nemotron_h_moe"]
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
            runner.launch(pages.batch(step, admit=step is steps[0]))
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
    assert driver.launches.keys() >= {"choose", "place_tokens", "experts_floats_1", "combine_1"}


@pytest.mark.parametrize("weights", [WeightsFormat.FILE, WeightsFormat.FP8])
@pytest.mark.parametrize("name", ["qwen3moe-q8_0", "qwen35moe-q8_0"])
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
