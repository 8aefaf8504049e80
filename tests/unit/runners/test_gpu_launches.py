"""The GPU runner's launches, without a GPU: against the compiled kernels where nvcc is."""

import random
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields, replace
from itertools import permutations
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import numpy as np
import pytest
from annotated_types import Le

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import RunnerError
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.base import FROM_SLOT, Admission, IntArray, StepBatch, make_draws, mask_words
from nightmill.worker.runners.gpu.activations import Activations
from nightmill.worker.runners.gpu.attention.choice import decode_attention, prefill_attention
from nightmill.worker.runners.gpu.attention.plans import Decode, Prefill
from nightmill.worker.runners.gpu.catalogue import check_spec
from nightmill.worker.runners.gpu.device import compiler
from nightmill.worker.runners.gpu.device.chosen import describe_device
from nightmill.worker.runners.gpu.device.device import Device, NoDeviceError
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.graphs import Graph
from nightmill.worker.runners.gpu.device.operands import ELEMENT, Buffer, Matrix
from nightmill.worker.runners.gpu.kv_cache import PAGE
from nightmill.worker.runners.gpu.layers import Layer, LayerKernels
from nightmill.worker.runners.gpu.mixers import AttentionMixer
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.products.chooser import Product
from nightmill.worker.runners.gpu.products.elements.few_rows import MAX_ROWS
from nightmill.worker.runners.gpu.products.fp8.hopper_fp8 import FP8_TILES
from nightmill.worker.runners.gpu.shapes import Kind, padded_rows
from nightmill.worker.runners.gpu.step_inputs import StepInputs, StepShape
from nightmill.worker.runners.kv_format import KvFormat
from tests.support.cuda_runners import cuda_runner
from tests.support.driving import Chunk, Pages
from tests.support.engines import NoText
from tests.support.family_cases import GPU_FILES, file_of
from tests.support.ggufs import write_model
from tests.support.operands import all_products, cache_of, inputs_of, room, shape_of
from tests.support.parts import PARTS, file_of_halves
from tests.support.specs import dense_spec
from tests.unit.runners.recorded_cuda import AMPERE, HOPPER, RecordedDriver, record

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
            for step in steps:
                runner.launch(pages.batch(step, admit=step is steps[0]))
                assert runner.collect() is not None
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
        used = [key for key, graph in runner._graphs.items() if graph in replayed]
        assert {room > size for size, (room,) in used} == {
            True,
            False,
        }  # with contexts cut, and whole or split


def decode_all(slots: int, pages: IntArray) -> StepBatch:
    """A step of one token of each sequence, at its position 20."""
    everyone, at = np.arange(slots, dtype=np.int32), np.full(slots, 20, dtype=np.int32)
    return StepBatch(
        tokens=np.full(slots, FROM_SLOT, dtype=np.int32), positions=at, cache_rows=pages[:, 1] * 16 + 4,
        sequence_starts=np.arange(slots + 1, dtype=np.int32), context_lengths=at + 1, page_tables=pages,
        slots=everyone, draws=make_draws(everyone, everyone, at + 1), drawn=slots,
    )  # fmt: skip


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


@pytest.mark.parametrize("kind", list(Kind), ids=str)
def test_every_way_of_a_product_can_be_launched(hopper: RecordedDriver, kind: Kind) -> None:
    with Device() as device, all_products(device) as products:
        for rows in (1, 8, 17, 64, 200, 256, 300, 2048):
            for outputs, inputs in ((896, 4864), (1152, 896), (520, 72)):
                product = products.of(kind, outputs, inputs)
                x = room(device, (padded_rows(rows), inputs), ELEMENT)
                y = room(device, (padded_rows(rows), outputs), np.float32)
                weight = Matrix(device.allocate(4 * outputs * inputs), outputs, inputs)
                product.tune(x, [weight], y, rows, lambda: None)
                before = hopper.launches.total()
                product(x, weight, y, rows)
                assert hopper.launches.total() > before
        ways = products.tuned()[f"{kind.value} 896 x 4,864, f16"]
        assert list(ways) == [1, 8, 24, 64, 200, 256, 320, 2048] and all(ways.values())


