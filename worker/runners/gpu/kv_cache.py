"""The KV cache on the GPU: how large a page is, what it takes, and where the pages of each layer are.

`cuda/kv_cache.cuh` says where in them a token's key and value lie; nothing else knows.
"""

from dataclasses import dataclass

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device import Arena, Device, aligned

__all__ = ["PAGE", "KvCache", "page_bytes"]

PAGE = 16
"""Tokens in a page, as in `kv_cache.cuh`."""
_ITEM_BYTES = 2  # half


@dataclass(frozen=True, slots=True)
class KvCache:
    """Per layer the addresses of half [pages, kv_heads, PAGE, head_dim], of keys and of values."""

    keys: tuple[int, ...]
    values: tuple[int, ...]
    pages: int

    @classmethod
    def allocate(cls, device: Device, spec: ModelSpec, pages: int) -> "KvCache":
        """Take the memory, zeroed: what is behind a context must be finite. Raises DeviceMemoryError."""
        size = _part_bytes(spec) * pages
        arena = Arena(device, 2 * len(spec.layers) * aligned(size), "the KV cache")
        addresses = [arena.take(size) for _ in range(2 * len(spec.layers))]
        device.fill(addresses[0], 0, arena.size)
        return cls(tuple(addresses[::2]), tuple(addresses[1::2]), pages)


def page_bytes(spec: ModelSpec) -> int:
    """Bytes of a page: keys and values of all layers."""
    return 2 * len(spec.layers) * _part_bytes(spec)


def _part_bytes(spec: ModelSpec) -> int:
    """Bytes of the keys, or of the values, of a layer in a page."""
    return spec.layers[0].attention.keys * PAGE * _ITEM_BYTES
