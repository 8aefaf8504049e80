"""The list of weights that a spec gives, which the file's check and all loaders read."""

from dataclasses import replace

import pytest

from nightmill.worker.model.spec import Norm, Role, Weight
from tests.support.specs import PLAIN, VARIANTS


def test_what_shares_an_input_is_stacked_in_order() -> None:
    weights = PLAIN.layer_weights(1)
    assert weights[Role.QKV] == Weight(
        (
            ("blk.1.attn_q.weight", (64, 64)),
            ("blk.1.attn_k.weight", (32, 64)),
            ("blk.1.attn_v.weight", (32, 64)),
        )
    )
    assert weights[Role.QKV].shape == (128, 64)
    assert weights[Role.QKV_BIAS].shape == (128,)
    assert weights[Role.GATE_UP].names == ("blk.1.ffn_gate.weight", "blk.1.ffn_up.weight")


def test_a_tensor_that_the_file_has_fused_takes_the_place_of_the_stack() -> None:
    fused, plain = VARIANTS["fused tensors"].layer_weights(0), PLAIN.layer_weights(0)
    assert fused[Role.QKV] == Weight((("blk.0.attn_qkv.weight", (128, 64)),))
    assert fused[Role.GATE_UP] == Weight((("blk.0.ffn_up.weight", (192, 64)),))
    assert {role: weight.shape for role, weight in fused.items()} == {
        role: weight.shape for role, weight in plain.items()
    }


def test_layers_that_compute_the_same_are_one_key() -> None:
    layer = PLAIN.layers[0]
    other = replace(layer, mixer=replace(layer.attention, window=9))
    assert len({layer, replace(layer), other}) == 2


def test_a_bias_that_has_no_role_is_refused() -> None:
    attention = replace(PLAIN.layers[0].attention, qk_norm=Norm(1e-5, bias=True))
    with pytest.raises(ValueError, match="'q_norm_bias' is not a valid Role"):
        attention.weights(PLAIN.width)
