"""The GPU runner's launches, without a GPU: against the compiled kernels where nvcc is."""

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

from nightmill.jobs.errors import RunnerError
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.base import FROM_SLOT, Admission, mask_words
from nightmill.worker.runners.gpu.device import compiler
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.graphs import Graph
from nightmill.worker.runners.gpu.device.operands import Buffer, Matrix
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.products.chooser import Product
from nightmill.worker.runners.gpu.products.elements.few_rows import MAX_ROWS
from nightmill.worker.runners.gpu.products.fp8.hopper_fp8 import FP8_TILES
from nightmill.worker.runners.gpu.shapes import Kind
from nightmill.worker.runners.kv_format import KvFormat
from tests.support.cuda_runners import cuda_runner
from tests.support.driving import Chunk, Pages
from tests.support.engines import NoText
from tests.unit.runners.recorded_cuda import AMPERE, HOPPER, RecordedDriver
from tests.unit.runners.recorded_steps import decode_all, take_steps

pytestmark = pytest.mark.heavy  # kernels are compiled where nvcc is

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "models" / "nightmill-demo.gguf"
SLOTS, CONTEXT = 48, 128
FP8_WEIGHTS = Precision(weights=WeightsFormat.FP8)
SAMPLING = {"admit", "gather_tokens", "apply_masks", "adjust", "sample", "sample_filtered"}
ANYWHERE = SAMPLING | {"embed", "gather_rows", "rms_norm_1", "library"}
ATTENTION = {"decode_attention_8_2", "decode_attention_8_4", "split_attention_8"}
PER_KIND = {
    HOPPER: {"hopper_attention", "few_qkv_1", "few_residual", "few_swiglu_1"},
    AMPERE: {"prefill_attention", "qkv_rope_write", "few_qkv_1", "few_residual", "few_swiglu_1", "swiglu"},
}


