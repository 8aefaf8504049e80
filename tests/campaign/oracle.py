"""The judge: what the ledger promises against what the history shows. Knows nothing of Nightmill's code.

A pure function over data, so that tests can plant each violation and see it caught.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.campaign.history import TRACKED, Change
from tests.campaign.ledger import Intent, Promise
from tests.campaign.texts import begins

FINAL = frozenset({"succeeded", "failed", "cancelled"})
CLOCK_SLACK = 2.0  # seconds by which two readings of one clock may lie apart in a busy minute


@dataclass(frozen=True)
class Violation:
    """A rule that was broken. `kind` is for counting, `said` for a person."""

    kind: str
    said: str


@dataclass(frozen=True)
class Evidence:
    """All that the judge looks at; `present`: the ids in the table of jobs at the end."""

    promises: Mapping[str, Promise]
    intents: Sequence[Intent]
    history: Iterable[Change]
    present: frozenset[str]
    settled: bool = True  # everything had the time to end
    wrong_clocks: Sequence[tuple[float, float]] = ()  # from when until when a clock was wrong, or trusted so
    deletions: Mapping[str, Sequence[float]] = field(default_factory=dict)  # by batch: when they were marked
    sleepers: Sequence[tuple[str, float, int]] = ()  # a worker that fell asleep, when, how many jobs it had


def judge(evidence: Evidence) -> Iterator[Violation]:
    """Every violation there is."""
    lives: dict[str, list[Change]] = defaultdict(list)
    for change in evidence.history:
        lives[change.id].append(change)
    for worker, _, held in evidence.sleepers:
        if held:
            yield Violation("held-asleep", f"worker {worker} fell asleep with {held} jobs in its hands")
    for job_id in evidence.promises:
        if job_id not in lives:
            yield Violation("lost", f"{job_id} was acknowledged and is in no row, and never was")
    for job_id, life in lives.items():
        if job_id not in evidence.promises and _is_trial(life):
            continue
        yield from _Life(job_id, life, evidence, _before(life, lives)).judge()


def _before(life: Sequence[Change], lives: Mapping[str, Sequence[Change]]) -> list[Sequence[Change]]:
    """The lives of the job that this one follows, of the one that that follows, and so on."""
    found: list[Sequence[Change]] = []
    while (prior := life[0].prior) is not None and len(found) < len(lives):
        life = lives.get(prior, ())
        if not life:
            break
        found.append(life)
    return found


def _is_trial(life: Sequence[Change]) -> bool:
    """Say if this is a row by which `/ready` tries writing: never queued, removed in its transaction."""
    return [(change.op, change.state) for change in life] == [("I", "cancelled"), ("D", "cancelled")]


class _Life:
    """One job, from INSERT to its end."""

    def __init__(
        self,
        job_id: str,
        life: Sequence[Change],
        evidence: Evidence,
        before: Sequence[Sequence[Change]] = (),
    ) -> None:
        self.id = job_id
        self.life = life
        self.before = before
        self.promise = evidence.promises.get(job_id)
        self.settled = evidence.settled
        self.present = job_id in evidence.present
        self.wrong_clocks = evidence.wrong_clocks
        self.left = [one.began for one in evidence.intents if one.what == "leave"]
        batch = life[0].batch
        self.marked = evidence.deletions.get(batch, ()) if batch is not None else ()
        self.intents = [
            one for one in evidence.intents if one.target in (job_id, batch) or one.what == "prune"
        ]
        above = {name for one in before for name in (one[0].id, one[0].batch)}
        self.retried_above = [
            one.began for one in evidence.intents if one.what == "retry" and one.target in above
        ]

    def judge(self) -> Iterator[Violation]:
        first, last = self.life[0], self.life[-1]
        if first.op != "I":
            yield self._wrong("history", f"began with {first.op}")
        for before, after in zip(self.life, self.life[1:], strict=False):
            yield from self._deleted(before, after) if after.op == "D" else self._changed(before, after)
        for change in self.life:
            if change.op != "D":
                yield from self._sound(change)
        if last.op != "D":
            if not self.present:
                yield self._wrong("lost", "its row vanished, and no DELETE was seen")
            if self.settled and not last.final:
                yield self._wrong("unfinished", f"is {last.state} after attempt {last.attempt}, and stays so")

    # -- a row by itself ---------------------------------------------------------------------------

    def _sound(self, row: Change) -> Iterator[Violation]:
        if row.final != (row.finished_at is not None):
            yield self._wrong("illegal", f"is {row.state} with finished_at {row.finished_at}")
        if row.state == "running" and not row.worker:
            yield self._wrong("illegal", "is running without a worker")
        if self.promise is None or self.promise.free or not row.final:
            return
        answer, guilty = self.promise.answer, self.promise.guilty
        if row.state == "succeeded":
            if guilty:
                yield self._wrong("guilty-succeeded", "cannot succeed, and did")
            elif answer and (row.text, row.stop_reason) != (answer.text, answer.stop_reason):
                found = f"{row.text!r} ({row.stop_reason}), not {answer.text!r} ({answer.stop_reason})"
                yield self._wrong("wrong-text", f"attempt {row.attempt} gave {found}")
        elif answer and row.text and not begins(answer.text, row.text):
            yield self._wrong("wrong-text", f"ended early with {row.text!r}, which does not begin its answer")
        if row.state == "failed" and not guilty and self._prior(row) not in ("failed", "gone"):
            yield from self._failed(row)

    def _failed(self, row: Change) -> Iterator[Violation]:
        deadline = row.deadline_at
        if row.stop_reason != "deadline" or deadline is None:
            yield self._wrong("innocent-failed", f"failed after {row.failures} failures: {row.error}"[:300])
        elif row.finished_at is not None and self._is_before(row.finished_at, deadline, row.at):
            early = deadline - row.finished_at
            yield self._wrong("deadline", f"was ended {early:.1f} s before its deadline")

    # -- from one row to the next --------------------------------------------------------------------

    def _changed(self, old: Change, new: Change) -> Iterator[Violation]:
        step = f"{old.state} -> {new.state} (attempt {old.attempt} -> {new.attempt})"
        guilty = self.promise is not None and (self.promise.guilty or self.promise.free)
        legal = False
        match old.state, new.state:
            case "queued", "running":
                legal = new.attempt == old.attempt + 1
                if new.worker_state == "sleeping":
                    yield self._wrong("claimed-asleep", f"was claimed by {new.worker}, which sleeps")
                if self._prior(new) not in ("", "succeeded", "gone"):
                    yield self._wrong(
                        "ran-early", f"runs while the job that it follows is {self._prior(new)}"
                    )
            case "queued", "queued":
                legal = new.attempt == old.attempt
            case "queued", "cancelled":
                asked = self._intended("cancel", new.at) or self._left(new.at)
                legal = new.attempt == old.attempt and (asked or self._prior(new) == "cancelled")
            case "queued", "failed":
                deadline = old.deadline_at
                expired = deadline is not None and not self._is_before(new.at, deadline, new.at)
                with_prior = self._prior(new) in ("failed", "gone")
                legal = new.attempt == old.attempt and (expired or guilty or with_prior)
            case "running", "running":
                legal = (new.attempt, new.worker) == (old.attempt, old.worker)
            case "running", "cancelled":
                asked = self._intended("cancel", new.at) or self._left(new.at)
                legal = new.attempt == old.attempt and asked
            case "running", "queued" | "succeeded" | "failed":
                legal = new.attempt == old.attempt
            case "failed" | "cancelled", "queued":
                asked = any(began - CLOCK_SLACK <= new.at for began in self.retried_above)
                legal = new.attempt == old.attempt and (asked or self._intended("retry", new.at))
            case _ if old.state in FINAL:
                changed = [name for name in TRACKED if getattr(old, name) != getattr(new, name)]
                yield self._wrong("final-changed", f"{step}: {', '.join(changed)} changed after its end")
                return
        if not legal:
            yield self._wrong("illegal", step)

    def _deleted(self, old: Change, gone: Change) -> Iterator[Violation]:
        if not old.final:
            yield self._wrong("deleted-unfinished", f"was deleted while {old.state}")
        elif not any(self._excuses(intent, gone) for intent in self.intents):
            yield self._wrong(
                "deleted", "was deleted, and nobody had asked for that since it was last queued"
            )

    def _is_before(self, moment: float, deadline: float, seen_at: float) -> bool:
        """Whether a job was ended too early, by a clock that was right then."""
        if any(since - CLOCK_SLACK <= seen_at <= until for since, until in self.wrong_clocks):
            return False
        return moment < deadline - CLOCK_SLACK

    def _excuses(self, intent: Intent, gone: Change) -> bool:
        """Say if this call may delete a row then: a retry after the batch was marked had to be refused."""
        if not intent.began - CLOCK_SLACK <= gone.at <= (intent.ended or gone.at) + CLOCK_SLACK:
            return False
        if intent.what == "prune":
            return gone.finished_at is not None and gone.finished_at < float(intent.target)
        queued_at = max((change.at for change in self.life if change.state == "queued"), default=0.0)
        if intent.what != "delete":
            return False
        # A call may wait for the database, while others queue the row again and it ends again.
        return queued_at < intent.began or any(
            queued_at <= at + CLOCK_SLACK and intent.began - CLOCK_SLACK <= at <= gone.at
            for at in self.marked
        )

    def _prior(self, change: Change) -> str:
        """The state of the job that this one follows, as of a change; "" if it follows none, or "gone"."""
        if self.life[0].prior is None:
            return ""
        seen = [one for one in self.before[0] if one.n < change.n] if self.before else []
        if not seen:
            return "gone"
        return "gone" if seen[-1].op == "D" else seen[-1].state

    def _intended(self, what: str, at: float) -> bool:
        return any(one.what == what and one.began - CLOCK_SLACK <= at for one in self.intents)

    def _left(self, at: float) -> bool:
        """Whether somebody may have waited for it, and left: only for a job without a promise and a batch."""
        waited_for = self.promise is None and self.life[0].batch is None
        return waited_for and any(began - CLOCK_SLACK <= at for began in self.left)

    def _wrong(self, kind: str, said: str) -> Violation:
        whose = "" if self.promise else " (never acknowledged)"
        return Violation(kind, f"job {self.id}{whose}: {said}")
