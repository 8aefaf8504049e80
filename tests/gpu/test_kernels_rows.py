"""Embedding, gathers, norms, SwiGLU and rotation against the reference's operations in float64."""

from dataclasses import replace

import numpy as np
import pytest

from nightmill.worker.model.rope import RopeScaling, RopeStyle
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ABSENT, Matrix
from nightmill.worker.runners.gpu.rows.embedding import Embedding
from nightmill.worker.runners.gpu.rows.norms import RmsNorm
from nightmill.worker.runners.gpu.rows.rotation import Rotation
from nightmill.worker.runners.gpu.rows.swiglu import SwiGlu
from nightmill.worker.runners.gpu.weights.layout import LayerWeights, NormWeight
from nightmill.worker.runners.reference import ops
from tests.gpu.operands import buffer, cache_of, fetched, matrix, poisoned
from tests.gpu.oracles import EXACT, PAGE, assert_close
from tests.specs import dense_spec

ROWS = (1, 7, 63, 65, 1000)


def test_embedding_rows_are_the_tables(device: Device) -> None:
    spec = dense_spec(vocab=1003)
    embedding = Embedding(device, spec.vocab)
    rng = np.random.default_rng(1)
    table = rng.standard_normal((spec.vocab, spec.width)).astype(np.float16)
    weights = matrix(device, table)
    for count in ROWS:
        tokens = rng.integers(0, spec.vocab, count, dtype=np.int32)
        tokens[0] = spec.vocab - 1
        out = poisoned(device, (count, spec.width), np.float32)
        embedding.embed(buffer(device, tokens), weights, out, count)
        expected = ops.embedding(table, tokens).astype(np.float32)
        np.testing.assert_array_equal(fetched(device, out), expected)


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_gathered_rows_are_the_rows(device: Device, kind: type) -> None:
    embedding = Embedding(device, 1000)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((1000, 904)).astype(kind)
    held = buffer(device, x)
    for count in ROWS:
        rows = rng.integers(0, 1000, count, dtype=np.int32)
        out = poisoned(device, (count, 904), kind)
        embedding.gather_rows(held, device.upload(rows), out, count)
        np.testing.assert_array_equal(fetched(device, out), x[rows])


@pytest.mark.parametrize("width", [8, 64, 896, 1024, 2056, 3584, 4096, 8192, 12288])
def test_norms(device: Device, width: int) -> None:
    norm = RmsNorm(device)
    rng = np.random.default_rng(width)
    weight = rng.standard_normal(width).astype(np.float32)
    gains = NormWeight(buffer(device, weight), 1e-6)
    for count in ROWS if width < 4096 else (1, 65):
        scale = rng.uniform(0.001, 100, (count, 1))  # rows of very different sizes
        x = (rng.standard_normal((count, width)) * scale).astype(np.float32)
        out = poisoned(device, (count, width), np.float16)
        norm(buffer(device, x), gains, out, count)
        expected = ops.rms_norm(x.astype(np.float64), weight.astype(np.float64), 1e-6)
        assert_close(fetched(device, out), expected, EXACT)


@pytest.mark.parametrize("ffn", [8, 1000, 4864])
def test_swiglu(device: Device, ffn: int) -> None:
    swiglu = SwiGlu(device)
    rng = np.random.default_rng(ffn)
    for count in ROWS:
        gate_up = (rng.standard_normal((count, 2 * ffn)) * 4).astype(np.float16)
        gate_up[0, 0], gate_up[-1, ffn - 1] = 60000, -60000  # the ends of silu
        gate_up[0, ffn] = 0.5
        out = poisoned(device, (count, ffn), np.float16)
        swiglu(buffer(device, gate_up), out, count)
        expected = ops.swiglu(gate_up.astype(np.float64))
        actual = fetched(device, out)
        assert actual[0, 0] == expected[0, 0] and actual[-1, ffn - 1] == 0
        actual[0, 0] = expected[0, 0] = 0
        assert_close(actual[:, 1:], expected[:, 1:], EXACT)


