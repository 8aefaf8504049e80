"""Attention with heads of any size: both kinds, a warp for each query head."""

from nightmill.worker.model.spec import Attention, ModelSpec
from nightmill.worker.runners.base import IntArray
from nightmill.worker.runners.gpu.attention.pieces import NO_PIECES
from nightmill.worker.runners.gpu.attention.scale import score_scale
from nightmill.worker.runners.gpu.attention.tiles import TILE_ROWS, prefill_tiles
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs
from nightmill.worker.runners.gpu.device.operands import Buffer
from nightmill.worker.runners.gpu.device.sources import TENSOR_CORE_HEADS, Source, by_head, source_of
from nightmill.worker.runners.gpu.kv_cache import LayerCache
from nightmill.worker.runners.gpu.steps import StepInputs, StepShape

__all__ = ["GeneralDecode", "GeneralPrefill"]

_ARGUMENTS = "PPPPiPPPPiif"


def _source(attention: Attention) -> Source:
    return source_of("attention_any", *by_head(attention))


class GeneralDecode:
    """Launches `decode_attention_any`; the methods are those of `DecodeAttention`."""

    def __init__(self, device: Device, attention: Attention) -> None:
        self._heads, self._kv_heads = attention.heads, attention.kv_heads
        self._scale = score_scale(attention)
        kernels = KernelPairs(device, _source(attention))
        self._kernel = kernels.function("decode_attention_any", _ARGUMENTS, dependent=False)

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """What both are compiled from, for heads that no other kernel takes."""
        attention = spec.layers[0].attention
        return [] if attention.head_dim in TENSOR_CORE_HEADS else [_source(attention)]

    def pieces(self, lengths: IntArray, sequences: IntArray) -> IntArray:
        """None: contexts stay whole."""
        return NO_PIECES

    def room(self, sequences: int, pieces: int) -> int:
        return 0

    def rooms(self, sequences: int) -> list[int]:
        return [0]

    def most_pieces(self, sequences: int) -> int:
        return 0

    def __call__(
        self, qkv: Buffer, cache: LayerCache, inputs: StepInputs, shape: StepShape, out: Buffer
    ) -> None:
        self._kernel.of(shape.drawn)(
            (self._heads, shape.drawn, 1), (32, 1, 1), qkv.address, cache.keys.address,
            cache.values.address, inputs.block_tables, inputs.table_width, inputs.context_lengths, 0, 0,
            out.address, self._heads, self._kv_heads, self._scale,
        )  # fmt: skip


class GeneralPrefill:
    """Launches `prefill_attention_any`; the methods are those of `HopperPrefill`."""

    def __init__(self, device: Device, attention: Attention) -> None:
        self._heads, self._kv_heads = attention.heads, attention.kv_heads
        self._scale = score_scale(attention)
        kernels = KernelPairs(device, _source(attention))
        self._kernel = kernels.function("prefill_attention_any", _ARGUMENTS, dependent=False)

    @staticmethod
    def refusal(spec: ModelSpec) -> str | None:
        """What of a model no prefill attention takes."""
        attention = spec.layers[0].attention
        group = attention.heads // attention.kv_heads
        return f"{group} query heads to a KV head (at most {TILE_ROWS})" if group > TILE_ROWS else None

    def tiles(self, sequence_starts: IntArray, context_lengths: IntArray, drawn: int) -> IntArray:
        return prefill_tiles(
            sequence_starts, self._heads // self._kv_heads, context_lengths, TILE_ROWS, drawn
        )

    def __call__(
        self, qkv: Buffer, cache: LayerCache, inputs: StepInputs, shape: StepShape, out: Buffer
    ) -> None:
        self._kernel.of(shape.tiles)(
            (self._heads, shape.tiles, 1), (128, 1, 1), qkv.address, cache.keys.address,
            cache.values.address, inputs.block_tables, inputs.table_width, inputs.context_lengths,
            inputs.sequence_starts, inputs.tiles, out.address, self._heads, self._kv_heads, self._scale,
        )  # fmt: skip
