"""Prefill attention: the causal attention of chunks of prompts."""

from nightmill.worker.model.spec import Attention, ModelSpec
from nightmill.worker.runners.base import IntArray
from nightmill.worker.runners.gpu.attention.scores import FAST_HEADS, SCORES, score_arguments, scoring
from nightmill.worker.runners.gpu.attention.tiles import TILE_ROWS, prefill_tiles
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs, Module
from nightmill.worker.runners.gpu.device.operands import Buffer
from nightmill.worker.runners.gpu.device.sources import Source
from nightmill.worker.runners.gpu.device.tensor_maps import TensorMaps
from nightmill.worker.runners.gpu.kv_cache import PAGE, LayerCache
from nightmill.worker.runners.gpu.products.shapes import padded_rows
from nightmill.worker.runners.gpu.steps import StepInputs, StepShape
from nightmill.worker.runners.kv_format import KvFormat

__all__ = ["HopperPrefill", "PortablePrefill"]

_LARGE = 128  # elements of a head, above which a warpgroup's results fill the registers
_LARGEST_OF_MANY = 192  # elements of a head, up to which there is room for four tiles of E4M3


class HopperPrefill:
    """Launches `hopper_attention.cu`."""

    def __init__(self, device: Device, attention: Attention) -> None:
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
        self._widens = device.kv is KvFormat.FP8
        if self._widens:  # tiles of 64 keys or values, as they are in the pages
            raw = 6 if self._head == 64 else 2 if self._head > _LARGEST_OF_MANY else 4
            self._shared += raw * 64 * (self._head + 1)
        module = Module.of(device, scoring("hopper_attention", attention))
        arguments = ("128sPPPiPPPPiii" if self._widens else "128s128s128sPiPPPPiii") + SCORES
        self._kernel = module.function("hopper_attention", arguments, shared=self._shared, dependent=True)
        self._at_once = self._kernel.blocks_at_once(self._threads, self._shared) * device.multiprocessors

    @staticmethod
    def suits(attention: Attention, *, hopper: bool) -> bool:
        """Whether the kernel takes a model."""
        return hopper and attention.head_dim in FAST_HEADS

    @classmethod
    def sources(cls, spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """What it is compiled from."""
        suited = (attention for attention in spec.attentions if cls.suits(attention, hopper=hopper))
        return [scoring("hopper_attention", attention) for attention in suited]

    def tiles(self, sequence_starts: IntArray, context_lengths: IntArray, drawn: int) -> IntArray:
        """The pieces of a step's prompts, on the host; the first `drawn` chunks are not of prompts."""
        return prefill_tiles(sequence_starts, self._group, context_lengths, self._rows, drawn)

    def __call__(
        self, qkv: Buffer, cache: LayerCache, inputs: StepInputs, shape: StepShape, out: Buffer
    ) -> None:
        """Queue attention of the chunks in the step's tiles: qkv (T, H + 2 G, D) -> out (T, H D).

        Rows of qkv are read up to `padded_rows(T)`.
        """
        heads, kv_heads, head = self._heads, self._kv_heads, self._head
        rows, cached = padded_rows(shape.tokens), cache.pages * kv_heads * PAGE
        pages: tuple[int, ...] | tuple[bytes, ...] = (cache.keys.address, cache.values.address)
        if not self._widens:
            pages = tuple(self._maps(one.address, cached, head, PAGE) for one in (cache.keys, cache.values))
        queries = self._maps.of_three(
            qkv.address, (rows, heads + 2 * kv_heads, head), (self._rows // self._group, self._group)
        )
        self._kernel(
            (min(shape.tiles * kv_heads, self._at_once), 1, 1), (self._threads, 1, 1), queries, *pages,
            inputs.block_tables, inputs.table_width, inputs.context_lengths, inputs.sequence_starts,
            inputs.tiles, out.address, shape.tiles, heads, kv_heads, *self._scores, shared=self._shared,
        )  # fmt: skip


class PortablePrefill:
    """Launches `prefill_attention.cu`, or `attention_any.cu` for other heads; else as `HopperPrefill`."""

    def __init__(self, device: Device, attention: Attention) -> None:
        self._heads, self._kv_heads = attention.heads, attention.kv_heads
        self._scores = score_arguments(attention)
        fast = attention.head_dim in FAST_HEADS
        self._columns = attention.kv_heads if fast else attention.heads  # of the grid
        self._threads = 256 if fast and attention.head_dim > 64 else 128
        self._shared = _tile_bytes(attention.head_dim) if fast else 0
        kernels = KernelPairs(device, self._source(attention))
        name = "prefill_attention" if fast else "prefill_attention_any"
        self._kernel = kernels.function(name, "PPPPiPPPPii" + SCORES, shared=self._shared, dependent=fast)

    @staticmethod
    def _source(attention: Attention) -> Source:
        fast = attention.head_dim in FAST_HEADS
        return scoring("prefill_attention" if fast else "attention_any", attention)

    @classmethod
    def sources(cls, spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """What it is compiled from, where no better one suits."""
        others = (one for one in spec.attentions if not HopperPrefill.suits(one, hopper=hopper))
        return [cls._source(attention) for attention in others]

    @staticmethod
    def refusal(spec: ModelSpec) -> str | None:
        """What of a model no prefill attention takes."""
        attention = spec.layers[0].attention
        group = attention.heads // attention.kv_heads
        return f"{group} query heads to a KV head (at most {TILE_ROWS})" if group > TILE_ROWS else None

    def tiles(self, sequence_starts: IntArray, context_lengths: IntArray, drawn: int) -> IntArray:
        group = self._heads // self._kv_heads
        return prefill_tiles(sequence_starts, group, context_lengths, TILE_ROWS, drawn)

    def __call__(
        self, qkv: Buffer, cache: LayerCache, inputs: StepInputs, shape: StepShape, out: Buffer
    ) -> None:
        self._kernel.of(shape.tiles)(
            (self._columns, shape.tiles, 1), (self._threads, 1, 1), qkv.address, cache.keys.address,
            cache.values.address, inputs.block_tables, inputs.table_width, inputs.context_lengths,
            inputs.sequence_starts, inputs.tiles, out.address, self._heads, self._kv_heads, *self._scores,
            shared=self._shared,
        )  # fmt: skip


def _tile_bytes(head: int) -> int:
    """Of the tiles of keys and values that a block of `prefill_attention.cu` has at once."""
    keys, pitch = 32 if head > 128 else 64, 2 * head if head in (64, 128) else 2 * head + 16
    return 4 * keys * pitch