def test_steps_of_all_sizes_launch_kernels_as_they_were_compiled(driver: RecordedDriver) -> None:
    file = GgufFile.open(MODEL)
    spec = read_spec(file)
    runner = cuda_runner(
        file, spec, slots=SLOTS, context=CONTEXT, kv_pages=SLOTS * CONTEXT // 16, max_tokens=2048
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
    plain_draws = step.draws.copy()
    for masked in (step, pages.batch(mixed, admit=False)):
        masked.draws["mask"][1:3] = 0, 1
        runner.launch(masked)
        for call in (runner.collect, lambda: runner.launch(step)):
            with pytest.raises(RunnerError, match="waits for its masks"):
                call()
        runner.draw(np.zeros((2, mask_words(spec.vocab)), dtype=np.int32))
        assert len(runner.collect().tokens) == len(masked.draws)  # type: ignore[union-attr]
        with pytest.raises(RunnerError, match="no launch waits for masks"):
            runner.draw(np.zeros((0, 1), dtype=np.int32))
    assert "adjust" not in driver.launches
    wishes = GenerationParams(logit_bias={3: 1.0}, frequency_penalty=0.5)
    admitted = tuple(Admission(slot, (1, 2), wishes, 0, 1, ((4, 5),)) for slot in (0, 1))
    runner.launch(replace(step, draws=plain_draws, admissions=admitted))
    runner.launch(pages.batch(mixed, admit=False))
    assert [len(runner.collect().tokens) for _ in range(2)] == [SLOTS, 3]  # type: ignore[union-attr]
    expected = ANYWHERE | ATTENTION | PER_KIND[driver.capability]
    assert expected <= driver.launches.keys()
    assert driver.launches.keys() - {"library"} <= driver.checked
    runner.close()


def test_weights_as_in_the_file_launch_kernels_for_their_type(driver: RecordedDriver) -> None:
    """Of the bundled model, Q8_0; in room for its weights that the plan counts."""
    file = GgufFile.open(MODEL)
    precision = Precision(weights=WeightsFormat.FILE)
    options = {"context": CONTEXT, "kv_pages": 64, "tune": False, "graphs": False, "precision": precision}
    with closing(cuda_runner(file, read_spec(file), slots=4, **options)) as runner:  # type: ignore[arg-type]
        pages = Pages(4, CONTEXT // 16)
        prompts = [Chunk(slot, [1] * CONTEXT, 0, length, 1) for slot, length in enumerate((3, 9, 100))]
        for step in ([prompts[0]], [prompts[1]], [prompts[2]], [Chunk(0, [1] * CONTEXT, 3, 1, 1, True)]):
            runner.launch(pages.batch(step, admit=not step[0].drawn))
            runner.collect()
        in_file = sum(file.raw(name).nbytes for name in file.tensors)
        assert in_file <= runner.memory.weights < 1.03 * in_file
    others = set() if driver.capability == HOPPER else {"packed_floats_1", "packed_mma_elements_128_128_8"}
    assert driver.capability == HOPPER or "unpack_Q8_0" not in driver.launches, "written anew in each step"
    assert driver.launches.keys() >= {"repack_Q8_0", "embed_Q8_0"} | others
    kinds = {"product", "swiglu", "residual", "float"} if driver.capability == HOPPER else set()
    few_rows = {name.partition("_")[0] for name in driver.launches if re.fullmatch(r"[a-z]+(_\d+){3}", name)}
    tiles = {name.partition("_")[0] for name in driver.launches if re.fullmatch(r"[a-z]+(_\d+){9}", name)}
    assert few_rows - {"dequantize"} == kinds
    assert tiles == kinds, "of the head in the self-test of many rows"


def test_an_fp8_cache_is_written_and_read_by_kernels_of_its_own(hopper: RecordedDriver) -> None:
    file = GgufFile.open(MODEL)
    spec, tokens, pages = read_spec(file), [1] * CONTEXT, Pages(8, CONTEXT // 16)
    options: dict[str, Any] = {"slots": 8, "context": CONTEXT, "kv_pages": 8 * CONTEXT // 16, "tune": False}
    steps = [
        [Chunk(slot, tokens, 0, 9 + slot) for slot in range(8)],
        [Chunk(0, tokens, 9, 1, 1, True)],
        [Chunk(slot, tokens, 20, 1, 1, True) for slot in range(8)],
    ]
    memory = []
    for kv in KvFormat:
        with closing(cuda_runner(file, spec, precision=Precision(kv=kv), **options)) as runner:
            memory.append(runner.memory.cache)
            take_steps(runner, pages, steps)
    assert 1.9 < memory[0] / memory[1] < 2
    assert {
        "hopper_attention",
        "widen_pages",
        "split_attention_8",
        "kv_write",
        "few_qkv_1",
    } <= hopper.launches.keys()
    assert hopper.launches.keys() - {"library"} <= hopper.checked


def test_steps_with_fp8_weights_launch_kernels_as_they_were_compiled(hopper: RecordedDriver) -> None:
    """Of the sizes at which other tiles are taken; by a model that kernels would fuse more of in 16 bits."""
    file = GgufFile.open(MODEL)
    options = {"slots": SLOTS, "context": CONTEXT, "kv_pages": SLOTS * CONTEXT // 16, "max_tokens": 2048}
    with closing(cuda_runner(file, read_spec(file), precision=FP8_WEIGHTS, **options)) as runner:  # type: ignore[arg-type]
        pages = Pages(SLOTS, CONTEXT // 16)
        for count, length in ((40, 30), (1, 9), (3, 20), (1, 100)):
            prompts = [Chunk(slot, [1] * CONTEXT, 0, length) for slot in range(count)]
            runner.launch(pages.batch(prompts, admit=True))
            assert runner.collect() is not None
    for kind in (Kind.PLAIN, Kind.SWIGLU, Kind.RESIDUAL):
        assert hopper.launches.keys() & {f"{kind.value}_{tile.name}" for tile in FP8_TILES[kind]}
    assert hopper.launches.keys() >= {"rms_norm_fp8_1", "quantise_1"}
    assert not hopper.launches.keys() & {"few_residual", "hopper_qkv"}
    assert hopper.launches.keys() - {"library"} <= hopper.checked


def test_nothing_is_captured_in_the_middle_of_a_night(
    driver: RecordedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and answers of many lengths, a few so long that contexts are cut; and all end one by one."""
    file = GgufFile.open(MODEL)
    context = 4200
    spec = replace(read_spec(file), context_length=context)
    replayed: list[Graph] = []
    launch = Graph.launch

    def noted(graph: Graph) -> None:
        replayed.append(graph)
        launch(graph)

    with closing(cuda_runner(file, spec, slots=SLOTS)) as runner:
        monkeypatch.setattr(Graph, "launch", noted)
        monkeypatch.setattr(Graph, "__init__", lambda *_: pytest.fail("captured late"))
        engine = Engine(
            runner,
            Detokenizer(text_stream=NoText, eos_ids=frozenset()),
            EngineSizes(context_length=context, max_sequences=SLOTS, token_budget=8192),
        )
        draw = random.Random(1)
        for number in range(3 * SLOTS):
            prompt = draw.randint(5, 4000 if number % 9 == 0 else 60)
            params = GenerationParams(max_tokens=draw.randint(1, 40), ignore_eos=True)
            engine.submit(Request(str(number), 1, (number, *[1] * prompt), params, seed=1))
        while engine.has_work:
            engine.step()
        assert len(replayed) > engine.stats.steps // 3
        assert runner._graphs is not None
        used = [key for key, graph in runner._graphs.usual.items() if graph in replayed]
        assert {room > size for size, (room,) in used} == {
            True,
            False,
        }  # with contexts cut, and whole or split


def test_the_last_layer_computes_what_the_rows_that_draw_need(
    hopper: RecordedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its keys and values: nothing else of it is read."""
    file = GgufFile.open(MODEL)
    spec = read_spec(file)
    spec = replace(spec, layers=spec.layers[:2])
    rows: list[int] = []
    compute = Product.__call__

    def noted(product: Product, x: Buffer, weight: Matrix, y: Buffer, count: int) -> None:
        if weight.rows == spec.width:
            rows.append(count)
        compute(product, x, weight, y, count)

    options = {"slots": 4, "context": CONTEXT, "kv_pages": 64, "max_draws": 18}
    with closing(cuda_runner(file, spec, tune=False, **options)) as runner:  # type: ignore[arg-type]
        monkeypatch.setattr(Product, "__call__", noted)
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


def test_rows_that_are_pooled_go_through_no_head(
    hopper: RecordedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two texts one is embedded whole, in pieces; a third one draws beside them."""
    file = GgufFile.open(MODEL)
    spec = read_spec(file)
    heads: list[int] = []
    compute = Product.__call__

    def noted(product: Product, x: Buffer, weight: Matrix, y: Buffer, count: int) -> None:
        if product is runner._model.head:
            heads.append(count)
        compute(product, x, weight, y, count)

    options = {"slots": 4, "context": CONTEXT, "kv_pages": 64, "max_draws": 36}
    with closing(cuda_runner(file, spec, tune=False, **options)) as runner:  # type: ignore[arg-type]
        monkeypatch.setattr(Product, "__call__", noted)
        engine = Engine(
            runner,
            Detokenizer(text_stream=NoText, eos_ids=frozenset()),
            EngineSizes(context_length=CONTEXT, max_sequences=4, token_budget=512),
        )
        embed = GenerationParams(embed=True)
        texts = [tuple(range(1, 100)), tuple(range(2, 60))]
        engine.submit(Request("mean", 1, texts[0], embed, 0, embeds=range(99)))
        engine.submit(Request("last", 1, texts[1], embed, 0, embeds=range(57, 58)))
        engine.submit(Request("text", 1, (3, 4), GenerationParams(max_tokens=1), 0))
        done = []
        while engine.has_work:
            done += engine.step()
            engine.check_integrity()
        assert {one.job_id: len(one.embedding or b"") for one in done} == {
            "mean": 4 * spec.width, "last": 4 * spec.width, "text": 0,
        }  # fmt: skip
        assert heads == [1]
        assert hopper.launches["pool_rows"] == 3  # 34 rows, 34, 31
        assert "pool_rows" in hopper.checked


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
    cuda_runner(file, read_spec(file), slots=4, context=CONTEXT, kv_pages=64).close()
    jobs = [(name, options) for name, options, _ in compiled]
    assert sorted(jobs) == sorted(set(jobs))
    assert ("hopper_split.cu" in dict(jobs)) == (driver.capability == HOPPER)
    assert sum(name == "hopper_gemm.cu" for name, _ in jobs) == (3 if driver.capability == HOPPER else 0)
    assert not any(late for *_, late in compiled)


def test_a_runner_of_bfloat16_launches_its_kernels_and_says_so_in_the_name_of_its_arithmetic(
    driver: RecordedDriver,
) -> None:
    """In the same memory; maps and products of the library are told of it."""
    file = GgufFile.open(MODEL)
    names, plans = [], []
    for element in Element:
        options = {
            "slots": 8,
            "context": CONTEXT,
            "kv_pages": 64,
            "tune": False,
            "precision": Precision(element),
        }
        driver.types.clear()
        with closing(cuda_runner(file, read_spec(file), **options)) as runner:  # type: ignore[arg-type]
            pages, tokens = Pages(8, CONTEXT // 16), [1] * CONTEXT
            runner.launch(pages.batch([Chunk(slot, tokens, 0, 70) for slot in range(8)], admit=True))
            runner.launch(decode_all(8, pages.tables))
            assert [len(runner.collect().tokens) for _ in range(2)] == [8, 8]  # type: ignore[union-attr]
            names.append(runner.arithmetic)
            plans.append(runner.memory)
        library, maps = {Element.F16: ("2", "FLOAT16"), Element.BF16: ("14", "BFLOAT16")}[element]
        expected = {library, maps} if driver.capability == HOPPER else {library}
        assert driver.types - {"0", "FLOAT32"} == expected
    assert plans[0] == plans[1]
    assert names[0].difference(names[1]) == ("weights: f16, now bf16", "kv: f16, now bf16")
    assert driver.launches.keys() - {"library"} <= driver.checked
