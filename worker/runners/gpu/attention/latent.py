"""Latent attention: one head of keys, which are values too, for all heads of queries."""

import math

import numpy as np

from nightmill.worker.model.spec import Attention, LatentAttention, ModelSpec
from nightmill.worker.runners.base import IntArray
from nightmill.worker.runners.gpu.attention.general import GeneralDecode
from nightmill.worker.runners.gpu.attention.latent_rows import row_sources
from nightmill.worker.runners.gpu.attention.pieces import NO_PIECES, whole_pieces
from nightmill.worker.runners.gpu.attention.prefill import PortablePrefill
from nightmill.worker.runners.gpu.attention.scores import score_arguments, scoring
from nightmill.worker.runners.gpu.attention.tiles import TILE_ROWS, prefill_tiles
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs
from nightmill.worker.runners.gpu.device.operands import ABSENT, Buffer
from nightmill.worker.runners.gpu.device.sources import Source
from nightmill.worker.runners.gpu.kv_cache import PAGE, LayerCache
from nightmill.worker.runners.gpu.steps import PromptGroup, StepInputs, StepShape

__all__ = [
    "LatentDecode", "LatentKernels", "LatentPrefill", "as_attention", "latent_decode", "latent_kernels",
    "latent_pieces", "latent_prefill",
]  # fmt: skip

_LATENT = 512  # elements that the fast kernels take of values
_ROOMY = ((9, 0), (10, 0), (10, 3))  # compute capabilities with 227 KB of shared memory for a block
_BLOCK = (256, 1, 1)
_KEYS = 32
_DECODE_ROWS = 32
_DECODE_STAGES = {True: 3, False: 1}  # of tiles of keys, where blocks have much room, and where not
_PREFILL = {True: (64, 2), False: (32, 1)}  # rows, and stages
_MAX_SEGMENTS = 64  # of a context
_MOST_CUT = 2048  # segments that contexts which are cut have in all ...
_MOST_BYTES = 128 << 20  # ... or as many as so much holds
_WAVES = 2  # pieces that contexts are cut into, at most, for each one at once
_UNEVEN = 1.5  # times what is to be done for each piece at once, that a context may have without being cut


