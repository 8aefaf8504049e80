"""Encoders, which embed texts: BERT, Nomic's with rotated positions and a gate, and ModernBERT."""

from dataclasses import replace

from nightmill.worker.model.encoder import Encoder
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import Activation, LayerSpec, ModelSpec, Norm

__all__ = ["bert", "modern_bert", "nomic_bert"]

_GLOBAL_EVERY = 3  # of ModernBERT's layers, the first and each so many see the whole text


def bert(keys: Keys) -> ModelSpec:
    """Norms behind what is added, positions from a table, GELU without a gate."""
    norm = _norm(keys)
    attention = keys.attention(RopeStyle.HALVES, rope=keys.no_rope(RopeStyle.HALVES))
    layer = LayerSpec(
        attention_norm=norm,
        attention_norm_name="attn_output_norm",
        mixer=replace(attention, causal=False),
        feed_forward_norm=norm,
        feed_forward_norm_name="layer_output_norm",
        feed_forward=keys.feed_forward(activation=Activation.GELU_ERF, gated=False),
        norms_behind=True,
    )
    positions = keys.rows("position_embd.weight")
    return _model(keys, [layer] * keys.block_count(), norm, positions)


def nomic_bert(keys: Keys) -> ModelSpec:
    """The same with rotation in the place of the table, and SwiGLU."""
    keys.refuse_experts()
    norm = _norm(keys)
    layer = LayerSpec(
        attention_norm=norm,
        attention_norm_name="attn_output_norm",
        mixer=replace(keys.attention(RopeStyle.HALVES), causal=False),
        feed_forward_norm=norm,
        feed_forward_norm_name="layer_output_norm",
        feed_forward=keys.feed_forward(),
        norms_behind=True,
    )
    return _model(keys, [layer] * keys.block_count(), norm)


def modern_bert(keys: Keys) -> ModelSpec:
    """Norms before each part but the first, two layers of three with a window to both sides, GEGLU."""
    norm = Norm(keys.positive("attention.layer_norm_epsilon"), centred=True)
    window, style = keys.window(), RopeStyle.HALVES
    whole = keys.attention(style)
    local = replace(whole, window=window, rope=keys.local_rope(whole.rope, 10_000.0))
    layers = []
    for index in range(keys.block_count()):
        attention = whole if index % _GLOBAL_EVERY == 0 or window is None else local
        layers.append(
            LayerSpec(
                attention_norm=norm if index else None,
                mixer=replace(attention, causal=False),
                feed_forward_norm=norm,
                feed_forward=keys.feed_forward(activation=Activation.GELU_ERF, fused=True),
            )
        )
    return _model(keys, layers, norm)


def _norm(keys: Keys) -> Norm:
    return Norm(keys.positive("attention.layer_norm_epsilon"), centred=True, bias=True)


def _model(keys: Keys, layers: list[LayerSpec], norm: Norm, positions: int = 0) -> ModelSpec:
    keys.reads("attention.causal")
    behind, name = layers[-1].norms_behind, "output_norm"
    if behind:  # the last norm of the last layer is the model's
        name = f"blk.{len(layers) - 1}.layer_output_norm"
        layers = [*layers[:-1], replace(layers[-1], feed_forward_norm=None)]
    context = keys.size("context_length")
    if positions and positions < context:
        keys.file.fail(
            f"{keys.name('context_length')}: is {context}, but position_embd.weight has only {positions} rows"
        )
    types = keys.rows("token_types.weight") if keys.has_tensor("token_types.weight") else 0
    return ModelSpec(
        family=keys.family,
        name=keys.file.string("general.name", default="") or keys.file.path.stem,
        width=keys.size("embedding_length"),
        vocab=keys.vocab(),
        context_length=context,
        layers=tuple(layers),
        output_norm=norm,
        output_norm_name=name,
        tied_head=True,
        encoder=Encoder(norm=norm, positions=positions, token_types=types),
    )
