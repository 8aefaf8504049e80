"""How GPU results are held against oracles."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


def nmse(actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """Mean squared error over the mean square of `expected`; NaN or infinity anywhere gives infinity."""
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    error = np.square(actual - expected).sum() / np.square(expected).sum()
    return float(error) if np.isfinite(error) else float("inf")


@dataclass(frozen=True)
class Agreement:
    """How far the distributions of two sets of logits are apart."""

    mean_kl: float
    largest_kl: float
    same_top: float  # share of the rows whose best two differ clearly
    clear_rows: int

    def check(self, *, mean_kl: float = 1e-4, same_top: float = 0.995) -> None:
        """Raise AssertionError where they are too far apart; NaN is."""
        assert self.mean_kl < mean_kl, self
        assert self.same_top >= same_top, self


def compare_logits(actual: npt.NDArray[Any], expected: npt.NDArray[Any], *, clear: float = 0.05) -> Agreement:
    """Compare logits (rows, vocab); `clear`: from this distance of its best two a row's best token counts."""
    p, q = _log_softmax(expected), _log_softmax(actual)
    divergence = (np.exp(p) * (p - q)).sum(axis=1)
    best_two = np.partition(expected, -2, axis=1)[:, -2:]
    is_clear = best_two[:, 1] - best_two[:, 0] > clear
    same = (actual.argmax(axis=1) == expected.argmax(axis=1))[is_clear]
    return Agreement(
        mean_kl=float(divergence.mean()),
        largest_kl=float(divergence.max()),
        same_top=float(same.mean()) if same.size else 1.0,
        clear_rows=int(is_clear.sum()),
    )


def _log_softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
