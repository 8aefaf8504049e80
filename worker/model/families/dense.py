"""Parts that most families share: layers of attention and SwiGLU with a norm before each; models of them."""

from dataclasses import replace
from typing import Any

from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import LayerSpec, ModelSpec, Norm

__all__ = ["attending", "dense_layer", "dense_model"]


def dense_layer(
    keys: Keys, *, style: RopeStyle, bias: bool | None = None, qk_norm: bool = False, fused: bool = False,
    norm: Norm | None = None,
) -> LayerSpec:  # fmt: skip
    """Such a layer; `bias` of queries, keys and values (None: as the file), `qk_norm` of each head.

    fused  gate and up are one tensor
    norm   all its norms; None: an RMS norm
    """
    norm = norm or keys.norm()
    return LayerSpec(
        attention_norm=norm,
        mixer=keys.attention(style, bias=bias, qk_norm=norm if qk_norm else None),
        feed_forward_norm=norm,
        feed_forward=keys.feed_forward(fused=fused),
    )


def dense_model(keys: Keys, *kinds: LayerSpec, norm: Norm | None = None) -> ModelSpec:
    """A model whose layers are of these kinds in turn, with `norm` (None: an RMS norm) after the last."""
    return ModelSpec(
        family=keys.family,
        name=keys.file.string("general.name", default="") or keys.file.path.stem,
        width=keys.size("embedding_length"),
        vocab=keys.vocab(),
        context_length=keys.size("context_length"),
        layers=tuple(kinds[index % len(kinds)] for index in range(keys.block_count())),
        output_norm=norm or keys.norm(),
        tied_head=not keys.has_tensor("output.weight"),
    )


def attending(layer: LayerSpec, **changes: Any) -> LayerSpec:
    """The layer with other fields of its attention."""
    return replace(layer, mixer=replace(layer.attention, **changes))
