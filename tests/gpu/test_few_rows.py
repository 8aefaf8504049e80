"""The fused kernels of steps of a few sequences give the bits of the kernels that they stand in for."""

import numpy as np
import pytest

from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ABSENT, ELEMENT, FLOAT, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.kv_cache import PAGE, LayerCache
from nightmill.worker.runners.gpu.products.elements.few_rows import MAX_ROWS, FewRows
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.rows.norms import Norms
from nightmill.worker.runners.gpu.rows.rotation import Rotation
from nightmill.worker.runners.gpu.shapes import Kind
from nightmill.worker.runners.gpu.weights.layout import NO_MATRIX, LayerWeights, NormWeight
from tests.support.elements import BOTH_ELEMENTS, ELEMENTS_AND_KV
from tests.support.operands import (
    ByLibrary,
    buffer,
    cache_of,
    elements,
    fetched,
    inputs_of,
    matrix,
    pages_in,
    poisoned,
)
from tests.support.specs import dense_spec

CONTEXT = 4096
MODELS = {
    "qwen2.5-0.5b": {},
    "llama-3.2-1b": {
        "heads": 32, "kv_heads": 8, "width": 2048, "ffn_width": 8192, "style": RopeStyle.PAIRS,
        "bias": False,
    },
    "heads-of-128": {"heads": 12, "kv_heads": 2, "head_dim": 128, "width": 1536, "ffn_width": 4512},
}  # fmt: skip


class Bench:
    """A layer's weights, both ways to compute with them, and arrays full of poison."""

    def __init__(self, device: Device, spec: ModelSpec) -> None:
        self.device, self.spec = device, spec
        self.rng = np.random.default_rng(spec.width)
        layer = spec.layers[0]
        attention, ffn, eps = layer.attention, layer.feed_forward.width, spec.output_norm.eps
        self.attention, self.ffn = attention, ffn
        self.norm, self.activation = Norms(device, spec), Activate(device)
        self.rotation = Rotation(device, attention, max_context=CONTEXT)
        self.product = ByLibrary(device)
        width, self.queries, self.qkv_width = spec.width, attention.queries, attention.qkv
        self.layer = LayerWeights(
            attn_norm=NormWeight(self.floats(width), eps), qkv=self.weight(self.qkv_width, width),
            qkv_bias=self.floats(self.qkv_width) if attention.bias else ABSENT, q_norm=ABSENT, k_norm=ABSENT,
            attn_output=self.weight(width, self.queries), ffn_norm=NormWeight(self.floats(width), eps),
            gate_up=self.weight(2 * ffn, width), ffn_down=self.weight(width, ffn),
        )  # fmt: skip

    def floats(self, *shape: int) -> Buffer:
        return buffer(self.device, self.rng.standard_normal(shape).astype(np.float32))

    def elements(self, rows: int, columns: int) -> Buffer:
        return elements(self.device, self.rng.standard_normal((rows, columns)) / np.sqrt(columns))

    def weight(self, rows: int, columns: int) -> Matrix:
        return matrix(self.device, self.rng.standard_normal((rows, columns)) / np.sqrt(columns))

    def poison(self, *shape: int) -> Buffer:
        return poisoned(self.device, shape, ELEMENT)

    def pages(self, count: int) -> LayerCache:
        """Full of poison."""
        shape = (count, self.attention.kv_heads, PAGE, self.attention.head_dim)
        poison = np.full(shape, np.nan, dtype=np.float32)
        return cache_of(self.device, poison, poison)

    def held(self, cache: LayerCache) -> list[np.ndarray]:
        """Its keys and values."""
        return pages_in(self.device, cache, self.attention.head_dim)

    def normed(self, x: Buffer, norm: NormWeight, tokens: int) -> Buffer:
        out = self.poison(tokens, self.spec.width)
        self.norm(x, norm, out, tokens)
        return out


@pytest.fixture(params=MODELS)
def bench(device: Device, request: pytest.FixtureRequest) -> Bench:
    spec = dense_spec(**MODELS[request.param])
    assert FewRows.suits(spec.layers[0], spec.width, [device.element.format], hopper=device.hopper)
    return Bench(device, spec)


@pytest.fixture
def few(bench: Bench) -> FewRows:
    return FewRows(bench.device, bench.spec.layers[0], bench.spec.width, bench.rotation.table)


