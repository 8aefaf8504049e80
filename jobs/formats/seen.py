"""A compact set of custom_ids with their rows."""

from array import array

_FIRST_SLOTS = 1024
_MASK = 2**64 - 1


class SeenIds:
    """An open hash table of 64-bit hashes and row numbers: 18 to 36 bytes an id, independent of its length.

    Ids with equal hashes count as equal: for 1,000,000 ids the probability of any collision is 3e-8.
    """

    def __init__(self) -> None:
        self._hashes = array("Q", bytes(8 * _FIRST_SLOTS))  # 0: a free slot
        self._rows = array("I", bytes(4 * _FIRST_SLOTS))
        self._count = 0

    def add(self, custom_id: str, row: int) -> int | None:
        """Add the `custom_id` of `row`; returns the row that had it before, or None."""
        if 3 * self._count >= 2 * len(self._hashes):
            self._grow()
        key = (hash(custom_id) & _MASK) or 1
        slot = self._find(key)
        if self._hashes[slot]:
            return self._rows[slot]
        self._hashes[slot], self._rows[slot] = key, row
        self._count += 1
        return None

    def _find(self, key: int) -> int:
        """Return the slot of `key`, or the free slot for it."""
        hashes = self._hashes
        last = len(hashes) - 1  # the number of slots is a power of two
        slot = key & last
        while hashes[slot] not in (0, key):
            slot = (slot + 1) & last
        return slot

    def _grow(self) -> None:
        old = [(key, row) for key, row in zip(self._hashes, self._rows, strict=True) if key]
        slots = 2 * len(self._hashes)
        self._hashes, self._rows = array("Q", bytes(8 * slots)), array("I", bytes(4 * slots))
        for key, row in old:
            slot = self._find(key)
            self._hashes[slot], self._rows[slot] = key, row
