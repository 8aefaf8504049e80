"""What families of the common shape share: equal layers of attention and SwiGLU, a norm before each."""

from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import LayerSpec, ModelSpec

__all__ = ["dense_model"]


def dense_model(keys: Keys, *, style: RopeStyle, bias: bool = False, qk_norm: bool = False) -> ModelSpec:
    """Such a model; `bias` of queries, keys and values, `qk_norm` of each head's query and key."""
    keys.refuse_other_arithmetic()
    layers, width = keys.block_count(), keys.size("embedding_length")
    norm = keys.norm()
    layer = LayerSpec(
        attention_norm=norm,
        attention=keys.attention(
            layers=layers, width=width, style=style, bias=bias, qk_norm=norm if qk_norm else None
        ),
        feed_forward_norm=norm,
        feed_forward=keys.feed_forward(layers=layers),
    )
    return ModelSpec(
        family=keys.family,
        name=keys.file.string("general.name", default="") or keys.file.path.stem,
        width=width,
        vocab=keys.vocab(),
        context_length=keys.size("context_length"),
        layers=(layer,) * layers,
        output_norm=norm,
        tied_head=not keys.has_tensor("output.weight"),
    )
