"""What the GPU runner takes and refuses, without a GPU: sizes of models, grids, memory, old cards."""

import re
from contextlib import closing
from dataclasses import fields, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from annotated_types import Le

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import Experts, FeedForward
from nightmill.worker.runners.base import IntArray, StepBatch, make_draws
from nightmill.worker.runners.gpu.activations import Activations
from nightmill.worker.runners.gpu.catalogue import check_spec
from nightmill.worker.runners.gpu.device.chosen import describe_device
from nightmill.worker.runners.gpu.device.device import Device, NoDeviceError
from nightmill.worker.runners.gpu.experts.combine import Combine
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.kv_format import KvFormat
from tests.support.cuda_runners import cuda_runner
from tests.support.ggufs import write_model
from tests.support.specs import GEMMAS, MIXTURES, dense_spec, mixture
from tests.unit.runners.recorded_cuda import AMPERE, HOPPER, RecordedDriver, record
from tests.unit.runners.recorded_steps import allocations, decode_all

pytestmark = pytest.mark.heavy  # kernels are compiled where nvcc is

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "models" / "nightmill-demo.gguf"
SLOTS, CONTEXT = 48, 128
FP8_WEIGHTS = Precision(weights=WeightsFormat.FP8)


def prefill_all(slots: int, pages: IntArray) -> StepBatch:
    """Two tokens of every second sequence: as many chunks as there can be in a step of `slots` tokens."""
    half = slots // 2
    everyone, starts = np.arange(half, dtype=np.int32), np.arange(half + 1, dtype=np.int32) * 2
    return StepBatch(
        tokens=np.ones(slots, dtype=np.int32), positions=np.tile(np.arange(2, dtype=np.int32), half),
        cache_rows=(pages[:half, :1] * 16 + np.arange(2, dtype=np.int32)).reshape(-1), sequence_starts=starts,
        context_lengths=np.full(half, 2, dtype=np.int32), page_tables=pages[:half, :1],
        slots=everyone, draws=make_draws(starts[1:] - 1, everyone, np.full_like(everyone, 2)), drawn=0,
    )  # fmt: skip