@ELEMENTS_AND_KV
@pytest.mark.parametrize("tokens", [1, 2, MAX_ROWS])
def test_norm_qkv_bias_rotation_and_cache_write(bench: Bench, few: FewRows, tokens: int) -> None:
    device, layer = bench.device, bench.layer
    x = bench.floats(tokens, bench.spec.width)
    positions = bench.rng.integers(0, CONTEXT, tokens, dtype=np.int32)
    rows = bench.rng.permutation(4 * PAGE)[:tokens].astype(np.int32)
    rows[0] = -1 if tokens > 1 else rows[0]  # not written
    inputs = inputs_of(device, positions=positions, cache_rows=rows)
    results = []
    for fused in (True, False):
        qkv, cache = bench.poison(tokens, bench.qkv_width), bench.pages(4)
        if fused:
            few.qkv(x, layer, inputs, qkv, cache, tokens)
        else:
            bench.product(bench.normed(x, layer.attn_norm, tokens), layer.qkv, qkv, tokens)
            bench.rotation(qkv, layer, inputs.positions, inputs.cache_rows, cache, tokens)
        results.append((fetched(device, qkv)[:, : bench.queries], *bench.held(cache)))
    assert np.isfinite(results[0][0]).all()
    assert np.isfinite(results[0][1]).sum() == (tokens - (tokens > 1)) * bench.attention.keys
    for fused_array, plain in zip(*results, strict=True):
        np.testing.assert_array_equal(fused_array, plain)


@BOTH_ELEMENTS
@pytest.mark.parametrize("tokens", [1, 2, MAX_ROWS])
def test_norm_and_what_other_mixers_read(bench: Bench, tokens: int) -> None:
    """Two matrices of one input, the second as float, as elements, or none."""
    device, width, norm = bench.device, bench.spec.width, bench.layer.attn_norm
    few = FewRows(device, bench.spec.layers[0], width, None)
    assert not few.rotates
    weight, other = bench.weight(1352, width), bench.weight(24, width)
    x = bench.floats(tokens, width)
    normed = bench.normed(x, norm, tokens)
    for second, kind, dtype in (
        (other, Kind.ADDEND, FLOAT), (other, Kind.PLAIN, ELEMENT), (NO_MATRIX, None, ELEMENT),
    ):  # fmt: skip
        results = []
        for fused in (True, False):
            out, beside = bench.poison(tokens + 1, 1352), poisoned(device, (tokens + 1, 24), dtype)
            if fused:
                few.input(x, norm, weight, out, second, beside, tokens)
            else:
                bench.product(normed, weight, out, tokens)
                if kind is not None:
                    bench.product(normed, second, beside, tokens, kind)
            results.append((fetched(device, out), fetched(device, beside)))
        assert np.isfinite(results[0][0][:tokens]).all()
        assert np.isfinite(results[0][1][:tokens]).all() == (kind is not None)
        for fused_array, plain in zip(*results, strict=True):
            np.testing.assert_array_equal(fused_array, plain)


@BOTH_ELEMENTS
@pytest.mark.parametrize("tokens", [1, 2, MAX_ROWS])
def test_products_added_to_the_residual_stream(bench: Bench, few: FewRows, tokens: int) -> None:
    device, width = bench.device, bench.spec.width
    assert few.adds_down or not device.hopper
    for weight in (bench.layer.attn_output, bench.layer.ffn_down)[: 1 + few.adds_down]:
        before = bench.rng.standard_normal((tokens + 1, width)).astype(np.float32)
        x, plain, source = (
            buffer(device, before),
            buffer(device, before),
            bench.elements(tokens, weight.columns),
        )
        few.residual(source, weight, x, tokens)
        bench.product(source, weight, plain, tokens, Kind.RESIDUAL)
        after = fetched(device, x)
        np.testing.assert_array_equal(after, fetched(device, plain))
        np.testing.assert_array_equal(after[tokens], before[tokens])
        assert not np.isclose(after[:tokens], before[:tokens]).all()


@BOTH_ELEMENTS
@pytest.mark.parametrize("tokens", [1, 2, MAX_ROWS])
def test_norm_gate_up_and_swiglu(bench: Bench, few: FewRows, tokens: int) -> None:
    device, layer, ffn = bench.device, bench.layer, bench.ffn
    x, fused = bench.floats(tokens, bench.spec.width), bench.poison(tokens + 1, ffn)
    few.swiglu(x, layer, fused, tokens)
    gate_up, plain = bench.poison(tokens, 2 * ffn), bench.poison(tokens, ffn)
    bench.product(bench.normed(x, layer.ffn_norm, tokens), layer.gate_up, gate_up, tokens)
    bench.activation(gate_up, plain, tokens)
    result = fetched(device, fused)
    np.testing.assert_array_equal(result[:tokens], fetched(device, plain))
    assert np.isnan(result[tokens]).all()


def test_models_with_other_sizes_take_the_general_way() -> None:
    odd = ({"qk_norm": True}, {"head_dim": 96, "heads": 10}, {"width": 904}, {"ffn_width": 18_944})
    specs = [dense_spec(**changes) for changes in odd]
    assert not any(FewRows.suits(s.layers[0], s.width, [Format.F16], hopper=True) for s in specs)
    usual = dense_spec()
    assert FewRows.suits(usual.layers[0], usual.width, [Format.F16], hopper=False)
    wide = dense_spec(width=2560, heads=32)
    assert [FewRows.suits(wide.layers[0], 2560, [Format.F16], hopper=here) for here in (True, False)] == [
        True,
        False,
    ]
