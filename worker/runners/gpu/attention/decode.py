"""Decode attention: the attention of drawn tokens, each over its own context."""

from itertools import pairwise

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.spec import Attention, ModelSpec
from nightmill.worker.runners.base import IntArray
from nightmill.worker.runners.gpu.attention.pieces import NO_PIECES, WAVES, Planner
from nightmill.worker.runners.gpu.attention.scores import FAST_HEADS, SCORES, score_arguments, scoring
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs
from nightmill.worker.runners.gpu.device.operands import ABSENT, ELEMENT, Buffer
from nightmill.worker.runners.gpu.device.sources import Source
from nightmill.worker.runners.gpu.kv_cache import PAGE, LayerCache
from nightmill.worker.runners.gpu.step_inputs import StepInputs, StepShape
from nightmill.worker.runners.kv_format import KvFormat

__all__ = ["DecodeAttention"]

_THREADS = (128, 1, 1)
_MAX_SEGMENTS = 128  # of a context
_AHEAD, _FAR_AHEAD = 2, 4  # pages that each warp has under way
_LARGE_AHEAD, _LARGE_FAR_AHEAD = 1, 3  # the same with large heads, the second on Hopper
_LARGE = 128  # elements of a head, above which registers do not hold a page
_FAR_BLOCKS, _LARGE_FAR_BLOCKS = 3, 1  # a multiprocessor, up to which these are more
_FEW_WAVES = 2  # of pieces, which short contexts that are cut have at most
_MOST_CUT = 8192  # segments, or sections, 30 MB with 14 heads of 64
_WHOLE_BLOCKS = 0.9  # a multiprocessor, from which on contexts are not split
_SPLIT_SEGMENTS = 0.4  # for each block that the GPU holds, up to which split attention is no worse
_SPLIT_BLOCKS = 4  # a multiprocessor, of split attention
_MAX_CLUSTER = 8  # blocks, on every Hopper


