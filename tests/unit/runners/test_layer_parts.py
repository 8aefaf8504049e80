"""What follows from a layer's spec before a launch: kinds of products, the order of elements of heads."""

from dataclasses import replace

import numpy as np
import pytest

from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import Activation, FeedForward, LayerSpec, Norm, ShortConv
from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.kinds import kinds_of, layer_kinds
from nightmill.worker.runners.gpu.products.elements.few_rows import FewRows
from nightmill.worker.runners.gpu.shapes import Kind
from nightmill.worker.runners.gpu.weights.head_order import HeadOrder
from nightmill.worker.runners.reference import ops
from tests.support.specs import PLAIN, VARIANTS, dense_spec

FUSED = (Kind.RESIDUAL, Kind.SWIGLU, Kind.RESIDUAL)
KINDS = {
    "soft-caps": FUSED,
    "norms of whole Q and K": FUSED,
    "scales": (Kind.ADDEND, Kind.SWIGLU, Kind.ADDEND),
    "norms after too": (Kind.ADDEND, Kind.SWIGLU, Kind.ADDEND),
    "GeGLU": (Kind.RESIDUAL, Kind.GEGLU, Kind.RESIDUAL),
    "gate with biases": (Kind.RESIDUAL, Kind.PLAIN, Kind.ADDEND),
    "LayerNorm, no gate, biases": (Kind.ADDEND, Kind.PLAIN, Kind.ADDEND),
}


@pytest.mark.parametrize("name", KINDS)
def test_products_are_fused_with_what_follows_where_nothing_comes_between(name: str) -> None:
    assert layer_kinds(VARIANTS[name].layers[0]) == KINDS[name]
    assert kinds_of(VARIANTS[name]) == {Kind.PLAIN, Kind.FLOAT, *KINDS[name]}


def test_the_fused_layer_takes_nothing_that_it_does_not_compute() -> None:
    plain = dense_spec().layers[0]

    def suits(layer: LayerSpec) -> bool:
        return FewRows.suits(layer, 896, [Format.F16], hopper=True)

    assert suits(plain)
    attention = replace(plain.attention, window=100, softcap=30.0, scale=0.5)  # attention's own kernels do
    assert suits(replace(plain, mixer=attention))
    others = [
        replace(plain, mixer=replace(plain.attention, output_bias=True)),
        replace(plain, residual_scale=0.5),
        replace(plain, parallel=True),
        replace(plain, attention_norm=None),
        replace(plain, feed_forward_post_norm=plain.attention_norm),
        replace(plain, feed_forward=replace(plain.feed_forward, gated=False)),
        replace(plain, feed_forward=replace(plain.feed_forward, activation=Activation.GELU)),
        replace(plain, feed_forward_norm=Norm(1e-6, centred=True)),
        replace(plain, feed_forward_norm=Norm(1e-6, bias=True)),
    ]
    assert not any(map(suits, others))


def test_products_are_fused_whatever_is_done_to_heads_between_them() -> None:
    """Norms of heads, gates and states are launches of their own; what a product would miss is refused."""
    plain = dense_spec().layers[0]

    def suits(layer: LayerSpec) -> bool:
        return FewRows.suits_products(layer, 896, [Format.F16], hopper=True)

    normed = replace(plain.attention, qk_norm=Norm(1e-6), head_dim=96, gated=True, bias=False)
    state = ShortConv(width=896, kernel=3)
    for mixer in (plain.mixer, normed, state):
        assert suits(replace(plain, mixer=mixer))
        assert not suits(replace(plain, mixer=mixer, residual_scale=0.5))
        assert not suits(replace(plain, mixer=mixer, feed_forward=FeedForward(width=0)))
    assert not FewRows.suits(replace(plain, mixer=normed), 896, [Format.F16], hopper=True)
    assert not suits(replace(plain, mixer=replace(state, width=904)))
    assert not suits(replace(plain, mixer=None))


@pytest.mark.parametrize(("head", "rotated"), [(16, 4), (40, 20), (12, 6), (128, 96)])
def test_halves_of_a_head_are_rotated_as_the_halves_of_its_part_were(head: int, rotated: int) -> None:
    """As kernels do it: elements i and i + D / 2, of which those past the part are left as they are."""
    rng = np.random.default_rng(head)
    attention = PLAIN.layers[0].attention
    rope = replace(attention.rope, dim=rotated, style=RopeStyle.HALVES)
    attention = replace(attention, heads=3, kv_heads=1, head_dim=head, rope=rope)
    queries = rng.standard_normal((5, 3, head))
    cosine, sine = ops.rope_table(np.arange(5), rope.frequencies(), 1.25, np.float64)
    still = np.ones((5, (head - rotated) // 2))
    wide = np.concatenate([cosine, still], axis=1), np.concatenate([sine, 0 * still], axis=1)

    def arranged(array: np.ndarray, first: int = 0) -> np.ndarray:
        rows = np.ascontiguousarray(array.reshape(len(array), -1).T)
        raw = HeadOrder(attention).arranged(rows.view(np.uint8).reshape(-1), first, len(rows))
        return raw.view(array.dtype).reshape(rows.shape).T.reshape(array.shape)

    expected = arranged(ops.rope(queries, cosine, sine, interleaved=False))
    np.testing.assert_allclose(ops.rope(arranged(queries), *wide, interleaved=False), expected)
    both = rng.standard_normal((5, 5, head))  # three of queries, a key's, a value's
    np.testing.assert_array_equal(arranged(both)[:, :3], arranged(both[:, :3]))
    np.testing.assert_array_equal(arranged(both)[:, 3], arranged(both[:, 3:4])[:, 0])
    np.testing.assert_array_equal(arranged(both)[:, 4], both[:, 4])
    np.testing.assert_array_equal(arranged(both[:, 4:], 4 * head), both[:, 4:])


@pytest.mark.parametrize("style", RopeStyle)
def test_heads_that_are_rotated_whole_or_in_pairs_stay_as_they_are(style: RopeStyle) -> None:
    attention = PLAIN.layers[0].attention
    raw = np.arange(attention.qkv * 8, dtype=np.uint8)
    for dim in (0, 16) if style is RopeStyle.HALVES else (0, 8, 16):
        rope = replace(attention.rope, dim=dim, style=style)
        order = HeadOrder(replace(attention, rope=rope))
        np.testing.assert_array_equal(order.arranged(raw, 0, attention.qkv), raw)
