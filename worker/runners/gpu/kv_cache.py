"""The KV cache on the GPU: how large a page is, what it takes, and where the pages of each layer are.

It knows of which tokens its keys and values are, since they are kept beside them.

`cuda/common/kv_cache.cuh` says where in them a token's key and value lie; nothing else knows.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from nightmill.worker.model.spec import Attention, LatentAttention, Mixer, ModelSpec
from nightmill.worker.runners.gpu.device.arena import Arena, aligned
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ABSENT, ELEMENT, Buffer
from nightmill.worker.runners.kv_format import KvFormat
from nightmill.worker.runners.page_layout import LayerPart, PageLayout, page_layout

__all__ = [
    "PAGE", "KvCache", "LayerCache", "kinds_layout", "layer_page_bytes", "page_bytes", "part_numbers",
    "pool_page_bytes",
]  # fmt: skip

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
    kind: int = field(default=0, kw_only=True)
    """The kind of its pages, and so of the tables that name them."""

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
        if (layout := kinds_layout(spec, device.kv)) is not None:
            return cls._of_kinds(device, spec, layout, pages)
        kind = _NUMBERS[device.kv]
        shapes = [
            [(pages, heads, part_numbers(size, device.kv)) for heads, size in _parts(mixer)]
            for mixer in spec.caches
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

    @classmethod
    def _of_kinds(cls, device: Device, spec: ModelSpec, layout: PageLayout, pages: int) -> "KvCache":
        """Pages that any kind of layers may have: each is as long as a whole number of any layer's parts."""
        kind, size = _NUMBERS[device.kv], pages * layout.numbers
        base = device.allocate(size * _NUMBERS[device.kv].itemsize, "the KV cache")
        device.fill(base, 0, size * kind.itemsize)

        def held(mixer: Attention, part: LayerPart) -> LayerCache:
            """Keys and values from where they begin on, as far as both reach: all parts that tables name."""
            shape = (mixer.kv_heads, part_numbers(mixer.head_dim, device.kv))
            count = (size - max(part.keys, part.values)) // math.prod(shape)
            keys, values = (
                Buffer(base + first * kind.itemsize, (count, *shape), kind)
                for first in (part.keys, part.values)
            )
            return LayerCache(keys, values, kind=part.kind)

        layers = tuple(
            held(mixer, part) if isinstance(mixer, Attention) and part is not None else NO_PAGES
            for mixer, part in zip(spec.caches, layout.layers, strict=True)
        )
        parts, tokens = pages * layout.kinds[0].stride, np.dtype(np.int32)
        address = device.allocate(parts * PAGE * tokens.itemsize, "the tokens of the KV cache")
        return cls(layers, Buffer(address, (parts, PAGE), tokens))


def kinds_layout(spec: ModelSpec, kv: KvFormat = KvFormat.ELEMENT) -> PageLayout | None:
    """Return the layout of pages of several kinds; None: one kind, and each layer has its pages apart.

    So it is, too, in FP8, whose pages become elements by one table, and where all layers have windows: what
    is behind these may be asked about.
    """
    if kv is not KvFormat.ELEMENT or not all(isinstance(one, Attention | None) for one in spec.caches):
        return None
    layout = page_layout(spec, PAGE, lambda mixer: PAGE * mixer.kv_heads * mixer.head_dim)
    return None if layout.apart or layout.kinds[0].window is not None else layout


def pool_page_bytes(spec: ModelSpec, kv: KvFormat = KvFormat.ELEMENT) -> int:
    """Bytes of a page of the pool: of any kind, with the tokens; of one kind as `page_bytes`."""
    layout = kinds_layout(spec, kv)
    if layout is None:
        return page_bytes(spec, kv)
    return layout.numbers * _NUMBERS[kv].itemsize + 4 * PAGE * layout.kinds[0].stride


def page_bytes(spec: ModelSpec, kv: KvFormat = KvFormat.ELEMENT) -> int:
    """Bytes of `PAGE` tokens: keys and values of all layers, and the tokens."""
    return sum(layer_page_bytes(mixer, kv) for mixer in spec.caches) + 4 * PAGE


def layer_page_bytes(mixer: Mixer | None, kv: KvFormat = KvFormat.ELEMENT) -> int:
    """Bytes of the keys and values of `PAGE` tokens that a layer's mixer reads."""
    return sum(heads * part_numbers(size, kv) for heads, size in _parts(mixer)) * _NUMBERS[kv].itemsize


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
