"""Pages of an FP8 cache that a step's prompts see, which prefill attention finds as elements.

`widen_pages.cu` makes them so, in room for a bounded number of pages: prompts are grouped so that the pages
of a group fit. A page that several prompts share is there once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nightmill.worker.runners.base import IntArray
from nightmill.worker.runners.gpu.kv_cache import PAGE
from nightmill.worker.runners.gpu.step_inputs import PromptGroup

__all__ = ["WidePages", "wide_pages"]


@dataclass(frozen=True, slots=True)
class WidePages:
    """Pages that are widened for a step.

    pages   (n,) int32: those of the cache, group after group; each group's fill the room from its beginning
    places  (S, B) int32: where in the room those of a chunk's page table are, as far as it sees them
    groups  of prompts
    tiles   (tiles, 2) int32: those of a group beside each other
    """

    pages: IntArray
    places: IntArray
    groups: tuple[PromptGroup, ...]
    tiles: IntArray


def wide_pages(page_tables: IntArray, context_lengths: IntArray, tiles: IntArray, room: int) -> WidePages:
    """Group the chunks that have tiles, of which there are some.

    page_tables, context_lengths  as in `StepBatch`
    tiles  (tiles, 2), as `prefill_tiles` gives them; within a group they keep their order
    room   pages; at least those of each context
    """
    chunks = np.unique(tiles[:, 0])
    held = -(-context_lengths[chunks] // PAGE)
    tables = page_tables[chunks, : held.max()]
    seen = np.arange(tables.shape[1]) < held[:, None]
    places = np.zeros((len(page_tables), tables.shape[1]), dtype=np.int32)
    pages, groups, shares = [], [], []
    first_page = first_tile = 0
    for part, widened in _parts(tables, seen, slice(0, len(chunks)), room):
        place_of = np.zeros(widened[-1] + 1, dtype=np.int32)
        place_of[widened] = np.arange(len(widened), dtype=np.int32)
        places[chunks[part]] = place_of[np.where(seen[part], tables[part], widened[0])]
        share = tiles[np.isin(tiles[:, 0], chunks[part])]
        groups.append(PromptGroup(first_page, len(widened), first_tile, len(share)))
        pages.append(widened)
        shares.append(share)
        first_page, first_tile = first_page + len(widened), first_tile + len(share)
    return WidePages(np.concatenate(pages), places, tuple(groups), np.concatenate(shares))


def _parts(
    tables: IntArray, seen: npt.NDArray[np.bool_], rows: slice, room: int
) -> Iterator[tuple[slice, IntArray]]:
    """These rows, halved as long as their pages do not fit, and the pages of each part, sorted."""
    used = tables[rows][seen[rows]]
    marks = np.zeros(used.max() + 1, dtype=bool)
    marks[used] = True
    pages = np.flatnonzero(marks).astype(np.int32)
    if len(pages) <= room or rows.stop - rows.start == 1:
        yield rows, pages
        return
    middle = (rows.start + rows.stop) // 2
    yield from _parts(tables, seen, slice(rows.start, middle), room)
    yield from _parts(tables, seen, slice(middle, rows.stop), room)
