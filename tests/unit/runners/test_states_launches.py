"""The launches of models whose layers hold states, on a driver that computes nothing."""

from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import GatedDeltaNet, Mamba2, ShortConv
from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from tests.support.cuda_runners import cuda_runner
from tests.support.driving import Chunk, Pages
from tests.support.family_cases import file_of
from tests.support.hybrid_cases import GPU_HYBRID_FILES
from tests.support.hybrid_shapes import HYBRID_SHAPES
from tests.support.quantised_models import write
from tests.support.thinning import thinned
from tests.tiny import FILES, unpacked
from tests.unit.runners.recorded_cuda import RecordedDriver
from tests.unit.runners.recorded_steps import benchmarked, take_steps, two_sequences

pytestmark = pytest.mark.heavy  # kernels are compiled where nvcc is

CONTEXT = 256


@pytest.mark.parametrize("name", GPU_HYBRID_FILES)
def test_every_family_is_launched_as_it_was_compiled(
    driver: RecordedDriver,
    name: str,
    tmp_path: Path,
) -> None:
    file = file_of(tmp_path, *GPU_HYBRID_FILES[name])
    options = {"slots": 2, "context": CONTEXT, "kv_pages": 16, "max_tokens": 128}
    spec = read_spec(file)
    with closing(cuda_runner(file, spec, **options)) as runner:  # type: ignore[arg-type]
        take_steps(runner, Pages(2, CONTEXT // 16), two_sequences(CONTEXT, 64))
    assert driver.launches.keys() - {"library"} <= driver.checked
    plain = all(one.residual_scale == 1 and one.mixer and one.feed_forward.width for one in spec.layers)
    assert ("few_input_1" in driver.launches) == plain


@pytest.mark.parametrize(
    ("name", "weights"), thinned(product(FILES, (WeightsFormat.FILE, WeightsFormat.FP8)), 3)
)
def test_weights_in_all_formats_are_launched_as_they_were_compiled(
    hopper: RecordedDriver, name: str, weights: WeightsFormat, tmp_path: Path
) -> None:
    """Controls are elements in any; a self-test looks at the products of the others."""
    file = GgufFile.open(unpacked(name, tmp_path))
    spec, tokens = read_spec(file), [1] * CONTEXT
    options = {"slots": 2, "context": CONTEXT, "kv_pages": 32, "max_tokens": 256, "tune": False}
    with closing(cuda_runner(file, spec, precision=Precision(weights=weights), **options)) as runner:
        chunks = ((0, 128, False), (128, 70, False), (198, 1, True))
        steps = [[Chunk(0, tokens, start, length, 1, drawn)] for start, length, drawn in chunks]
        take_steps(runner, Pages(2, CONTEXT // 16), steps)
        layer = runner._model.layers[0].weights
        kept = {"lfm2": Format.F16, "qwen35": Format.Q8_0 if "q8_0" in name else Format.F16}[spec.family]
        expected = Format.FP8 if weights is WeightsFormat.FP8 else kept
        assert layer.mixer_input.format is layer.attn_output.format is expected
        assert layer.mixer_controls.format is Format.F16
    assert hopper.launches.keys() - {"library"} <= hopper.checked


@pytest.mark.parametrize("name", thinned(["qwen3.5-0.8b", "nemotron-nano-9b-v2", "lfm2-1.2b"], 3, 2))
def test_benchmarks_count_states(
    hopper: RecordedDriver, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Nothing is computed, but all operations have a line, and those with states their bytes."""
    whole = HYBRID_SHAPES[name]
    state = (16, 2, 32, 32) if whole.state[0] else whole.state
    shape = replace(
        whole, layers=8, width=256, ffn=512, vocab=512, heads=(4, 2, whole.heads[2]), state=state,
        attends=(3, 7), context=2048,
    )  # fmt: skip
    path = str(write(tmp_path / "m.gguf", shape, "F16", pool_bytes=1 << 19))
    steps, printed = benchmarked(path, tmp_path / "report.json", monkeypatch, capsys)
    states = 2 * shape.file()[2].state_bytes
    for step, sequences in (("decode 4", 4), ("prefill", 2)):
        found = steps[step]
        (mixer,) = (found[one.title] for one in (GatedDeltaNet, Mamba2, ShortConv) if one.title in found)
        assert mixer["bytes"] > sequences * states
        counted = {one for one, line in found.items() if line["bytes"]}
        assert {"mixer input", "output", "down", "head", "qkv"} <= counted
        assert counted >= {one for one in found if one not in ("step", "gather_tokens", "scale_logits")}
    assert all(one["slots"] in (1, 128) for one in printed)
