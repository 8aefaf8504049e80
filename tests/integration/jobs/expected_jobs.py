"""Jobs as the state machine's model has them: what becomes of one, apart from all SQL."""

from dataclasses import dataclass, field
from datetime import datetime

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.sql.partials import SavedTokens


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


@dataclass(frozen=True)
class Held:
    """A claim that a worker made once, and may still believe in."""

    worker: int
    job: str
    attempt: int
