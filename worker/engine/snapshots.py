"""Copies of states, so that a sequence can go on from a prefix that another has computed.

A runner with states has places for some snapshots: each is the state of a slot after so many tokens, a
multiple of the runner's grid. It belongs to the node of the prefix tree whose page ends there, and is
forgotten with it. Where all places are taken, the snapshot that was used least recently makes room. Launches
run in order, so a place may be written by the step that is planned while an earlier one, or an admission of
the same, still reads it.
"""

from collections import OrderedDict
from collections.abc import Iterable

from nightmill.worker.engine.kv_cache import CacheIntegrityError
from nightmill.worker.engine.prefix_tree import PrefixNode
from nightmill.worker.runners.base import NO_SNAPSHOT

__all__ = ["Snapshots"]


class Snapshots:
    """`places` of snapshots, numbered from 0."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._free = list(range(places - 1, -1, -1))
        self._kept: OrderedDict[int, PrefixNode] = OrderedDict()  # the least recently used first

    def take(self) -> int:
        """Return a place for a new snapshot, to be given to `keep`; NO_SNAPSHOT where all wait for that."""
        if self._free:
            return self._free.pop()
        if not self._kept:
            return NO_SNAPSHOT
        place, node = self._kept.popitem(last=False)
        node.snapshot = NO_SNAPSHOT
        return place

    def keep(self, place: int, node: PrefixNode | None) -> None:
        """Let the snapshot in a place be found at `node`; None, or one that has another: nobody wants it."""
        if node is None or node.snapshot != NO_SNAPSHOT:
            self._free.append(place)
            return
        node.snapshot = place
        self._kept[place] = node

    def use(self, node: PrefixNode) -> int:
        """Return the place of a node's snapshot, which counts as used last."""
        self._kept.move_to_end(node.snapshot)
        return node.snapshot

    def forget(self, node: PrefixNode) -> None:
        """Free the place of a node that leaves the tree."""
        if node.snapshot != NO_SNAPSHOT:
            del self._kept[node.snapshot]
            self._free.append(node.snapshot)
            node.snapshot = NO_SNAPSHOT

    def check_integrity(self, nodes: Iterable[PrefixNode]) -> None:
        """Audit the places against all nodes of the tree, between steps; raises CacheIntegrityError."""
        found = {node.snapshot: node for node in nodes if node.snapshot != NO_SNAPSHOT}
        if found != dict(self._kept):
            raise CacheIntegrityError("the snapshots that are kept are not those that can be found")
        if sorted([*self._free, *self._kept]) != list(range(self._places)):
            raise CacheIntegrityError(
                f"places of snapshots are lost or given twice: {sorted(self._free)} are free"
            )
