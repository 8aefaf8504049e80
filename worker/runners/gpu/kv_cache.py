"""The KV cache on the GPU: how large a page is, what it takes, and where the pages of each layer are.

It knows of which tokens its keys and values are, since they are kept beside them.

`cuda/common/kv_cache.cuh` says where in them a token's key and value lie; nothing else knows.
"""

import math
from dataclasses import dataclass

import numpy as np

from nightmill.worker.model.spec import Attention, LatentAttention, Mixer, ModelSpec
from nightmill.worker.runners.gpu.device.device import Arena, Device, aligned
from nightmill.worker.runners.gpu.device.operands import ABSENT, ELEMENT, Buffer
from nightmill.worker.runners.kv_format import KvFormat

__all__ = ["PAGE", "KvCache", "LayerCache", "page_bytes", "part_numbers"]

PAGE = 16
"""Tokens in a page, as in `kv_cache.cuh`."""

_NUMBERS = {KvFormat.ELEMENT: ELEMENT, KvFormat.FP8: np.dtype(np.uint8)}


@dataclass(frozen=True, slots=True)
class LayerCache:
    """A layer's keys and values, each (pages, kv_heads, a part): elements or, of an FP8 cache, bytes.

    Latent attention has one head of what it keeps, whose keys are its values, too: both are the same buffer.
    """

    keys: Buffer
    values: Buffer

    @property
    def pages(self) -> int:
        return self.keys.shape[0]


NO_PAGES = LayerCache(ABSENT, ABSENT)
"""Stands for those of a layer without attention."""


@dataclass(frozen=True, slots=True)
class KvCache:
    """The pages of all layers; `tokens` (pages, PAGE) int32: of what they are."""

    layers: tuple[LayerCache, ...]
    tokens: Buffer

    @classmethod
    def allocate(cls, device: Device, spec: ModelSpec, pages: int) -> "KvCache":
        """Take the memory, zeroed: what is behind a context must be finite. Raises DeviceMemoryError."""
        kind = _NUMBERS[device.kv]
        shapes = [
            [(pages, heads, part_numbers(size, device.kv)) for heads, size in _parts(layer.mixer)]
            for layer in spec.layers
        ]
        sizes = (math.prod(shape) * kind.itemsize for parts in shapes for shape in parts)
        arena = Arena(device, sum(map(aligned, sizes)), "the KV cache")
        layers = []
        for parts in shapes:
            held = [Buffer(arena.take(math.prod(shape) * kind.itemsize), shape, kind) for shape in parts]
            layers.append(LayerCache(held[0], held[-1]) if held else NO_PAGES)
        device.fill(arena.base, 0, arena.size)
        tokens = np.dtype(np.int32)
        address = device.allocate(pages * PAGE * tokens.itemsize, "the tokens of the KV cache")
        return cls(tuple(layers), Buffer(address, (pages, PAGE), tokens))


def page_bytes(spec: ModelSpec, kv: KvFormat = KvFormat.ELEMENT) -> int:
    """Bytes of a page: keys and values of all layers, and the tokens."""
    parts = (part for layer in spec.layers for part in _parts(layer.mixer))
    return sum(heads * part_numbers(size, kv) for heads, size in parts) * _NUMBERS[kv].itemsize + 4 * PAGE


def part_numbers(head_dim: int, kv: KvFormat) -> int:
    """Count the numbers of a KV head in a page, keys or values; in FP8 with an exponent for each token."""
    return PAGE * (head_dim + (kv is KvFormat.FP8))


def _parts(mixer: Mixer | None) -> list[tuple[int, int]]:
    """KV heads and their sizes: of keys and of values, or of what is both."""
    match mixer:
        case Attention():
            return [(mixer.kv_heads, mixer.head_dim)] * 2
        case LatentAttention():
            return [(mixer.kv_heads, mixer.kept)]
        case _:
            return []
