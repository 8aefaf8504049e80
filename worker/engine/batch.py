"""Turns a plan into the flat arrays that a runner takes."""

from collections.abc import Iterator
from itertools import compress
from typing import Literal, NamedTuple

import numpy as np

from nightmill.worker.engine.drafting import Draft
from nightmill.worker.engine.kv_cache import PagePool
from nightmill.worker.engine.page_tables import KindTable
from nightmill.worker.engine.plan import Chunk, StepPlan
from nightmill.worker.engine.request import Sequence
from nightmill.worker.runners.base import (
    FROM_SLOT,
    NO_LOGPROBS,
    NO_POOLS,
    NO_SNAPSHOT,
    POOL,
    Admission,
    DrawArray,
    IntArray,
    KindRows,
    PageKind,
    PoolArray,
    StepBatch,
    make_draws,
)

_NO_INTS: IntArray = np.zeros(0, dtype=np.int32)


class SlotTables:
    """The page tables of all slots for a kind of pages.

    entries  (slots, B), one for `page_size` tokens; -1 behind them. Those of a page that was given back name
             the page behind the last one
    """

    def __init__(self, kind: PageKind, pool: PagePool, slots: int, context: int) -> None:
        self._page_size = page_size = pool.page_size
        self._stride, self._given_back = kind.stride, pool.pages
        self._each = kind.tokens // page_size
        self._places = np.arange(self._each, dtype=np.int32)
        width = -(-context // kind.tokens) * self._each
        self.entries: IntArray = np.full((slots, width), -1, dtype=np.int32)
        self._first = [0] * slots  # page that is not given back

    def enter(self, slot: int, table: KindTable) -> None:
        """Write the pages of the sequence that takes a slot."""
        self.entries[slot] = -1
        self.entries[slot, : len(table.pages) * self._each] = self._entries_of(table.pages)
        self._first[slot] = 0
        self.trim(slot, table)

    def trim(self, slot: int, table: KindTable) -> None:
        """Overwrite what a sequence has given back."""
        first, self._first[slot] = self._first[slot], table.first
        self.entries[slot, first * self._each : table.first * self._each] = self._given_back * self._stride

    def extend(self, slot: int, pages: list[int]) -> None:
        """Write the last page of a sequence that has grown, if it is new: another kind may have had room."""
        first = (len(pages) - 1) * self._each
        if self.entries[slot, first] < 0:
            for part in range(self._each):
                self.entries[slot, first + part] = pages[-1] * self._stride + part

    def cache_rows(self, slots: IntArray, positions: IntArray) -> IntArray:
        """Return the rows of the cache for the tokens at these positions."""
        rows: IntArray = self.entries[slots, positions // self._page_size] * self._page_size
        return rows + positions % self._page_size

    def _entries_of(self, pages: list[int]) -> IntArray:
        first = np.array(pages, dtype=np.int32) * self._stride
        entries: IntArray = (first[:, None] + self._places).reshape(-1)
        return entries


class Receivers(NamedTuple):
    """Whom what a launch returns is for, in its order.

    drawing    the sequences that draw a token
    asking     one for each token that is given
    embedding  those whose embedding is complete
    """

    drawing: list[Sequence]
    asking: list[Sequence]
    embedding: list[Sequence]


class BatchBuilder:
    """Keeps what all slots have as arrays, so that a step takes rows of them: page tables, who is masked.

    slots: sequences at once; context: the most tokens of a sequence; pool: whose pages they have.
    predicts: the runner guesses, for which it is told the token behind each chunk.
    """

    def __init__(self, pool: PagePool, *, slots: int, context: int, predicts: bool = False) -> None:
        self._predicts = predicts
        self._page_size = pool.page_size
        self._tables = [SlotTables(kind, pool, slots, context) for kind in pool.needs.kinds]
        self._masked_from = np.zeros(slots, dtype=np.int32)
        self._masked_until = np.zeros(slots, dtype=np.int32)
        self._likely = np.full(slots, NO_LOGPROBS, dtype=np.int32)

    def build(self, plan: StepPlan) -> tuple[StepBatch, "Receivers"]:
        """Return the arrays of `plan`, and whom what it returns is for.

        Sequences that decode come first; their tokens are left to the runner, which drew them. Then come
        drafts, each of whose tokens is followed by a draw, then the drawn tokens that are computed again,
        then the prompts.
        """
        self._enter(plan)
        decodes = plan.decodes
        again = [*_drafted(plan.drafts), *_drawn_again(plan.chunks)]
        prompts = [chunk for chunk in plan.chunks if chunk.of_prompt]
        drawn = len(decodes) + len(again)
        slots = np.array(
            [sequence.slot for sequence in decodes]
            + [one.sequence.slot for one in again]
            + [chunk.sequence.slot for chunk in prompts],
            dtype=np.int32,
        )
        starts = np.array(
            [sequence.computed for sequence in decodes]
            + [one.place for one in again]
            + [chunk.start for chunk in prompts],
            dtype=np.int32,
        )
        lengths = np.ones(len(slots), dtype=np.int32)
        lengths[drawn:] = [chunk.of_prompt for chunk in prompts]
        ends = np.cumsum(lengths, dtype=np.int32)
        sequence_starts = np.zeros(len(slots) + 1, dtype=np.int32)
        sequence_starts[1:] = ends
        tokens = np.full(ends[-1], FROM_SLOT, dtype=np.int32)
        tokens[len(decodes) : drawn] = [one.token for one in again]
        tokens[drawn:] = _prompt_tokens(prompts)
        draws = np.ones(len(slots), dtype=np.bool_)
        draws[len(decodes) : drawn] = [one.draws for one in again]
        draws[drawn:] = [chunk.draws and chunk.of_prompt == chunk.length for chunk in prompts]
        others = [one.sequence for one in again] + [chunk.sequence for chunk in prompts]
        drawing = decodes + list(compress(others, draws[len(decodes) :]))
        token_slots = np.repeat(slots, lengths)
        positions = np.arange(len(tokens), dtype=np.int32)
        positions += np.repeat(starts - sequence_starts[:-1], lengths)
        contexts = starts + lengths
        widest = -(-int(contexts.max()) // self._page_size)
        first, *further = (
            KindRows(tables.cache_rows(token_slots, positions), tables.entries[slots, :widest])
            for tables in self._tables
        )
        drawn_rows = self._draws(ends[draws] - 1, slots[draws], contexts[draws])
        given_rows, asking = _given(prompts, sequence_starts[drawn:])
        pools, embedding = _pools(prompts, sequence_starts[drawn:])
        return (
            StepBatch(
                tokens=tokens,
                positions=positions,
                cache_rows=first.cache_rows,
                sequence_starts=sequence_starts,
                context_lengths=contexts,
                page_tables=first.page_tables,
                slots=slots,
                draws=np.concatenate([drawn_rows, given_rows]) if asking else drawn_rows,
                drawn=drawn,
                admissions=tuple(_admission(sequence) for sequence in plan.admitted),
                snapshots=_snapshots(prompts),
                keeps=_copies(plan.drafts, "keeps"),
                restores=_copies(plan.drafts, "restores"),
                further=tuple(further),
                pools=pools,
                text_types=_text_types(prompts, sequence_starts[drawn:], len(tokens)),
                following=_following([*decodes, *others], contexts) if self._predicts else _NO_INTS,
                guesses=plan.guesses,
            ),
            Receivers(drawing, asking, embedding),
        )

    def mask(self, sequence: Sequence) -> None:
        """Note which draws of a sequence are masked; to be called again when that changes."""
        if sequence.slot is not None:
            self._masked_from[sequence.slot] = sequence.masked_from
            self._masked_until[sequence.slot] = sequence.masked_until

    def _enter(self, plan: StepPlan) -> None:
        for sequence in plan.trimmed:
            for tables, own in zip(self._tables, sequence.tables, strict=False):  # it may have left: none
                if sequence.slot is not None:
                    tables.trim(sequence.slot, own)
        for sequence in plan.admitted:
            assert sequence.slot is not None
            for tables, own in zip(self._tables, sequence.tables, strict=True):
                tables.enter(sequence.slot, own)
            self.mask(sequence)
            self._likely[sequence.slot] = sequence.likely
        for sequence in plan.grown:
            assert sequence.slot is not None
            for tables, own in zip(self._tables, sequence.tables, strict=True):
                tables.extend(sequence.slot, own.pages)
        for draft in plan.drafts:
            assert draft.sequence.slot is not None
            for tables, own in zip(self._tables, draft.sequence.tables, strict=True):
                tables.enter(draft.sequence.slot, own)

    def _draws(self, rows: IntArray, slots: IntArray, positions: IntArray) -> DrawArray:
        draws = make_draws(rows, slots, positions)
        draws["likely"] = self._likely[slots]
        if self._masked_until.any():
            begun = positions >= self._masked_from[slots]
            masked = np.flatnonzero(begun & (positions < self._masked_until[slots]))
            draws["mask"][masked] = np.arange(len(masked))
        return draws


def _snapshots(prompts: list[Chunk]) -> tuple[tuple[int, int], ...]:
    """Slots whose states are copied, with the place of the copy."""
    saving = [chunk for chunk in prompts if chunk.snapshot != NO_SNAPSHOT]
    return tuple((chunk.sequence.slot, chunk.snapshot) for chunk in saving if chunk.sequence.slot is not None)


def _copies(drafts: list[Draft], which: Literal["keeps", "restores"]) -> tuple[tuple[int, int], ...]:
    """The slots whose states are copied before the step, with the place of the copy."""
    places = [(draft.sequence.slot, getattr(draft, which)) for draft in drafts]
    return tuple((slot, place) for slot, place in places if slot is not None and place != NO_SNAPSHOT)


class _Known(NamedTuple):
    """A token behind the prompt, at a place, that is given to the runner; `draws`: the next one is drawn."""

    sequence: Sequence
    place: int
    token: int
    draws: bool


def _drafted(drafts: list[Draft]) -> Iterator[_Known]:
    """The tokens of drafts."""
    for draft in drafts:
        for place, token in enumerate(draft.known, start=draft.start - draft.again):
            yield _Known(draft.sequence, place, token, draws=False)
        for place, token in enumerate(draft.tokens, start=draft.start):
            yield _Known(draft.sequence, place, token, draws=True)


def _drawn_again(chunks: list[Chunk]) -> Iterator[_Known]:
    """The drawn tokens that are computed again."""
    for chunk in chunks:
        tokens = chunk.sequence.tokens
        for place in range(chunk.start + chunk.of_prompt, chunk.start + chunk.length):
            yield _Known(chunk.sequence, place, tokens[place], draws=place == len(tokens) - 1)


def _given(prompts: list[Chunk], starts: IntArray) -> tuple[DrawArray, list[Sequence]]:
    """Draws of the prompts' tokens that are asked about, and who asks; `starts`: where their chunks begin."""
    rows: list[int] = []
    places: list[int] = []
    asking: list[Sequence] = []
    for chunk, first in zip(prompts, starts.tolist(), strict=False):
        given = chunk.given
        rows += [first + place - 1 - chunk.start for place in given]
        places += given
        asking += [chunk.sequence] * len(given)
    draws = make_draws(
        np.array(rows, dtype=np.int32), np.full(len(rows), -1, dtype=np.int32),
        np.array(places, dtype=np.int32),
    )  # fmt: skip
    draws["given"] = [one.tokens[place] for one, place in zip(asking, places, strict=True)]
    draws["likely"] = [one.likely for one in asking]
    return draws, asking


def _pools(prompts: list[Chunk], starts: IntArray) -> tuple[PoolArray, list[Sequence]]:
    """The rows of the prompts that go into embeddings, and whose are complete with them."""
    pooling = [(chunk, first, chunk.pooled) for chunk, first in zip(prompts, starts.tolist(), strict=False)]
    pooling = [(chunk, first, pooled) for chunk, first, pooled in pooling if pooled]
    if not pooling:
        return NO_POOLS, []
    pools = np.empty(len(pooling), dtype=POOL)
    complete = []
    for place, (chunk, first, pooled) in enumerate(pooling):
        embeds = chunk.sequence.request.embeds
        assert embeds is not None
        begins, ends = pooled.start == embeds.start, pooled.stop == embeds.stop
        row = first + pooled.start - chunk.start
        pools[place] = (row, len(pooled), chunk.sequence.slot, begins, ends)
        if ends:
            complete.append(chunk.sequence)
    return pools, complete


def _text_types(prompts: list[Chunk], starts: IntArray, tokens: int) -> IntArray | None:
    """Which of a step's tokens are of the second texts of pairs; None: no prompt is a pair."""
    if all(chunk.sequence.request.second is None for chunk in prompts):
        return None
    types = np.zeros(tokens, dtype=np.int32)
    for chunk, first in zip(prompts, starts.tolist(), strict=False):
        if (second := chunk.sequence.request.second) is not None:
            types[first + max(0, second - chunk.start) : first + chunk.of_prompt] = 1
    return types


def _following(sequences: list[Sequence], ends: IntArray) -> IntArray:
    """The token behind each chunk of a step, which are of these sequences and end there; -1: not known."""
    return np.array(
        [
            sequence.tokens[end] if end < len(sequence.tokens) else -1
            for sequence, end in zip(sequences, ends.tolist(), strict=True)
        ],
        dtype=np.int32,
    )


def _prompt_tokens(chunks: list[Chunk]) -> list[int]:
    tokens: list[int] = []
    for chunk in chunks:
        tokens += chunk.sequence.tokens[chunk.start : chunk.start + chunk.of_prompt]
    return tokens


def _admission(sequence: Sequence) -> Admission:
    request = sequence.request
    assert sequence.slot is not None, "a sequence without a slot was planned"
    return Admission(
        sequence.slot,
        tuple(sequence.tokens),
        request.params,
        request.seed,
        answered=sequence.generated,
        banned=request.banned if request.thinking is None else (),  # `Sequence.banned_here`
        snapshot=sequence.snapshot,
    )
