"""Steps of chosen shapes for a runner, without an engine."""

import numpy as np

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.runners.base import (
    Admission,
    IntArray,
    KindRows,
    PageKind,
    Runner,
    StepBatch,
    make_draws,
)  # fmt: skip

__all__ = ["FILL", "Steps"]

FILL = 8192  # tokens of a step that fills the cache before decode steps are timed


class Steps:
    """Makes steps of a runner whose sequences have their own pages, in an order unlike that of addresses."""

    def __init__(self, runner: Runner, context: int) -> None:
        self._runner, self._page = runner, runner.page_size
        kinds = runner.page_kinds or (PageKind(None, self._page),)
        each = [kind.pages_for(context) for kind in kinds]
        order = np.random.default_rng(0).permutation(runner.slots * sum(each))
        pages = np.split(order.astype(np.int32).reshape(runner.slots, -1), np.cumsum(each)[:-1], axis=1)
        self._tables = [self._entries(kind, own) for kind, own in zip(kinds, pages, strict=True)]

    def _entries(self, kind: PageKind, pages: IntArray) -> IntArray:
        """Tables (slots, B) of these pages of a kind."""
        parts = np.arange(kind.tokens // self._page, dtype=np.int32)
        return (pages[:, :, None] * kind.stride + parts).reshape(len(pages), -1).astype(np.int32)

    def batch(self, slots: range, start: int, length: int, *, admit: bool) -> StepBatch:
        """Tokens start .. start + length - 1 of each of these slots."""
        count = len(slots)
        rng = np.random.default_rng(start)
        positions = np.tile(np.arange(start, start + length, dtype=np.int32), count)
        rows = np.repeat(np.array(slots, dtype=np.int32), length)
        params = GenerationParams(temperature=0.6, ignore_eos=True)
        ends = np.arange(1, count + 1, dtype=np.int32) * length
        first, *further = (
            KindRows(
                tables[rows, positions // self._page] * self._page + positions % self._page,
                tables[list(slots)],
            )
            for tables in self._tables
        )
        return StepBatch(
            tokens=rng.integers(0, self._runner.vocab, count * length).astype(np.int32),
            positions=positions,
            cache_rows=first.cache_rows,
            sequence_starts=np.arange(count + 1, dtype=np.int32) * length,
            context_lengths=np.full(count, start + length, dtype=np.int32),
            page_tables=first.page_tables,
            slots=np.array(slots, dtype=np.int32),
            draws=make_draws(ends - 1, rows[ends - 1], np.full(count, start + length, dtype=np.int32)),
            drawn=count if start and length == 1 else 0,
            admissions=tuple(Admission(slot, (1,), params, slot) for slot in slots) if admit else (),
            further=tuple(further),
        )

    def fill(self, context: int) -> None:
        """Compute all slots' first `context` tokens, so that attention reads real keys and values."""
        at_once = max(1, FILL // context)
        for first in range(0, self._runner.slots, at_once):
            slots = range(first, min(first + at_once, self._runner.slots))
            self._runner.launch(self.batch(slots, 0, context, admit=True))
            self._runner.collect()
