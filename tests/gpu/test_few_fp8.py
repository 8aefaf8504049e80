"""Fused kernels of steps of a few sequences with FP8 weights give the bits of those they stand in for."""

import numpy as np
import pytest

from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ABSENT, ELEMENT, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.kv_cache import LayerCache
from nightmill.worker.runners.gpu.products.few_fp8 import FewFp8
from nightmill.worker.runners.gpu.products.few_rows import MAX_ROWS
from nightmill.worker.runners.gpu.products.hopper_fp8 import HopperFp8
from nightmill.worker.runners.gpu.products.shapes import Kind, Shape
from nightmill.worker.runners.gpu.rows.norms import Norms
from nightmill.worker.runners.gpu.rows.rotation import Rotation
from nightmill.worker.runners.gpu.weights.layout import LayerWeights, NormWeight
from tests.elements import BOTH_ELEMENTS, ELEMENTS_AND_KV
from tests.gpu.operands import (
    Array,
    RoundedRows,
    buffer,
    cache_of,
    elements,
    fetched,
    fp8_room,
    inputs_of,
    pages_in,
    poisoned,
)
from tests.gpu.oracles import PAGE
from tests.specs import dense_spec

CONTEXT = 512
MODELS = {
    "qwen2.5-0.5b": {},
    "pairs": {
        "heads": 33, "kv_heads": 3, "width": 2064, "ffn_width": 1040, "style": RopeStyle.PAIRS, "bias": False,
    },
    "heads-of-128": {"heads": 12, "kv_heads": 2, "head_dim": 128, "width": 4112, "ffn_width": 8208},
}  # fmt: skip
TOKENS = pytest.mark.parametrize("tokens", [1, MAX_ROWS - 1, MAX_ROWS])


class Bench:
    """A layer's weights in FP8, both ways to compute with them, and arrays full of poison."""

    def __init__(self, device: Device, spec: ModelSpec) -> None:
        self.device, self.spec = device, spec
        self.rng = np.random.default_rng(spec.width)
        layer, eps = spec.layers[0], spec.output_norm.eps
        self.attention, self.ffn = layer.attention, layer.feed_forward.width
        assert FewFp8.suits(layer, spec.width, [Format.FP8], hopper=True)
        self.norm = Norms(device, spec)
        self.rotation = Rotation(device, self.attention, max_context=CONTEXT)
        widest = max(spec.width, self.attention.queries, self.ffn)
        self.products = HopperFp8(
            device, (Kind.PLAIN, Kind.SWIGLU, Kind.RESIDUAL), fp8_room(device, MAX_ROWS, widest)
        )
        self.few = FewFp8(device, layer, spec.width, self.rotation.table)
        self.layer = LayerWeights(
            attn_norm=NormWeight(self.floats(spec.width), eps),
            qkv=self.weight(self.attention.qkv, spec.width),
            qkv_bias=self.floats(self.attention.qkv) if self.attention.bias else ABSENT, q_norm=ABSENT,
            k_norm=ABSENT, attn_output=self.weight(spec.width, self.attention.queries),
            ffn_norm=NormWeight(self.floats(spec.width), eps), gate_up=self.weight(2 * self.ffn, spec.width),
            ffn_down=self.weight(spec.width, self.ffn),
        )  # fmt: skip

    def floats(self, *shape: int) -> Buffer:
        return buffer(self.device, self.rng.standard_normal(shape).astype(np.float32))

    def weight(self, rows: int, columns: int) -> Matrix:
        return RoundedRows(self.device, rows, columns, self.rng).matrix

    def pages(self) -> LayerCache:
        poison = np.full(
            (4, self.attention.kv_heads, PAGE, self.attention.head_dim), np.nan, dtype=np.float32
        )
        return cache_of(self.device, poison, poison)

    def product(self, x: Buffer, weight: Matrix, y: Buffer, tokens: int, kind: Kind) -> None:
        """By the kernels of any number of rows."""
        shape = Shape(tokens, y.shape[1], weight.columns, kind, Format.FP8)
        self.products.candidates(shape)[0].way(shape)(x, weight, y)

    def normed(self, x: Buffer, norm: NormWeight, tokens: int) -> Buffer:
        out = fp8_room(self.device, tokens, self.spec.width)
        self.norm(x, norm, out, tokens)
        return out


