"""Mixtures of experts as data: a router sends each token to some of many feed-forward networks.

Scores come of the router's logits, one for each expert. The `used` experts of the highest scores are chosen,
the best first; of equal scores that of the lower index. The layer's output is the sum of their outputs, each
times its weight, in that order. What becomes of a token hangs on that token alone: an expert takes all that
are sent to it. The router is computed in float32, whatever the precision of all else.
"""

from dataclasses import dataclass
from enum import StrEnum

from nightmill.worker.model.feed_forward import Activation, FeedForward
from nightmill.worker.model.weights import Norm, Role, Shape, Weight, Weights, stack

__all__ = ["Experts", "RouterScores"]


class RouterScores(StrEnum):
    """The function that gives a token's weights for experts, before they are normalised and scaled."""

    SOFTMAX = "softmax"
    """The softmax of all logits."""
    SIGMOID = "sigmoid"
    """The sigmoid of each logit."""
    SOFTMAX_OF_CHOSEN = "softmax of the chosen"
    """Experts are chosen by their logits; the softmax goes over those of the chosen alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """`count` feed-forward networks of `width` elements between, of which a token goes through `used`.

    With `groups`, experts that follow each other are a group, and only those of the `groups_used` best groups
    can be chosen. A group is as good as the scores of its best experts, added: of its two best, where scores
    are sigmoids (DeepSeek-V3), else of the best (DeepSeek-V2).
    """

    count: int
    used: int
    width: int
    activation: Activation = Activation.SILU
    gated: bool = True
    scores: RouterScores = RouterScores.SOFTMAX
    selection_bias: bool = False  # added to the scores to choose by; weights are without it
    groups: int = 1
    groups_used: int = 1
    normalise: bool = False  # weights are divided by their sum
    scale: float = 1.0  # then multiplied with
    router_bias: bool = False
    bias: bool = False  # of all matrices of the experts
    expert_scales: tuple[
        str, ...
    ] = ()  # which of gate, up, down are multiplied with a number for each expert
    fused: bool = False  # the file has gate and up in one tensor
    latent: int | None = None  # experts read and write so many elements, made of the input by a product
    shared: FeedForward | None = None  # every token goes through it too
    shared_gated: bool = False  # its output is multiplied by the sigmoid of a product of the input
    beside: Norm | None = None
    """Experts stand beside the shared one as a branch of their own, with norms of this kind (Gemma 4).

    They read the residual stream by a norm of theirs, and what they add has a norm after it, as what the
    shared one adds has; the sum is then the layer's. The router reads the residual stream, too, by another
    norm, whose output is divided by the square root of the stream's width. In the file the shared expert has
    the names of a dense network.
    """

    @property
    def group_best(self) -> int:
        """The number of a group's experts by which it is judged."""
        return 2 if self.scores is RouterScores.SIGMOID else 1

    def weights(self, width: int) -> Weights:
        """Its weights in a block of the file, for a residual stream of `width` elements."""
        read, count, inner = width if self.latent is None else self.latent, self.count, self.width
        parts = ["gate", "up"] if self.gated else ["up"]
        rows = dict.fromkeys(parts, inner)
        if self.fused:
            rows = {"gate_up": inner * len(parts)}
        weights = {Role.ROUTER: stack({"ffn_gate_inp.weight": (count, width)})}
        if self.router_bias:
            weights[Role.ROUTER_BIAS] = stack({"ffn_gate_inp.bias": (count,)})
        if self.selection_bias:
            weights[Role.SELECTION_BIAS] = stack({"exp_probs_b.bias": (count,)})
        if self.latent is not None:
            weights[Role.LATENT_DOWN] = stack({"ffn_latent_down.weight": (self.latent, width)})
            weights[Role.LATENT_UP] = stack({"ffn_latent_up.weight": (width, self.latent)})

        def experts(shapes: dict[str, Shape], kind: str) -> Weight:
            named = {f"ffn_{part}_exps.{kind}": (count, *shape) for part, shape in shapes.items()}
            return stack(named, product=kind == "weight")

        weights[Role.EXPERTS_GATE_UP] = experts({part: (size, read) for part, size in rows.items()}, "weight")
        weights[Role.EXPERTS_DOWN] = experts({"down": (read, inner)}, "weight")
        if self.bias:
            weights[Role.EXPERTS_GATE_UP_BIAS] = experts(
                {part: (size,) for part, size in rows.items()}, "bias"
            )
            weights[Role.EXPERTS_DOWN_BIAS] = experts({"down": (read,)}, "bias")
        for part in self.expert_scales:
            weights[Role(f"experts_{part}_scale")] = experts({part: ()}, "scale")
        if self.beside is not None:
            weights[Role.ROUTER_NORM] = stack({"ffn_gate_inp.scale": (width,)})
            weights |= self.beside.weights(Role.ROUTED_NORM, "pre_ffw_norm_2", width)
            weights |= self.beside.weights(Role.ROUTED_POST_NORM, "post_ffw_norm_2", width)
            weights |= self.beside.weights(Role.SHARED_POST_NORM, "post_ffw_norm_1", width)
        return weights | self._shared_weights(width)

    def _shared_weights(self, width: int) -> Weights:
        """Return the weights of the shared expert: a feed-forward network under other names."""
        if self.shared is None:
            return {}
        suffix = "." if self.beside is not None else "_shexp."
        weights = {
            Role(f"shared_{role}"): weight.called(lambda name: name.replace(".", suffix))
            for role, weight in self.shared.weights(width).items()
        }
        if self.shared_gated:
            weights[Role.SHARED_GATE] = stack({"ffn_gate_inp_shexp.weight": (width,)}, product=False)
        return weights
