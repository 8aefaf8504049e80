"""Embedding, gathers, norms, SwiGLU and rotation against the reference's operations in float64."""

import numpy as np
import pytest

from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.runners.gpu.device import Device
from nightmill.worker.runners.gpu.kernels import Kernels
from nightmill.worker.runners.reference import ops
from tests.gpu.oracles import EXACT, PAGE, assert_close
from tests.specs import dense_spec

ROWS = (1, 7, 63, 65, 1000)


def poisoned(device: Device, count: int, dtype: type) -> int:
    return device.upload(np.full(count, np.nan, dtype=dtype))


def test_embedding_rows_are_the_tables(device: Device) -> None:
    spec = dense_spec(vocab=1003)
    kernels = Kernels(device, spec, max_context=64)
    rng = np.random.default_rng(1)
    table = rng.standard_normal((spec.vocab, spec.width)).astype(np.float16)
    address = device.upload(table)
    for count in ROWS:
        tokens = rng.integers(0, spec.vocab, count, dtype=np.int32)
        tokens[0] = spec.vocab - 1
        out = poisoned(device, count * spec.width, np.float32)
        kernels.embed(device.upload(tokens), address, out, count)
        actual = device.download(out, (count, spec.width), np.float32)
        np.testing.assert_array_equal(actual, ops.embedding(table, tokens).astype(np.float32))


def test_unknown_tokens_come_from_their_slots(device: Device) -> None:
    kernels = Kernels(device, dense_spec(), max_context=64)
    rng = np.random.default_rng(2)
    last = rng.integers(0, 1000, 50, dtype=np.int32)
    for count in ROWS:
        tokens = rng.integers(-1, 3, count, dtype=np.int32)
        slots = rng.integers(0, 50, count, dtype=np.int32)
        out = device.upload(np.full(count, -7, dtype=np.int32))
        kernels.gather_tokens(device.upload(tokens), device.upload(slots), device.upload(last), out, count)
        expected = np.where(tokens < 0, last[slots], tokens)
        np.testing.assert_array_equal(device.download(out, count, np.int32), expected)


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_gathered_rows_are_the_rows(device: Device, kind: type) -> None:
    kernels = Kernels(device, dense_spec(), max_context=64)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((1000, 904)).astype(kind)
    address = device.upload(x)
    for count in ROWS:
        rows = rng.integers(0, 1000, count, dtype=np.int32)
        out = poisoned(device, count * 904, kind)
        kernels.gather_rows(address, device.upload(rows), out, count, 904, itemsize=x.itemsize)
        np.testing.assert_array_equal(device.download(out, (count, 904), kind), x[rows])


@pytest.mark.parametrize("width", [8, 64, 896, 1024, 2056, 3584, 4096, 8192, 12288])
def test_norms(device: Device, width: int) -> None:
    kernels = Kernels(device, dense_spec(), max_context=64)
    rng = np.random.default_rng(width)
    weight = rng.standard_normal(width).astype(np.float32)
    gains = device.upload(weight)
    for count in ROWS if width < 4096 else (1, 65):
        scale = rng.uniform(0.001, 100, (count, 1))  # rows of very different sizes
        x = (rng.standard_normal((count, width)) * scale).astype(np.float32)
        stream, out = device.upload(x), poisoned(device, count * width, np.float16)
        kernels.rms_norm(stream, gains, out, count, width, 1e-6)
        expected = ops.rms_norm(x.astype(np.float64), weight.astype(np.float64), 1e-6)
        assert_close(device.download(out, (count, width), np.float16), expected, EXACT)


@pytest.mark.parametrize("ffn", [8, 1000, 4864])
def test_swiglu(device: Device, ffn: int) -> None:
    kernels = Kernels(device, dense_spec(), max_context=64)
    rng = np.random.default_rng(ffn)
    for count in ROWS:
        gate_up = (rng.standard_normal((count, 2 * ffn)) * 4).astype(np.float16)
        gate_up[0, 0], gate_up[-1, ffn - 1] = 60000, -60000  # the ends of silu
        gate_up[0, ffn] = 0.5
        out = poisoned(device, count * ffn, np.float16)
        kernels.swiglu(device.upload(gate_up), out, count, ffn)
        expected = ops.swiglu(gate_up.astype(np.float64))
        actual = device.download(out, (count, ffn), np.float16)
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
    kernels = Kernels(device, spec, max_context=context)
    frequencies, magnitude = attention.rope.frequencies(), attention.rope.magnitude
    magnitude *= 1.25
    kernels.set_rope(frequencies, magnitude)
    rng = np.random.default_rng(head_dim)
    all_heads = heads + 2 * kv_heads
    bias = rng.standard_normal(all_heads * head_dim).astype(np.float32)
    bias[heads * head_dim :] *= 100  # as Qwen2's
    gains = [rng.standard_normal(head_dim).astype(np.float32) for _ in range(2)]
    for count in ROWS:
        qkv = rng.standard_normal((count, all_heads, head_dim)).astype(np.float16)
        positions = rng.integers(0, context, count, dtype=np.int32)
        positions[0] = context - 1
        pages = count // PAGE + 3
        rows = rng.permutation(pages * PAGE)[:count].astype(np.int32)
        rows[count // 2] = -1 if count > 1 else rows[0]
        device_qkv = device.upload(qkv)
        caches = [poisoned(device, pages * kv_heads * PAGE * head_dim, np.float16) for _ in range(2)]
        kernels.qkv_rope_write(
            device_qkv, 0 if norm else device.upload(bias), *(device.upload(g) if norm else 0 for g in gains),
            device.upload(positions), device.upload(rows), *caches, count,
        )  # fmt: skip
        exact = qkv.astype(np.float64) + (0 if norm else bias.reshape(all_heads, head_dim))
        q, k, v = np.split(exact, [heads, heads + kv_heads], axis=1)
        if norm:
            q, k = (ops.rms_norm(x, g.astype(np.float64), 1e-6) for x, g in zip((q, k), gains, strict=True))
        angles = ops.rope_table(positions, frequencies, magnitude, np.float64)
        q, k = (ops.rope(x, *angles, interleaved=style is RopeStyle.PAIRS) for x in (q, k))
        actual = device.download(device_qkv, qkv.shape, np.float16)
        assert_close(actual[:, :heads], q, EXACT)
        np.testing.assert_array_equal(actual[:, heads:], qkv[:, heads:])
        for cache, expected in zip(caches, (k, v), strict=True):
            held = device.download(cache, (pages, kv_heads, PAGE, head_dim), np.float16)
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
