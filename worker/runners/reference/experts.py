"""Mixtures of experts in NumPy: a router's choice, the experts' products, and what they add to a token.

A token's result is the same to the bit whoever comes with it: its experts are chosen by its own logits, a
product's rows do not depend on each other (see `ops`), and their outputs are added in the order of its ranks.
No expert turns tokens away.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from nightmill.worker.model.spec import Experts, Role, RouterScores
from nightmill.worker.runners.reference import ops

__all__ = ["choose", "mix_experts"]

FloatArray = ops.FloatArray
Weights = dict[Role, npt.NDArray[np.float32]]
Linear = Callable[[FloatArray, npt.NDArray[np.float32], npt.NDArray[np.float32] | None], FloatArray]

_LEAST_SUM = 1e-20
"""Added to the sum that weights are divided by, which may be 0."""


def choose(
    experts: Experts, logits: FloatArray, bias: FloatArray | None = None
) -> tuple[npt.NDArray[np.intp], FloatArray]:
    """The experts (T, used) of tokens, the best first, and their weights (T, used).

    logits (T, count); bias (count,) is added to the scores to choose by. Of equal scores the lower index
    comes first. A row with NaN has some experts, and weights that are NaN.
    """
    scores = logits
    if experts.scores is RouterScores.SOFTMAX:
        scores = _softmax(logits)
    elif experts.scores is RouterScores.SIGMOID:
        scores = ops.sigmoid(logits)
    by = scores if bias is None else scores + bias
    if experts.groups > 1:
        by = _of_best_groups(experts, by)
    chosen = _best(by, experts.used)
    weights = np.take_along_axis(scores, chosen, axis=1)
    if experts.scores is RouterScores.SOFTMAX_OF_CHOSEN:
        weights = _softmax(weights)
    if experts.normalise:
        weights = weights / (weights.sum(axis=1, keepdims=True) + weights.dtype.type(_LEAST_SUM))
    return chosen, weights if experts.scale == 1.0 else weights * weights.dtype.type(experts.scale)


def mix_experts(
    experts: Experts, weights: Weights, x: FloatArray, linear: Linear,
    activate: Callable[[FloatArray], FloatArray], routed: tuple[npt.NDArray[np.intp], FloatArray],
) -> FloatArray:  # fmt: skip
    """Return what the chosen experts add to T tokens x (T, columns of EXPERTS_GATE_UP), in its size.

    linear    a product, whose rows do not depend on each other
    activate  of gate and up
    routed    as `choose` returns it
    """
    chosen, shares = routed
    down = weights[Role.EXPERTS_DOWN]
    down_bias, down_scale = weights.get(Role.EXPERTS_DOWN_BIAS), weights.get(Role.EXPERTS_DOWN_SCALE)
    outputs = np.empty((*chosen.shape, down.shape[2]), dtype=x.dtype)
    for expert in np.unique(chosen).tolist():
        tokens, ranks = np.nonzero(chosen == expert)
        output = linear(activate(_gate_up(experts, weights, x[tokens], linear, expert)), down[expert], None)
        if down_scale is not None:
            output = output * down_scale[expert]
        outputs[tokens, ranks] = output if down_bias is None else output + down_bias[expert]
    total: FloatArray = outputs[:, 0] * shares[:, :1]
    for rank in range(1, experts.used):
        total = total + outputs[:, rank] * shares[:, rank : rank + 1]
    return total


def _gate_up(experts: Experts, weights: Weights, x: FloatArray, linear: Linear, expert: int) -> FloatArray:
    """Gate and up of one expert for tokens x: their products, times their scales, plus their biases."""

    def of_expert(role: Role) -> list[FloatArray]:
        """Return an expert's parts of gate and up: one part if the file has both in one tensor."""
        stacked = weights.get(role)
        return [] if stacked is None else list(stacked[expert :: experts.count])

    parts = [linear(x, part, None) for part in of_expert(Role.EXPERTS_GATE_UP)]
    inner = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    named = [Role.EXPERTS_GATE_SCALE, Role.EXPERTS_UP_SCALE] if experts.gated else [Role.EXPERTS_UP_SCALE]
    for place, role in enumerate(named):
        if (scale := weights.get(role)) is not None:
            inner[:, place * experts.width : (place + 1) * experts.width] *= scale[expert]
    if bias := of_expert(Role.EXPERTS_GATE_UP_BIAS):
        inner = inner + np.concatenate(bias)
    return inner


def _softmax(x: FloatArray) -> FloatArray:
    exponentials = np.exp(x - x.max(axis=1, keepdims=True))
    result: FloatArray = exponentials / exponentials.sum(axis=1, keepdims=True)
    return result


def _best(scores: FloatArray, count: int) -> npt.NDArray[np.intp]:
    """Indices of the `count` highest of each row, the highest first; of equal ones the lower index."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


def _of_best_groups(experts: Experts, scores: FloatArray) -> FloatArray:
    """The scores with -inf where the group is not among the best."""
    grouped = scores.reshape(len(scores), experts.groups, -1)
    good = np.sort(grouped, axis=2)[:, :, ::-1][:, :, : experts.group_best].sum(axis=2)
    kept = np.zeros((len(scores), experts.groups, 1), dtype=bool)
    np.put_along_axis(kept[:, :, 0], _best(good, experts.groups_used), True, axis=1)
    return np.where(kept, grouped, -np.inf).reshape(scores.shape)
