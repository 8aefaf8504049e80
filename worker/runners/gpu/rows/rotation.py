"""What follows the product of queries, keys and values: bias, QK norm, rotation, the write to the cache."""

import numpy as np

from nightmill.worker.model.spec import Attention, ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs, blocks_for
from nightmill.worker.runners.gpu.device.operands import FLOAT, Buffer
from nightmill.worker.runners.gpu.device.sources import Source, rotated, source_of
from nightmill.worker.runners.gpu.kv_cache import LayerCache
from nightmill.worker.runners.gpu.weights.layout import LayerWeights

__all__ = ["Rotation"]

_BLOCK = (256, 1, 1)


class Rotation:
    """Launches `qkv_rope.cu`, for layers of one kind of attention; owns the table of angles that others read.

    max_context  tokens that a sequence may have: rows of the table
    """

    def __init__(self, device: Device, attention: Attention, *, max_context: int) -> None:
        self._attention = attention
        self._eps = attention.qk_norm.eps if attention.qk_norm is not None else 0.0
        kernels = KernelPairs(device, self._source(attention))
        self._write = kernels.function("qkv_rope_write", "PPPPfPPPiPPiii")
        half = attention.head_dim // 2
        size = self.workspace(attention, max_context=max_context)
        self.table = Buffer(device.allocate(size, "the rotation table"), (max_context, half, 2), FLOAT)
        """Cosines and sines."""
        frequencies = device.upload(attention.rope.frequencies().astype(np.float64), "rotation frequencies")
        fill = kernels.function("rope_table", "PdPi", dependent=False)
        fill.many(
            blocks_for(max_context * half), _BLOCK, frequencies, attention.rope.magnitude, self.table.address,
            max_context,
        )  # fmt: skip
        device.synchronize()
        device.free(frequencies)
        vector = 8 if attention.head_dim % 16 == 0 else 2
        lanes = 1 << (attention.head_dim // (2 * vector) - 1).bit_length()
        self._threads = (attention.heads + 2 * attention.kv_heads) * lanes  # of a token

    @staticmethod
    def _source(attention: Attention) -> Source:
        return source_of("qkv_rope", *rotated(attention))

    @classmethod
    def sources(cls, spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """What it is compiled from."""
        return [cls._source(attention) for attention in spec.attentions]

    @staticmethod
    def refusal(spec: ModelSpec) -> str | None:
        """What of a model it does not take."""
        for attention in spec.attentions:
            head, keys = attention.head_dim, attention.keys
            if head % 4 or head > 512 or (head > 128 and head % 16):
                return f"a head size of {head} (multiples of 4 up to 512, above 128 of 16)"
            if keys % 8:
                return f"KV heads of {keys} elements in all (multiples of 8)"
        return None

    @staticmethod
    def workspace(attention: Attention, *, max_context: int) -> int:
        """Bytes of the table."""
        return max_context * attention.head_dim * FLOAT.itemsize

    def __call__(
        self, qkv: Buffer, layer: LayerWeights, positions: int, cache_rows: int, cache: LayerCache, rows: int
    ) -> None:
        """Queue it for qkv (rows, (H + 2 G) D) half: queries in place, keys and values to their pages."""
        if rows:
            attention, table = self._attention, self.table
            self._write.of(rows)(
                blocks_for(rows * self._threads), _BLOCK, qkv.address, layer.qkv_bias.address,
                layer.q_norm.address, layer.k_norm.address, self._eps, positions, cache_rows, table.address,
                table.shape[0], cache.keys.address, cache.values.address, rows, attention.heads,
                attention.kv_heads,
            )  # fmt: skip