@pytest.mark.parametrize(
    ("heads", "scores"),
    [
        ((14, 2, 64), {"window": 100}),
        ((20, 1, 128), {"softcap": 50.0}),
        ((4, 2, 80), {}),
        ((20, 1, 256), {"window": 100, "softcap": 50.0, "scale": 0.1}),
        ((2, 1, 320), {"window": 100, "softcap": 50.0, "sinks": True}),
        ((64, 8, 64), {"window": 128, "sinks": True}),
    ],
    ids=str,
)
def test_attention_of_all_kinds_is_launched_as_it_was_compiled(
    driver: RecordedDriver, heads: tuple[int, int, int], scores: dict[str, Any]
) -> None:
    layer = dense_spec(heads=heads[0], kv_heads=heads[1], head_dim=heads[2]).layers[0]
    attention = replace(layer.attention, **scores)
    with Device() as device:
        decode = decode_attention(device, attention, max_context=4096)
        prefill = prefill_attention(device, attention)
        rows, pages = 128, np.zeros((64, attention.kv_heads, PAGE, attention.head_dim), dtype=np.float16)
        cache = cache_of(device, pages, pages)
        qkv, out = (room(device, (rows, width), ELEMENT) for width in (attention.qkv, attention.queries))
        numbers = np.zeros(1024, dtype=np.int32)
        inputs = inputs_of(
            device, table_width=256, page_tables=numbers, context_lengths=numbers, pieces=numbers,
            tiles=numbers, sequence_starts=numbers,
        )  # fmt: skip
        for count in (1, 20, 128):
            contexts = np.full(count, 300, dtype=np.int32)
            pieces = len(decode.pieces(contexts, np.arange(count, dtype=np.int32)))
            decode(qkv, cache, inputs, shape_of(tokens=count, drawn=count, pieces=pieces), out)
        prefill(qkv, cache, inputs, shape_of(tokens=rows, tiles=7), out)
    assert sum("attention" in name for name in driver.launches) >= 2


