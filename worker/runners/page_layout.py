"""The layout of keys and values in pages: which layers share a kind, and where each has its part.

A kind is of layers that need the same tokens of a sequence, all or those of a window, and keep as much of
each. All pages have one size, so that there is one pool of them: the kind that keeps the most of a token says
what a page is, and one that keeps less has more tokens in a page. Layers that read the keys of others take
none.

A table of a kind names parts of pages, each of `page_size` tokens of a layer. A page is as long as a whole
number of such parts, whatever the kind: so a layer finds its keys at the part that the table names, counted
in parts of its own size from where its own first one is. Where there is one kind, nothing is shared out: a
page is a part, and each layer has its parts one behind the other, apart from those of other layers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from nightmill.worker.model.spec import Attention, LatentAttention, ModelSpec
from nightmill.worker.runners.base import PageKind

__all__ = ["LayerPart", "PageLayout", "page_layout"]

_MOST_PARTS = 8
"""Most parts of a page: beginnings of prompts are shared by whole pages of every kind."""


@dataclass(frozen=True, slots=True)
class LayerPart:
    """The place of a layer's keys and values in a page, in numbers, and the kind of that page."""

    kind: int
    keys: int
    values: int


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The kinds of a model's pages, those without a window first, and the numbers that a page holds.

    layers  by layer; None: it keeps no keys and values of its own
    """

    kinds: tuple[PageKind, ...]
    numbers: int
    layers: tuple[LayerPart | None, ...]

    @property
    def apart(self) -> bool:
        """True if each layer has its parts apart from those of others, since there is one kind of pages."""
        return len(self.kinds) == 1

    def pages_for(self, tokens: int) -> int:
        """Pages of all kinds for a sequence that has so many tokens, none of which is computed yet."""
        return sum(kind.pages_for(tokens) for kind in self.kinds)

    def pages_at(self, tokens: int) -> int:
        """Pages of all kinds that a sequence of so many tokens keeps for those to come."""
        return sum(kind.pages_at(tokens) for kind in self.kinds)


def page_layout(
    spec: ModelSpec, page_size: int, numbers_of: Callable[[Attention | LatentAttention], int]
) -> PageLayout:
    """Lay out the pages of a model.

    page_size   tokens of a part
    numbers_of  numbers of a layer's keys, or of its values, in a part
    """
    caches = spec.caches
    sizes = [(0, 0) if mixer is None else (_window(spec, mixer), numbers_of(mixer)) for mixer in caches]
    found = sorted({size for size, mixer in zip(sizes, caches, strict=True) if mixer is not None})
    if not found:
        return PageLayout((PageKind(None, page_size),), 0, (None,) * len(caches))
    arrays = [1 if isinstance(mixer, LatentAttention) else 2 for mixer in caches]
    kept = [
        sum(
            number * count
            for (window, number), count in zip(sizes, arrays, strict=True)
            if one == (window, number)
        )
        for one in found
    ]
    parts = [max(1, min(_MOST_PARTS, round(max(kept) / each))) for each in kept]
    whole = math.lcm(*(number for _, number in found))
    numbers = -(-max(each * count for each, count in zip(kept, parts, strict=True)) // whole) * whole
    parts = [max(1, min(_MOST_PARTS, numbers // each)) for each in kept]  # some more, if there is room
    kinds = tuple(
        PageKind(window or None, page_size * count, 1 if len(found) == 1 else numbers // number)
        for (window, number), count in zip(found, parts, strict=True)
    )
    layers: list[LayerPart | None] = []
    taken = [0] * len(found)
    for size, mixer, count in zip(sizes, caches, arrays, strict=True):
        if mixer is None:
            layers.append(None)
            continue
        kind = found.index(size)
        first, each = taken[kind], parts[kind] * size[1]
        layers.append(LayerPart(kind, first, first + (count - 1) * each))
        taken[kind] += count * each
    return PageLayout(kinds, numbers, tuple(layers))


def _window(spec: ModelSpec, mixer: Attention | LatentAttention) -> int:
    """The window of a layer; 0 if it hides nothing."""
    window = mixer.window if isinstance(mixer, Attention) else None
    return window if window is not None and window < spec.context_length else 0
