"""The head of a cross-encoder: from the pooled state of a pair of texts to one number, its relevance."""

from dataclasses import dataclass

from nightmill.worker.model.feed_forward import Activation
from nightmill.worker.model.weights import Norm, Role, Weights, stack

__all__ = ["RankHead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHead:
    """The layers that a pooled state goes through: a dense one, where there is one, and a row of weights.

    mean         the states of all tokens are pooled; else the first token's is taken
    dense        there is a dense layer before the last row
    dense_bias   it has a bias
    activation   behind the dense layer; None: tanh
    norm         behind that
    output_bias  the last row has a bias
    labels       numbers that the head gives; only one is a relevance
    second_type  tokens of a pair's second text take the second row of the table of kinds of texts
    """

    mean: bool = False
    dense: bool = True
    dense_bias: bool = True
    activation: Activation | None = None
    norm: Norm | None = None
    output_bias: bool = True
    labels: int = 1
    second_type: bool = False

    def weights(self, width: int) -> Weights:
        """Its weights, which a runner keeps apart from those of its kernels."""
        weights: Weights = {}
        if self.dense:
            weights[Role.RANK_DENSE] = stack({"cls.weight": (width, width)})
        if self.dense_bias:
            weights[Role.RANK_DENSE_BIAS] = stack({"cls.bias": (width,)})
        if self.norm is not None:
            weights |= self.norm.weights(Role.RANK_NORM, "cls.norm", width)
        weights[Role.RANK_OUTPUT] = stack({"cls.output.weight": (self.labels, width)})
        if self.output_bias:
            weights[Role.RANK_OUTPUT_BIAS] = stack({"cls.output.bias": (self.labels,)})
        return weights
