"""The fused kernels of steps of a few sequences give the bits of the kernels that they stand in for."""

from typing import Any

import numpy as np
import pytest

from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device import Device
from nightmill.worker.runners.gpu.few_rows import MAX_ROWS, FewRows
from nightmill.worker.runners.gpu.gemm import Gemm
from nightmill.worker.runners.gpu.hopper import is_hopper
from nightmill.worker.runners.gpu.kernels import Kernels
from nightmill.worker.runners.gpu.steps import StepInputs
from nightmill.worker.runners.gpu.weights import LayerWeights
from tests.gpu.oracles import PAGE
from tests.specs import dense_spec

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
        self.kernels = Kernels(device, spec, max_context=CONTEXT)
        layer = spec.layers[0]
        attention, ffn, self.eps = layer.attention, layer.feed_forward.width, layer.attention_norm.eps
        self.attention, self.ffn = attention, ffn
        self.kernels.set_rope(attention.rope.frequencies(), attention.rope.magnitude)
        self.gemm = Gemm(device, own_kernels=False, reproducible=True)
        self.few = FewRows(device, spec, self.kernels, max_context=CONTEXT)
        width, self.queries, self.qkv_width = spec.width, attention.queries, attention.qkv
        self.layer = LayerWeights(
            attn_norm=self.floats(width), qkv=self.halves(self.qkv_width, width),
            qkv_bias=self.floats(self.qkv_width) if attention.bias else 0, q_norm=0, k_norm=0,
            attn_output=self.halves(width, self.queries), ffn_norm=self.floats(width),
            gate_up=self.halves(2 * ffn, width), ffn_down=self.halves(width, ffn),
        )  # fmt: skip

    def floats(self, *shape: int) -> int:
        return self.device.upload(self.rng.standard_normal(shape).astype(np.float32))

    def halves(self, rows: int, columns: int) -> int:
        values = self.rng.standard_normal((rows, columns)) / np.sqrt(columns)
        return self.device.upload(values.astype(np.float16))

    def poison(self, *shape: int) -> int:
        return self.device.upload(np.full(shape, np.nan, dtype=np.float16))

    def normed(self, x: int, weight: int, tokens: int) -> int:
        out = self.poison(tokens, self.spec.width)
        self.kernels.rms_norm(x, weight, out, tokens, self.spec.width, self.eps)
        return out


@pytest.fixture(params=MODELS)
def bench(device: Device, request: pytest.FixtureRequest) -> Bench:
    if not is_hopper(device):
        pytest.skip("these kernels run on Hopper only")
    spec = dense_spec(**MODELS[request.param])
    assert FewRows.suits(spec)
    return Bench(device, spec)


def inputs_of(device: Device, **arrays: Any) -> StepInputs:
    """Step inputs of which only the arrays named are there."""
    fields = dict.fromkeys(StepInputs.__dataclass_fields__, 0)
    return StepInputs(**fields | {name: device.upload(array) for name, array in arrays.items()})


@pytest.mark.parametrize("tokens", [1, 2, MAX_ROWS])
def test_norm_qkv_bias_rotation_and_cache_write(bench: Bench, tokens: int) -> None:
    device, spec, kernels, attention = bench.device, bench.spec, bench.kernels, bench.attention
    x = bench.floats(tokens, spec.width)
    positions = bench.rng.integers(0, CONTEXT, tokens, dtype=np.int32)
    rows = bench.rng.permutation(4 * PAGE)[:tokens].astype(np.int32)
    rows[0] = -1 if tokens > 1 else rows[0]  # not written
    inputs = inputs_of(device, positions=positions, cache_rows=rows)
    shape = (4, attention.kv_heads, PAGE, attention.head_dim)
    results = []
    for fused in (True, False):
        qkv = bench.poison(tokens, bench.qkv_width)
        keys, values = bench.poison(*shape), bench.poison(*shape)
        if fused:
            bench.few.qkv(x, bench.layer, inputs, qkv, keys, values, tokens)
        else:
            normed = bench.normed(x, bench.layer.attn_norm, tokens)
            bench.gemm(normed, bench.layer.qkv, qkv, tokens, bench.qkv_width, spec.width)
            kernels.qkv_rope_write(
                qkv, bench.layer.qkv_bias, 0, 0, inputs.positions, inputs.cache_rows, keys, values, tokens
            )
        queries = device.download(qkv, (tokens, bench.qkv_width), np.float16)[:, : bench.queries]
        results.append((queries, *(device.download(cache, shape, np.float16) for cache in (keys, values))))
    assert np.isfinite(results[0][0]).all()
    assert np.isfinite(results[0][1]).sum() == (tokens - (tokens > 1)) * attention.keys
    for fused_array, plain in zip(*results, strict=True):
        np.testing.assert_array_equal(fused_array, plain)


@pytest.mark.parametrize("tokens", [1, 2, MAX_ROWS])
def test_products_added_to_the_residual_stream(bench: Bench, tokens: int) -> None:
    device, width = bench.device, bench.spec.width
    for weight, inputs in (
        (bench.layer.attn_output, bench.queries), (bench.layer.ffn_down, bench.ffn)
    ):  # fmt: skip
        before = bench.rng.standard_normal((tokens + 1, width)).astype(np.float32)
        x, source = device.upload(before), bench.halves(tokens, inputs)
        bench.few.residual(source, weight, x, tokens, inputs)
        plain = device.upload(before)
        bench.gemm.residual(source, weight, plain, tokens, width, inputs)
        after = device.download(x, before.shape, np.float32)
        np.testing.assert_array_equal(after, device.download(plain, before.shape, np.float32))
        np.testing.assert_array_equal(after[tokens], before[tokens])
        assert not np.isclose(after[:tokens], before[:tokens]).all()


@pytest.mark.parametrize("tokens", [1, 2, MAX_ROWS])
def test_norm_gate_up_and_swiglu(bench: Bench, tokens: int) -> None:
    device, width, ffn = bench.device, bench.spec.width, bench.ffn
    x = bench.floats(tokens, width)
    fused = bench.poison(tokens + 1, ffn)
    bench.few.swiglu(x, bench.layer, fused, tokens)
    normed = bench.normed(x, bench.layer.ffn_norm, tokens)
    gate_up, plain = bench.poison(tokens, 2 * ffn), bench.poison(tokens, ffn)
    bench.gemm(normed, bench.layer.gate_up, gate_up, tokens, 2 * ffn, width)
    bench.kernels.swiglu(gate_up, plain, tokens, ffn)
    result = device.download(fused, (tokens + 1, ffn), np.float16)
    np.testing.assert_array_equal(result[:tokens], device.download(plain, (tokens, ffn), np.float16))
    assert np.isnan(result[tokens]).all()


def test_models_with_other_sizes_take_the_general_way(device: Device) -> None:
    odd = ({"qk_norm": True}, {"head_dim": 96, "heads": 10}, {"width": 904}, {"ffn_width": 18_944})
    assert not any(FewRows.suits(dense_spec(**changes)) for changes in odd)
