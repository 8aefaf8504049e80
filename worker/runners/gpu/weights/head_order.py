"""Which rows of a file's tensors come where on the GPU."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import Attention

__all__ = ["HeadOrder", "KindOrder", "RowOrder", "RowRange"]


class RowOrder(Protocol):
    """The rows of a tensor that are wanted, in the order in which they are."""

    def arranged(self, raw: npt.NDArray[np.uint8], first: int, rows: int) -> npt.NDArray[np.uint8]:
        """Their bytes, of a tensor of `rows` rows; in a stack of tensors it begins at row `first`."""
        ...


class RowRange:
    """The rows of a tensor from `first` to before `end`; None: to the last."""

    def __init__(self, first: int, end: int | None) -> None:
        self._range = slice(first, end)

    def arranged(self, raw: npt.NDArray[np.uint8], first: int, rows: int) -> npt.NDArray[np.uint8]:
        """The bytes of these rows, as `RowOrder` says."""
        return raw.reshape(rows, -1)[self._range].reshape(-1)


class KindOrder:
    """Rows of several kinds, of which each group has some: here all of one kind come first, then the next."""

    def __init__(self, groups: int, kinds: int) -> None:
        self._groups, self._kinds = groups, kinds

    def arranged(self, raw: npt.NDArray[np.uint8], first: int, rows: int) -> npt.NDArray[np.uint8]:
        """The bytes of all rows, as `RowOrder` says."""
        together = raw.reshape(self._groups, self._kinds, -1)
        return np.ascontiguousarray(together.swapaxes(0, 1)).reshape(-1)


class HeadOrder:
    """Puts heads of which a part is rotated, by halves of it, into the order that kernels rotate in.

    These take elements i and i + D / 2 of a head for a pair. Where only the first N < D elements are rotated,
    pairs are i and i + N / 2: the halves of that part move to the beginnings of the head's halves, and what
    is not rotated fills these up. Scores are sums over the elements of a head, so any order will do in which
    queries and keys agree. Other heads stay as they are.

    Where a gate comes after each head's query in the file, it takes queries alone, or `gates` alone, which
    stay in their order.
    """

    def __init__(self, attention: Attention, *, gates: bool = False) -> None:
        self._attention, self._gates = attention, gates
        head, rotated = attention.head_dim, attention.rope.dim
        self._moves = attention.rope.style is RopeStyle.HALVES and 0 < rotated < head
        self._head = head
        self._rows = attention.queries + attention.keys  # behind them are values
        halves = np.arange(rotated).reshape(2, -1), np.arange(rotated, head).reshape(2, -1)
        self._order = np.concatenate(halves, axis=1).reshape(-1)
        """Which element of the file comes to each place."""

    def arranged(self, raw: npt.NDArray[np.uint8], first: int, rows: int) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor of `rows` rows: of those of all heads, or of a norm, from row `first` on."""
        if self._attention.gated and rows == self._attention.gated_queries:
            halves = raw.reshape(self._attention.heads, 2, -1)
            raw, rows = np.ascontiguousarray(halves[:, int(self._gates)]).reshape(-1), rows // 2
        if not self._moves or self._gates:
            return raw
        places = np.arange(rows)
        turned = min(max(self._rows - first, 0), rows)
        heads = places[:turned].reshape(-1, self._head)
        places[:turned] = heads[:, self._order].reshape(-1)
        return raw.reshape(rows, -1)[places].reshape(-1)
