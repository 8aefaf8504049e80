"""How the contexts of a step's drawn tokens are shared out among blocks of the GPU."""

import numpy as np

from nightmill.worker.runners.base import IntArray

__all__ = ["NO_PIECES", "WAVES", "Planner", "decode_pieces", "whole_pieces"]

NO_PIECES = np.empty((0, 4), dtype=np.int32)

# Where contexts are cut (chosen on an H200 by the times of 40 mixtures of lengths, heads of 64 and of 128):
WAVES = 2  # of pieces
_LEAST = 2  # segments in a piece ...
_FEW = 4  # ... but where there are fewer sequences than one for so many pieces at once
_UNEVEN, _FILLED = 1.5, 0.4  # contexts of nearly one length stay whole where there are so many for each piece


def whole_pieces(lengths: IntArray, sequences: IntArray, *, segment: int) -> IntArray:
    """Pieces (S, 4) that are whole contexts; arguments and pieces as for `decode_pieces`."""
    pieces = np.empty((len(sequences), 4), dtype=np.int32)
    pieces[:, 0] = np.where(lengths > 0, sequences, -1)
    pieces[:, 1] = -(-lengths // segment) << 16
    pieces[:, 2] = -1
    pieces[:, 3] = lengths
    return pieces


def decode_pieces(
    lengths: IntArray, sequences: IntArray, *, segment: int, at_once: int, most_cut: int
) -> IntArray:
    """Pieces (n, 4) of the contexts of `sequences`, the longest first, for an even end.

    lengths   tokens of each context, those of this step included; 0: nothing to compute
    segment   tokens of a segment; pieces are whole segments
    at_once   pieces that the GPU works on at once
    most_cut  segments that cut contexts may have in all

    A context that is longer than others is cut, so that none is what all wait for; where sequences are few,
    any that is long is. A piece is (sequence or -1, first segment | the one after the last << 16, base,
    length). Base: of a context that is cut, where its segments meet, counted in segments; else -1. There are
    at most `most_pieces` of them.
    """
    if not len(lengths):
        return NO_PIECES
    order = np.argsort(-lengths, kind="stable")
    lengths, sequences = lengths[order], sequences[order]
    segments = -(-lengths // segment)
    longest, total = int(segments[0]), int(segments.sum())
    share = max(_LEAST if _FEW * len(segments) > at_once else 1, -(-total // (WAVES * at_once)))
    even = longest * len(segments) < _UNEVEN * total and len(segments) >= _FILLED * at_once
    if even or longest < 2 * share:
        return whole_pieces(lengths, sequences, segment=segment)
    parts = np.maximum(segments // share, 1)  # from here on, what is cut comes before what is not
    ends = np.cumsum(segments)
    parts[ends > most_cut] = 1
    owner = np.repeat(np.arange(len(parts)), parts)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    first, end = (turn * segments[owner] // parts[owner] for turn in (place, place + 1))
    cut = parts[owner] > 1
    pieces = np.stack(
        [
            np.where(end > first, sequences[owner], -1),
            first | end << 16,
            np.where(cut, (ends - segments)[owner], -1),
            lengths[owner],
        ],
        axis=1,
    ).astype(np.int32)
    return np.ascontiguousarray(pieces[np.argsort(first - end, kind="stable")])


class Planner:
    """`decode_pieces`, kept from step to step: most contexts grow within their last segment."""

    def __init__(self, *, segment: int, at_once: int, most_cut: int) -> None:
        self.segment = segment
        self._at_once = at_once
        self._most_cut = most_cut
        self._key = b""
        self._pieces = NO_PIECES
        self._owners = NO_PIECES[:, 0]

    def pieces(self, lengths: IntArray, sequences: IntArray) -> IntArray:
        """As `decode_pieces`, good until the next call; within a segment, lengths may be in any order."""
        key = (-(-lengths // self.segment)).tobytes() + sequences.tobytes()
        if key != self._key:
            places = np.arange(len(lengths), dtype=np.int32)
            pieces = decode_pieces(
                lengths, places, segment=self.segment, at_once=self._at_once, most_cut=self._most_cut
            )
            self._key, self._pieces, self._owners = key, pieces, pieces[:, 0].copy()
            pieces[:, 0] = np.where(self._owners < 0, -1, sequences[self._owners])
        self._pieces[:, 3] = np.where(self._owners < 0, 0, lengths[self._owners])
        return self._pieces
