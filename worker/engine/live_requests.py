"""Requests from submission to completion: by job, and those that ended since the last step."""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping

from nightmill.jobs.base.contract import StopReason
from nightmill.worker.engine.completing import Decode, completion, not_computed, snapshot
from nightmill.worker.engine.masking import FailedSequences
from nightmill.worker.engine.metering import Metering
from nightmill.worker.engine.request import (
    Completion,
    DrawnTokens,
    Partial,
    Request,
    Sequence,
    SequenceState,
)
from nightmill.worker.engine.scheduler import Scheduler


class LiveRequests:
    """The sequences of an engine that are not finished, and the completions that nobody has taken yet.

    scheduler  where the sequences wait and run
    decode     the text of all tokens at once
    metering   says whether energy is known
    clock      seconds since the epoch
    """

    def __init__(
        self, scheduler: Scheduler, decode: Decode, metering: Metering, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._decode = decode
        self._metering = metering
        self._clock = clock
        self._sequences: dict[str, Sequence] = {}  # by job id
        self._cancelled: list[Sequence] = []
        self._deadlines: list[tuple[float, int, Sequence]] = []  # a heap; may hold finished sequences
        self._done: list[Completion] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    @property
    def by_job(self) -> Mapping[str, Sequence]:
        """The unfinished sequences by job id."""
        return self._sequences

    @property
    def any_done(self) -> bool:
        """True if there are completions to be taken."""
        return bool(self._done)

    def add(self, sequence: Sequence) -> None:
        """Take a new sequence in and have it wait for its turn."""
        request = sequence.request
        self._sequences[request.job_id] = sequence
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, sequence.order, sequence))
        self._scheduler.add(sequence)

    def reject(self, request: Request, reason: StopReason, error: str | None = None) -> None:
        """Complete a request that is not computed."""
        self._done.append(not_computed(request, reason, error))

    def cancel(self, job_id: str) -> None:
        """See `Engine.cancel`."""
        if (sequence := self._sequences.get(job_id)) is not None:
            self._cancelled.append(sequence)

    def end_unwanted(self) -> None:
        """Finish what was cancelled or is past its deadline, wherever it stands."""
        cancelled, self._cancelled = self._cancelled, []
        for sequence in cancelled:
            if sequence.state is not SequenceState.FINISHED:
                self.finish(sequence, StopReason.CANCELLED)
        if not self._deadlines:
            return
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heapq.heappop(self._deadlines)[2]
            if sequence.state is not SequenceState.FINISHED:
                self.finish(sequence, StopReason.DEADLINE)

    def finish(
        self,
        sequence: Sequence,
        reason: StopReason,
        error: str | None = None,
        embedding: bytes | None = None,
    ) -> None:
        """Make the completion; pages and slot follow when no launch uses them any more."""
        del self._sequences[sequence.request.job_id]
        self._scheduler.finish(sequence)
        metered = self._metering.joules is not None
        done = completion(sequence, self._decode, reason, error, embedding, metered=metered)
        self._done.append(done)

    def fail(self, failed: FailedSequences) -> None:
        """Finish sequences that cannot go on, each with its fault."""
        for sequence, fault in failed:
            self.finish(sequence, StopReason.ERROR, error=fault)

    def take_done(self) -> list[Completion]:
        """Return the completions since the last call."""
        done, self._done = self._done, []
        return done

    def partial(self, job_id: str) -> Partial | None:
        """See `Engine.partial`."""
        sequence = self._sequences.get(job_id)
        return None if sequence is None else snapshot(sequence, self._decode)

    def progress(self, job_ids: Iterable[str], at_least: int) -> list[DrawnTokens]:
        """See `Engine.progress`."""
        reports = []
        for job_id in job_ids:
            sequence = self._sequences.get(job_id)
            if sequence is not None and sequence.generated - sequence.reported >= at_least:
                sequence.reported = sequence.generated
                request, drawn = sequence.request, sequence.tokens[sequence.prompt_length :]
                reports.append(DrawnTokens(request.job_id, request.attempt, tuple(drawn)))
        return reports

    def abandon(self) -> list[Partial]:
        """Take all sequences out without a completion; returns what each had."""
        metered = self._metering.joules is not None
        partials = [snapshot(sequence, self._decode, metered=metered) for sequence in self]
        for sequence in self:
            self._scheduler.finish(sequence)
        self._sequences.clear()
        self._deadlines.clear()
        self._cancelled.clear()
        return partials