@pytest.fixture(params=MODELS)
def bench(device: Device, request: pytest.FixtureRequest) -> Bench:
    if not device.hopper:
        pytest.skip("these kernels run on Hopper only")
    return Bench(device, dense_spec(**MODELS[request.param]))


@ELEMENTS_AND_KV
@TOKENS
def test_norm_qkv_bias_rotation_and_cache_write(bench: Bench, tokens: int) -> None:
    device, layer, queries = bench.device, bench.layer, bench.attention.queries
    x = bench.floats(tokens, bench.spec.width)
    positions = bench.rng.integers(0, CONTEXT, tokens, dtype=np.int32)
    rows = bench.rng.permutation(4 * PAGE)[:tokens].astype(np.int32)
    rows[0] = -1 if tokens > 1 else rows[0]  # not written
    inputs = inputs_of(device, positions=positions, cache_rows=rows)
    results: list[tuple[Array, ...]] = []
    for fused in (True, False):
        qkv, cache = poisoned(device, (tokens + 1, bench.attention.qkv), ELEMENT), bench.pages()
        if fused:
            bench.few.qkv(x, layer, inputs, qkv, cache, tokens)
        else:
            bench.product(bench.normed(x, layer.attn_norm, tokens), layer.qkv, qkv, tokens, Kind.PLAIN)
            bench.rotation(qkv, layer, inputs.positions, inputs.cache_rows, cache, tokens)
        held = pages_in(device, cache, bench.attention.head_dim)
        results.append((fetched(device, qkv)[:, :queries], *held))
    assert np.isfinite(results[0][0][:tokens]).all()
    assert np.isfinite(results[0][1]).sum() == (tokens - (tokens > 1)) * bench.attention.keys
    for fused_array, plain in zip(*results, strict=True):
        np.testing.assert_array_equal(fused_array, plain)


@BOTH_ELEMENTS
@TOKENS
def test_products_added_to_the_residual_stream(bench: Bench, tokens: int) -> None:
    device = bench.device
    weights = [bench.layer.attn_output]
    weights += [bench.layer.ffn_down] if bench.few.takes_down(tokens) else []
    for weight in weights:
        before = bench.rng.standard_normal((tokens + 1, weight.rows)).astype(np.float32)
        x, plain = buffer(device, before), buffer(device, before)
        source = elements(device, bench.rng.standard_normal((tokens, weight.columns)))
        bench.few.residual(source, weight, x, tokens)
        bench.product(source, weight, plain, tokens, Kind.RESIDUAL)
        after = fetched(device, x)
        np.testing.assert_array_equal(after, fetched(device, plain))
        np.testing.assert_array_equal(after[tokens], before[tokens])
        assert not np.isclose(after[:tokens], before[:tokens]).all()


@BOTH_ELEMENTS
@TOKENS
def test_norm_gate_up_and_swiglu(bench: Bench, tokens: int) -> None:
    device, layer = bench.device, bench.layer
    x = bench.floats(tokens, bench.spec.width)
    fused, plain = (poisoned(device, (tokens + 1, bench.ffn), ELEMENT) for _ in range(2))
    bench.few.swiglu(x, layer, fused, tokens)
    bench.product(bench.normed(x, layer.ffn_norm, tokens), layer.gate_up, plain, tokens, Kind.SWIGLU)
    result = fetched(device, fused)
    assert np.isfinite(result[:tokens]).all()
    assert np.isnan(result[tokens]).all()
    np.testing.assert_array_equal(result[:tokens], fetched(device, plain)[:tokens])
