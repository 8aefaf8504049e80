"""The layers of a model, each bound once to its launchers, weights, pages and buffers."""

from dataclasses import dataclass

from nightmill.worker.model.spec import LayerSpec, ModelSpec
from nightmill.worker.runners.gpu.activations import Activations
from nightmill.worker.runners.gpu.attention.choice import Attentions, Decode, Prefill
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.kv_cache import KvCache, LayerCache
from nightmill.worker.runners.gpu.products.chooser import Product, Products
from nightmill.worker.runners.gpu.products.few_rows import FewRows
from nightmill.worker.runners.gpu.products.qkv import Qkv
from nightmill.worker.runners.gpu.products.shapes import Kind
from nightmill.worker.runners.gpu.rows.rotation import Rotation
from nightmill.worker.runners.gpu.weights.layout import LayerWeights, Weights

__all__ = ["Layer", "LayerKernels", "bind_layers"]


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """What computes layers of one kind, but for norms, which all layers share.

    decode, prefill  attention of drawn tokens, and of prompts
    few              the fused kernels for steps of a few sequences, where they suit
    """

    qkv: Qkv
    decode: Decode
    prefill: Prefill
    output: Product
    gate_up: Product
    down: Product
    few: FewRows | None


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer; `at`: buffers as wide as it needs."""

    kernels: LayerKernels
    weights: LayerWeights
    cache: LayerCache
    at: Activations


def bind_layers(
    device: Device, spec: ModelSpec, weights: Weights, cache: KvCache, at: Activations, products: Products,
    attentions: Attentions, *, max_context: int,
) -> tuple[Layer, ...]:  # fmt: skip
    """All layers; those alike, in weights' formats too, share launchers, and so what timing finds out."""
    rotations = {
        attention: Rotation(device, attention, max_context=max_context) for attention in spec.attentions
    }

    def kernels_of(layer: LayerSpec, own: LayerWeights) -> LayerKernels:
        attention, width, ffn = layer.attention, spec.width, layer.feed_forward.width
        rotation = rotations[attention]
        decode, prefill = attentions.of(attention)
        few = FewRows.suits(layer, width, own.formats, hopper=device.hopper)
        return LayerKernels(
            qkv=Qkv(device, attention, width, own.qkv.format, products, rotation),
            decode=decode,
            prefill=prefill,
            output=products.of(Kind.RESIDUAL, width, attention.queries, own.attn_output.format),
            gate_up=products.of(Kind.SWIGLU, ffn, width, own.gate_up.format),
            down=products.of(Kind.RESIDUAL, width, ffn, own.ffn_down.format),
            few=FewRows(device, layer, width, rotation.table) if few else None,
        )

    known: dict[tuple[LayerSpec, tuple[Format, ...]], LayerKernels] = {}
    layers = []
    for layer, own, pages in zip(spec.layers, weights.layers, cache.layers, strict=True):
        kind = layer, own.formats
        if kind not in known:
            known[kind] = kernels_of(layer, own)
        layers.append(Layer(known[kind], own, pages, at.of(layer)))
    return tuple(layers)
