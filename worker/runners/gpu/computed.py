"""Parts of a spec that the kernels compute: a model that has others is refused, not computed wrongly."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from nightmill.worker.model.spec import Attention, Experts, FeedForward, LayerSpec, ModelSpec

__all__ = ["refusal"]


def refusal(spec: ModelSpec) -> str | None:
    """Name the parts or the fields of a spec that no kernel computes, or return None."""
    if lacking := list(_lacking(spec)):
        return ", ".join(lacking)
    if not (spec.attentions or spec.latents):
        return "a model without a layer of attention"
    names = sorted(set(_differences(spec, _computed(spec))))
    return f"a model with its own {', '.join(names)}" if names else None


def _lacking(spec: ModelSpec) -> Iterator[str]:
    """List what whole layers have that no kernel computes."""
    if any(layer.inputs is not None for layer in spec.layers) and spec.layer_inputs is None:
        yield "some layers with inputs of their own"


def _computed(spec: ModelSpec) -> ModelSpec:
    """Copy a spec as the kernels see it: they know nothing of what is not copied here."""
    return ModelSpec(
        family=spec.family,
        name=spec.name,
        width=spec.width,
        vocab=spec.vocab,
        context_length=spec.context_length,
        layers=tuple(map(_computed_layer, spec.layers)),
        output_norm=spec.output_norm,
        output_norm_name=spec.output_norm_name,
        tied_head=spec.tied_head,
        overflows_half=spec.overflows_half,
        pooling=spec.pooling,
        embedding_scale=spec.embedding_scale,
        logit_scale=spec.logit_scale,
        logit_softcap=spec.logit_softcap,
        suppressed=spec.suppressed,
        tensor_types=spec.tensor_types,
        encoder=spec.encoder,
        ranking=spec.ranking,
        predictor=spec.predictor,  # its guesses are taken or left
    )


def _computed_layer(layer: LayerSpec) -> LayerSpec:
    return LayerSpec(
        attention_norm=layer.attention_norm,
        attention_norm_name=layer.attention_norm_name,
        mixer=_computed_attention(layer.mixer) if isinstance(layer.mixer, Attention) else layer.mixer,
        attention_post_norm=layer.attention_post_norm,
        feed_forward_norm=layer.feed_forward_norm,
        feed_forward_norm_name=layer.feed_forward_norm_name,
        feed_forward=_computed_network(layer.feed_forward),
        feed_forward_post_norm=layer.feed_forward_post_norm,
        residual_scale=layer.residual_scale,
        norms_behind=layer.norms_behind and _takes_norms_behind(layer),
        parallel=layer.parallel and not isinstance(layer.feed_forward, Experts),
        inputs=layer.inputs,
        output_scale=layer.output_scale,
    )


def _takes_norms_behind(layer: LayerSpec) -> bool:
    """Return whether norms may stand behind what is added: of two additions each has one."""
    plain = isinstance(layer.mixer, Attention) and isinstance(layer.feed_forward, FeedForward)
    return plain and not layer.parallel and layer.inputs is None and not layer.output_scale


def _computed_network(network: FeedForward | Experts) -> FeedForward | Experts:
    if isinstance(network, FeedForward):
        return network
    return Experts(
        count=network.count,
        used=network.used,
        width=network.width,
        activation=network.activation,
        gated=network.gated,
        scores=network.scores,
        selection_bias=network.selection_bias,
        groups=network.groups,
        groups_used=network.groups_used,
        normalise=network.normalise,
        scale=network.scale,
        router_bias=network.router_bias,
        bias=network.bias,
        expert_scales=network.expert_scales,
        fused=network.fused,
        latent=network.latent,
        shared=None if network.shared is None else replace(network.shared, bias=False),
        shared_gated=network.shared_gated and network.beside is None,
        # Both branches end in a norm of what is there in one launch: no product of a latent comes between.
        beside=network.beside if network.shared is not None and network.latent is None else None,
    )


def _computed_attention(attention: Attention) -> Attention:
    heads, own = attention.qk_norm, attention.keys_of is None
    # Values are normed as queries and keys are, by heads and before rotation, with one epsilon.
    alike = heads is not None and attention.value_norm == heads and not heads.centred and not heads.bias
    alike = alike and not attention.qk_norm_whole
    split = not (attention.fused or attention.gated or attention.qk_norm_whole)
    return Attention(
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        rope=attention.rope,
        bias=attention.bias,
        output_bias=attention.output_bias,
        fused=attention.fused,
        gated=attention.gated and not (attention.fused or attention.bias),
        qk_norm=attention.qk_norm,
        # What norms of whole queries and keys need is summed before they are rotated.
        qk_norm_rotated=attention.qk_norm_rotated and not attention.qk_norm_whole,
        qk_norm_whole=attention.qk_norm_whole,
        window=attention.window,
        scale=attention.scale,
        softcap=attention.softcap,
        temperature=attention.temperature,
        sinks=attention.sinks,
        value_norm=attention.value_norm if alike else None,
        values_are_keys=attention.values_are_keys and split and own,
        causal=attention.causal,
        keys_of=attention.keys_of if split else None,
    )


def _differences(given: Any, computed: Any) -> Iterator[str]:
    """The names of the innermost fields that differ."""
    for field in fields(given):
        one, other = getattr(given, field.name), getattr(computed, field.name)
        if one == other:
            continue
        pairs = list(zip(one, other, strict=True)) if isinstance(one, tuple) else [(one, other)]
        for pair in pairs:
            if all(map(is_dataclass, pair)):
                yield from _differences(*pair)
            else:
                yield field.name
