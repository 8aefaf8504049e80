"""Pages of an FP8 cache as elements, for prefill attention: their room, and the kernel that fills it."""

import math

from nightmill.worker.model.spec import Attention, ModelSpec
from nightmill.worker.runners.base import IntArray
from nightmill.worker.runners.gpu.attention.prompts import WidePages, wide_pages
from nightmill.worker.runners.gpu.attention.scores import FAST_HEADS
from nightmill.worker.runners.gpu.device.arena import Arena, aligned
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Module
from nightmill.worker.runners.gpu.device.operands import ELEMENT, INT, Buffer
from nightmill.worker.runners.gpu.device.sources import Source, by_head, source_of
from nightmill.worker.runners.gpu.kv_cache import PAGE, LayerCache
from nightmill.worker.runners.gpu.step_inputs import PromptGroup

__all__ = ["Widening"]

_THREADS = 256
_NUMBERS = 8192  # that a block widens


class Widening:
    """Launches `widen_pages.cu`. Layers have equal heads, and one after the other the same room."""

    def __init__(self, device: Device, attention: Attention) -> None:
        self._device, self._attention = device, attention
        module = Module.of(device, source_of("widen_pages", *by_head(attention)))
        self._kernel = module.function("widen_pages", "PiPPPPi", dependent=True)

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files, if `HopperPrefill` computes a layer of a model."""
        fast = (one for one in spec.attentions if hopper and one.head_dim in FAST_HEADS)
        return [source_of("widen_pages", *by_head(one)) for one in fast]

    @staticmethod
    def bytes(attention: Attention, *, slots: int, max_context: int, max_tokens: int) -> int:
        """Device memory that `reserve` takes."""
        part = attention.kv_heads * PAGE * attention.head_dim * ELEMENT.itemsize
        table = slots * _pages(max_context) * INT.itemsize
        return 2 * aligned(_room(max_context, max_tokens) * part) + 2 * aligned(table)

    def reserve(self, *, slots: int, max_context: int, max_tokens: int, depth: int) -> None:
        """Take the memory for steps of up to `max_tokens` tokens of `slots` sequences.

        max_context  tokens that a sequence may have
        depth        steps that may be outstanding

        Raises DeviceMemoryError.
        """
        device, attention, width = self._device, self._attention, _pages(max_context)
        size = self.bytes(attention, slots=slots, max_context=max_context, max_tokens=max_tokens)
        arena = Arena(device, size, "pages as elements")
        shape = (_room(max_context, max_tokens), attention.kv_heads, PAGE, attention.head_dim)
        bytes_of_room = math.prod(shape) * ELEMENT.itemsize
        self._wide = LayerCache(*(Buffer(arena.take(bytes_of_room), shape, ELEMENT) for _ in range(2)))
        self._pages, self._places = (arena.take(slots * width * INT.itemsize) for _ in range(2))
        self._host_pages = [device.pinned(slots * width, INT) for _ in range(depth)]
        self._host_places = [device.pinned((slots, width), INT) for _ in range(depth)]

    @property
    def places(self) -> tuple[int, int]:
        """The address of the tables (S, B) of places in the room, in place of page tables, and their B."""
        return self._places, self._host_places[0].shape[1]

    def stage(
        self, turn: int, page_tables: IntArray, context_lengths: IntArray, tiles: IntArray
    ) -> WidePages:
        """Plan a step, and queue the copy of what the GPU needs of that.

        turn  names buffers whose earlier copies are done
        """
        plan = wide_pages(page_tables, context_lengths, tiles, self._wide.pages)
        pages, places = self._host_pages[turn], self._host_places[turn]
        count, width = plan.places.shape
        pages[: len(plan.pages)] = plan.pages
        places[:count, :width] = plan.places
        self._device.copy_in(self._pages, pages[: len(plan.pages)])
        pitch = places.shape[1] * INT.itemsize
        self._device.copy_rows_in(self._places, pitch, places[:count], width * INT.itemsize)
        return plan

    def __call__(self, cache: LayerCache, group: PromptGroup) -> LayerCache:
        """Queue a group's pages of a layer -> elements (pages, G, PAGE, D), valid up to the next call."""
        wide, kv_heads = self._wide, self._attention.kv_heads
        blocks = -(-group.pages * math.prod(wide.keys.shape[1:]) // _NUMBERS)
        self._kernel(
            (blocks, 2, 1), (_THREADS, 1, 1), self._pages + INT.itemsize * group.first_page, group.pages,
            cache.keys.address, cache.values.address, wide.keys.address, wide.values.address, kv_heads,
        )  # fmt: skip
        return wide


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE)


def _room(max_context: int, max_tokens: int) -> int:
    """Pages: what one context has, and all that a step adds beside it."""
    return _pages(max_context) + _pages(max_tokens)
