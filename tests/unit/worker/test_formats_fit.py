"""What formats of weights make of a GPU's memory, by the plan of a worker."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.worker.assembly.engine import build_engine
from nightmill.worker.assembly.forecast import CARDS, GIB, Forecast, forecast
from nightmill.worker.assembly.model import open_model
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.kv_cache import PAGE, page_bytes
from nightmill.worker.runners.gpu.memory import MemoryPlan, RunnerSizes, StatePlan
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.weights.choice import choose_weights
from nightmill.worker.runners.kv_format import KvFormat
from nightmill.worker.runners.reference import ReferenceRunner
from tests.support.ggufs import write_model
from tests.support.hybrid_shapes import HYBRID_SHAPES
from tests.support.quantised_models import kinds_of
from tests.unit.worker.test_recommended_models import qwen

IN_FILE = Precision(weights=WeightsFormat.FILE)
BYTES_OF_A_FILE = {"Q4_K_M": 4.68e9, "Q8_0": 8.10e9}  # of Qwen2.5-7B-Instruct's files on the Hub


def of_type(name: str, size: str = "7B") -> ModelSpec:
    spec = qwen(size)
    return replace(spec, tensor_types={tensor: kind.name for tensor, kind in kinds_of(spec, name).items()})


def on_80_gb(name: str, precision: Precision, **settings: object) -> Forecast:
    return forecast(of_type(name), CARDS[-1], Settings.model_validate(settings), precision)


@pytest.mark.parametrize("name", BYTES_OF_A_FILE)
def test_weights_as_in_the_file_take_what_the_file_takes(name: str) -> None:
    assert on_80_gb(name, IN_FILE).weights == pytest.approx(BYTES_OF_A_FILE[name], rel=0.03)
    assert on_80_gb(name, Precision()).weights == pytest.approx(2 * 7.616e9, rel=0.01)


def test_a_7b_in_four_bits_runs_in_8_gib_with_16_sequences_of_2048() -> None:
    found = on_80_gb("Q4_K_M", IN_FILE, gpu_memory="8GiB", max_sequences=16, context=2048)
    assert found.sequences[2048] == 16
    assert found.weights + found.workspace < 6.25 * GIB


def test_fewer_bytes_are_more_sequences_and_more_speed() -> None:
    small, large = on_80_gb("Q4_K_M", IN_FILE), on_80_gb("Q4_K_M", Precision())
    assert small.sequences[1024] > large.sequences[1024]
    for card, gain in ((CARDS[1], 2), (CARDS[2], 1.2)):  # large cards are not as fast as their memory
        alone = [
            forecast(of_type("Q4_K_M"), card, Settings(max_sequences=1), precision).rate
            for precision in (IN_FILE, Precision())
        ]
        assert alone[0] > gain * alone[1]


@pytest.mark.parametrize(
    ("name", "gib", "kept"),
    [
        ("Q4_K_M", 80, "16bit"),
        ("Q4_K_M", 24, "file"),
        ("Q8_0", 30, "file"),
        ("Q8_0", 36, "16bit"),
        ("F16", 24, "16bit"),
    ],
)
def test_by_itself_it_is_16_bits_unless_they_take_more_than_half_of_the_memory(
    name: str, gib: int, kept: str
) -> None:
    precision = Precision(weights=WeightsFormat.AUTO)
    found, why = choose_weights(of_type(name), precision, int(0.9 * gib * GIB))
    assert found == Precision(weights=WeightsFormat(kept))
    assert why.startswith(found.weights.words)
    assert (
        forecast(of_type(name), CARDS[-1], Settings(gpu_memory=int(0.9 * gib * GIB)), precision).weights_in
        == kept
    )


def test_what_was_asked_for_stays() -> None:
    for kept in (WeightsFormat.FILE, WeightsFormat.ELEMENT, WeightsFormat.FP8):
        precision = Precision(weights=kept)
        assert choose_weights(of_type("Q4_K_M"), precision, 1) == (precision, f"{kept.words}, as asked for")


def test_a_worker_s_log_says_what_the_choice_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def on_a_gpu(file: GgufFile, spec: ModelSpec, sizes: RunnerSizes, **options: Any) -> Any:
        runner = ReferenceRunner(file, spec, kv_pages=64, page_size=PAGE, slots=sizes.slots)
        device = SimpleNamespace(peaks=lambda: CARDS[-1].peaks, multiprocessors=132)
        cache = 65 * page_bytes(spec, KvFormat.FP8)
        memory = MemoryPlan(1 << 20, 0, cache, 64, 1 << 30, 1 << 30, StatePlan(sizes.slots))
        precision = replace(options["precision"], weights=WeightsFormat.ELEMENT)
        vars(runner).update(device=device, memory=memory, precision=precision, max_tokens=512)
        return runner

    module = SimpleNamespace(CudaRunner=on_a_gpu)
    monkeypatch.setitem(sys.modules, "nightmill.worker.runners.gpu.runner", module)
    settings = Settings(
        model=write_model(tmp_path / "model.gguf", layers=1), gpu=0, max_sequences=8, kv="fp8"
    )
    with caplog.at_level("INFO"):
        build_engine(settings, open_model(settings))
    assert re.search(
        r"a KV cache in FP8 has room for 2 sequences of 512 tokens at once; about [\d,]+ output tokens/s",
        caplog.text,
    )


def test_states_are_counted_and_choose_how_many_sequences_run() -> None:
    """Those of a 9B take 53 MB each: on 80 GB 256 of 4,096 tokens have room, but not 2,048 of 1,024."""
    spec = HYBRID_SHAPES["qwen3.5-9b"].file()[2]
    found = forecast(spec, CARDS[-1], Settings(max_sequences=256))
    assert found.sequences[4096] == 256
    assert found.states == pytest.approx((256 + 64) * spec.state_bytes, rel=0.001)
    assert f"{found.states / GIB:.2f} of states" in str(found)
    most = forecast(spec, CARDS[-1], Settings())
    running = most.sequences[1024]
    assert 400 < running < 700
    assert most.states == pytest.approx(1.25 * running * spec.state_bytes, rel=0.02)
    assert most.cache_tokens >= 1024 * running
