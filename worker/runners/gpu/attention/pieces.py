"""Division of the contexts of a step's drawn tokens among blocks of the GPU."""

import math

import numpy as np

from nightmill.worker.runners.base import IntArray

__all__ = ["NO_PIECES", "SECTION", "WAVES", "Planner", "decode_pieces", "whole_pieces"]

NO_PIECES = np.empty((0, 4), dtype=np.int32)

SECTION = 4
"""Segments that are merged before others, as `decode_page.cuh` says."""
WAVES = 8
"""Pieces that contexts are cut into, at most, for each one at once."""

# Where contexts are cut (chosen on an H200 by 33 mixtures of lengths, heads of 64 and of 128, both formats):
_BY_SECTIONS = 0.9  # sections for each piece at once, from which on contexts are cut into these ...
_LONG = 64  # ... or with a context of so many segments, which would take long to merge
_MUCH = 3.5  # sections for each piece at once, from which on pieces have two
_UNCUT = 2 / 3  # of what is to be done for each piece at once, that a context may have without being cut
_LEAST = 2  # segments in a piece ...
_FEW = 4  # ... but where there are fewer sequences than one for so many pieces at once
_UNEVEN = 1.5  # contexts of nearly one length stay whole where they fill so much of ...
_FILLED, _FILLED_LAST = (
    0.4,
    0.75,
)  # ... the pieces at once, or, if that would be cut into sections, of all waves


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
    any that is long is. Where there is much to compute, contexts are cut into whole sections, fewer of which
    have to meet. A piece is (sequence or -1, first segment | the one after the last << 16, base, length).
    Base: -1 of a whole context; of one that is cut, twice the row where its segments meet, or, if all are
    whole sections, where these do, and 1. There are at most WAVES * at_once more pieces than sequences.
    """
    if not len(lengths):
        return NO_PIECES
    order = np.argsort(-lengths, kind="stable")
    lengths, sequences = lengths[order], sequences[order]
    segments = -(-lengths // segment)
    sections = -(-segments // SECTION)
    unit = SECTION if segments[0] >= _LONG or sections.sum() >= _BY_SECTIONS * at_once else 1
    units = segments if unit == 1 else sections
    load, waves = units.sum() / at_once, len(units) / at_once
    if unit == 1:
        share = max(_LEAST if _FEW * len(units) > at_once else 1, round(load))
        cut_from, filled = 2.0 * share, waves >= _FILLED
    else:
        share = max(math.ceil(load / WAVES), 2 if load >= _MUCH else 1)
        cut_from, filled = max(2 * share, _UNCUT * load), waves >= _FILLED_LAST * math.ceil(waves)
    even = segments[0] * len(segments) < _UNEVEN * segments.sum()
    if (even and filled) or units[0] < cut_from:
        return whole_pieces(lengths, sequences, segment=segment)
    # From here on, what is cut comes before what is not.
    parts = np.where(units < cut_from, 1, np.maximum(units // share, 1))
    ends = np.cumsum(units)
    parts[ends > most_cut] = 1
    owner = np.repeat(np.arange(len(parts)), parts)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    first, end = (
        np.minimum(turn * units[owner] // parts[owner] * unit, segments[owner]) for turn in (place, place + 1)
    )
    cut = parts[owner] > 1
    pieces = np.stack(
        [
            np.where(end > first, sequences[owner], -1),
            first | end << 16,
            np.where(cut, (ends - units)[owner] * 2 + (unit > 1), -1),
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
        """Return the pieces of `decode_pieces`, good until the next call; order within a segment is free."""
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
