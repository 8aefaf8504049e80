"""The GPU runner's launches, without a GPU: against the compiled kernels where nvcc is."""

import fcntl
import random
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import numpy as np
import pytest
from annotated_types import Le

from nightmill.jobs.contract import GenerationParams
from nightmill.jobs.errors import RunnerError
from nightmill.jobs.settings import Settings
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.request import Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.base import FROM_SLOT, IntArray, StepBatch
from nightmill.worker.runners.gpu import compiler
from nightmill.worker.runners.gpu.catalogue import sources_for
from nightmill.worker.runners.gpu.compiler import compile_all
from nightmill.worker.runners.gpu.device import Device
from nightmill.worker.runners.gpu.few_rows import MAX_ROWS
from nightmill.worker.runners.gpu.gemm import Gemm, padded_rows
from nightmill.worker.runners.gpu.graphs import Graph
from nightmill.worker.runners.gpu.hopper import Kind
from nightmill.worker.runners.gpu.kernels import Kernels
from nightmill.worker.runners.gpu.runner import CudaRunner
from tests.ggufs import write_model
from tests.gpu.driving import Chunk, Pages
from tests.specs import dense_spec
from tests.unit.runners.recorded_cuda import RecordedDriver, nvcc_is_there

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "models" / "nightmill-demo.gguf"
HOPPER, AMPERE = (9, 0), (8, 0)
SLOTS, CONTEXT = 48, 128
ANYWHERE = {"embed", "gather_tokens", "gather_rows", "rms_norm_1", "sample", "sample_filtered", "library"}
ATTENTION = {"decode_attention_8_2", "decode_attention_8_4", "split_attention_8"}
PER_KIND = {
    HOPPER: {"hopper_attention", "few_qkv_1", "few_residual", "few_swiglu_1"},
    AMPERE: {"prefill_attention", "qkv_rope_write", "swiglu"},
}


def record(capability: tuple[int, int], patch: pytest.MonkeyPatch, cubins: Path) -> RecordedDriver:
    """cubins: of all test processes, since files appear there whole (`worker.runners.gpu.compiler`)."""
    patch.setenv("XDG_CACHE_HOME", str(cubins))
    recorded = RecordedDriver(capability)
    recorded.install(patch)
    return recorded


@pytest.fixture(scope="session")
def cubins() -> Path:
    """With the bundled model's kernels in it: those of `make check`, or one test process compiles them."""
    directory = ROOT / "build" / "kernels"
    directory.mkdir(parents=True, exist_ok=True)
    if nvcc_is_there():
        spec = read_spec(GgufFile.open(MODEL))
        with (directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for capability in (HOPPER, AMPERE):
                with pytest.MonkeyPatch.context() as patch:
                    record(capability, patch, directory)
                    with Device() as device:
                        compile_all(sources_for(spec, hopper=capability == HOPPER), device.architecture)
    return directory


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, cubins: Path) -> RecordedDriver:
    return record(HOPPER, monkeypatch, cubins)


