"""The KV cache on the GPU: how large a page is, what it takes, and where the pages of each layer are.

`cuda/common/kv_cache.cuh` says where in them a token's key and value lie; nothing else knows.
"""

from dataclasses import dataclass

from nightmill.worker.model.spec import Attention, ModelSpec
from nightmill.worker.runners.gpu.device.device import Arena, Device, aligned
from nightmill.worker.runners.gpu.device.operands import ELEMENT, Buffer

__all__ = ["PAGE", "KvCache", "LayerCache", "page_bytes"]

PAGE = 16
"""Tokens in a page, as in `kv_cache.cuh`."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """A layer's keys and values, each (pages, kv_heads, PAGE, head_dim)."""

    keys: Buffer
    values: Buffer

    @property
    def pages(self) -> int:
        return self.keys.shape[0]


@dataclass(frozen=True, slots=True)
class KvCache:
    """The pages of all layers."""

    layers: tuple[LayerCache, ...]

    @classmethod
    def allocate(cls, device: Device, spec: ModelSpec, pages: int) -> "KvCache":
        """Take the memory, zeroed: what is behind a context must be finite. Raises DeviceMemoryError."""
        shapes = [(pages, layer.attention.kv_heads, PAGE, layer.attention.head_dim) for layer in spec.layers]
        sizes = [pages * _part_bytes(layer.attention) for layer in spec.layers]
        arena = Arena(device, sum(2 * aligned(size) for size in sizes), "the KV cache")
        layers = tuple(
            LayerCache(*(Buffer(arena.take(size), shape, ELEMENT) for _ in range(2)))
            for shape, size in zip(shapes, sizes, strict=True)
        )
        device.fill(layers[0].keys.address, 0, arena.size)
        return cls(layers)


def page_bytes(spec: ModelSpec) -> int:
    """Bytes of a page: keys and values of all layers."""
    return sum(2 * _part_bytes(layer.attention) for layer in spec.layers)


def _part_bytes(attention: Attention) -> int:
    """Bytes of the keys, or of the values, of a layer in a page."""
    return attention.keys * PAGE * ELEMENT.itemsize
