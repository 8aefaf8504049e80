"""LFM2, without experts: most layers have a short convolution in place of attention."""

from dataclasses import replace

from nightmill.worker.model.families.dense import dense_model
from nightmill.worker.model.families.hybrid import attention_layers, kinds_by_heads
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import LayerSpec, ModelSpec, ShortConv

__all__ = ["lfm2"]

_CONVOLUTION = "a short convolution"
_FURTHEST = 64


def lfm2(keys: Keys) -> ModelSpec:
    """Each head's query and key are normed; the last norm goes by another name."""
    keys.refuse_experts()
    kinds, norm = kinds_by_heads(keys, _CONVOLUTION, "shortconv.conv.weight"), keys.norm()
    attending = LayerSpec(
        attention_norm=norm,
        mixer=keys.attention(
            RopeStyle.HALVES, qk_norm=norm, layers=attention_layers(keys, kinds, "attention.head_count_kv")
        ),
        feed_forward_norm=norm,
        feed_forward=keys.feed_forward(),
    )
    kernel = keys.file.integer(keys.name("shortconv.l_cache"), minimum=1, maximum=_FURTHEST)
    convolution = ShortConv(width=keys.size("embedding_length"), kernel=kernel)
    layers = {"attention": attending, _CONVOLUTION: replace(attending, mixer=convolution)}
    model = dense_model(keys, *(layers[kind] for kind in kinds))
    return replace(model, output_norm_name="token_embd_norm")
