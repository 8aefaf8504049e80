"""Nemotron-H and Nemotron 3: a layer is one of Mamba-2, attention, and a feed-forward network or experts."""

from nightmill.worker.model.families.dense import dense_model
from nightmill.worker.model.families.experts import experts_of
from nightmill.worker.model.families.hybrid import attention_layers, check_kinds, mamba2
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import (
    NO_FEED_FORWARD,
    Activation,
    Experts,
    FeedForward,
    LayerSpec,
    ModelSpec,
    Norm,
    RouterScores,
)

__all__ = ["nemotron_h", "nemotron_h_moe"]

_MAMBA, _FEED_FORWARD, _EXPERTS = "Mamba-2", "a feed-forward network", "experts"


def nemotron_h(keys: Keys) -> ModelSpec:
    """Without experts."""
    keys.refuse_experts()
    return _model(keys)


def nemotron_h_moe(keys: Keys) -> ModelSpec:
    """Layers that feed forward have experts if the file has their router; the largest read a latent."""
    return _model(keys)


def _model(keys: Keys) -> ModelSpec:
    """Positions do not count in attention; feed-forward networks have no gate, and square."""
    heads, widths = keys.by_layer("attention.head_count_kv"), keys.by_layer("feed_forward_length")
    kinds = [
        _feeding(keys, index) if width else "attention" if count else _MAMBA
        for index, (count, width) in enumerate(zip(heads, widths, strict=True))
    ]
    tensors = {
        "attention": "attn_output.weight", _MAMBA: "ssm_out.weight", _FEED_FORWARD: "ffn_down.weight",
        _EXPERTS: "ffn_down_exps.weight",
    }  # fmt: skip
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
        layers[_FEED_FORWARD] = _alone(
            norm, keys.feed_forward(activation=Activation.RELU_SQUARED, gated=False, layers=feeding)
        )
    return dense_model(
        keys,
        *(
            _alone(norm, _experts(keys, index)) if kind == _EXPERTS else layers[kind]
            for index, kind in enumerate(kinds)
        ),
        norm=norm,
    )


def _feeding(keys: Keys, index: int) -> str:
    """The kind of a layer that feeds forward."""
    return _EXPERTS if keys.has_tensor(f"blk.{index}.ffn_gate_inp.weight") else _FEED_FORWARD


def _experts(keys: Keys, index: int) -> Experts:
    return experts_of(
        keys, index, activation=Activation.RELU_SQUARED, gated=False, scores=RouterScores.SIGMOID
    )


def _alone(norm: Norm, network: FeedForward | Experts) -> LayerSpec:
    """A layer that only feeds forward."""
    return LayerSpec(
        attention_norm=None,
        mixer=None,
        feed_forward_norm=norm,
        feed_forward_norm_name="attn_norm",
        feed_forward=network,
    )


def _norm(keys: Keys) -> Norm:
    """An RMS norm; files of some converters give its constant under the name of LayerNorm's."""
    given = keys.optional("attention.layer_norm_rms_epsilon")
    return Norm(given or keys.positive("attention.layer_norm_epsilon"))
