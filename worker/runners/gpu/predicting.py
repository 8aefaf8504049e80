"""Guesses of the CUDA runner's own, by the block of a model that predicts further tokens (MTP).

As in `worker.runners.reference.predicting`, but for when: behind the draws of a step, before the host sees
them, all that the step computed goes through the block, each hidden state with the token behind it, which
writes the block's keys and values; and where a sequence draws, what it gives is a guess, from which it goes
on twice. Behind guesses of an earlier step the last draw counts that follows right ones: the GPU sees which.
Places behind the last token are overwritten when they are computed, so nothing is put back.

Where a token behind a row is not known, that of a prompt's piece which nobody told of, zero stands for it.
"""

from dataclasses import replace
from itertools import groupby

import numpy as np

from nightmill.worker.model.spec import Attention, ModelSpec
from nightmill.worker.runners.base import NOT_GIVEN, IntArray, StepBatch
from nightmill.worker.runners.gpu.attention.plans import AttentionPlans
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.kv_cache import KvCache, kinds_layout
from nightmill.worker.runners.gpu.layers import Launchers, bind_layers
from nightmill.worker.runners.gpu.model import Model
from nightmill.worker.runners.gpu.planning import takes_tail
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.rows.predictor import (
    GUESSES,
    MOST_GUESSED,
    PAIRS_AT_ONCE,
    DrawGroup,
    PredictorRows,
)
from nightmill.worker.runners.gpu.shapes import Kind
from nightmill.worker.runners.gpu.states.memory import States
from nightmill.worker.runners.gpu.step_inputs import StepInputs, StepShape
from nightmill.worker.runners.gpu.weights.layout import PredictorWeights, predictor_precision

__all__ = ["CudaPredictor", "can_predict", "draw_groups", "known_tokens"]


def can_predict(spec: ModelSpec, precision: Precision) -> bool:
    """Return whether a model has a block that the kernels compute: whose layer is like one of its own."""
    if spec.predictor is None or spec.predictor.layer not in spec.layers:
        return False
    attends = isinstance(spec.predictor.layer.mixer, Attention)
    one_kind = kinds_layout(spec, precision.kv) is None and not takes_tail(spec, precision)
    return attends and one_kind and predictor_precision(spec, precision) is not None