class LatentDecode:
    """Launches `latent_decode`, and `latent_merge` where contexts are cut; methods as in `DecodeAttention`.

    max_context  tokens that a sequence may have
    """

    def __init__(self, device: Device, attention: LatentAttention, *, max_context: int) -> None:
        self._heads = attention.heads
        self._head_tiles = -(-attention.heads // _DECODE_ROWS)
        self._scale = score_arguments(as_attention(attention))[0]
        self._segment_pages = _segment_pages(max_context)
        stages = _DECODE_STAGES[device.compute_capability in _ROOMY]
        self._shared = _shared(attention, _DECODE_ROWS, stages)
        kernels = KernelPairs(device, _source(attention))
        self._decode = kernels.function(f"latent_decode_{stages}", "PPPiPPPPiif", shared=self._shared)
        self._merge = kernels.function("latent_merge", "PPPPii")
        self._at_once = max(1, device.multiprocessors // self._head_tiles)
        self._most_cut = _most_cut(attention)
        parts, sums = _meeting(attention)
        self._partials = device.allocate(parts, "segments of contexts")
        self._sums = device.allocate(sums, "sums of segments")

    @staticmethod
    def suits(attention: LatentAttention) -> bool:
        """Return whether the kernels take it."""
        return attention.latent == _LATENT and attention.kept % 32 == 0

    @staticmethod
    def workspace(attention: LatentAttention) -> int:
        """Bytes of device memory that they take."""
        return sum(_meeting(attention)) if LatentDecode.suits(attention) else 0

    def pieces(self, lengths: IntArray, sequences: IntArray) -> IntArray:
        """Divide contexts into the pieces that blocks compute, on the host."""
        return latent_pieces(
            lengths, sequences, segment=self._segment_pages * PAGE, at_once=self._at_once,
            most_cut=self._most_cut,
        )  # fmt: skip

    def room(self, sequences: int, pieces: int) -> int:
        """The number that so many pieces are padded to."""
        return next(room for room in self.rooms(sequences) if pieces <= room)

    def rooms(self, sequences: int) -> list[int]:
        """Padded sizes of the work list: contexts that are whole, or some cut."""
        return [sequences, sequences + _WAVES * self._at_once]

    def most_pieces(self, sequences: int) -> int:
        """The largest room."""
        return self.rooms(sequences)[-1]

    def __call__(
        self, queries: Buffer, cache: LayerCache, inputs: StepInputs, shape: StepShape, out: Buffer,
        sinks: Buffer = ABSENT,
    ) -> None:  # fmt: skip
        """Queue attention of drawn tokens: queries (T, H, latent and rotated) -> out (T, H, latent).

        The result is the same to the bit, however contexts are shared out.
        """
        assert sinks is ABSENT
        self._decode.of(shape.drawn)(
            (self._head_tiles, shape.pieces, 1), _BLOCK, queries.address, cache.keys.address,
            inputs.page_tables, inputs.table_width, inputs.pieces, out.address, self._partials, self._sums,
            self._heads, self._segment_pages, self._scale, shared=self._shared,
        )  # fmt: skip
        if shape.pieces > shape.drawn:
            self._merge.of(shape.drawn)(
                (self._heads, shape.pieces, 1), (_LATENT // 4, 1, 1), inputs.pieces, self._partials,
                self._sums, out.address, self._heads, self._segment_pages,
            )  # fmt: skip


class LatentPrefill:
    """Launches `latent_prefill`; the methods are those of `HopperPrefill`."""

    def __init__(self, device: Device, attention: LatentAttention) -> None:
        self._heads = attention.heads
        self._rows, stages = _PREFILL[device.compute_capability in _ROOMY]
        self._group = max(n for n in range(1, self._rows + 1) if attention.heads % n == 0)
        self._scale = score_arguments(as_attention(attention))[0]
        self._shared = _shared(attention, self._rows, stages)
        kernels = KernelPairs(device, _source(attention))
        self._kernel = kernels.function(f"latent_prefill_{self._rows}", "PPPiPPPPiif", shared=self._shared)

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
        """Queue attention of the chunks in the step's tiles, as `LatentDecode` does of drawn tokens."""
        assert sinks is ABSENT
        self._kernel.of(shape.tiles)(
            (self._heads // self._group, shape.tiles, 1), _BLOCK, queries.address, cache.keys.address,
            inputs.page_tables, inputs.table_width, inputs.context_lengths, inputs.sequence_starts,
            inputs.tiles, out.address, self._heads, self._group, self._scale, shared=self._shared,
        )  # fmt: skip


class LatentKernels:
    """All kernels that layers of latent attention have of their own, as `Launcher` says."""

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        return [source for attention in spec.latents for source in latent_kernels(attention)]

    @staticmethod
    def refusal(spec: ModelSpec) -> str | None:
        """Return the part of a model that no kernel takes, or None."""
        if spec.latents and spec.attentions:
            return "layers of latent attention beside layers of other attention"
        for one in spec.latents:
            sizes = one.key_dim, one.rope.dim, one.value_dim, one.latent, one.query_latent or 0
            if any(size % 4 for size in sizes) or one.head_dim % 8 or one.latent % 8 or one.kept > 576:
                return f"latent attention of sizes {', '.join(map(str, sizes))} (multiples of 8, 576 kept)"
            if one.key_dim % 8 or one.heads * one.value_dim % 8 or (one.query_latent or 0) % 8:
                return f"latent attention of sizes {', '.join(map(str, sizes))} (multiples of 8)"
            if one.heads > TILE_ROWS:
                return f"latent attention of {one.heads} heads (at most {TILE_ROWS})"
            if one.norm.centred or one.norm.bias:
                return "latents with other norms than RMS norms"
        return None


def latent_kernels(attention: LatentAttention) -> list[Source]:
    """List the kernel files for layers of latent attention."""
    name = "latent_attention" if LatentDecode.suits(attention) else "attention_any"
    return [*row_sources(), scoring(name, as_attention(attention), attention.latent)]


def as_attention(attention: LatentAttention) -> Attention:
    """Latent attention as attention over one head of keys, whose values are the first elements of these."""
    return Attention(
        heads=attention.heads, kv_heads=1, head_dim=attention.kept, rope=attention.rope,
        scale=attention.scale,
    )  # fmt: skip


def latent_decode(
    device: Device, attention: LatentAttention, *, max_context: int
) -> LatentDecode | GeneralDecode:
    """Choose the launcher for drawn tokens; arguments as for `LatentDecode`."""
    if LatentDecode.suits(attention):
        return LatentDecode(device, attention, max_context=max_context)
    return GeneralDecode(device, as_attention(attention), attention.latent)


def latent_prefill(device: Device, attention: LatentAttention) -> LatentPrefill | PortablePrefill:
    """Choose the launcher for chunks of prompts."""
    if LatentDecode.suits(attention):
        return LatentPrefill(device, attention)
    return PortablePrefill(device, as_attention(attention), attention.latent)


def latent_pieces(
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


def _source(attention: LatentAttention) -> Source:
    return scoring("latent_attention", as_attention(attention), attention.latent)


def _shared(attention: LatentAttention, rows: int, stages: int) -> int:
    """Bytes of shared memory of a block: queries, tiles of keys, scores, weights and factors of rows."""
    pitch = 2 * attention.kept + 16
    return (rows + stages * _KEYS) * pitch + rows * (4 * (_KEYS + 8) + 2 * _KEYS + 16 + 8)


def _segment_pages(max_context: int) -> int:
    pages = 16
    while -(-max_context // (pages * PAGE)) > _MAX_SEGMENTS:
        pages *= 2
    return pages


def _most_cut(attention: LatentAttention) -> int:
    return min(_MOST_CUT, _MOST_BYTES // (4 * attention.heads * (attention.latent + 2)))


def _meeting(attention: LatentAttention) -> tuple[int, int]:
    """Bytes of what segments leave for each other: their sums, and their maxima and weights."""
    parts = _most_cut(attention) * attention.heads
    return 4 * parts * attention.latent, 8 * parts