@pytest.mark.parametrize("style", list(RopeStyle))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "norm"),
    [(14, 2, 64, False), (16, 8, 128, True), (32, 8, 64, False), (4, 4, 16, True), (3, 1, 40, True),
     (6, 2, 96, False), (2, 1, 256, True)],
)  # fmt: skip
def test_qkv_is_rotated_and_written(
    device: Device, style: RopeStyle, heads: int, kv_heads: int, head_dim: int, norm: bool
) -> None:
    context = 40_000
    spec = dense_spec(heads=heads, kv_heads=kv_heads, head_dim=head_dim, style=style, qk_norm=norm)
    attention = spec.layers[0].attention
    rope = replace(attention.rope, scaling=RopeScaling(attention_factor=1.25))
    attention = replace(attention, rope=rope)
    rotation = Rotation(device, attention, max_context=context)
    rng = np.random.default_rng(head_dim)
    all_heads = heads + 2 * kv_heads
    bias = rng.standard_normal(all_heads * head_dim).astype(np.float32)
    bias[heads * head_dim :] *= 100  # as Qwen2's
    gains = [rng.standard_normal(head_dim).astype(np.float32) for _ in range(2)]
    unused = Matrix(0, 0, 0)
    no_norm = NormWeight(ABSENT, 0.0)
    layer = LayerWeights(
        attn_norm=no_norm, qkv=unused, qkv_bias=ABSENT if norm else buffer(device, bias),
        q_norm=buffer(device, gains[0]) if norm else ABSENT,
        k_norm=buffer(device, gains[1]) if norm else ABSENT,
        attn_output=unused, ffn_norm=no_norm, gate_up=unused, ffn_down=unused,
    )  # fmt: skip
    for count in ROWS:
        qkv = rng.standard_normal((count, all_heads, head_dim)).astype(np.float16)
        positions = rng.integers(0, context, count, dtype=np.int32)
        positions[0] = context - 1
        pages = count // PAGE + 3
        rows = rng.permutation(pages * PAGE)[:count].astype(np.int32)
        rows[count // 2] = -1 if count > 1 else rows[0]
        device_qkv = buffer(device, qkv)
        poison = np.full((pages, kv_heads, PAGE, head_dim), np.nan, dtype=np.float16)
        cache = cache_of(device, poison, poison)
        rotation(device_qkv, layer, device.upload(positions), device.upload(rows), cache, count)
        exact = qkv.astype(np.float64) + (0 if norm else bias.reshape(all_heads, head_dim))
        q, k, v = np.split(exact, [heads, heads + kv_heads], axis=1)
        if norm:
            q, k = (ops.rms_norm(x, g.astype(np.float64), 1e-6) for x, g in zip((q, k), gains, strict=True))
        angles = ops.rope_table(positions, rope.frequencies(), rope.magnitude, np.float64)
        q, k = (ops.rope(x, *angles, interleaved=style is RopeStyle.PAIRS) for x in (q, k))
        actual = fetched(device, device_qkv)
        assert_close(actual[:, :heads], q, EXACT)
        np.testing.assert_array_equal(actual[:, heads:], qkv[:, heads:])
        for part, expected in ((cache.keys, k), (cache.values, v)):
            held = fetched(device, part)
            by_row = held.transpose(0, 2, 1, 3).reshape(pages * PAGE, kv_heads, head_dim)
            written = rows >= 0
            assert_close(by_row[rows[written]], expected[written], EXACT)
            assert np.isnan(np.delete(by_row, rows[written], axis=0)).all()


def test_a_fault_of_one_percent_is_noticed() -> None:
    rng = np.random.default_rng(0)
    right = rng.standard_normal((65, 896))
    assert_close(right.astype(np.float16), right, EXACT)
    for limit in (EXACT, 5e-5):
        with pytest.raises(AssertionError):
            assert_close(right * 1.01, right, limit)
        wrong = right.copy()
        wrong[3] *= 1.05  # one row alone
        with pytest.raises(AssertionError):
            assert_close(wrong, right, limit)
        wrong[3, 5] = np.nan
        with pytest.raises(AssertionError):
            assert_close(wrong, right, limit)
