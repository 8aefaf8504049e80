"""What the GPU runner launches for layers: products, attention of all kinds, families; without a GPU."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.attention.choice import decode_attention, prefill_attention
from nightmill.worker.runners.gpu.attention.plans import Decode, Prefill
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ELEMENT, Matrix
from nightmill.worker.runners.gpu.kv_cache import PAGE
from nightmill.worker.runners.gpu.layers import Layer, LayerKernels
from nightmill.worker.runners.gpu.mixers import AttentionMixer
from nightmill.worker.runners.gpu.shapes import Kind, padded_rows
from nightmill.worker.runners.gpu.step_inputs import StepInputs, StepShape
from tests.support.cuda_runners import cuda_runner
from tests.support.driving import Chunk, Pages
from tests.support.family_cases import GPU_FILES, file_of
from tests.support.ggufs import write_model
from tests.support.operands import all_products, cache_of, inputs_of, room, shape_of
from tests.support.parts import PARTS, file_of_halves
from tests.support.specs import dense_spec
from tests.unit.runners.recorded_cuda import RecordedDriver
from tests.unit.runners.recorded_steps import take_steps, two_sequences

pytestmark = pytest.mark.heavy  # kernels are compiled where nvcc is

CONTEXT = 128


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
    options = {"slots": 2, "context": CONTEXT, "kv_pages": 32, "max_tokens": 64}
    with closing(cuda_runner(file, part or read_spec(file), **options)) as runner:  # type: ignore[arg-type]
        take_steps(runner, Pages(2, CONTEXT // 16), two_sequences(CONTEXT, 40))
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
        take_steps(runner, Pages(4, CONTEXT // 16), [[Chunk(0, [1] * CONTEXT, 0, 70)]])
    windowed = with_second(window=20)
    with closing(cuda_runner(file, windowed, slots=4, context=CONTEXT, kv_pages=64)) as runner:
        one, other = (layer.kernels for layer in runner._model.layers)
        assert not {*_attention(one)} & {*_attention(other)}
        launched = hopper.launches["hopper_attention"]
        take_steps(runner, Pages(4, CONTEXT // 16), [[Chunk(0, [1] * CONTEXT, 0, 70)]])
        assert hopper.launches["hopper_attention"] == launched + 2
