"""Division of a step's attention among blocks: once for all layers that have equal heads."""

from collections.abc import Sequence
from itertools import product

import numpy as np

from nightmill.worker.runners.base import IntArray, StepBatch
from nightmill.worker.runners.gpu.attention.decode import DecodeAttention
from nightmill.worker.runners.gpu.attention.general import GeneralDecode
from nightmill.worker.runners.gpu.attention.hopper_wide import HopperWide
from nightmill.worker.runners.gpu.attention.pieces import NO_PIECES, whole_pieces
from nightmill.worker.runners.gpu.attention.prefill import HopperPrefill, PortablePrefill
from nightmill.worker.runners.gpu.attention.wide import WideDecode, WidePrefill
from nightmill.worker.runners.gpu.kv_cache import PAGE
from nightmill.worker.runners.gpu.step_inputs import Division, PromptGroup

__all__ = ["AttentionPlans", "Decode", "Prefill", "Rooms"]

Decode = DecodeAttention | GeneralDecode | WideDecode
Prefill = HopperPrefill | PortablePrefill | WidePrefill | HopperWide

Rooms = tuple[int, ...]
"""The numbers of pieces that a decode step has room for, by plan; 0: attention goes without."""


class AttentionPlans:
    """Makes the pieces of contexts and the tiles of prompts that the launchers of all layers read.

    launchers  for each plan those that divide a step for it: of the first layer with such heads
    decodes    launchers of all layers for drawn tokens
    """

    def __init__(self, launchers: Sequence[tuple[Decode, Prefill]], decodes: Sequence[Decode]) -> None:
        self._decodes = [decode for decode, _ in launchers]
        self._prefills = [prefill for _, prefill in launchers]
        self._all_decodes = decodes

    def __len__(self) -> int:
        return len(self._decodes)

    def load(self) -> bool:
        """Load all kernels for drawn tokens now; False if the driver cannot: then a launch loads one."""
        return all(decode.load() for decode in self._all_decodes)

    def most_pieces(self, sequences: int) -> int:
        """Return the most pieces that a step of so many drawn tokens has in all plans."""
        return sum(decode.most_pieces(sequences) for decode in self._decodes)

    def most_rows(self, sequences: int) -> int:
        """Return the most pieces that one launch takes."""
        return max(decode.most_pieces(sequences) for decode in self._decodes)

    def rooms(self, size: int) -> list[Rooms]:
        """The rooms that a decode step of so many sequences may need.

        The first plan has all of its own. Others have the largest for all that are cut into pieces: a graph
        for each combination would be too many, and a block without a piece ends at once.
        """
        first, *others = self._decodes
        return list(product(first.rooms(size), *(_largest(decode.rooms(size)) for decode in others)))

    def room(self, size: int, pieces: Sequence[IntArray]) -> Rooms:
        """The rooms that these pieces are padded to."""
        first, *others = zip(self._decodes, pieces, strict=True)
        rooms = [first[0].room(size, len(first[1]))]
        for decode, own in others:
            each = _largest(decode.rooms(size))
            rooms.append(0 if not len(own) and 0 in each else each[-1])
        return tuple(rooms)

    def pieces(self, lengths: IntArray, sequences: IntArray) -> list[IntArray]:
        """Divide contexts into pieces, on the host, for each plan; good until the next call."""
        return [decode.pieces(lengths, sequences) for decode in self._decodes]

    def divide(self, turn: int, batch: StepBatch) -> tuple[list[IntArray], list[IntArray], list[Division]]:
        """Tiles and pieces of a step for each plan, and how many these are; as `stage` and `pieces`."""
        drawn = batch.drawn
        staged = self.stage(turn, batch.page_tables, batch.sequence_starts, batch.context_lengths, drawn)
        pieces = self.pieces(batch.context_lengths[:drawn], np.arange(drawn, dtype=np.int32))
        tiles = [own for own, _ in staged]
        sizes = zip(tiles, pieces, (groups for _, groups in staged), strict=True)
        return tiles, pieces, [Division(len(own), len(cut), groups) for own, cut, groups in sizes]

    @staticmethod
    def least_pieces(rooms: Rooms, sequences: int) -> list[IntArray]:
        """The pieces of so many contexts of one token, where there is room for pieces."""
        ones, numbers = np.ones(sequences, dtype=np.int32), np.arange(sequences, dtype=np.int32)
        whole = whole_pieces(ones, numbers, segment=PAGE)
        return [whole if room else NO_PIECES for room in rooms]

    def whole_segment(self, sequences: int) -> int:
        """Tokens of a segment where contexts of so many sequences have pieces, which may be whole; 0: none.

        Of the first plan.
        """
        decode = self._decodes[0]
        return 0 if 0 in decode.rooms(sequences) else decode.segment

    def reserve(self, *, slots: int, max_context: int, max_tokens: int, depth: int) -> None:
        """Take the memory that steps need, as `HopperPrefill.reserve` says."""
        for prefill in self._prefills:
            prefill.reserve(slots=slots, max_context=max_context, max_tokens=max_tokens, depth=depth)

    def stage(
        self, turn: int, page_tables: IntArray, sequence_starts: IntArray, context_lengths: IntArray,
        drawn: int,
    ) -> list[tuple[IntArray, tuple[PromptGroup, ...]]]:  # fmt: skip
        """The tiles of a step's prompts for each plan, as `HopperPrefill.stage` does."""
        return [
            prefill.stage(turn, page_tables, sequence_starts, context_lengths, drawn)
            for prefill in self._prefills
        ]


def _largest(rooms: list[int]) -> list[int]:
    """Return the largest of some rooms, behind none if that is among them."""
    return [0, rooms[-1]] if rooms[0] == 0 and rooms[-1] else rooms[-1:]
