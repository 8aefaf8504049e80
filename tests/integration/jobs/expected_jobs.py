"""Jobs as the state machine's model has them: what becomes of one, apart from all SQL."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.sql.partials import SavedTokens


@dataclass(frozen=True)
class Held:
    """A claim that a worker made once, and may still believe in."""

    worker: int
    job: str
    attempt: int

    @property
    def kept(self) -> SavedTokens:
        """The tokens of its answer, if that was cut."""
        return SavedTokens(self.job, self.attempt, "c" * 64, (self.attempt, 7))


@dataclass
class Expected:
    """What the model knows of a job."""

    max_attempts: int
    priority: int
    deadline: datetime | None
    scheduled: datetime | None
    sent: bool
    state: JobState = JobState.QUEUED
    attempt: int = 0
    failures: int = 0
    worker: int | None = None
    cancel_requested: bool = False
    stop_reason: StopReason | None = None
    text: str | None = None
    arithmetic: str | None = None
    errors: list[tuple[int, int]] = field(default_factory=list)  # (attempt, worker)
    suspects: int | None = None  # the number of its group, by the order in which groups were made
    saved: SavedTokens | None = None  # what the next attempt goes on from
    limit: int = 256

    def end(self, reason: StopReason, text: str | None = None) -> None:
        self.state, self.stop_reason = reason.state, reason
        if reason is not StopReason.LENGTH:
            self.saved = None
        if text is not None:
            self.text = text

    def queue_again(self, deadline: datetime | None) -> None:
        self.state, self.worker, self.sent = JobState.QUEUED, None, True
        self.failures, self.cancel_requested, self.suspects = 0, False, None
        self.stop_reason = self.scheduled = None
        self.deadline = deadline

    def back_to_queue(self) -> None:
        self.state, self.worker, self.sent = JobState.QUEUED, None, False

    def died_alone(self) -> None:
        assert self.worker is not None
        self.failures += 1
        self.errors.append((self.attempt, self.worker))
        if self.cancel_requested:
            self.end(StopReason.CANCELLED)
        elif self.failures < self.max_attempts:
            self.back_to_queue()
        else:
            self.end(StopReason.ERROR)

    def claimable(self, now: datetime) -> bool:
        return (
            self.state is JobState.QUEUED
            and (self.scheduled is None or self.scheduled <= now)
            and (self.deadline is None or self.deadline > now)
        )

    def is_held_as(self, claim: Held) -> bool:
        held = (self.attempt, self.worker)
        return self.state is JobState.RUNNING and held == (claim.attempt, claim.worker)

    def finish(self, claim: Held, reason: StopReason, text: str) -> None:
        """By the worker that holds it."""
        if reason is StopReason.LENGTH:
            self.saved = claim.kept
        if reason is StopReason.ERROR and not text and self.text:
            text = self.text  # of before it was extended
        else:
            self.arithmetic = f"that of worker {claim.worker}"
        self.end(reason, text)
        if reason is StopReason.ERROR:
            self.errors.append((claim.attempt, claim.worker))

    def check_row(self, row: Any) -> None:
        """Assert that the job's row says the same."""
        worker = None if row.worker is None else int(row.worker, 16)
        assert (row.state, row.attempt, row.failures) == (
            self.state,
            self.attempt,
            self.failures,
        )
        assert worker == self.worker
        assert (row.cancel_requested_at is not None) is self.cancel_requested
        assert row.stop_reason == self.stop_reason
        assert row.text == (None if self.text is None else self.text.replace("\x00", "\ufffd"))
        assert row.arithmetic == self.arithmetic
        assert (row.sent_at is not None) is self.sent
        assert (row.suspects is not None) is (self.suspects is not None)
        assert [(e["attempt"], int(e["worker"], 16)) for e in row.errors or []] == self.errors