class CudaPredictor:
    """Queues the block behind the steps of a model. Raises DeviceMemoryError where its pages have no room.

    weights    of the block
    rows       what it has beside its layer
    model      that it guesses for
    launchers  of that model's layers
    plans      of their attention
    """

    def __init__(
        self, device: Device, spec: ModelSpec, weights: PredictorWeights, rows: PredictorRows, model: Model,
        launchers: Launchers, plans: AttentionPlans,
    ) -> None:  # fmt: skip
        assert spec.predictor is not None
        alone, sizing, at = spec.predictor.model(spec), rows.sizing, model.activations
        cache = KvCache.allocate(device, alone, sizing.pages)
        states = States(device, alone, slots=sizing.slots, snapshots=0, depth=sizing.depth)
        layers = bind_layers(device, alone, weights.block, cache, states, at, launchers)
        products = launchers.products
        self._model = Model(
            alone, weights.block, model.shared, layers, products, model.slots, cache.tokens, at
        )
        self._weights, self._rows, self._plans, self._slots = weights, rows, plans, model.slots
        self._normed = spec.predictor.hands_on_normed
        self._input = products.of(Kind.FLOAT, spec.width, 2 * spec.width, weights.input.format)

    def tune(self, rows: int) -> None:
        """Time the products of steps of so many tokens, as `Model.tune`."""
        at, few = self._model.activations, min(rows, PAIRS_AT_ONCE)
        self._model.tune(rows, min(rows, MOST_GUESSED))
        norm = self._model.layers[0].first_norm
        self._input.tune(
            self._rows.pairs, [self._weights.input], at.x, few,
            lambda: self._model.shared.norms(at.x, norm, at.entering, few),
        )  # fmt: skip

    def follow(self, turn: int, batch: StepBatch, inputs: StepInputs, shape: StepShape) -> int:
        """Queue what follows the draws of a step; behind how many of its sequences is guessed.

        turn   a staging buffer whose earlier copies are done
        shape  of the step, whose rows all have a hidden state
        """
        groups = draw_groups(batch) if batch.guesses else []
        count = len(groups) if len(groups) <= MOST_GUESSED else 0
        model, rows, at = self._model, self._rows, self._model.activations
        rows.stage(turn, known_tokens(batch), groups[:count], batch.page_tables, shape.tokens)
        if count:
            rows.choose(inputs, at.drawn, at.tokens, self._slots, count)
        rows.next_tokens(at.drawn, shape.tokens)
        for first in range(0, shape.tokens, PAIRS_AT_ONCE):
            self._pair(first, min(PAIRS_AT_ONCE, shape.tokens - first), normed=True)
        # What is fetched ahead of a kernel's end must not be what the block has just written: `again`.
        shape = replace(shape, draws=count, given=True, again=True, pooled=0, whole=False)
        if not count:
            model.fill_pages(inputs, shape)
            return 0
        model.through_layers(replace(inputs, rows=rows.rows), shape)
        segment = self._plans.whole_segment(count)
        own = StepShape(
            tokens=count, sequences=count, drawn=count, draws=count, tiles=0,
            pieces=count if segment else 0, given=True, again=True,
        )  # fmt: skip
        for guess in range(GUESSES):
            if guess:
                self._pair(0, count, normed=self._normed)
                model.through_layers(rows.inputs, own)
            model.head(at.normed, model.weights.head, at.logits, count)
            model.shared.logit_scale(at.logits, count)
            model.shared.sampler.sample(at.logits, count, rows.guessing, rows.slots, rows.drawn)
            rows.go_on(guess, segment, count)
        rows.tell(turn, count)
        return count

    def told(self, turn: int, count: int, draws: int) -> IntArray | None:
        """The guesses of a step that is over, as `Drawn.guesses`."""
        return self._rows.told(turn, count, draws) if count else None

    def _pair(self, first: int, count: int, *, normed: bool) -> None:
        """Queue the block's input for rows from `first` on, of their states, normed or not."""
        model, weights, at = self._model, self._weights, self._model.activations
        x = at.x.from_row(first)
        model.shared.embedding.embed(self._rows.tokens.from_row(first), model.weights.embedding, x, count)
        states = (at.normed if normed else at.x_drawing).from_row(first)
        self._rows.pair(x, weights.embedding_norm, states, weights.state_norm, count)
        self._input(self._rows.pairs, weights.input, x, count)


def draw_groups(batch: StepBatch) -> list[DrawGroup]:
    """The draws of each sequence; they follow each other."""
    drawing = batch.draws[batch.draws["slot"] >= 0]
    chunks = np.searchsorted(batch.sequence_starts, drawing["row"], side="right") - 1
    groups, first = [], 0
    for _, draws in groupby(drawing["slot"].tolist()):
        count = sum(1 for _ in draws)
        groups.append(DrawGroup(first, count, int(chunks[first])))
        first += count
    return groups


def known_tokens(batch: StepBatch) -> IntArray:
    """The token behind each of a step's (T,), or -1 - the number of the draw that gives it; 0: unknown.

    A draw counts before what was guessed: where these differ, nothing behind it counts.
    """
    slots = np.repeat(batch.slots, np.diff(batch.sequence_starts))
    known = np.zeros(len(batch.tokens), dtype=np.int32)
    follows = (slots[1:] == slots[:-1]) & (batch.positions[1:] == batch.positions[:-1] + 1)
    known[:-1] = np.where(follows, np.maximum(batch.tokens[1:], 0), 0)
    if len(batch.following):
        last = batch.sequence_starts[1:] - 1
        told = batch.following >= 0
        known[last[told]] = batch.following[told]
    drawing = np.flatnonzero(batch.draws["given"] == NOT_GIVEN)
    known[batch.draws["row"][drawing]] = -1 - drawing
    return known
