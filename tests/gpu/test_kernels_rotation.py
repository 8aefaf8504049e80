"""Norms and rotation of queries and keys, and what is written to pages, against the operations in float64."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nightmill.worker.model.rope import RopeScaling, RopeStyle
from nightmill.worker.model.spec import Attention, Norm, Temperature
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ABSENT, ELEMENT
from nightmill.worker.runners.gpu.kinds import made_heads
from nightmill.worker.runners.gpu.rows.rotation import Rotation
from nightmill.worker.runners.gpu.weights.head_order import HeadOrder
from nightmill.worker.runners.reference import ops
from tests.gpu.oracles import PAGE, assert_close
from tests.support.elements import BOTH_ELEMENTS, ROUNDED_ONCE, rounded
from tests.support.operands import (
    buffer,
    cache_of,
    elements,
    fetched,
    layer_of_heads,
    poisoned,
)  # fmt: skip
from tests.support.specs import dense_spec

ROWS = (1, 7, 63, 65, 1000)
CONTEXT = 40_000
Array = npt.NDArray[Any]

HEADS = [
    (14, 2, 64, False), (16, 8, 128, True), (32, 8, 64, False), (4, 4, 16, True), (3, 1, 40, True),
    (6, 2, 96, False), (2, 1, 256, True), (5, 2, 12, True),
]  # fmt: skip


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed after rotation": {"qk_norm_rotated": True},
    "normed whole": {"qk_norm_whole": True},
    "centred": {"qk_norm": Norm(1e-5, centred=True)},
    "centred, after rotation": {"qk_norm": Norm(1e-5, centred=True), "qk_norm_rotated": True},
    "centred, whole": {"qk_norm": Norm(1e-5, centred=True), "qk_norm_whole": True},
    "temperature": {"temperature": Temperature(0.3, 100)},
    "partly rotated": {"rotated": 0.5},
    "not rotated": {"rotated": 0.0},
}


HEADS_AND_KINDS = [  # what changes norms needs some
    (*heads, kind) for heads in HEADS for kind in KINDS if heads[3] or "normed" not in kind
]


@BOTH_ELEMENTS
@pytest.mark.parametrize("style", list(RopeStyle))
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "normed", "kind"), HEADS_AND_KINDS)
def test_qkv_is_normed_rotated_and_written(
    device: Device, kind: str, style: RopeStyle, heads: int, kv_heads: int, head_dim: int, normed: bool
) -> None:
    """Elements of heads are in the order in which weights are loaded (`HeadOrder`)."""
    changes = dict(KINDS[kind])
    rotated = int(head_dim * changes.pop("rotated", 1.0)) // 2 * 2
    spec = dense_spec(heads=heads, kv_heads=kv_heads, head_dim=head_dim, style=style, qk_norm=normed)
    attention = spec.layers[0].attention
    scaling = RopeScaling(attention_factor=1.25)
    rope = replace(attention.rope, scaling=scaling, dim=rotated)
    attention = replace(attention, rope=rope, **changes)
    norm = attention.qk_norm
    rng = np.random.default_rng(head_dim)
    all_heads, counts = heads + 2 * kv_heads, (heads, kv_heads)
    bias = rng.standard_normal((all_heads, head_dim)).astype(np.float32)
    bias[heads:] *= 100  # as Qwen2's
    biased = norm is None or attention.qk_norm_whole
    whole = attention.qk_norm_whole
    gains = [rng.standard_normal((count if whole else 1, head_dim)).astype(np.float32) for count in counts]
    held = [ABSENT if norm is None else buffer(device, ordered(attention, gain)) for gain in gains]
    layer = layer_of_heads(buffer(device, ordered(attention, bias)) if biased else ABSENT, held)
    statistics = poisoned(device, (max(ROWS), 2, 2), np.float32)
    rotation = Rotation(device, attention, max_context=CONTEXT, statistics=statistics)

    def normalised(x: Array, gain: Array) -> Array:
        if norm is None:
            return x
        rows = x.reshape(len(x), 1, -1) if whole else x
        by = ops.layer_norm if norm.centred else ops.rms_norm
        return by(rows, gain.reshape(rows.shape[1:] if whole else -1), norm.eps).reshape(x.shape)

    for count in ROWS:
        qkv = rounded(rng.standard_normal((count, all_heads, head_dim)), device.element)
        positions = rng.integers(0, CONTEXT, count, dtype=np.int32)
        positions[0] = CONTEXT - 1
        pages = count // PAGE + 3
        rows = rng.permutation(pages * PAGE)[:count].astype(np.int32)
        rows[count // 2] = -1 if count > 1 else rows[0]
        device_qkv = elements(device, ordered(attention, qkv))
        poison = np.full((pages, kv_heads, PAGE, head_dim), np.nan, dtype=np.float32)
        cache = cache_of(device, poison, poison)
        rotation(device_qkv, layer, device.upload(positions), device.upload(rows), cache, count)
        exact = qkv.astype(np.float64) + biased * bias
        q, k, v = np.split(exact, [heads, heads + kv_heads], axis=1)
        angles = ops.rope_table(positions, rope.frequencies(), rope.magnitude, np.float64)
        finished = []
        for x, gain in zip((q, k), gains, strict=True):
            before = x if attention.qk_norm_rotated else normalised(x, gain)
            turned = ops.rope(before, *angles, interleaved=style is RopeStyle.PAIRS)
            finished.append(normalised(turned, gain) if attention.qk_norm_rotated else turned)
        if attention.temperature is not None:
            finished[0] *= attention.temperature.factors(positions)[:, None, None]
        q, k = (ordered(attention, x) for x in finished)
        actual = fetched(device, device_qkv)
        assert_close(actual[:, :heads], q, ROUNDED_ONCE[device.element])
        np.testing.assert_array_equal(actual[:, heads:], ordered(attention, qkv)[:, heads:])
        for part, expected in ((cache.keys, k), (cache.values, v)):
            found = fetched(device, part)
            by_row = found.transpose(0, 2, 1, 3).reshape(pages * PAGE, kv_heads, head_dim)
            written = rows >= 0
            assert_close(by_row[rows[written]], expected[written], ROUNDED_ONCE[device.element])
            assert np.isnan(np.delete(by_row, rows[written], axis=0)).all()


OTHERS: dict[str, dict[str, Any]] = {
    "normed values": {"value_norm": Norm(1e-5)},
    "values made of keys": {"value_norm": Norm(1e-5), "values_are_keys": True},
    "values that are keys": {"values_are_keys": True},
    "another layer's keys": {"value_norm": Norm(1e-5), "keys_of": 0},
}


@BOTH_ELEMENTS
@pytest.mark.parametrize("heads", [(3, 1, 40), (4, 2, 512), (8, 1, 256)], ids=str)
@pytest.mark.parametrize("kind", OTHERS)
def test_heads_that_a_layer_does_not_make(device: Device, kind: str, heads: tuple[int, int, int]) -> None:
    """Values have a norm without weights; of keys, values, or of both there are none in the product."""
    queries, kv_heads, head_dim = heads
    spec = dense_spec(heads=queries, kv_heads=kv_heads, head_dim=head_dim, qk_norm=True)
    attention = replace(spec.layers[0].attention, **OTHERS[kind])
    norm = attention.qk_norm
    assert norm is not None
    rng = np.random.default_rng(head_dim)
    shares, made = attention.keys_of is not None, made_heads(attention)
    gains = [rng.standard_normal(head_dim).astype(np.float32) for _ in range(2)]
    held = [buffer(device, gains[0]), ABSENT if shares else buffer(device, gains[1])]
    layer = layer_of_heads(ABSENT, held)
    rotation = Rotation(device, attention, max_context=CONTEXT)
    for count in ROWS:
        given = rounded(3 * rng.standard_normal((count, made, head_dim)), device.element)
        positions = rng.integers(0, CONTEXT, count, dtype=np.int32)
        pages = count // PAGE + 3
        rows = rng.permutation(pages * PAGE)[:count].astype(np.int32)
        all_heads = queries + 2 * kv_heads
        of_product, qkv = elements(device, given), poisoned(device, (count, all_heads, head_dim), ELEMENT)
        apart = made < all_heads
        target = qkv if apart else of_product
        poison = np.full((pages, kv_heads, PAGE, head_dim), np.nan, dtype=np.float32)
        cache = cache_of(device, poison, poison)
        rotation(
            target, layer, device.upload(positions), device.upload(rows), cache, count,
            of_product if apart else None,
        )  # fmt: skip
        exact = given.astype(np.float64)
        q, k, v = np.split(exact, [queries, queries + kv_heads], axis=1)
        angles = ops.rope_table(positions, attention.rope.frequencies(), attention.rope.magnitude, np.float64)
        interleaved = attention.rope.style is RopeStyle.PAIRS
        turned = ops.rope(ops.rms_norm(q, gains[0], norm.eps), *angles, interleaved=interleaved)
        actual = fetched(device, target)
        assert_close(actual[:, :queries], turned, ROUNDED_ONCE[device.element])
        if apart:
            assert np.isnan(actual[:, queries:]).all()
            np.testing.assert_array_equal(fetched(device, of_product), given)
        if shares:
            assert np.isnan(fetched(device, cache.keys)).all()
            assert np.isnan(fetched(device, cache.values)).all()
            continue
        v = k if attention.values_are_keys else v
        if attention.value_norm is not None:
            v = ops.unit_rms(v, attention.value_norm.eps)
        k = ops.rope(ops.rms_norm(k, gains[1], norm.eps), *angles, interleaved=interleaved)
        for part, expected in ((cache.keys, k), (cache.values, v)):
            found = fetched(device, part).transpose(0, 2, 1, 3).reshape(pages * PAGE, kv_heads, head_dim)
            assert_close(found[rows], expected, ROUNDED_ONCE[device.element])
            assert np.isnan(np.delete(found, rows, axis=0)).all()


def ordered(attention: Attention, heads: Array) -> Array:
    """Heads (..., count, D), those of values last, with elements in the order in which the GPU has them."""
    count, head_dim = heads.shape[-2:]
    raw = np.arange(count * head_dim, dtype=np.int64).view(np.uint8)
    order = HeadOrder(attention).arranged(raw, 0, count * head_dim).view(np.int64)
    return heads.reshape(*heads.shape[:-2], -1)[..., order].reshape(heads.shape)
