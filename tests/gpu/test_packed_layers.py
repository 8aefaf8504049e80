"""Fused products over packed weights give the bits of products over the same weights as elements."""

import numpy as np
import pytest

from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import Format, Matrix
from nightmill.worker.runners.gpu.kv_cache import PAGE
from nightmill.worker.runners.gpu.products.packed.packed_qkv import PackedQkv
from nightmill.worker.runners.gpu.shapes import padded_rows
from nightmill.worker.runners.gpu.weights.layout import LayerWeights
from tests.gpu.test_few_rows import CONTEXT, MODELS, Bench
from tests.support.elements import BOTH_ELEMENTS
from tests.support.needs import Need, missing
from tests.support.operands import elements, fetched, inputs_of
from tests.support.packed_weights import packed, weights_of
from tests.support.specs import dense_spec

CASES = [
    ("qwen2.5-0.5b", Format.Q8_0), ("qwen2.5-0.5b", Format.Q5_1), ("llama-3.2-1b", Format.Q4_K),
    ("llama-3.2-1b", Format.Q4_0), ("heads-of-128", Format.Q6_K), ("heads-of-128", Format.Q4_K, Format.Q6_K),
    ("llama-3.2-1b", Format.Q8_0, Format.Q5_K), ("smollm2-135m", Format.Q4_1),
    ("smollm2-135m", Format.Q5_0, Format.Q8_0),
]  # fmt: skip
"""A model, the format of its matrices, and that of values if it is another."""
SIZES = MODELS | {
    "heads-of-128": MODELS["heads-of-128"] | {"ffn_width": 4608},  # whole blocks of K types
    "smollm2-135m": {
        "heads": 9, "kv_heads": 3, "width": 576, "ffn_width": 1536, "style": RopeStyle.PAIRS, "bias": False,
    },
}  # fmt: skip


class PackedBench(Bench):
    """A layer's weights packed (`packed`) and as elements (`layer`)."""

    def __init__(self, device: Device, model: str, kept: Format, of_values: Format | None = None) -> None:
        self.kept, self.of_values, self.packed_matrices = kept, of_values, list[Matrix]()
        super().__init__(device, dense_spec(**SIZES[model]))
        qkv, output, gate_up, down = self.packed_matrices
        vectors = {name: getattr(self.layer, name) for name in LayerWeights.__dataclass_fields__}
        matrices = {"qkv": qkv, "attn_output": output, "gate_up": gate_up, "ffn_down": down}
        self.packed = LayerWeights(**vectors | matrices)

    def weight(self, rows: int, columns: int) -> Matrix:
        attention, parts = self.spec.layers[0].attention, [(self.kept, rows)]
        first = not self.packed_matrices  # that of queries, keys and values
        if first and self.of_values is not None:
            values = attention.kv_heads * attention.head_dim
            parts = [(self.kept, rows - values), (self.of_values, values)]
        made, exact = [], []
        for kept, count in parts:
            raw, numbers = weights_of(kept, count, columns, self.device.element)
            made.append(packed(self.device, kept, raw, columns))
            exact.append(numbers)
        whole = Matrix(made[0].address, rows, columns, Format.MIXED, parts=tuple(made))
        self.packed_matrices.append(whole if len(made) > 1 else made[0])
        joined = elements(self.device, np.concatenate(exact))
        return Matrix(joined.address, rows, columns, self.device.element.format)


@pytest.fixture(params=CASES, ids=lambda case: "-".join([case[0], *(kept.name for kept in case[1:])]))
def bench(device: Device, request: pytest.FixtureRequest) -> PackedBench:
    if not device.hopper:
        missing(Need.HOPPER)
    return PackedBench(device, *request.param)


@BOTH_ELEMENTS
def test_queries_keys_and_values_in_one_launch(bench: PackedBench) -> None:
    device, attention, width, layer = bench.device, bench.attention, bench.spec.width, bench.layer
    formats = bench.packed.qkv.formats
    assert PackedQkv.suits(attention, formats, device.kv, hopper=True)
    fused = PackedQkv(device, attention, formats, bench.rotation.table)
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