@pytest.fixture(params=[HOPPER, AMPERE], ids=["hopper", "ampere"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, cubins: Path) -> RecordedDriver:
    return record(request.param, monkeypatch, cubins)


def test_steps_of_all_sizes_launch_kernels_as_they_were_compiled(driver: RecordedDriver) -> None:
    file = GgufFile.open(MODEL)
    spec = read_spec(file)
    runner = CudaRunner(
        file, spec, slots=SLOTS, context=CONTEXT, kv_blocks=SLOTS * CONTEXT // 16, max_tokens=2048
    )
    pages = Pages(SLOTS, CONTEXT // 16)
    tokens = [1] * CONTEXT
    prompts = [Chunk(slot, tokens, 0, 9 + slot) for slot in range(40)]
    runner.launch(pages.batch(prompts, admit=True))
    mixed = [Chunk(0, tokens, 9, 1, 1, True), Chunk(1, tokens, 10, 1, 1, True), Chunk(45, tokens, 0, 100)]
    runner.launch(pages.batch(mixed, admit=False))
    assert [len(runner.collect().tokens) for _ in range(2)] == [40, 3]  # type: ignore[union-attr]
    fed_back = [FROM_SLOT] * CONTEXT
    for count in (1, 3, MAX_ROWS + 1, 20, SLOTS):
        step = pages.batch([Chunk(slot, fed_back, 60, 1, 1, True) for slot in range(count)], admit=False)
        runner.launch(step)
        assert len(runner.collect().tokens) == count  # type: ignore[union-attr]
    expected = ANYWHERE | ATTENTION | PER_KIND[driver.capability]
    assert expected <= driver.launches.keys()
    assert driver.launches.keys() - {"library"} <= driver.checked
    runner.close()


class NoText:
    """Detokenising is not what is tested."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def test_nothing_is_captured_in_the_middle_of_a_night(
    driver: RecordedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and answers of many lengths, a few so long that contexts are cut; and all end one by one."""
    file = GgufFile.open(MODEL)
    context = 4200
    config = replace(read_spec(file), context_length=context)
    replayed: list[Graph] = []
    launch = Graph.launch

    def noted(graph: Graph) -> None:
        replayed.append(graph)
        launch(graph)

    with closing(CudaRunner(file, config, slots=SLOTS)) as runner:
        monkeypatch.setattr(Graph, "launch", noted)
        monkeypatch.setattr(Graph, "__init__", lambda *_: pytest.fail("captured late"))
        engine = Engine(
            runner, text_stream=NoText, eos_ids=frozenset(), context_length=context,
            max_sequences=SLOTS, token_budget=8192,
        )  # fmt: skip
        draw = random.Random(1)
        for number in range(3 * SLOTS):
            prompt = draw.randint(5, 4000 if number % 9 == 0 else 60)
            params = GenerationParams(max_tokens=draw.randint(1, 40), ignore_eos=True)
            engine.submit(Request(str(number), 1, (number, *[1] * prompt), params, seed=1))
        while engine.has_work:
            engine.step()
        assert len(replayed) > engine.stats.steps // 3
        used = [key for key, graph in runner._graphs.items() if graph in replayed]
        assert len(used) > len({size for size, _ in used})  # some sizes come with contexts cut and whole


def decode_all(slots: int, pages: IntArray) -> StepBatch:
    """A step of one token of each sequence, at its position 20."""
    everyone, at = np.arange(slots, dtype=np.int32), np.full(slots, 20, dtype=np.int32)
    return StepBatch(
        tokens=np.full(slots, FROM_SLOT, dtype=np.int32), positions=at, cache_rows=pages[:, 1] * 16 + 4,
        sequence_starts=np.arange(slots + 1, dtype=np.int32), context_lengths=at + 1, block_tables=pages,
        slots=everyone, sample_rows=everyone, sample_slots=everyone, drawn=slots,
    )  # fmt: skip


def prefill_all(slots: int, pages: IntArray) -> StepBatch:
    """Two tokens of every second sequence: as many chunks as there can be in a step of `slots` tokens."""
    half = slots // 2
    starts = np.arange(half + 1, dtype=np.int32) * 2
    return StepBatch(
        tokens=np.ones(slots, dtype=np.int32), positions=np.tile(np.arange(2, dtype=np.int32), half),
        cache_rows=(pages[:half, :1] * 16 + np.arange(2, dtype=np.int32)).reshape(-1), sequence_starts=starts,
        context_lengths=np.full(half, 2, dtype=np.int32), block_tables=pages[:half, :1],
        slots=np.arange(half, dtype=np.int32), sample_rows=starts[1:] - 1,
        sample_slots=np.arange(half, dtype=np.int32), drawn=0,
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
    runner = CudaRunner(
        file, spec, slots=slots, context=32, kv_blocks=2 * slots, max_tokens=slots, tune=False, graphs=False
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
        CudaRunner(file, read_spec(file), slots=70_000, context=32, max_tokens=70_000)


def test_the_last_layer_computes_what_the_rows_that_draw_need(
    hopper: RecordedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its keys and values: nothing else of it is read."""
    file = GgufFile.open(MODEL)
    spec = read_spec(file)
    spec = replace(spec, layers=spec.layers[:2])
    rows: list[int] = []
    residual = Gemm.residual

    def noted(gemm: Gemm, x: int, weight: int, y: int, count: int, outputs: int, inputs: int) -> None:
        rows.append(count)
        residual(gemm, x, weight, y, count, outputs, inputs)

    options = {"slots": 4, "context": CONTEXT, "kv_blocks": 64, "max_draws": 18}
    with closing(CudaRunner(file, spec, tune=False, **options)) as runner:  # type: ignore[arg-type]
        monkeypatch.setattr(Gemm, "residual", noted)
        for draws, attentions in (((1, 0, 1), 2), ((0, 0, 0), 1), ((8, 9, 1), 2)):
            lengths = enumerate(zip((8, 9, 1), draws, strict=True))
            chunks = [Chunk(slot, [1] * CONTEXT, 0, length, draw) for slot, (length, draw) in lengths]
            rows.clear()
            hopper.launches.clear()
            runner.launch(Pages(4, CONTEXT // 16).batch(chunks, admit=True))
            runner.collect()
            assert hopper.launches["hopper_attention"] == attentions
            drawing = [sum(draws)] * 2 if any(draws) else []
            assert rows == [18, 18, *drawing]


def test_all_kernels_are_compiled_at_once(
    driver: RecordedDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the threads of a pool, none of them later, where the start would wait for one after the other."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled: list[tuple[str, tuple[str, ...], bool]] = []

    def compile_nothing(source: Path, options: Sequence[str], arch: str, nvcc: str) -> bytes:
        compiled.append((source.name, tuple(options), current_thread() is main_thread()))
        return b""  # as where nvcc is missing

    monkeypatch.setattr(compiler, "_run_compiler", compile_nothing)
    file = GgufFile.open(MODEL)
    CudaRunner(file, read_spec(file), slots=4, context=CONTEXT, kv_blocks=64).close()
    jobs = [(name, options) for name, options, _ in compiled]
    assert sorted(jobs) == sorted(set(jobs))
    assert ("hopper_split.cu" in dict(jobs)) == (driver.capability == HOPPER)
    assert sum(name == "hopper_gemm.cu" for name, _ in jobs) == (3 if driver.capability == HOPPER else 0)
    assert not any(late for *_, late in compiled)


@pytest.mark.parametrize("kind", [Kind.HALF, Kind.FLOAT, Kind.SWIGLU, Kind.RESIDUAL], ids=str)
def test_every_way_of_a_product_can_be_launched(hopper: RecordedDriver, kind: Kind) -> None:
    with Device() as device:
        gemm = Gemm(device, reproducible=True)
        kernels = Kernels(device, dense_spec(), max_context=64)
        gemm.separate_swiglu(kernels.swiglu, device.allocate(2048 * 4 * 4864))
        for rows in (1, 8, 17, 64, 200, 256, 300, 2048):
            for outputs, inputs in ((896, 4864), (1152, 896), (520, 72)):
                room = padded_rows(rows)
                x, weight = device.allocate(room * inputs * 2), device.allocate(2 * outputs * inputs * 2)
                y = device.allocate(room * outputs * 4)
                gemm.tune(x, [weight], y, (rows, outputs, inputs, kind))
                before = hopper.launches.total()
                call = {Kind.SWIGLU: gemm.swiglu, Kind.RESIDUAL: gemm.residual}.get(kind)
                if call is not None:
                    call(x, weight, y, rows, outputs, inputs)
                else:
                    gemm(x, weight, y, rows, outputs, inputs, floats=kind is Kind.FLOAT)
                assert hopper.launches.total() > before
        gemm.close()


@pytest.mark.parametrize("heads", [(14, 2, 64), (16, 8, 128), (2, 1, 256)], ids=str)
def test_attention_of_all_shapes_is_launched_as_it_was_compiled(
    driver: RecordedDriver, heads: tuple[int, int, int]
) -> None:
    spec = dense_spec(heads=heads[0], kv_heads=heads[1], head_dim=heads[2])
    attention = spec.layers[0].attention
    with Device() as device:
        kernels = Kernels(device, spec, max_context=4096)
        pages, rows = 64, 128
        cache = [device.allocate(pages * 16 * attention.keys * 2) for _ in range(2)]
        qkv = device.allocate(rows * attention.qkv * 2)
        numbers, out = device.allocate(4096), device.allocate(rows * attention.queries * 2)
        for count in (1, 20, 128):
            contexts = np.full(count, 300, dtype=np.int32)
            pieces = len(kernels.decode_pieces(contexts, np.arange(count, dtype=np.int32)))
            kernels.decode_attention(qkv, *cache, numbers, numbers, out, count, 256, 0, 0, numbers, pieces)
        kernels.prefill_attention(
            qkv, *cache, numbers, numbers, numbers, out, numbers, 7, 256, rows=rows, pages=pages
        )
    assert sum("attention" in name for name in driver.launches) >= 2
