"""Guesses of the reference runner's own, by the block of a model that predicts further tokens (MTP).

What the block computes of a token at a place hangs on the one at the next place, too: on the hidden state
behind the first and the embedding of the second, as vLLM has it. So its keys and values of a place, in pages
of their own beside the model's, are written when the next token is known: at once within a prompt, else when
that is drawn or comes. Where a hidden state was not computed here, as behind a beginning that is shared,
those of its place are left as they are. Guesses may be worse for it; no text hangs on them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec, Role
from nightmill.worker.runners.base import NOT_A_NUMBER, IntArray, StepBatch, make_draws
from nightmill.worker.runners.reference import ops
from nightmill.worker.runners.reference.kv_cache import ReferenceKvCache
from nightmill.worker.runners.reference.loading import load
from nightmill.worker.runners.reference.model import ReferenceModel
from nightmill.worker.runners.reference.states import Flow, ReferenceStates
from nightmill.worker.runners.sampling import SamplingRows, sample

__all__ = ["GUESSES", "ReferencePredictor"]

GUESSES = 3
"""Most tokens that are guessed behind a draw: each further one is worse than the one before."""
NO_GUESS = -1

_NO_INTS = np.zeros(0, dtype=np.int32)


class _Pair(NamedTuple):
    """A token, and the hidden state behind the one before it, whose place and row of the cache these are."""

    token: int
    state: ops.FloatArray
    place: int
    row: int


class _Chunk(NamedTuple):
    """Pairs of a sequence that follow each other; chunk: which of the step's has its page table."""

    pairs: list[_Pair]
    chunk: int