class DecodeAttention:
    """Launches `decode_attention.cu` and `split_attention.cu`: models with FAST_HEADS.

    max_context  tokens that a sequence may have
    clusters     blocks are launched in clusters, which takes a Hopper
    beside       for other layers of the model, never at the same time: the two share memory

    Where there are few sequences with short contexts, split attention has a block for each segment; else, and
    always with heads over 128, blocks take the pieces of `decode_pieces`. Both give the same bits.
    """

    def __init__(
        self, device: Device, attention: Attention, *, max_context: int, clusters: bool | None = None,
        beside: "DecodeAttention | None" = None,
    ) -> None:  # fmt: skip
        self._device = device
        self._heads, self._kv_heads = attention.heads, attention.kv_heads
        self._scores = score_arguments(attention)
        rows, width = _rows(attention), _width(attention)
        self._blocks = _blocks(attention)
        self._segment_pages, self._segments = _segments(max_context)
        self._seen_segments = _seen_segments(attention, self._segment_pages, self._segments)
        self._splits = self.splits(attention)
        decode = KernelPairs(device, scoring("decode_attention", attention))
        self._near, self._far = (
            (
                decode.function(f"decode_attention_{rows}_{ahead}", "PPPPiPPPPPPiii" + SCORES, shared=ring),
                ring,
            )
            for ahead in _aheads(attention, device.kv, hopper=device.hopper)
            for ring in (4 * ahead * _page_room(attention, device.kv),)  # of four warps
        )
        if self._splits:
            in_clusters = device.hopper if clusters is None else clusters
            most = min(self._seen_segments, _MAX_CLUSTER)
            self._cluster = 1 << (most - 1).bit_length() if in_clusters else 1
            # What the first block of a cluster is sent: o, and m and l of each of the 128 threads.
            self._sent = 4 * (self._cluster - 1) * (rows * width + 2 * _THREADS[0])
            split = KernelPairs(device, scoring("split_attention", attention))
            name, arguments = f"split_attention_{rows}", "PPPPiPPPPPPPiiii" + SCORES
            self._split = split.function(name, arguments)
            self._split_in_clusters = split.function(
                name, arguments, shared=self._sent, cluster=self._cluster
            )
        kernel, shared = self._near
        held = kernel.many.blocks_at_once(_THREADS[0], shared) * device.multiprocessors
        self._held = -(-held // self._blocks)  # pieces that the GPU works on at once
        self._full_chip = int(_WHOLE_BLOCKS * device.multiprocessors)
        self._planner = Planner(
            segment=self._segment_pages * PAGE, at_once=self._held,
            most_cut=_most_cut(attention, max_context, device.multiprocessors),
        )  # fmt: skip
        self._meeting: tuple[int, ...] = beside._meeting if beside is not None else ()
        if not self._meeting:
            sizes = _meeting(attention, max_context, device.multiprocessors)
            self._meeting = tuple(device.allocate(size, "segments of contexts") for size in sizes)
            device.fill(self._meeting[-1], 0, sizes[-1])

    @staticmethod
    def suits(attention: Attention) -> bool:
        """Return whether the kernels take a layer's attention."""
        return attention.head_dim in FAST_HEADS

    @staticmethod
    def splits(attention: Attention) -> bool:
        """Return whether few short contexts are split among blocks, on Hopper in clusters of them."""
        return attention.head_dim <= _LARGE

    @classmethod
    def sources(cls, spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        return [source for one in spec.attentions if cls.suits(one) for source in _sources(one)]

    @classmethod
    def workspace(cls, attention: Attention, *, max_context: int, multiprocessors: int) -> int:
        """Bytes of device memory that they take."""
        return sum(_meeting(attention, max_context, multiprocessors))

    @property
    def segment(self) -> int:
        """Tokens of a segment."""
        return self._planner.segment

    def pieces(self, lengths: IntArray, sequences: IntArray) -> IntArray:
        """Divide contexts into the pieces that blocks compute, on the host; good until the next call.

        lengths    (S,) tokens of contexts
        sequences  (S,) which of the step's they are

        None where split attention is better.
        """
        if self._may_split(len(lengths)):
            segments = int((-(-lengths // self._planner.segment)).sum())
            if segments < _SPLIT_SEGMENTS * self._held:
                return NO_PIECES
        return self._planner.pieces(lengths, sequences)

    def room(self, sequences: int, pieces: int) -> int:
        """The number that so many pieces are padded to: the least of `rooms`."""
        return next(room for room in (0, *self._paddings(sequences)) if pieces <= room)

    def rooms(self, sequences: int) -> list[int]:
        """Padded sizes of the work list for a batch of that size; 0: split attention, which has none."""
        segments = sequences * self._segments  # at most
        split = self._may_split(sequences)
        if split and segments < _SPLIT_SEGMENTS * self._held:
            return [0]
        reached = [room for less, room in pairwise([0, *self._paddings(sequences)]) if less < segments]
        return [0, *reached] if split else reached

    def most_pieces(self, sequences: int) -> int:
        """The largest room."""
        return self._paddings(sequences)[-1]

    def _may_split(self, sequences: int) -> bool:
        """Return whether so few sequences leave the chip idle, and there is a kernel for them."""
        return self._splits and self._blocks * sequences < self._full_chip

    def _paddings(self, sequences: int) -> list[int]:
        cut = (sequences + waves * self._held for waves in (_FEW_WAVES, WAVES))
        return sorted({sequences, max(sequences, self._far_pieces), *cut})

    @property
    def _far_pieces(self) -> int:
        blocks = _FAR_BLOCKS if self._splits else _LARGE_FAR_BLOCKS
        return blocks * self._device.multiprocessors // self._blocks

    def load(self) -> bool:
        """Load all its kernels now, as `Function.load`."""
        pairs = [self._near[0], self._far[0]]
        pairs += [self._split, self._split_in_clusters] if self._splits else []
        return all(pair.load() for pair in pairs)

    def __call__(
        self, qkv: Buffer, cache: LayerCache, inputs: StepInputs, shape: StepShape, out: Buffer,
        sinks: Buffer = ABSENT,
    ) -> None:  # fmt: skip
        """Queue attention of a step's first chunks, drawn tokens: qkv (T, H + 2 G, D) -> out (T, H D).

        Without pieces in the step they are split. Where a step writes more of a context than its last token
        (`again`), nothing is fetched ahead of that. The result is the same to the bit, however contexts are
        shared out. `sinks`: float (H,), of a layer that has them.
        """
        if not shape.pieces:
            self._in_segments(qkv, cache, inputs, shape, out, sinks)
            return
        kernel, shared = self._far if shape.pieces <= self._far_pieces else self._near
        kernel.of(shape.drawn)(
            (self._blocks, shape.pieces, 1), _THREADS, qkv.address, cache.keys.address, cache.values.address,
            inputs.page_tables, inputs.table_width, 0, inputs.pieces, out.address, *self._meeting,
            self._heads, self._kv_heads, self._segment_pages, *self._scores, sinks.address, shared=shared,
            apart=shape.again,
        )  # fmt: skip

    def _in_segments(
        self, qkv: Buffer, cache: LayerCache, inputs: StepInputs, shape: StepShape, out: Buffer, sinks: Buffer
    ) -> None:
        """Blocks for each segment: too few sequences to fill the chip, whatever their contexts."""
        count, stride = shape.drawn, inputs.table_width
        if not self._may_split(count):
            raise RunnerError(f"decode attention of {count} sequences goes by pieces")
        segments = min(self._seen_segments, -(-stride // self._segment_pages))
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
            (self._blocks, count, segments), _THREADS, qkv.address, cache.keys.address, cache.values.address,
            inputs.page_tables, stride, inputs.context_lengths, 0, 0, out.address, *self._meeting,
            self._heads, self._kv_heads, self._segment_pages, self._segments, *self._scores, sinks.address,
            shared=shared, apart=shape.again,
        )  # fmt: skip


def _sources(attention: Attention) -> list[Source]:
    names = ("decode_attention", "split_attention") if attention.head_dim <= _LARGE else ("decode_attention",)
    return [scoring(name, attention) for name in names]


def _aheads(attention: Attention, kv: KvFormat, *, hopper: bool) -> tuple[int, int]:
    """Pages under way where pieces are many, and where they are few.

    Pages of FP8 are smaller, but with 4 or 8 of them 1,024 contexts of 512 took 46 and 59 us, not 44 (H200).
    """
    if kv is KvFormat.FP8:
        return _AHEAD, _AHEAD
    if attention.head_dim > _LARGE:
        return _LARGE_AHEAD, _LARGE_FAR_AHEAD if hopper else _LARGE_AHEAD
    return _AHEAD, _FAR_AHEAD if attention.head_dim == 64 else _AHEAD


def _width(attention: Attention) -> int:
    """Return the width of a row in registers."""
    return -(-attention.head_dim // 64) * 64


def _page_room(attention: Attention, kv: KvFormat) -> int:
    """Bytes in shared memory of a page's keys and values, of FP8 with their exponents."""
    width = _width(attention)
    if kv is KvFormat.FP8:
        return 2 * PAGE * ((256 if width == 192 else width) + 1)
    return 2 * PAGE * width * ELEMENT.itemsize


def _rows(attention: Attention) -> int:
    """Query heads that a block takes."""
    return 8 if attention.heads // attention.kv_heads <= 8 or attention.head_dim > _LARGE else 16


def _blocks(attention: Attention) -> int:
    """Return the number of blocks for a piece."""
    return attention.kv_heads * -(-(attention.heads // attention.kv_heads) // _rows(attention))


def _segments(max_context: int) -> tuple[int, int]:
    """Pages of a segment, and segments that a context may have."""
    pages = 16
    while -(-max_context // (pages * PAGE)) > _MAX_SEGMENTS:
        pages *= 2
    return pages, -(-max_context // (pages * PAGE))


def _seen_segments(attention: Attention, pages: int, segments: int) -> int:
    """Segments of `pages` that a token may see."""
    window = attention.window
    return segments if window is None else min(segments, 1 + -(-(window - 1) // (pages * PAGE)))


def _most_cut(attention: Attention, max_context: int, multiprocessors: int) -> int:
    """Segments that contexts which are cut or split may have in all."""
    most = -(-int(_WHOLE_BLOCKS * multiprocessors) // _blocks(attention))  # sequences that are split
    return max(_MOST_CUT, most * _segments(max_context)[1])


def _meeting(attention: Attention, max_context: int, multiprocessors: int) -> tuple[int, int, int]:
    """Bytes of what segments leave for each other: their sums, their maxima and weights, and counters."""
    cut = _most_cut(attention, max_context, multiprocessors)
    parts = cut * attention.heads
    return 4 * parts * attention.head_dim, 8 * parts, 4 * cut * _blocks(attention)
