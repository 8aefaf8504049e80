"""A constraint over any vocabulary, for runners that compute."""

import numpy as np
import numpy.typing as npt

from nightmill.worker.runners.base import IntArray


class EveryNth:
    """Allows each `step`th token, beginning one further with every token that was drawn. Accepts no other.

    A step of 1 allows all.
    """

    def __init__(self, vocab: int, step: int) -> None:
        self._vocab = vocab
        self._step = step
        self._drawn = 0

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens (V,) may be next."""
        return (np.arange(self._vocab) + self._drawn) % self._step == 0

    def mask(self, row: IntArray, /) -> None:
        """See `nightmill.worker.engine.constraints`."""
        assert not row.any()
        bits = np.zeros(32 * len(row), dtype=np.bool_)
        bits[: self._vocab] = self.allowed()
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int, /) -> None:
        """See `nightmill.worker.engine.constraints`."""
        assert self.allowed()[token_id]
        self._drawn += 1
