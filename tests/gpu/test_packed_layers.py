"""Fused products over packed weights give the bits of products over the same weights as elements."""

import numpy as np
import pytest

from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import Format, Matrix
from nightmill.worker.runners.gpu.products.packed_qkv import PackedQkv
from nightmill.worker.runners.gpu.products.shapes import padded_rows
from nightmill.worker.runners.gpu.weights.layout import LayerWeights
from tests.elements import BOTH_ELEMENTS
from tests.gpu.operands import elements, fetched, inputs_of
from tests.gpu.oracles import PAGE
from tests.gpu.test_few_rows import CONTEXT, MODELS, Bench
from tests.gpu.test_packed import packed, weights_of
from tests.specs import dense_spec

CASES = [
    ("qwen2.5-0.5b", Format.Q8_0), ("qwen2.5-0.5b", Format.Q5_1), ("llama-3.2-1b", Format.Q4_K),
    ("llama-3.2-1b", Format.Q4_0), ("heads-of-128", Format.Q6_K),
]  # fmt: skip
SIZES = MODELS | {"heads-of-128": MODELS["heads-of-128"] | {"ffn_width": 4608}}  # whole blocks of K types


class PackedBench(Bench):
    """A layer's weights packed (`packed`) and as elements (`layer`)."""

    def __init__(self, device: Device, model: str, kept: Format) -> None:
        self.kept, self.packed_matrices = kept, list[Matrix]()
        super().__init__(device, dense_spec(**SIZES[model]))
        qkv, output, gate_up, down = self.packed_matrices
        vectors = {name: getattr(self.layer, name) for name in LayerWeights.__dataclass_fields__}
        matrices = {"qkv": qkv, "attn_output": output, "gate_up": gate_up, "ffn_down": down}
        self.packed = LayerWeights(**vectors | matrices)

    def weight(self, rows: int, columns: int) -> Matrix:
        raw, exact = weights_of(self.kept, rows, columns)
        self.packed_matrices.append(packed(self.device, self.kept, raw, columns))
        return Matrix(elements(self.device, exact).address, rows, columns, self.device.element.format)


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1].name}")
def bench(device: Device, request: pytest.FixtureRequest) -> PackedBench:
    if not device.hopper:
        pytest.skip("these kernels run on Hopper only")
    return PackedBench(device, *request.param)


@BOTH_ELEMENTS
def test_queries_keys_and_values_in_one_launch(bench: PackedBench) -> None:
    device, attention, width, layer = bench.device, bench.attention, bench.spec.width, bench.layer
    assert PackedQkv.suits(attention, bench.kept, device.kv, hopper=True)
    fused = PackedQkv(device, attention, bench.kept, bench.rotation.table)
    assert fused.tiles
    for tokens in (1, 15, 63, 130, 300):
        padded, pages = padded_rows(tokens), -(-tokens // PAGE) + 2
        values = np.full((padded, width), np.nan, dtype=np.float32)
        values[:tokens] = bench.rng.standard_normal((tokens, width))
        x = elements(device, values)
        positions = bench.rng.integers(0, CONTEXT, tokens, dtype=np.int32)
        rows = bench.rng.permutation(pages * PAGE)[:tokens].astype(np.int32)
        rows[1::7] = -1  # not written
        inputs = inputs_of(device, positions=positions, cache_rows=rows)
        expected, kept = bench.poison(padded, bench.qkv_width), bench.pages(pages)
        bench.product(x, layer.qkv, expected, tokens)
        bench.rotation(expected, layer, inputs.positions, inputs.cache_rows, kept, tokens)
        for tile in fused.tiles:
            if tokens > tile.rows < 64:
                continue
            qkv, cache = bench.poison(padded + 1, bench.qkv_width), bench.pages(pages)
            fused.run(tile, x, bench.packed, inputs.positions, inputs.cache_rows, qkv, cache, tokens)
            queries = fetched(device, qkv)[:, : bench.queries]
            assert np.isnan(queries[tokens:]).all(), "wrote past its rows"
            np.testing.assert_array_equal(
                queries[:tokens], fetched(device, expected, tokens)[:, : bench.queries]
            )
            for own_array, plain_array in zip(bench.held(cache), bench.held(kept), strict=True):
                np.testing.assert_array_equal(own_array, plain_array)
