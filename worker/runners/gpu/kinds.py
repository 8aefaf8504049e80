"""Kinds of the products that the layers of a model have."""

from typing import NamedTuple

from nightmill.worker.model.spec import LayerSpec, ModelSpec, Norm
from nightmill.worker.runners.gpu.shapes import GATED, Kind

__all__ = ["LayerKinds", "kinds_of", "layer_kinds"]


class LayerKinds(NamedTuple):
    """Kinds of a layer's products, beside that of queries, keys and values, which is PLAIN.

    RESIDUAL where a product is added to the residual stream as it is; ADDEND where a bias, a norm or a scale
    comes between. PLAIN where the activation is no part of gate and up.
    """

    output: Kind
    gate_up: Kind
    down: Kind


def layer_kinds(layer: LayerSpec) -> LayerKinds:
    """Return the kinds of a layer's products."""
    ffn = layer.feed_forward
    fused = next(kind for kind, activation in GATED.items() if activation is ffn.activation)
    return LayerKinds(
        output=_added(layer, layer.attention_post_norm, bias=layer.attention.output_bias),
        gate_up=fused if ffn.gated and not ffn.bias else Kind.PLAIN,
        down=_added(layer, layer.feed_forward_post_norm, bias=ffn.bias),
    )


def kinds_of(spec: ModelSpec) -> frozenset[Kind]:
    """Return all kinds of products that a model has."""
    return frozenset((Kind.PLAIN, Kind.FLOAT)).union(*map(layer_kinds, spec.layers))


def _added(layer: LayerSpec, after: Norm | None, *, bias: bool) -> Kind:
    return Kind.ADDEND if after is not None or bias or layer.residual_scale != 1.0 else Kind.RESIDUAL