@pytest.mark.parametrize("heads", [(2, 1, 64), (16, 1, 64), (4, 1, 40)], ids=str)
def test_the_most_sequences_that_settings_allow_fit_the_grid_of_every_launch(
    driver: RecordedDriver, heads: tuple[int, int, int], tmp_path: Path
) -> None:
    """A grid has 65,535 rows at most, which the driver that records holds every launch to."""
    (slots,) = (one.le for one in Settings.model_fields["max_sequences"].metadata if isinstance(one, Le))
    assert isinstance(slots, int)
    options: dict[str, Any] = {"heads": heads[0], "kv_heads": heads[1], "head_dim": heads[2], "width": 64}
    file = GgufFile.open(write_model(tmp_path / "wide.gguf", layers=1, **options))
    spec = read_spec(file)
    pages = np.arange(2 * slots, dtype=np.int32).reshape(slots, 2)
    runner = cuda_runner(
        file, spec, slots=slots, context=32, kv_pages=2 * slots, max_tokens=slots, tune=False, graphs=False
    )
    with closing(runner):
        runner.launch(prefill_all(slots, pages))
        runner.launch(decode_all(slots, pages))
        assert [len(runner.collect().tokens) for _ in range(2)] == [slots // 2, slots]  # type: ignore[union-attr]
    assert sum(count for name, count in driver.launches.items() if "attention" in name) == 2
    name = runner.arithmetic
    assert (name.runner, name.device, name.weights, name.model) == (
        "cuda",
        runner.device.name,
        "f16",
        file.digest()[:16],
    )
    assert re.fullmatch(r"[0-9a-f]{16}, nvcc \d+\.[\d.]+, cuBLASLt 130100", name.kernels)


def test_more_sequences_than_a_grid_has_rows_are_refused(hopper: RecordedDriver) -> None:
    file = GgufFile.open(MODEL)
    with pytest.raises(RunnerError, match=r"70,000 sequences .* a GPU takes 65,535: lower --max-sequences"):
        cuda_runner(file, read_spec(file), slots=70_000, context=32, max_tokens=70_000)


def test_the_memory_plan_covers_all_that_is_taken_and_little_more(
    driver: RecordedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = allocations(monkeypatch)
    file = GgufFile.open(MODEL)
    kv = KvFormat.FP8 if driver.capability == HOPPER else KvFormat.ELEMENT  # which takes more, and less
    options = {"slots": SLOTS, "context": CONTEXT, "kv_pages": 64, "precision": Precision(kv=kv)}
    with closing(cuda_runner(file, read_spec(file), tune=False, graphs=False, **options)) as runner:  # type: ignore[arg-type]
        plan = runner.memory
        planned = plan.weights + plan.workspace + plan.cache
        assert 0 <= planned - sum(taken.values()) < 64 << 10


def test_only_buffers_that_are_declared_to_share_memory_do(hopper: RecordedDriver) -> None:
    with Device() as device:
        at = Activations.allocate(device, dense_spec(layers=2), max_tokens=700, max_draws=1000)
        buffers = {field.name: getattr(at, field.name) for field in fields(Activations)}
        buffers = {name: buffer for name, buffer in buffers.items() if buffer.bytes}
        sharing = {
            (one, other)
            for (one, first), (other, second) in permutations(buffers.items(), 2)
            if first.address <= second.address < first.address + first.bytes
        }
        declared = {("qkv", "mixed_drawing"), ("tokens", "no_rows"), ("normed", "entering")}
        assert sharing == declared | {pair[::-1] for pair in declared}


REFUSED = {
    "a width of 1001": {"width": 1001},
    "an FFN width of 4865": {"ffn_width": 4865},
    "a head size of 258": {"head_dim": 258},
    "KV heads of 12 elements": {"heads": 2, "kv_heads": 1, "head_dim": 12},
    "129 query heads": {"heads": 129, "kv_heads": 1},
}


@pytest.mark.parametrize("problem", REFUSED)
def test_a_model_that_no_kernel_takes_is_refused_with_the_size(problem: str) -> None:
    with pytest.raises(RunnerError, match=f"do not take {problem}.*--reference"):
        check_spec(dense_spec(**REFUSED[problem]))  # type: ignore[arg-type]


def test_branches_of_rows_that_registers_do_not_hold_are_refused() -> None:
    wide = replace(GEMMAS["keys as values, experts beside"], width=4104)
    assert Combine.refusal(replace(wide, width=4096)) is None
    assert Combine.refusal(replace(MIXTURES["experts and a shared one"], width=4104)) is None
    with pytest.raises(RunnerError, match=r"beside a dense network at a width of 4,104 \(up to 4,096\)"):
        check_spec(wide)


def test_fp8_weights_are_refused_where_nothing_multiplies_them(
    monkeypatch: pytest.MonkeyPatch, cubins: Path
) -> None:
    record(AMPERE, monkeypatch, cubins)
    file = GgufFile.open(MODEL)
    with pytest.raises(RunnerError, match=r"FP8 weights need .* 8\.9 .* another --weights"):
        cuda_runner(file, read_spec(file), slots=1, precision=FP8_WEIGHTS)
    with pytest.raises(RunnerError, match=r"FP8 weights do not take an FFN width of 200 .*another --weights"):
        check_spec(dense_spec(ffn_width=200), FP8_WEIGHTS)
    with pytest.raises(RunnerError, match=r"an FFN width of 65552 \(multiples of 16, up to 65,536\)"):
        check_spec(dense_spec(ffn_width=65_552), FP8_WEIGHTS)
    experts = Experts(count=4, used=2, width=48, shared=FeedForward(width=40))
    with pytest.raises(
        RunnerError, match=r"do not take a shared expert of 40 \(multiples of 16, up to 65,536\)"
    ):
        check_spec(mixture(experts), FP8_WEIGHTS)
    with pytest.raises(RunnerError, match=r"do not take an FFN width of 40 \(multiples of 16"):
        check_spec(mixture(replace(experts, width=40, shared=None)), FP8_WEIGHTS)


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (6, 1)])
def test_a_gpu_that_is_too_old_is_refused_in_a_sentence(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, cubins: Path
) -> None:
    record(capability, monkeypatch, cubins)
    sentence = rf"GPU 0 \(recorded\) has compute capability {capability[0]}\.{capability[1]}; .*--reference"
    for refused in (Device, describe_device):
        with pytest.raises(NoDeviceError, match=sentence):
            refused()
