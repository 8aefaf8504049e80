"""What scores are multiplied with before softmax."""

from nightmill.worker.model.spec import Attention

__all__ = ["score_scale"]

_LOG2_E = 1.4426950408889634


def score_scale(attention: Attention) -> float:
    """1 / sqrt(head size), for kernels that take powers of 2."""
    scale: float = attention.head_dim**-0.5 * _LOG2_E
    return scale
