"""Parts that an encoder has beside those of a decoder: tables that are added to embeddings, and a norm."""

from dataclasses import dataclass

from nightmill.worker.model.weights import Norm, Role, Weights, stack

__all__ = ["Encoder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """A model whose tokens see those behind them, too: it embeds texts, and draws no tokens.

    norm         of the sum of a token's embeddings
    positions    rows of a learned table of positions; 0: there is none, and attention rotates
    token_types  rows of a table of kinds of texts, of which all tokens take the first; 0: there is none
    """

    norm: Norm
    positions: int = 0
    token_types: int = 0

    def weights(self, width: int) -> Weights:
        """Its weights, which stand outside the layers."""
        weights: Weights = {}
        if self.positions:
            table = stack({"position_embd.weight": (self.positions, width)}, product=False)
            weights[Role.POSITIONS] = table
        if self.token_types:
            weights[Role.TEXT_TYPES] = stack({"token_types.weight": (self.token_types, width)}, product=False)
        return weights | self.norm.weights(Role.EMBEDDING_NORM, "token_embd_norm", width)
