"""Layers' inputs of their own as data: a second embedding of each token, a row for each layer."""

from dataclasses import dataclass

from nightmill.worker.model.feed_forward import Activation
from nightmill.worker.model.weights import Norm, Role, Weights, stack

__all__ = ["LayerInputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """The inputs of layers for the token itself, by a row of `width` elements (Gemma 4, E2B and E4B).

    The rows of all layers are (table[token] * sqrt(width) + norm(product(h) / sqrt(width of h))) / sqrt(2),
    h being the token's embedding as it enters the first layer, and the norm each layer's alone. At its end a
    layer adds norm(up(activation(gate(x)) * row)) to the residual stream x.

    The table is as large as the rest of such a model, and a step reads one row of it for each token.
    """

    width: int
    norm: Norm
    activation: Activation = Activation.GELU

    def weights(self, width: int) -> Weights:
        """Its weights in a block of the file, for a residual stream of `width` elements."""
        return {
            Role.INPUT_GATE: stack({"inp_gate.weight": (self.width, width)}),
            Role.INPUT_UP: stack({"proj.weight": (width, self.width)}),
        } | self.norm.weights(Role.INPUT_POST_NORM, "post_norm", width)

    def model_weights(self, width: int, vocab: int, layers: int) -> Weights:
        """The weights outside blocks, of which the rows are made."""
        rows = layers * self.width
        return {
            Role.LAYER_EMBEDDING: stack({"per_layer_token_embd.weight": (vocab, rows)}, product=False),
            Role.LAYER_PROJECTION: stack({"per_layer_model_proj.weight": (rows, width)}),
        } | self.norm.weights(Role.LAYER_PROJECTION_NORM, "per_layer_proj_norm", self.width)
