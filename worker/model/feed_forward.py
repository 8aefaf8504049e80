"""Feed-forward networks as data."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from nightmill.worker.model.weights import Role, Weights, stack

__all__ = ["NO_FEED_FORWARD", "Activation", "FeedForward"]


class Activation(StrEnum):
    """The nonlinear function of a feed-forward network."""

    SILU = "silu"
    """x / (1 + exp(-x))"""
    GELU = "gelu"
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))"""
    GELU_ERF = "gelu_erf"
    """x / 2 (1 + erf(x / sqrt(2)))"""
    RELU_SQUARED = "relu_squared"
    """max(x, 0)^2"""
    CLAMPED_SWIGLU = "clamped_swiglu"
    """g sigmoid(1.702 g) (u + 1), with g = min(gate, 7) and u = up clipped to -7 and 7; with a gate alone"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """down(activation(gate(x)) * up(x)), with `width` elements between.

    Without a gate it is down(activation(up(x))). With a width of 0 there is none: nothing is added.
    """

    width: int
    activation: Activation = Activation.SILU
    gated: bool = True
    bias: bool = False  # of all its matrices
    fused: bool = False  # the file has gate and up in one tensor

    def weights(self, width: int) -> Weights:
        """Its weights in a block of the file, for a residual stream of `width` elements."""
        if not self.width:
            return {}
        sizes = {"gate": self.width, "up": self.width} if self.gated else {"up": self.width}
        if self.fused:
            sizes = {"up": sum(sizes.values())}
        weights = {
            Role.GATE_UP: stack({f"ffn_{part}.weight": (size, width) for part, size in sizes.items()}),
            Role.FFN_DOWN: stack({"ffn_down.weight": (width, self.width)}),
        }
        if self.bias:
            weights[Role.GATE_UP_BIAS] = stack({f"ffn_{part}.bias": (size,) for part, size in sizes.items()})
            weights[Role.FFN_DOWN_BIAS] = stack({"ffn_down.bias": (width,)})
        return weights


NO_FEED_FORWARD: Final = FeedForward(width=0)
