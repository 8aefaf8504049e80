"""Decode attention: how the contexts of a step's sequences are shared out among blocks of the GPU."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device import Device
from nightmill.worker.runners.gpu.functions import KernelPair
from nightmill.worker.runners.gpu.kv_cache import PAGE

__all__ = ["NO_PIECES", "DecodeAttention", "Planner", "decode_pieces", "whole_pieces"]

IntArray = npt.NDArray[np.int32]

NO_PIECES = np.empty((0, 4), dtype=np.int32)

_THREADS = (128, 1, 1)
_MAX_SEGMENTS = 128  # of a context
_AHEAD, _FAR_AHEAD = 2, 4  # pages that each warp has under way
_FAR_BLOCKS = 3  # a multiprocessor, up to which these are more
# Where contexts are cut (chosen on an H200 by the times of 40 mixtures of lengths, heads of 64 and of 128):
_WAVES = 2  # of pieces
_LEAST = 2  # segments in a piece ...
_FEW = 4  # ... but where there are fewer sequences than one for so many pieces at once
_UNEVEN, _FILLED = 1.5, 0.4  # contexts of nearly one length stay whole where there are so many for each piece
_MOST_CUT = 8192  # segments, 30 MB with 14 heads of 64
_WHOLE_BLOCKS = 0.9  # a multiprocessor, from which on contexts are not split
_SPLIT_SEGMENTS = 0.4  # for each block that the GPU holds, up to which split attention is no worse
_SPLIT_BLOCKS = 4  # a multiprocessor, of split attention
_MAX_CLUSTER = 8  # blocks, on every Hopper


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
    share = max(_LEAST if _FEW * len(segments) > at_once else 1, -(-total // (_WAVES * at_once)))
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


class DecodeAttention:
    """Launches `decode_attention.cu` and `split_attention.cu`: models with heads of 64 or 128.

    function     loads a kernel: file, name, arguments, bytes of shared memory, blocks of a cluster
    max_context  tokens that a sequence may have
    clusters     blocks can be launched in clusters

    Where there are few sequences with short contexts, split attention has a block for each segment; else
    blocks take the pieces of `decode_pieces`. Both give the same bits.
    """

    def __init__(
        self, device: Device, spec: ModelSpec, function: Callable[..., KernelPair], *, max_context: int,
        clusters: bool,
    ) -> None:  # fmt: skip
        self._device = device
        self._attention = attention = spec.layers[0].attention
        group = attention.heads // attention.kv_heads
        rows = 8 if group <= 8 else 16
        self._blocks = attention.kv_heads * -(-group // rows)  # of a piece
        self._segment_pages = 16
        while -(-max_context // (self._segment_pages * PAGE)) > _MAX_SEGMENTS:
            self._segment_pages *= 2
        self._segments = -(-max_context // (self._segment_pages * PAGE))
        arguments = "PPPPiPPPPPPiiif"
        self._near, self._far = (
            (function("decode_attention", f"decode_attention_{rows}_{ahead}", arguments, ring), ring)
            for ahead in (_AHEAD, _FAR_AHEAD if attention.head_dim == 64 else _AHEAD)
            for ring in (4 * ahead * 4 * PAGE * attention.head_dim,)  # pages of keys and values of four warps
        )
        self._cluster = 1 << (min(self._segments, _MAX_CLUSTER) - 1).bit_length() if clusters else 1
        # What the first block of a cluster is sent: o, and m and l of each of the 128 threads.
        self._sent = 4 * (self._cluster - 1) * (rows * attention.head_dim + 2 * _THREADS[0])
        split = ("split_attention", f"split_attention_{rows}", "PPPPiPPPPPPPiiiif")
        self._split = function(*split)
        self._split_in_clusters = function(*split, self._sent, self._cluster)
        kernel, shared = self._near
        held = kernel.many.blocks_at_once(_THREADS[0], shared) * device.multiprocessors
        self._held = -(-held // self._blocks)  # pieces that the GPU works on at once
        self._full_chip = int(_WHOLE_BLOCKS * device.multiprocessors)
        most = -(-self._full_chip // self._blocks)  # sequences that are split
        most_cut = max(_MOST_CUT, most * self._segments)
        self._planner = Planner(segment=self._segment_pages * PAGE, at_once=self._held, most_cut=most_cut)
        parts = most_cut * attention.heads
        counters = 4 * most_cut * self._blocks
        self._meeting = tuple(
            device.allocate(size, "segments of contexts")
            for size in (4 * parts * attention.head_dim, 8 * parts, counters)
        )
        device.fill(self._meeting[-1], 0, counters)

    def pieces(self, lengths: IntArray, sequences: IntArray) -> IntArray:
        """What blocks are to compute, good until the next call; none where split attention is better."""
        if self._blocks * len(lengths) < self._full_chip:
            segments = int((-(-lengths // self._planner.segment)).sum())
            if segments < _SPLIT_SEGMENTS * self._held:
                return NO_PIECES
        return self._planner.pieces(lengths, sequences)

    def room(self, sequences: int, pieces: int) -> int:
        """The number that so many pieces are padded to: the least of `rooms`."""
        return next(room for room in self._paddings(sequences) if pieces <= room)

    def rooms(self, sequences: int) -> list[int]:
        """All that the pieces of a step of so many may be padded to; 0: split attention, which has none."""
        segments = sequences * self._segments  # at most
        split = self._blocks * sequences < self._full_chip
        if split and segments < _SPLIT_SEGMENTS * self._held:
            return [0]
        reached = [room for less, room in pairwise([0, *self._paddings(sequences)]) if less < segments]
        return [0, *reached] if split else reached

    def most_pieces(self, sequences: int) -> int:
        """The largest room."""
        return self._paddings(sequences)[-1]

    def _paddings(self, sequences: int) -> list[int]:
        most = sequences + _WAVES * self._held
        return sorted({sequences, max(sequences, self._far_pieces), most})

    @property
    def _far_pieces(self) -> int:
        return _FAR_BLOCKS * self._device.multiprocessors // self._blocks

    def in_pieces(
        self, inputs: tuple[int, ...], sequence_starts: int, pieces: int, piece_count: int, out: int,
        count: int, scale: float, apart: bool = False,
    ) -> None:  # fmt: skip
        """Queue the pieces of `count` sequences; inputs: qkv, keys, values, block tables and their stride."""
        attention = self._attention
        kernel, shared = self._far if piece_count <= self._far_pieces else self._near
        kernel.of(count)(
            (self._blocks, piece_count, 1), _THREADS, *inputs, sequence_starts, pieces, out, *self._meeting,
            attention.heads, attention.kv_heads, self._segment_pages, scale, shared=shared, apart=apart,
        )  # fmt: skip

    def split(
        self, inputs: tuple[int, ...], context_lengths: int, sequence_starts: int, sequences: int, out: int,
        count: int, scale: float, apart: bool = False,
    ) -> None:  # fmt: skip
        """Queue `count` sequences, so few that they do not fill the chip, whatever their contexts are."""
        if self._blocks * count >= self._full_chip:
            raise RunnerError(f"decode attention of {count} sequences goes by pieces")
        attention, stride = self._attention, inputs[-1]
        segments = min(self._segments, -(-stride // self._segment_pages))
        split, shared = self._split.few, 0
        # A cluster starts only where one GPC has room for all of it. None should wait for that while blocks
        # with work have a multiprocessor each; with more, the latency of a merge in global memory hides.
        busy = self._blocks * count * self._cluster
        if segments > 1 and self._cluster > 1 and busy <= self._device.multiprocessors:
            split, shared = self._split_in_clusters.few, self._sent
            segments = -(-segments // self._cluster) * self._cluster
        # Contexts are mostly shorter than they may be: no more blocks than keep the chip busy.
        enough = -(-_SPLIT_BLOCKS * self._device.multiprocessors // (self._blocks * count))
        segments = min(segments, max(_MAX_CLUSTER, -(-enough // _MAX_CLUSTER) * _MAX_CLUSTER))
        split(
            (self._blocks, count, segments), _THREADS, *inputs, context_lengths, sequence_starts, sequences,
            out, *self._meeting, attention.heads, attention.kv_heads, self._segment_pages, self._segments,
            scale, shared=shared, apart=apart,
        )  # fmt: skip
