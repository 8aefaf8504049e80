"""SmolLM3."""

from nightmill.worker.model.families.dense import attending, dense_layer, dense_model
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec

__all__ = ["smollm3"]


def smollm3(keys: Keys) -> ModelSpec:
    """In every fourth layer positions do not count; no key says so."""
    layer = dense_layer(keys, style=RopeStyle.PAIRS)
    still = attending(layer, rope=keys.no_rope(RopeStyle.PAIRS))
    return dense_model(keys, layer, layer, layer, still)
