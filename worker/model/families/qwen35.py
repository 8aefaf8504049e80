"""Qwen3-Next and Qwen3.5 to 3.8: three of four layers have a gated delta net in place of attention."""

from dataclasses import replace

from nightmill.worker.model.families.dense import dense_model
from nightmill.worker.model.families.experts import experts_of
from nightmill.worker.model.families.hybrid import attention_layers, check_kinds, delta_net
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.families.mixture import mixture_layers
from nightmill.worker.model.families.predictors import predictor_of
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec

__all__ = ["qwen3next", "qwen35", "qwen35moe"]

_DELTA_NET = "a gated delta net"


def qwen35(keys: Keys) -> ModelSpec:
    """Without experts."""
    keys.refuse_experts()
    return _model(keys, dense=True)


def qwen35moe(keys: Keys) -> ModelSpec:
    """All layers have experts, and one that all tokens go through, with a gate."""
    return _model(keys, dense=False)


def qwen3next(keys: Keys) -> ModelSpec:
    """The same, with the value heads of the delta net in the order of the model."""
    return _model(keys, dense=False, by_key_head=True)


def _model(keys: Keys, *, dense: bool, by_key_head: bool = False) -> ModelSpec:
    """Attention has gates, norms of each query and key, and rotates a quarter of a head.

    The converter adds 1 to the weights of all norms but the delta net's, and orders value heads so that head
    h goes with key head h % key heads, but not for qwen3next. Blocks behind the last layer predict further
    tokens; the first of them is like a layer of attention.
    """
    keys.skip_predictors()
    keys.text_of_images()
    kinds, said_by = _kinds(keys)
    check_kinds(keys, kinds, {"attention": "attn_output.weight", _DELTA_NET: "ssm_out.weight"}, said_by)
    norm = keys.norm()
    attention = keys.attention(RopeStyle.HALVES, qk_norm=norm, layers=attention_layers(keys, kinds, said_by))
    layers = mixture_layers(
        keys, replace(attention, gated=True), lambda index: experts_of(keys, index), dense=lambda _: dense,
        norm_name="post_attention_norm",
    )  # fmt: skip
    net = replace(delta_net(keys, norm), by_key_head=by_key_head)
    mixed = (
        replace(layer, mixer=net) if kind == _DELTA_NET else layer
        for layer, kind in zip(layers, kinds, strict=True)
    )
    model = dense_model(keys, *mixed)
    attending = model.layers[kinds.index("attention")]
    return replace(model, predictor=predictor_of(keys, model, attending, hands_on_normed=True))


def _kinds(keys: Keys) -> tuple[list[str], str]:
    """Return the kind of mixer of each layer, and the key that says so; a fault is a ModelFileError."""
    file, name, count = keys.file, keys.name("attention.recurrent_layers"), keys.block_count()
    if file.is_array(name):
        given = file.booleans(name)
        if len(given) != count + keys.skipped_blocks:
            file.fail(f"{name}: has {len(given)} entries for {count + keys.skipped_blocks} layers")
        return [_DELTA_NET if one else "attention" for one in given[:count]], "attention.recurrent_layers"
    interval = file.integer(keys.name("full_attention_interval"), minimum=1, maximum=4096, default=4)
    kinds = [_DELTA_NET if (index + 1) % interval else "attention" for index in range(count)]
    return kinds, "full_attention_interval"
