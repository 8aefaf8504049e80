"""Turns a plan into the flat arrays that a runner takes."""

from collections.abc import Iterator
from itertools import compress
from typing import NamedTuple

import numpy as np

from nightmill.worker.engine.drafting import Draft
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
    PoolArray,
    StepBatch,
    make_draws,
)


class Wanted(NamedTuple):
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

    slots: sequences at once; pages: the most pages a sequence may have; page_size: tokens in a page.
    """

    def __init__(self, *, slots: int, pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._tables = np.full((slots, pages), -1, dtype=np.int32)
        self._masked_from = np.zeros(slots, dtype=np.int32)
        self._masked_until = np.zeros(slots, dtype=np.int32)
        self._likely = np.full(slots, NO_LOGPROBS, dtype=np.int32)

    def build(self, plan: StepPlan) -> tuple[StepBatch, "Wanted"]:
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
        drawn_rows = self._draws(ends[draws] - 1, slots[draws], contexts[draws])
        given_rows, asking = _given(prompts, sequence_starts[drawn:])
        pools, embedding = _pools(prompts, sequence_starts[drawn:])
        return (
            StepBatch(
                tokens=tokens,
                positions=positions,
                cache_rows=self._cache_rows(token_slots, positions),
                sequence_starts=sequence_starts,
                context_lengths=contexts,
                page_tables=self._tables[slots, :widest],
                slots=slots,
                draws=np.concatenate([drawn_rows, given_rows]) if asking else drawn_rows,
                drawn=drawn,
                admissions=tuple(_admission(sequence) for sequence in plan.admitted),
                snapshots=_snapshots(prompts),
                pools=pools,
            ),
            Wanted(drawing, asking, embedding),
        )

    def mask(self, sequence: Sequence) -> None:
        """Note which draws of a sequence are masked; to be called again when that changes."""
        if sequence.slot is not None:
            self._masked_from[sequence.slot] = sequence.masked_from
            self._masked_until[sequence.slot] = sequence.masked_until

    def _enter(self, plan: StepPlan) -> None:
        tables = self._tables
        for sequence in plan.admitted:
            pages = sequence.page_table
            tables[sequence.slot] = -1
            tables[sequence.slot, : len(pages)] = pages
            self.mask(sequence)
            self._likely[sequence.slot] = sequence.likely
        for sequence in plan.grown:
            pages = sequence.page_table
            tables[sequence.slot, len(pages) - 1] = pages[-1]
        for draft in plan.drafts:
            pages = draft.sequence.page_table
            tables[draft.sequence.slot, : len(pages)] = pages

    def _draws(self, rows: IntArray, slots: IntArray, positions: IntArray) -> DrawArray:
        draws = make_draws(rows, slots, positions)
        draws["likely"] = self._likely[slots]
        if self._masked_until.any():
            begun = positions >= self._masked_from[slots]
            masked = np.flatnonzero(begun & (positions < self._masked_until[slots]))
            draws["mask"][masked] = np.arange(len(masked))
        return draws

    def _cache_rows(self, slots: IntArray, positions: IntArray) -> IntArray:
        rows: IntArray = self._tables[slots, positions // self._page_size] * self._page_size
        return rows + positions % self._page_size


def _snapshots(prompts: list[Chunk]) -> tuple[tuple[int, int], ...]:
    """Slots whose states are copied, with the place of the copy."""
    saving = [chunk for chunk in prompts if chunk.snapshot != NO_SNAPSHOT]
    return tuple((chunk.sequence.slot, chunk.snapshot) for chunk in saving if chunk.sequence.slot is not None)


class _Known(NamedTuple):
    """A token behind the prompt, at a place, that is given to the runner; `draws`: the next one is drawn."""

    sequence: Sequence
    place: int
    token: int
    draws: bool


def _drafted(drafts: list[Draft]) -> Iterator[_Known]:
    """The tokens of drafts."""
    for draft in drafts:
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
