"""Decode steps as CUDA graphs: a launch of the host in place of hundreds.

A graph is of a number of sequences, padded, and of the rooms for pieces that their contexts are shared out
in. Those of steps that draw a token of each sequence are captured at the start. Rarer ones, without their
draws or with several tokens of a sequence, are captured when such a step first comes.
"""

import numpy as np

from nightmill.worker.runners.base import IntArray, StepBatch
from nightmill.worker.runners.gpu.attention.plans import AttentionPlans, Rooms
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.graphs import Graph, bucket_of
from nightmill.worker.runners.gpu.model import Model
from nightmill.worker.runners.gpu.step_inputs import Division, StepInputs, StepShape
from nightmill.worker.runners.gpu.steps import PADDING, StepBuffers, padded_lengths

__all__ = ["DecodeGraphs", "decode_shape"]


def decode_shape(size: int, rooms: Rooms, *, again: bool = False) -> StepShape:
    """Return the shape of a decode step that is replayed."""
    first, *others = rooms
    further = tuple(Division(0, room) for room in others)
    return StepShape(
        tokens=size, sequences=size, drawn=size, draws=size, tiles=0, pieces=first, again=again,
        further=further,
    )  # fmt: skip


class DecodeGraphs:
    """Captures and replays them; makes none for a model that draws nothing.

    steps  buffers of steps, which graphs read
    slots  sequences at once
    """

    def __init__(
        self, device: Device, model: Model, plans: AttentionPlans, steps: StepBuffers, slots: int
    ) -> None:
        self._device = device
        self._model = model
        self._plans = plans
        self._steps = steps
        self._slots = slots
        self.usual: dict[tuple[int, Rooms], Graph] = {}
        """By sequences, and pieces of their contexts."""
        self._rarer: dict[tuple[int, Rooms, bool, bool], Graph] = {}
        """By size, rooms, whether it draws, and whether a sequence has several tokens."""
        self._loaded = plans.load()
        """Nothing is loaded by the first launch of attention's kernels."""

    def capture(self, size: int, turn: int) -> None:
        """Capture the usual steps of so many sequences, for each room that their contexts' pieces may take.

        turn  of the buffers that may be overwritten

        Steps of one size differ in what attention launches alone, so one of them is run.
        """
        for place, rooms in enumerate(self._plans.rooms(size)):
            runs = place == 0 or not self._loaded
            self.usual[size, rooms] = self._captured(size, rooms, turn, draws=True, runs=runs)

    def launch(
        self, turn: int, batch: StepBatch, *, draws: bool, next_turn: int
    ) -> tuple[StepInputs, StepShape]:
        """Queue a step in which every token was drawn or guessed, and is followed by a draw.

        draws      with its draws
        next_turn  whose buffers may be overwritten, if such a step comes for the first time
        """
        size = min(bucket_of(len(batch.slots)), self._slots)
        again = len(np.unique(batch.slots)) < len(batch.slots)
        pieces = self.pieces(batch, size)
        rooms = self._plans.room(size, pieces)
        graph = self.usual.get((size, rooms)) if draws and not again else None
        if graph is None:
            graph = self._rarer_one(size, rooms, next_turn, draws=draws, again=again)
        inputs = self._steps.write_padded(turn, batch, size, pieces, rooms, again=again)
        graph.launch()
        return inputs, decode_shape(size, rooms, again=again)

    def pieces(self, batch: StepBatch, size: int) -> list[IntArray]:
        """Divide the contexts of a decode step, padded to `size`, into pieces, by plan."""
        lengths = padded_lengths(batch, size)
        return self._plans.pieces(lengths, np.arange(size, dtype=np.int32))

    def close(self) -> None:
        """Let go of them, once the device has done with them; safe to call twice."""
        graphs = [*self.usual.values(), *self._rarer.values()]
        if graphs and not self._device.lost:
            self._device.synchronize()
            for graph in graphs:
                graph.close()
        self.usual.clear()
        self._rarer.clear()

    def _rarer_one(self, size: int, rooms: Rooms, turn: int, *, draws: bool, again: bool) -> Graph:
        key = size, rooms, draws, again
        if key not in self._rarer:
            self._rarer[key] = self._captured(size, rooms, turn, draws=draws, again=again)
            self._device.synchronize()
        return self._rarer[key]

    def _captured(
        self, size: int, rooms: Rooms, turn: int, *, draws: bool, again: bool = False, runs: bool = True
    ) -> Graph:
        """Capture a decode step of `size` tokens, after one run in the open, which loads what it needs.

        runs  False: all that it needs is loaded
        """
        pieces = self._plans.least_pieces(rooms, size)
        self._device.synchronize()  # the host's copy of the inputs is still those of the run before
        inputs = self._steps.write_padded(turn, PADDING, size, pieces, rooms)
        shape = decode_shape(size, rooms, again=again)

        def queue() -> None:
            self._model.forward(inputs, shape)
            if draws:
                self._model.draw(inputs, shape)

        if runs:
            queue()
        return Graph(self._device, queue)
