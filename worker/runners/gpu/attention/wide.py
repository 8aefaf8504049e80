"""Attention with rows too wide for the registers of a warp: heads of 512, and latents."""

import math

import numpy as np

from nightmill.worker.model.spec import Attention, ModelSpec
from nightmill.worker.runners.base import IntArray
from nightmill.worker.runners.gpu.attention.pieces import NO_PIECES, whole_pieces
from nightmill.worker.runners.gpu.attention.scores import score_arguments, scoring
from nightmill.worker.runners.gpu.attention.tiles import prefill_tiles
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs
from nightmill.worker.runners.gpu.device.operands import ABSENT, Buffer
from nightmill.worker.runners.gpu.device.sources import Source
from nightmill.worker.runners.gpu.kv_cache import PAGE, LayerCache
from nightmill.worker.runners.gpu.step_inputs import PromptGroup, StepInputs, StepShape
from nightmill.worker.runners.kv_format import KvFormat

__all__ = ["VALUES", "WideDecode", "WidePrefill", "has_room", "heads_of_a_tile", "wide_pieces"]

VALUES = 512
"""Elements of a value, of all that the kernels take."""

_ROOM = 227 << 10  # bytes of shared memory of a block, where there are two stages of tiles of keys and values
_BLOCK = (256, 1, 1)
_KEYS = 32
_DECODE_ROWS = 32
_PREFILL = {True: (64, 2), False: (32, 1)}  # rows and stages of tiles of keys, where blocks have room, or not
_MAX_SEGMENTS = 64  # of a context
_MOST_CUT = 2048  # segments that contexts which are cut have in all ...
_MOST_BYTES = 128 << 20  # ... or as many as so much holds
_WAVES = 2  # pieces that contexts are cut into, at most, for each one at once
_UNEVEN = 1.5  # times what is to be done for each piece at once, that a context may have without being cut


