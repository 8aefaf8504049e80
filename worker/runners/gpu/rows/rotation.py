"""Work between the product of queries, keys and values and attention: bias, norms, rotation, cache write."""

import numpy as np

from nightmill.worker.model.rope import Rope
from nightmill.worker.model.spec import Attention, ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs, blocks_for
from nightmill.worker.runners.gpu.device.operands import ABSENT, FLOAT, Buffer
from nightmill.worker.runners.gpu.device.sources import Source, rotated, source_of
from nightmill.worker.runners.gpu.kinds import made_heads
from nightmill.worker.runners.gpu.kv_cache import LayerCache
from nightmill.worker.runners.gpu.weights.layout import LayerWeights

__all__ = ["KvWrite", "Rotation", "same_table"]

_BLOCK = (256, 1, 1)
_CENTRED, _ROTATED, _VALUES = 1, 2, 4  # of `norm_is`


class Rotation:
    """Launches `qkv_rope.cu`, for layers of one kind of attention; has the table of angles that others read.

    max_context  tokens that a sequence may have: rows of the table
    statistics   float (rows, 2, 2), for norms of whole queries and keys
    table        that of other layers that rotate alike (`same_table`)
    """

    def __init__(
        self, device: Device, attention: Attention, *, max_context: int, statistics: Buffer = ABSENT,
        table: Buffer | None = None,
    ) -> None:  # fmt: skip
        self._attention = attention
        norm = attention.qk_norm
        self._eps = norm.eps if norm is not None else 0.0
        centred = norm is not None and norm.centred
        self._norm_is = _CENTRED * centred + _ROTATED * attention.qk_norm_rotated
        self._norm_is += _VALUES * (attention.value_norm is not None)
        self._made = made_heads(attention)
        self._statistics = statistics if norm is not None and attention.qk_norm_whole else ABSENT
        kernels = KernelPairs(device, _source(attention))
        self._write = kernels.function("qkv_rope_write", "PiPPPPfiPPPPiPPPiii")
        self._sum = kernels.function("qk_statistics", "PPfiPii")
        self.table = _table(device, attention, kernels, max_context) if table is None else table
        """Cosines and sines."""
        self._factors = 0
        if attention.temperature is not None:
            factors = attention.temperature.factors(np.arange(max_context)).astype(np.float32)
            self._factors = device.upload(factors, "factors of queries")
        heads = attention.heads + (0 if attention.keys_of is not None else 2 * attention.kv_heads)
        self._threads = heads * _lanes(attention)  # of a token

    @classmethod
    def sources(cls, spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        return [_source(attention) for attention in spec.attentions]

    @staticmethod
    def refusal(spec: ModelSpec) -> str | None:
        """Return the part of a model that it does not take, or None."""
        for attention in spec.attentions:
            head, keys = attention.head_dim, attention.keys
            if head % 4 or head > 512 or (head > 128 and head % 16):
                return f"a head size of {head} (multiples of 4 up to 512, above 128 of 16)"
            if keys % 8:
                return f"KV heads of {keys} elements in all (multiples of 8)"
            if attention.values_are_keys and 0 < attention.rope.dim < head:  # in another order (`HeadOrder`)
                return "values made of keys that are rotated in part"
        return None

    @staticmethod
    def workspace(spec: ModelSpec, *, max_context: int) -> int:
        """Bytes of a model's tables."""
        tables = {same_table(one): _table_bytes(one, max_context) for one in spec.attentions}
        factors = sum(one.temperature is not None for one in spec.attentions)
        return sum(tables.values()) + FLOAT.itemsize * max_context * factors

    def __call__(
        self, qkv: Buffer, layer: LayerWeights, positions: int, cache_rows: int, cache: LayerCache, rows: int,
        made: Buffer | None = None,
    ) -> None:  # fmt: skip
        """Queue it for qkv (rows, (H + 2 G) D): queries in place, keys and values to their pages.

        made  (rows, `made_heads` D): what is there of them, if not in qkv
        """
        made = qkv if made is None else made
        if not rows:
            return
        heads, kv_heads, table = self._attention.heads, self._attention.kv_heads, self.table
        if self._statistics is not ABSENT:
            self._sum.of(rows)(
                (rows, 2), _BLOCK, made.address, layer.qkv_bias.address, self._eps, self._norm_is,
                self._statistics.address, heads, kv_heads,
            )  # fmt: skip
        self._write.of(rows)(
            blocks_for(rows * self._threads), _BLOCK, made.address, self._made, qkv.address,
            layer.qkv_bias.address, layer.q_norm.address, layer.k_norm.address, self._eps, self._norm_is,
            self._statistics.address, positions, cache_rows, table.address, table.shape[0], self._factors,
            cache.keys.address, cache.values.address, rows, heads, kv_heads,
        )  # fmt: skip


class KvWrite:
    """Writes keys and values to the pages of an FP8 cache that a kernel left in qkv, rotated: `kv_write`."""

    def __init__(self, device: Device, attention: Attention) -> None:
        self._heads, self._kv_heads = attention.heads, attention.kv_heads
        self._threads = 2 * attention.kv_heads * _lanes(attention)  # of a token
        self._write = KernelPairs(device, _source(attention)).function("kv_write", "PPPPiii")

    def __call__(self, qkv: Buffer, cache_rows: int, cache: LayerCache, rows: int) -> None:
        """Queue it for qkv (rows, (H + 2 G) D)."""
        self._write.of(rows)(
            blocks_for(rows * self._threads), _BLOCK, qkv.address, cache_rows, cache.keys.address,
            cache.values.address, rows, self._heads, self._kv_heads,
        )  # fmt: skip


def same_table(attention: Attention) -> tuple[Rope, int]:
    """Layers of which this is equal rotate by one table."""
    return attention.rope, attention.head_dim


def _table(device: Device, attention: Attention, kernels: KernelPairs, max_context: int) -> Buffer:
    """Compute the table of angles."""
    half, rope = attention.head_dim // 2, attention.rope
    address = device.allocate(_table_bytes(attention, max_context), "the rotation table")
    frequencies = device.upload(rope.frequencies().astype(np.float64), "rotation frequencies")
    fill = kernels.function("rope_table", "PdPii", dependent=False)
    fill.many(
        blocks_for(max_context * half), _BLOCK, frequencies, rope.magnitude, address, max_context,
        rope.dim // 2,
    )  # fmt: skip
    device.synchronize()
    device.free(frequencies)
    return Buffer(address, (max_context, half, 2), FLOAT)


def _source(attention: Attention) -> Source:
    return source_of("qkv_rope", *rotated(attention))


def _lanes(attention: Attention) -> int:
    """Threads that have a head between them."""
    vector = 8 if attention.head_dim % 16 == 0 else 2
    return 1 << (attention.head_dim // (2 * vector) - 1).bit_length()


def _table_bytes(attention: Attention, max_context: int) -> int:
    return max_context * attention.head_dim * FLOAT.itemsize
