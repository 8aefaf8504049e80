"""Decode attention with heads of any size: a warp for each query head."""

from nightmill.worker.model.spec import Attention, ModelSpec
from nightmill.worker.runners.base import IntArray
from nightmill.worker.runners.gpu.attention.pieces import NO_PIECES
from nightmill.worker.runners.gpu.attention.scores import FAST_HEADS, SCORES, score_arguments, scoring
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs
from nightmill.worker.runners.gpu.device.operands import ABSENT, Buffer
from nightmill.worker.runners.gpu.device.sources import Source
from nightmill.worker.runners.gpu.kv_cache import LayerCache
from nightmill.worker.runners.gpu.step_inputs import StepInputs, StepShape

__all__ = ["GeneralDecode"]


class GeneralDecode:
    """Launches `decode_attention_any`; the methods are those of `DecodeAttention`.

    value_dim  as for `scoring`
    """

    def __init__(self, device: Device, attention: Attention, value_dim: int | None = None) -> None:
        self._heads, self._kv_heads = attention.heads, attention.kv_heads
        self._scores = score_arguments(attention)
        kernels = KernelPairs(device, scoring("attention_any", attention, value_dim))
        self._kernel = kernels.function("decode_attention_any", "PPPPiPPPPii" + SCORES, dependent=False)

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files, if a model has heads that no other kernel takes."""
        slow = (one for one in spec.attentions if one.head_dim not in FAST_HEADS)
        return [scoring("attention_any", attention) for attention in slow]

    segment = 0
    """Tokens of a segment: there are none."""

    def pieces(self, lengths: IntArray, sequences: IntArray) -> IntArray:
        """Return no pieces: contexts stay whole."""
        return NO_PIECES

    def room(self, sequences: int, pieces: int) -> int:
        return 0

    def rooms(self, sequences: int) -> list[int]:
        return [0]

    def most_pieces(self, sequences: int) -> int:
        return 0

    def load(self) -> bool:
        return self._kernel.load()

    def __call__(
        self, qkv: Buffer, cache: LayerCache, inputs: StepInputs, shape: StepShape, out: Buffer,
        sinks: Buffer = ABSENT,
    ) -> None:  # fmt: skip
        self._kernel.of(shape.drawn)(
            (self._heads, shape.drawn, 1), (32, 1, 1), qkv.address, cache.keys.address,
            cache.values.address, inputs.page_tables, inputs.table_width, inputs.context_lengths, 0, 0,
            out.address, self._heads, self._kv_heads, *self._scores,
            sinks.address,
        )  # fmt: skip
