"""Reads the block behind the last layer that predicts further tokens, where a file has one (MTP)."""

from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.spec import LayerSpec, ModelSpec, Predictor, Role, Shape

__all__ = ["predictor_of"]

_LAST_NORM = "nextn.shared_head_norm"


def predictor_of(
    keys: Keys, model: ModelSpec, layer: LayerSpec, *, hands_on_normed: bool
) -> Predictor | None:
    """The first such block, whose layer is like this one; None if the file lacks any of its tensors.

    Guesses are worth having, and not needed: files have been written without these tensors, or with some of
    them, and their models are read as if there were none. Copies of the embedding and of the head that a
    block may have are not read: they are the model's.
    """
    if not keys.skipped_blocks:
        return None
    found = Predictor(
        block=keys.block_count(),
        layer=layer,
        norm=model.output_norm,
        last_norm_name=_LAST_NORM,
        hands_on_normed=hands_on_normed,
    )
    alone = found.model(model)
    weights = (
        *found.weights(model.width).values(),
        *alone.layer_weights(0).values(),
        *alone.output_norm.weights(Role.OUTPUT_NORM, alone.output_norm_name, model.width).values(),
    )
    parts: dict[str, Shape] = {name: shape for weight in weights for name, shape in weight.parts}
    there = keys.file.tensors
    complete = all(name in there and there[name].shape == shape for name, shape in parts.items())
    return found if complete else None
