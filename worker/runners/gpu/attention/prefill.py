"""Prefill attention: that of chunks of prompts."""

from nightmill.worker.model.spec import Attention, ModelSpec
from nightmill.worker.runners.base import IntArray
from nightmill.worker.runners.gpu.attention.scores import (
    FAST_HEADS,
    PREFILL_HEADS,
    SCORES,
    score_arguments,
    scoring,
)
from nightmill.worker.runners.gpu.attention.tiles import TILE_BYTES, TILE_ROWS, prefill_tiles
from nightmill.worker.runners.gpu.attention.widening import Widening
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs, Module
from nightmill.worker.runners.gpu.device.operands import ABSENT, Buffer
from nightmill.worker.runners.gpu.device.sources import Source
from nightmill.worker.runners.gpu.device.tensor_maps import TensorMaps
from nightmill.worker.runners.gpu.kv_cache import PAGE, LayerCache
from nightmill.worker.runners.gpu.shapes import padded_rows
from nightmill.worker.runners.gpu.step_inputs import PromptGroup, StepInputs, StepShape
from nightmill.worker.runners.kv_format import KvFormat

__all__ = ["HopperPrefill", "PortablePrefill"]

_LARGE = 128  # elements of a head, above which a warpgroup's results fill the registers


class HopperPrefill:
    """Launches `hopper_attention.cu`, of an FP8 cache after `widen_pages.cu`.

    beside  for other layers of the model, whose steps and room these share
    """

    def __init__(self, device: Device, attention: Attention, beside: "HopperPrefill | None" = None) -> None:
        self._heads, self._kv_heads = attention.heads, attention.kv_heads
        self._head, self._group = attention.head_dim, attention.heads // attention.kv_heads
        self._scores = score_arguments(attention)
        self._maps = TensorMaps(device)
        large = self._head > _LARGE
        groups, slots, stages = (2, 1, 2) if large else (3, 2, 4 if self._head == 64 else 3)
        self._rows = 64 * groups  # (token, query head) pairs in a tile
        self._threads = 128 * (groups + 1)
        width = -(-self._head // 64) * 64
        self._shared = (slots * self._rows + stages * 2 * 64) * width * 2 + 1024
        self._widening: Widening | None = None
        if device.kv is KvFormat.FP8:
            self._widening = Widening(device, attention) if beside is None else beside._widening
        module = Module.of(device, scoring("hopper_attention", attention))
        arguments = "128s128s128sPiPPPPiii" + SCORES
        self._kernel = module.function("hopper_attention", arguments, shared=self._shared, dependent=True)
        self._at_once = self._kernel.blocks_at_once(self._threads, self._shared) * device.multiprocessors

    @staticmethod
    def suits(attention: Attention, *, hopper: bool) -> bool:
        """Return whether the kernel takes a layer's attention."""
        return hopper and attention.causal and attention.head_dim in FAST_HEADS

    @classmethod
    def sources(cls, spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        suited = (attention for attention in spec.attentions if cls.suits(attention, hopper=hopper))
        return [scoring("hopper_attention", attention) for attention in suited]

    @staticmethod
    def reserved(attention: Attention, kv: KvFormat, **sizes: int) -> int:
        """Bytes that `reserve` takes, for layers that it suits."""
        return Widening.bytes(attention, **sizes) if kv is KvFormat.FP8 else 0

    def reserve(self, *, slots: int, max_context: int, max_tokens: int, depth: int) -> None:
        """Take the memory that steps need, as `Widening.reserve` says; before the first step."""
        if self._widening is not None:
            self._widening.reserve(slots=slots, max_context=max_context, max_tokens=max_tokens, depth=depth)

    def stage(
        self, turn: int, page_tables: IntArray, sequence_starts: IntArray, context_lengths: IntArray,
        drawn: int,
    ) -> tuple[IntArray, tuple[PromptGroup, ...]]:  # fmt: skip
        """The pieces of a step's prompts, and their groups; queues the copy of what else the step needs.

        turn   names buffers whose earlier copies are done
        drawn  the first so many chunks are not of prompts
        """
        tiles = prefill_tiles(sequence_starts, self._group, context_lengths, self._rows, drawn)
        if self._widening is None or not len(tiles):
            return tiles, ()
        plan = self._widening.stage(turn, page_tables, context_lengths, tiles)
        return plan.tiles, plan.groups

    def __call__(
        self, qkv: Buffer, cache: LayerCache, inputs: StepInputs, shape: StepShape, out: Buffer,
        sinks: Buffer = ABSENT,
    ) -> None:  # fmt: skip
        """Queue attention of the chunks in the step's tiles: qkv (T, H + 2 G, D) -> out (T, H D).

        Rows of qkv are read up to `padded_rows(T)`.
        """
        if self._widening is None:
            tables = inputs.page_tables, inputs.table_width
            self._attend(qkv, cache, tables, inputs, (inputs.tiles, shape.tiles), shape.tokens, out, sinks)
            return
        for group in shape.groups:
            wide, tables = self._widening(cache, group), self._widening.places
            tiles = inputs.tiles + TILE_BYTES * group.first_tile, group.tiles
            self._attend(qkv, wide, tables, inputs, tiles, shape.tokens, out, sinks)

    def _attend(
        self, qkv: Buffer, cache: LayerCache, tables: tuple[int, int], inputs: StepInputs,
        tiles: tuple[int, int], tokens: int, out: Buffer, sinks: Buffer,
    ) -> None:  # fmt: skip
        """Queue it over pages of elements; tables: which, and the width; tiles: where, and how many."""
        address, count = tiles
        heads, kv_heads, head = self._heads, self._kv_heads, self._head
        rows, cached = padded_rows(tokens), cache.pages * kv_heads * PAGE
        keys, values = (self._maps(one.address, cached, head, PAGE) for one in (cache.keys, cache.values))
        queries = self._maps.of_three(
            qkv.address, (rows, heads + 2 * kv_heads, head), (self._rows // self._group, self._group)
        )
        self._kernel(
            (min(count * kv_heads, self._at_once), 1, 1), (self._threads, 1, 1), queries, keys, values,
            *tables, inputs.context_lengths, inputs.sequence_starts, address, out.address, count, heads,
            kv_heads, *self._scores, sinks.address, shared=self._shared,
        )  # fmt: skip


class PortablePrefill:
    """Launches `prefill_attention.cu`, or `attention_any.cu` for other heads; else as `HopperPrefill`.

    value_dim  as for `scoring`
    """

    def __init__(self, device: Device, attention: Attention, value_dim: int | None = None) -> None:
        self._heads, self._kv_heads = attention.heads, attention.kv_heads
        self._scores = score_arguments(attention)
        fast = value_dim is None and attention.head_dim in PREFILL_HEADS
        self._columns = attention.kv_heads if fast else attention.heads  # of the grid
        self._threads = 256 if fast and attention.head_dim != 64 else 128
        self._shared = _block_bytes(attention.head_dim) if fast else 0
        kernels = KernelPairs(device, self._source(attention, value_dim))
        name = "prefill_attention" if fast else "prefill_attention_any"
        self._kernel = kernels.function(name, "PPPPiPPPPii" + SCORES, shared=self._shared, dependent=fast)

    @staticmethod
    def _source(attention: Attention, value_dim: int | None = None) -> Source:
        if value_dim is not None or attention.head_dim not in PREFILL_HEADS:
            return scoring("attention_any", attention, value_dim)
        return scoring("prefill_attention", attention)

    @classmethod
    def sources(cls, spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files, if no better ones suit a model."""
        others = (one for one in spec.attentions if not HopperPrefill.suits(one, hopper=hopper))
        return [cls._source(attention) for attention in others]

    @staticmethod
    def refusal(spec: ModelSpec) -> str | None:
        """Return the part of a model that no prefill attention takes, or None."""
        group = max((one.heads // one.kv_heads for one in spec.attentions), default=1)
        return f"{group} query heads to a KV head (at most {TILE_ROWS})" if group > TILE_ROWS else None

    def reserve(self, *, slots: int, max_context: int, max_tokens: int, depth: int) -> None:
        """Nothing: it reads pages as they are."""

    def stage(
        self, turn: int, page_tables: IntArray, sequence_starts: IntArray, context_lengths: IntArray,
        drawn: int,
    ) -> tuple[IntArray, tuple[PromptGroup, ...]]:  # fmt: skip
        group = self._heads // self._kv_heads
        return prefill_tiles(sequence_starts, group, context_lengths, TILE_ROWS, drawn), ()

    def __call__(
        self, qkv: Buffer, cache: LayerCache, inputs: StepInputs, shape: StepShape, out: Buffer,
        sinks: Buffer = ABSENT,
    ) -> None:  # fmt: skip
        self._kernel.of(shape.tiles)(
            (self._columns, shape.tiles, 1), (self._threads, 1, 1), qkv.address, cache.keys.address,
            cache.values.address, inputs.page_tables, inputs.table_width, inputs.context_lengths,
            inputs.sequence_starts, inputs.tiles, out.address, self._heads, self._kv_heads, *self._scores,
            sinks.address, shared=self._shared,
        )  # fmt: skip


def _block_bytes(head: int) -> int:
    """Return the bytes of keys and values in the shared memory of `prefill_attention.cu`."""
    keys, pitch = 32 if head > 128 else 64, 2 * head if head in (64, 128) else 2 * head + 16
    return 4 * keys * pitch