class ReferencePredictor:
    """Follows what a model computes, and guesses behind its draws.

    file, spec, model  the model, which has a predictor
    pages, page_size   as many as the model has, of which the same tables hold
    """

    def __init__(
        self, file: GgufFile, spec: ModelSpec, model: ReferenceModel, *, pages: int, page_size: int
    ) -> None:
        assert spec.predictor is not None
        self._predictor, self._page_size = spec.predictor, page_size
        alone = self._predictor.model(spec)
        self._cache = ReferenceKvCache(alone, pages=pages, page_size=page_size)
        self._model = ReferenceModel(file, alone, self._cache, ReferenceStates(alone, 0, 0), beside=model)
        self._weights = load(file, self._predictor.weights(spec.width))
        self._kept: dict[int, dict[int, tuple[ops.FloatArray, int]]] = {}
        """By slot, then by place: hidden states of its last tokens, and their rows of the cache."""

    @property
    def kinds(self) -> object:
        """The kinds of pages that it takes tables for."""
        return self._cache.layout.kinds

    def begin(self, slot: int) -> None:
        """Another sequence takes a slot."""
        self._kept.pop(slot, None)

    def read(self, batch: StepBatch, tokens: IntArray, hidden: ops.FloatArray) -> None:
        """Follow a step of these tokens (T,), whose hidden states (T, width) were normed."""
        starts, slots = batch.sequence_starts.tolist(), batch.slots.tolist()
        known = {slot: dict(self._kept.get(slot, {})) for slot in slots}
        chunks: list[_Chunk] = []
        for chunk, slot in enumerate(slots):
            pairs = []
            for row in range(starts[chunk], starts[chunk + 1]):
                place = int(batch.positions[row])
                before = known[slot].get(place - 1)
                if before is not None:
                    pairs.append(_Pair(int(tokens[row]), before[0], place - 1, before[1]))
                known[slot][place] = hidden[row], int(batch.cache_rows[row])
            if pairs:
                chunks.append(_Chunk(pairs, chunk))
        if chunks:
            self._through(batch, chunks, drawn=sum(one.chunk < batch.drawn for one in chunks))
        for chunk, slot in enumerate(slots):
            places = range(starts[chunk], starts[chunk + 1])
            self._keep(slot, known[slot], [int(batch.positions[row]) for row in places])

    def _keep(self, slot: int, known: dict[int, tuple[ops.FloatArray, int]], places: Sequence[int]) -> None:
        """Keep the hidden states that a later step may go on from: of drawn tokens, or a prompt's last."""
        kept = self._kept.setdefault(slot, {})
        if len(places) > 1:  # of a prompt
            kept.clear()
        for place in [one for one in kept if one < places[-1] - 2 * self._page_size]:
            del kept[place]
        kept[places[-1]] = known[places[-1]]

    def guess(
        self, batch: StepBatch, hidden: ops.FloatArray, tokens: IntArray, rows: SamplingRows
    ) -> IntArray:
        """Guess what follows the tokens (R,) that the rows of a step drew; (R, GUESSES), NO_GUESS: nothing.

        Draws of a sequence that stand behind guesses are taken one after the other: each writes what only
        itself may read, and puts back what was there.
        """
        draws = batch.draws
        guesses = np.full((len(draws), GUESSES), NO_GUESS, dtype=np.int32)
        seen: dict[int, int] = {}
        turns: list[list[int]] = []
        for index, slot in enumerate(draws["slot"].tolist()):
            if slot < 0 or tokens[index] == NOT_A_NUMBER:
                continue
            turn = seen[slot] = seen.get(slot, -1) + 1
            if turn == len(turns):
                turns.append([])
            turns[turn].append(index)
        for which in turns:
            self._guess_turn(batch, hidden, tokens, rows, np.array(which), guesses)
        return guesses

    def _guess_turn(
        self, batch: StepBatch, hidden: ops.FloatArray, tokens: IntArray, rows: SamplingRows,
        which: npt.NDArray[np.intp], guesses: IntArray,
    ) -> None:  # fmt: skip
        """Guess behind some draws, of which no two have the same sequence."""
        drawing = batch.draws["row"][which]
        chunks = np.searchsorted(batch.sequence_starts, drawing, side="right") - 1
        states, last = hidden[drawing], tokens[which].copy()
        places, cache_rows = batch.positions[drawing].copy(), batch.cache_rows[drawing].copy()
        (keys,), (values,) = self._cache.keys, self._cache.values
        # The pages of further places may be nobody's yet.
        most = np.minimum(GUESSES, self._page_size - places % self._page_size)
        further = zip(cache_rows.tolist(), most.tolist(), strict=True)
        written = np.concatenate([np.arange(row, row + more) for row, more in further])
        saved = keys[written].copy(), values[written].copy()
        for turn in range(GUESSES):
            left = np.flatnonzero(turn < most)
            if not left.size:
                break
            asked = [
                _Chunk(
                    [_Pair(int(last[n]), states[n], int(places[n]) + turn, int(cache_rows[n]) + turn)],
                    int(chunks[n]),
                )
                for n in left
            ]
            given = self._through(batch, asked, drawn=len(asked))
            normed = self._model.normed(given)
            drawn_by = rows.of(which[left])
            drawn_by = replace(drawn_by, positions=drawn_by.positions + 1 + turn)
            last[left] = sample(self._model.logits(normed), drawn_by)
            guesses[which[left], turn] = last[left]
            states = states.copy()
            states[left] = normed if self._predictor.hands_on_normed else given
        keys[written], values[written] = saved

    def _through(self, batch: StepBatch, chunks: Sequence[_Chunk], *, drawn: int) -> ops.FloatArray:
        """Compute the block over pairs; the first chunks, so many, are of single tokens."""
        pairs = [pair for chunk in chunks for pair in chunk.pairs]
        which = np.array([chunk.chunk for chunk in chunks])
        ends = np.cumsum([0, *(len(chunk.pairs) for chunk in chunks)]).astype(np.int32)
        step = StepBatch(
            tokens=np.array([pair.token for pair in pairs], dtype=np.int32),
            positions=np.array([pair.place for pair in pairs], dtype=np.int32),
            cache_rows=np.array([pair.row for pair in pairs], dtype=np.int32),
            sequence_starts=ends,
            context_lengths=np.array([chunk.pairs[-1].place + 1 for chunk in chunks], dtype=np.int32),
            page_tables=batch.page_tables[which],
            slots=batch.slots[which],
            draws=make_draws(_NO_INTS, _NO_INTS, _NO_INTS),
            drawn=drawn,
        )
        weights, norm = self._weights, self._predictor.norm
        embedded = ops.rms_norm(
            self._model.embedding(step.tokens), weights[Role.PREDICTOR_EMBEDDING_NORM], norm.eps
        )
        state = ops.rms_norm(
            np.array([pair.state for pair in pairs]), weights[Role.PREDICTOR_STATE_NORM], norm.eps
        )
        x = ops.linear(np.concatenate([embedded, state], axis=1), weights[Role.PREDICTOR_INPUT])
        return self._model.through(x, step.tokens, self._cache.places(step), Flow([], []))

    def close(self) -> None:
        """Drop weights and cache."""
        self._model.close()
        self._cache.close()
