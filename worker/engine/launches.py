"""Launches that were not collected yet: whom what they return is for, and in which order it comes."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nightmill.jobs.errors import RunnerError
from nightmill.worker.engine.batch import Receivers
from nightmill.worker.engine.kv_cache import CacheIntegrityError
from nightmill.worker.engine.plan import StepPlan
from nightmill.worker.engine.request import Sequence, SequenceState
from nightmill.worker.runners.base import Drawn, IntArray, Runner, StepBatch, masked_draws

__all__ = ["Launch", "LaunchQueue"]


@dataclass(slots=True)
class Launch:
    """An outstanding launch."""

    number: int
    plan: StepPlan
    drawing: list[Sequence | None]  # in the order of the tokens it will return; None: nobody wants that one
    asking: list[Sequence | None]  # the same of tokens of prompts, which are told after those
    embedding: list[Sequence | None]  # whose embeddings it completes
    masked: list[int]  # places in `drawing` of those that draw under a mask
    ahead: dict[int, Any] = field(default_factory=dict)
    """Constraints of draws behind guesses, by place: each has accepted these guesses."""

    def forget(self, sequence: Sequence) -> None:
        """Nobody wants what this launch computes for a sequence."""
        for others in (self.drawing, self.asking, self.embedding):
            others[:] = [None if other is sequence else other for other in others]

    def wanting(self, place: int) -> Sequence | None:
        """Who is to get the token that is drawn at a place, if anybody still is."""
        sequence = self.drawing[place]
        return None if sequence is None or sequence.state is SequenceState.FINISHED else sequence

    def drop_rest(self, place: int) -> None:
        """Drop what was drawn for a sequence behind a place: it followed a guess that was wrong."""
        self.drop_from(place + 1, self.drawing[place])

    def drop_from(self, place: int, sequence: Sequence | None) -> int:
        """Drop what is drawn for a sequence from a place on; return how many draws that are."""
        first = place
        while place < len(self.drawing) and self.drawing[place] is sequence:
            self.drawing[place] = None
            place += 1
        return place - first

    def before(self) -> dict[int, tuple[int, ...]]:
        """Return the guesses that draws follow by the place in `drawing` of the draw."""
        following: dict[int, tuple[int, ...]] = {}
        place = len(self.plan.decodes)
        for draft in self.plan.drafts:
            for count in range(1, len(draft.tokens)):
                following[place + count] = draft.guesses[:count]
            place += len(draft.tokens)
        return following

    def guesses(self) -> dict[int, int]:
        """Return the guesses by the place in `drawing` of the draw that each is compared with."""
        guessed: dict[int, int] = {}
        place = len(self.plan.decodes)
        for draft in self.plan.drafts:
            guessed |= enumerate(draft.guesses, start=place)
            place += len(draft.tokens)
        return guessed


class LaunchQueue:
    """The outstanding launches of a runner, oldest first.

    `failed`: the runner has raised an error, or returned what it should not, and is left alone from then on.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._outstanding: deque[Launch] = deque()
        self.launched = 0
        """Launches since the start; the number of the newest one."""
        self.failed = False

    def __len__(self) -> int:
        return len(self._outstanding)

    def __iter__(self) -> Iterator[Launch]:
        return iter(self._outstanding)

    @property
    def full(self) -> bool:
        """True if the oldest has to be collected before the next launch."""
        return len(self._outstanding) >= self._runner.depth

    def launch(self, batch: StepBatch, plan: StepPlan, receivers: Receivers) -> Launch:
        """Queue a step. Raises RunnerError."""
        self.failed = True  # unless the runner returns
        self._runner.launch(batch)
        self.launched += 1
        drawing, asking, embedding = receivers
        masked = masked_draws(batch.draws).tolist()
        launch = Launch(self.launched, plan, [*drawing], [*asking], [*embedding], masked)
        self._outstanding.append(launch)
        self.failed = False
        return launch

    def draw(self, masks: IntArray) -> None:
        """Let the newest launch draw under these masks. Raises RunnerError."""
        self.failed = True  # unless the runner returns
        self._runner.draw(masks)
        self.failed = False

    def collect(self) -> tuple[Launch, Drawn]:
        """Take out the oldest launch, with what it returned. Raises RunnerError."""
        self.failed = True  # unless the runner returns what it should
        drawn = self._runner.collect()
        launch = self._outstanding[0]
        if drawn is None or len(drawn.tokens) != len(launch.drawing) + len(launch.asking):
            raise RunnerError("the runner returned other tokens than the oldest launch was to draw")
        if len(launch.embedding) != (0 if drawn.sums is None else len(drawn.sums)):
            raise RunnerError("the runner returned other embeddings than the oldest launch was to complete")
        self.failed = False
        return self._outstanding.popleft(), drawn

    def drop(self) -> None:
        """Wait for all launches, as far as the runner works, and forget what they return."""
        while self._outstanding:
            if not self.failed:
                try:
                    self._runner.collect()
                except RunnerError:
                    self.failed = True  # what it would have drawn is dropped anyway
            self._outstanding.popleft()

    def forget(self, sequence: Sequence) -> None:
        """Nobody wants what the launches compute for a sequence."""
        for launch in self._outstanding:
            launch.forget(sequence)

    def check_integrity(self, sequence: Sequence) -> None:
        """Audit what a sequence knows of its launches; raises CacheIntegrityError."""
        draws = sum(launch.drawing.count(sequence) for launch in self._outstanding)
        touching = [launch.number for launch in self._outstanding if launch.plan.touches(sequence)]
        collected = self.launched - len(self._outstanding)
        newest = touching[-1] if touching else min(sequence.last_launch, collected)
        if (newest, draws) != (sequence.last_launch, sequence.drawing):
            raise CacheIntegrityError(f"{sequence.request.job_id} miscounts its launches")
