"""Nemotron-H, without experts: a layer is one of Mamba-2, attention, and a feed-forward network."""

from nightmill.worker.model.families.dense import dense_model
from nightmill.worker.model.families.hybrid import attention_layers, check_kinds, mamba2
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import NO_FEED_FORWARD, Activation, LayerSpec, ModelSpec, Norm

__all__ = ["nemotron_h"]

_MAMBA, _FEED_FORWARD = "Mamba-2", "a feed-forward network"


def nemotron_h(keys: Keys) -> ModelSpec:
    """Positions do not count in attention; the feed-forward network has no gate, and squares."""
    keys.refuse_experts()
    heads, widths = keys.by_layer("attention.head_count_kv"), keys.by_layer("feed_forward_length")
    kinds = [
        _FEED_FORWARD if width else "attention" if count else _MAMBA
        for count, width in zip(heads, widths, strict=True)
    ]
    tensors = {"attention": "attn_output.weight", _MAMBA: "ssm_out.weight", _FEED_FORWARD: "ffn_down.weight"}
    check_kinds(keys, kinds, tensors, "attention.head_count_kv")
    norm = _norm(keys)
    layers = {
        "attention": LayerSpec(
            attention_norm=norm,
            mixer=keys.attention(
                RopeStyle.HALVES,
                layers=attention_layers(keys, kinds, "attention.head_count_kv"),
                rope=keys.no_rope(RopeStyle.HALVES),
            ),
            feed_forward_norm=None,
            feed_forward=NO_FEED_FORWARD,
        )
    }
    if recurrent := [index for index, kind in enumerate(kinds) if kind == _MAMBA]:
        layers[_MAMBA] = LayerSpec(
            attention_norm=norm,
            mixer=mamba2(keys, norm, recurrent),
            feed_forward_norm=None,
            feed_forward=NO_FEED_FORWARD,
        )
    if feeding := [index for index, kind in enumerate(kinds) if kind == _FEED_FORWARD]:
        layers[_FEED_FORWARD] = LayerSpec(
            attention_norm=None,
            mixer=None,
            feed_forward_norm=norm,
            feed_forward_norm_name="attn_norm",
            feed_forward=keys.feed_forward(activation=Activation.RELU_SQUARED, gated=False, layers=feeding),
        )
    return dense_model(keys, *(layers[kind] for kind in kinds), norm=norm)


def _norm(keys: Keys) -> Norm:
    """An RMS norm; files of some converters give its constant under the name of LayerNorm's."""
    given = keys.optional("attention.layer_norm_rms_epsilon")
    return Norm(given or keys.positive("attention.layer_norm_epsilon"))