@pytest.mark.parametrize("name", [*GPU_FILES, *PARTS])
def test_every_family_is_launched_as_it_was_compiled(
    driver: RecordedDriver, name: str, tmp_path: Path
) -> None:
    """A prompt in two chunks, the second with a drawn token of another sequence; then steps of those."""
    part = PARTS.get(name)
    file = file_of(tmp_path, *GPU_FILES[name]) if part is None else file_of_halves(tmp_path, part)
    tokens, pages = [1] * CONTEXT, Pages(2, CONTEXT // 16)
    steps = [
        [Chunk(0, tokens, 0, 40), Chunk(1, tokens, 0, 9)],
        [Chunk(1, tokens, 9, 1, 1, True), Chunk(0, tokens, 40, 30)],
        [Chunk(1, tokens, 10, 1, 1, True), Chunk(0, tokens, 70, 1, 1, True)],
    ]
    options = {"slots": 2, "context": CONTEXT, "kv_pages": 32, "max_tokens": 64}
    with closing(cuda_runner(file, part or read_spec(file), **options)) as runner:  # type: ignore[arg-type]
        for step in steps:
            runner.launch(pages.batch(step, admit=step is steps[0], kinds=runner.page_kinds))
            assert runner.collect() is not None
    assert driver.launches.keys() - {"library"} <= driver.checked


def test_layers_read_the_tables_of_their_kind_of_pages(
    driver: RecordedDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3, six layers with a window and one without: in prompts, in decode steps and in their graphs."""
    file = file_of(tmp_path, *GPU_FILES["gemma3"])
    spec, read, mix = read_spec(file), set(), AttentionMixer.mix

    def noting(self: AttentionMixer, layer: Layer, inputs: StepInputs, shape: StepShape) -> None:
        read.add((layer.cache.kind, inputs.page_tables, inputs.cache_rows))
        mix(self, layer, inputs, shape)

    monkeypatch.setattr(AttentionMixer, "mix", noting)
    tokens, pages = [1] * CONTEXT, Pages(2, CONTEXT // 16)
    options = {"slots": 2, "context": CONTEXT, "kv_pages": 32, "max_tokens": 64}
    with closing(cuda_runner(file, spec, **options)) as runner:  # type: ignore[arg-type]
        assert [(kind.window, kind.tokens) for kind in runner.page_kinds] == [(None, 96), (100, 16)]
        batch = pages.batch([Chunk(0, tokens, 0, 40)], admit=True, kinds=runner.page_kinds)
        runner.launch(batch)
        runner.collect()
        assert len({kind for kind, _, _ in read}) == len(read) == 2  # each kind has one place, also in graphs
        assert len({address for _, *both in read for address in both}) == 4
        caches = [layer.cache for layer in runner._model.layers]
        assert [cache.kind for cache in caches] == [1, 1, 1, 1, 1, 0, 1]
        page, part = runner.memory.cache // (runner.kv_pages + 2), 16 * spec.layers[0].attention.keys * 2
        page -= 4 * 16 * runner.page_kinds[0].stride  # the tokens
        for kind in (0, 1):
            own = [one.keys.address for one in caches if one.kind == kind]
            own += [one.values.address for one in caches if one.kind == kind]
            each = runner.page_kinds[kind].tokens // 16 * part
            assert sorted(own) == [min(own) + place * each for place in range(len(own))]
            assert len(own) * each <= page == runner.page_kinds[kind].stride * part
        for cache in caches:
            last = cache.keys.address + cache.keys.shape[0] * part
            assert driver.holds(cache.keys.address, last - cache.keys.address)
            assert cache.keys.shape[0] > (runner.kv_pages + 1) * runner.page_kinds[cache.kind].stride
        (buffers,) = runner._steps._further
        turn = (runner._turn - 1) % runner.depth
        (given,) = batch.further
        assert (buffers._host_rows[turn][:40] == given.cache_rows).all()
        assert (buffers._host_tables[turn][0, :3] == given.page_tables[0]).all()


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


def _attention(kernels: LayerKernels) -> tuple[Decode, Prefill]:
    assert isinstance(kernels.mixer, AttentionMixer)
    return kernels.mixer.decode, kernels.mixer.prefill


def test_layers_may_differ_in_what_a_spec_says_of_them(hopper: RecordedDriver, tmp_path: Path) -> None:
    """Each kind of layer has launchers that suit it."""
    path = write_model(tmp_path / "plain.gguf", "qwen2", layers=2, ffn=256, head_dim=64, width=128)
    file = GgufFile.open(path)
    spec = read_spec(file)
    first, second = spec.layers

    def with_second(**changes: Any) -> ModelSpec:
        return replace(spec, layers=(first, replace(second, mixer=replace(second.attention, **changes))))

    mixed = with_second(rope=replace(second.attention.rope, base=500.0))
    with closing(cuda_runner(file, mixed, slots=4, context=CONTEXT, kv_pages=64)) as runner:
        one, other = (layer.kernels for layer in runner._model.layers)
        assert one != other
        assert _attention(one) == _attention(other)
        runner.launch(Pages(4, CONTEXT // 16).batch([Chunk(0, [1] * CONTEXT, 0, 70)], admit=True))
        assert runner.collect() is not None
    windowed = with_second(window=20)
    with closing(cuda_runner(file, windowed, slots=4, context=CONTEXT, kv_pages=64)) as runner:
        one, other = (layer.kernels for layer in runner._model.layers)
        assert not {*_attention(one)} & {*_attention(other)}
        launched = hopper.launches["hopper_attention"]
        pages, prompt = Pages(4, CONTEXT // 16), [Chunk(0, [1] * CONTEXT, 0, 70)]
        runner.launch(pages.batch(prompt, admit=True, kinds=runner.page_kinds))
        assert runner.collect() is not None
        assert hopper.launches["hopper_attention"] == launched + 2


def test_the_memory_plan_covers_all_that_is_taken_and_little_more(
    driver: RecordedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: dict[int, int] = {}
    allocate, free = Device.allocate, Device.free

    def noted(device: Device, size: int, purpose: str = "a buffer") -> int:
        address = allocate(device, size, purpose)
        taken[address] = size
        return address

    def freed(device: Device, address: int) -> None:
        del taken[address]
        free(device, address)

    monkeypatch.setattr(Device, "allocate", noted)
    monkeypatch.setattr(Device, "free", freed)
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


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (6, 1)])
def test_a_gpu_that_is_too_old_is_refused_in_a_sentence(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, cubins: Path
) -> None:
    record(capability, monkeypatch, cubins)
    sentence = rf"GPU 0 \(recorded\) has compute capability {capability[0]}\.{capability[1]}; .*--reference"
    for refused in (Device, describe_device):
        with pytest.raises(NoDeviceError, match=sentence):
            refused()