class WideDecode:
    """Launches `wide_decode`, and `wide_merge` where contexts are cut; methods as in `DecodeAttention`.

    value_dim    attention is latent: so many elements of a key are its value
    max_context  tokens that a sequence may have
    beside       for other layers of the model, never at the same time: the two share memory
    """

    def __init__(
        self, device: Device, attention: Attention, value_dim: int | None = None, *, max_context: int,
        beside: "WideDecode | None" = None,
    ) -> None:  # fmt: skip
        self._heads, self._kv_heads = attention.heads, attention.kv_heads
        self._blocks = self._kv_heads * -(-(self._heads // self._kv_heads) // _DECODE_ROWS)
        self._scale = score_arguments(attention)[0]
        self._segment_pages = _segment_pages(max_context)
        self.segment = self._segment_pages * PAGE
        """Tokens of a segment."""
        stages = 1 if not has_room(device) else 2 if value_dim is None else 3
        self._shared = _shared(attention, value_dim, _DECODE_ROWS, stages)
        kernels = KernelPairs(device, scoring("wide_attention", attention, value_dim))
        self._decode = kernels.function(f"wide_decode_{stages}", "PPPPiPPPPiiif", shared=self._shared)
        self._merge = kernels.function("wide_merge", "PPPPii")
        self._at_once = max(1, device.multiprocessors // self._blocks)
        self._most_cut = _most_cut(attention)
        self._meeting: tuple[int, ...] = () if beside is None else beside._meeting
        if not self._meeting:
            sizes = _meeting(attention)
            self._meeting = tuple(device.allocate(size, "segments of contexts") for size in sizes)

    @staticmethod
    def suits(attention: Attention) -> bool:
        """Return whether the kernels take a layer's attention, on a GPU that it `fits`."""
        plain = attention.window is None and attention.softcap is None and not attention.sinks
        return attention.head_dim == VALUES and plain

    @staticmethod
    def fits(device: Device) -> bool:
        """Return whether the kernels read what the device's cache keeps: elements, not FP8."""
        return device.kv is KvFormat.ELEMENT

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        return [scoring("wide_attention", one) for one in filter(WideDecode.suits, spec.attentions)]

    @staticmethod
    def workspace(attention: Attention) -> int:
        """Bytes of device memory that they take."""
        return sum(_meeting(attention))

    def pieces(self, lengths: IntArray, sequences: IntArray) -> IntArray:
        """Divide contexts into the pieces that blocks compute, on the host."""
        return wide_pieces(
            lengths, sequences, segment=self.segment, at_once=self._at_once, most_cut=self._most_cut
        )

    def room(self, sequences: int, pieces: int) -> int:
        """The number that so many pieces are padded to."""
        return next(room for room in self.rooms(sequences) if pieces <= room)

    def rooms(self, sequences: int) -> list[int]:
        """Padded sizes of the work list: contexts that are whole, or some cut."""
        return [sequences, sequences + _WAVES * self._at_once]

    def most_pieces(self, sequences: int) -> int:
        """The largest room."""
        return self.rooms(sequences)[-1]

    def load(self) -> bool:
        """Load all its kernels now, as `Function.load`."""
        return self._decode.load() and self._merge.load()

    def __call__(
        self, queries: Buffer, cache: LayerCache, inputs: StepInputs, shape: StepShape, out: Buffer,
        sinks: Buffer = ABSENT,
    ) -> None:  # fmt: skip
        """Queue attention of drawn tokens: qkv, or queries of latents (T, H, D) -> out (T, H, VALUES).

        The result is the same to the bit, however contexts are shared out.
        """
        assert sinks is ABSENT
        self._decode.of(shape.drawn)(
            (self._blocks, shape.pieces, 1), _BLOCK, queries.address, cache.keys.address,
            cache.values.address, inputs.page_tables, inputs.table_width, inputs.pieces, out.address,
            *self._meeting, self._heads, self._kv_heads, self._segment_pages, self._scale,
            shared=self._shared,
        )  # fmt: skip
        if shape.pieces > shape.drawn:
            self._merge.of(shape.drawn)(
                (self._heads, shape.pieces, 1), (VALUES // 4, 1, 1), inputs.pieces, *self._meeting,
                out.address, self._heads, self._segment_pages,
            )  # fmt: skip


class WidePrefill:
    """Launches `wide_prefill`; the methods are those of `HopperPrefill`.

    value_dim  as for `WideDecode`
    """

    def __init__(self, device: Device, attention: Attention, value_dim: int | None = None) -> None:
        self._heads, self._kv_heads = attention.heads, attention.kv_heads
        self._rows, stages = _PREFILL[has_room(device)]
        self._group = heads_of_a_tile(attention, self._rows)
        self._scale = score_arguments(attention)[0]
        self._shared = _shared(attention, value_dim, self._rows, stages)
        kernels = KernelPairs(device, scoring("wide_attention", attention, value_dim))
        self._kernel = kernels.function(f"wide_prefill_{self._rows}", "PPPPiPPPPiiif", shared=self._shared)

    def reserve(self, *, slots: int, max_context: int, max_tokens: int, depth: int) -> None:
        """Nothing: it reads pages as they are."""

    def stage(
        self, turn: int, page_tables: IntArray, sequence_starts: IntArray, context_lengths: IntArray,
        drawn: int,
    ) -> tuple[IntArray, tuple[PromptGroup, ...]]:  # fmt: skip
        return prefill_tiles(sequence_starts, self._group, context_lengths, self._rows, drawn), ()

    def __call__(
        self, queries: Buffer, cache: LayerCache, inputs: StepInputs, shape: StepShape, out: Buffer,
        sinks: Buffer = ABSENT,
    ) -> None:  # fmt: skip
        """Queue attention of the chunks in the step's tiles, as `WideDecode` does of drawn tokens."""
        assert sinks is ABSENT
        self._kernel.of(shape.tiles)(
            (self._heads // self._group, shape.tiles, 1), _BLOCK, queries.address, cache.keys.address,
            cache.values.address, inputs.page_tables, inputs.table_width, inputs.context_lengths,
            inputs.sequence_starts, inputs.tiles, out.address, self._heads, self._kv_heads, self._group,
            self._scale, shared=self._shared,
        )  # fmt: skip


def heads_of_a_tile(attention: Attention, rows: int) -> int:
    """Query heads that a tile of so many rows has of each token: as many as can be, in equal parts."""
    shared = attention.heads // attention.kv_heads
    return max(n for n in range(1, rows + 1) if shared % n == 0)


def has_room(device: Device) -> bool:
    """Return whether a block has shared memory for two stages of keys and values of heads of 512."""
    return device.features.block_shared >= _ROOM and device.kv is KvFormat.ELEMENT


def wide_pieces(
    lengths: IntArray, sequences: IntArray, *, segment: int, at_once: int, most_cut: int
) -> IntArray:
    """Pieces (n, 4) of contexts, the longest first; arguments and pieces as for `decode_pieces`.

    Here all that is cut meets as segments. A context is cut where all would wait for it. There are at most
    two more pieces than sequences for each one at once.
    """
    if not len(lengths):
        return NO_PIECES
    order = np.argsort(-lengths, kind="stable")
    lengths, sequences = lengths[order], sequences[order]
    segments = -(-lengths // segment)
    load = segments.sum() / at_once
    if segments[0] <= max(1.0, _UNEVEN * load):
        return whole_pieces(lengths, sequences, segment=segment)
    share = max(1, math.ceil(load / _WAVES))
    parts = np.maximum(-(-segments // share), 1)
    ends = np.cumsum(segments)
    parts[ends > most_cut] = 1
    owner = np.repeat(np.arange(len(parts)), parts)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    first, end = (turn * segments[owner] // parts[owner] for turn in (place, place + 1))
    base = np.where(parts[owner] > 1, (ends - segments)[owner], -1)
    held = np.where(lengths[owner] > 0, sequences[owner], -1)
    pieces = np.stack([held, first | end << 16, base, lengths[owner]], axis=1).astype(np.int32)
    return np.ascontiguousarray(pieces[np.argsort(first - end, kind="stable")])


def _shared(attention: Attention, value_dim: int | None, rows: int, stages: int) -> int:
    """Bytes of shared memory of a block: queries, tiles of keys, scores, weights and factors of rows.

    One tile of keys and values takes the room of queries, too.
    """
    pitch = 2 * attention.head_dim + 16
    tiles = stages * _KEYS * (2 if value_dim is None else 1) - (
        rows if stages == 1 and value_dim is None else 0
    )
    slices = 4 if rows == _DECODE_ROWS else 1  # of scores
    return (rows + tiles) * pitch + rows * (4 * (_KEYS + 8) * slices + 2 * _KEYS + 16 + 8)


def _segment_pages(max_context: int) -> int:
    pages = 8
    while -(-max_context // (pages * PAGE)) > _MAX_SEGMENTS:
        pages *= 2
    return pages


def _most_cut(attention: Attention) -> int:
    return min(_MOST_CUT, _MOST_BYTES // (4 * attention.heads * (VALUES + 2)))


def _meeting(attention: Attention) -> tuple[int, int]:
    """Bytes of what segments leave for each other: their sums, and their maxima and weights."""
    parts = _most_cut(attention) * attention.heads
    return 4 * parts * VALUES, 8 * parts
