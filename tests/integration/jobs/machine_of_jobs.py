"""Every transition of a job: a model in Python against the SQL of Store and Claims, step by step.

After each step the tables must say what the model says, and must not have broken a rule that is written down
apart from the model.
"""

from datetime import timedelta
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sqlalchemy import delete, select

from nightmill.jobs.base.contract import StopReason, WorkerState
from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.batches.requeueing import conditions_of
from nightmill.jobs.errors import InvalidTransitionError
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.sql import partials
from nightmill.jobs.sql.batches import BatchStore
from nightmill.jobs.sql.claims import Claim, Claims, Outcome
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.inserting import add
from nightmill.jobs.sql.jobs import JOBS, Store
from nightmill.jobs.sql.partials import SavedTokens
from nightmill.jobs.sql.requeueing import Requeueing
from nightmill.jobs.sql.sweep import Sweep
from nightmill.jobs.sql.tables import BatchRow, JobRow, PartialRow, WorkerRow
from tests.integration.jobs.events_of_jobs import (
    CANCELLED,
    EVENTS,
    FAILED,
    MOST_JOBS,
    QUEUED,
    RUNNING,
    STALE_AFTER,
    SUCCEEDED,
    WORKERS,
    job_options,
)
from tests.integration.jobs.expected_jobs import Expected, Held
from tests.integration.jobs.rules_of_life import check_life
from tests.support.servers import Clock


class Jobs(RuleBasedStateMachine):
    """What may happen, each a method; and what must hold after it."""

    def __init__(self, database: Database, clock: Clock) -> None:
        super().__init__()
        self.database, self.clock = database, clock
        self.store = Store(database)
        self.ids = IdSource()
        self.model: dict[str, Expected] = {}
        self.before: dict[str, Any] = {}
        self.retried: set[str] = set()
        self.extended: set[str] = set()
        self.requeueing = Requeueing(BatchStore(database))
        self.claimed: list[Held] = []
        self.groups = 0

    @initialize(options=st.lists(job_options, min_size=2, max_size=MOST_JOBS))
    def begin(self, options: list[JobSpec]) -> None:
        """Empty tables, live workers, and a few jobs: few, so that much happens to each."""
        with self.database.write() as connection:
            for table in (PartialRow, JobRow, BatchRow, WorkerRow):
                connection.execute(delete(table))
        self.claims = [Claims(self.database, f"{n:032x}") for n in range(WORKERS)]
        self.alive = [True] * WORKERS
        self.beaten = [self.clock()] * WORKERS
        for claims in self.claims:
            claims.register("host", 1, "model", None)
        for one in options:
            self.enqueue(one)

    @rule(event=EVENTS)
    def something_happens(self, event: tuple[Any, ...]) -> None:
        name, *arguments = event
        getattr(self, name)(*arguments)

    # -- the client ------------------------------------------------------------------------------

    def enqueue(self, options: JobSpec) -> None:
        if len(self.model) == MOST_JOBS:
            return
        job_id = self.ids.draw()
        row = JobSpec.parse({"prompt": "prompt", "batch": "b"}, options).row(job_id, self.clock(), 3)
        assert add([row], self.database) == {}
        self.model[job_id] = Expected(
            max_attempts=row["max_attempts"],
            priority=row["priority"],
            deadline=row["deadline_at"],
            scheduled=row["scheduled_at"],
            sent=row["scheduled_at"] is None,
        )

    def cancel(self, number: int) -> None:
        job = self._job(number)
        expected = self.model[job]
        if expected.state in (SUCCEEDED, FAILED):
            with pytest.raises(InvalidTransitionError):
                self.store.cancel(job)
            return
        expected.cancel_requested |= expected.state in (QUEUED, RUNNING)
        if expected.state is QUEUED:
            expected.end(StopReason.CANCELLED)
        assert self.store.cancel(job) is expected.state

    def retry(self, number: int, deadline: timedelta | None) -> None:
        job = self._job(number)
        expected = self.model[job]
        moment = None if deadline is None else self.clock() + deadline
        if expected.state not in (FAILED, CANCELLED):
            with pytest.raises(InvalidTransitionError):
                self.store.retry(job, moment)
            return
        self.store.retry(job, moment)
        self.retried = {job}
        expected.queue_again(moment)
        expected.text = expected.arithmetic = None

    def retry_batch(self, state: str, temperature: float, deadline: timedelta | None) -> None:
        """Rows that ended in this state begin afresh with another parameter."""
        chosen = {job for job, expected in self.model.items() if expected.state == state}
        moment = None if deadline is None else self.clock() + deadline
        conditions = conditions_of({"state": state})
        changed = {"temperature": temperature}
        groups = self.requeueing.retry("b", conditions, changed, moment, new_seeds=False)
        assert {row["id"] for group in groups for row in group.rows} == chosen
        self.retried = chosen
        for job in chosen:
            self.model[job].queue_again(moment)
            self.model[job].text = self.model[job].arithmetic = None

    def extend(self, further: int, deadline: timedelta | None) -> None:
        """Rows that were cut at a smaller limit continue from what is kept of them."""
        limit = 256 + further
        chosen = {
            job
            for job, expected in self.model.items()
            if expected.stop_reason is StopReason.LENGTH and expected.limit < limit
        }
        moment = None if deadline is None else self.clock() + deadline
        groups = self.requeueing.extend("b", limit, moment)
        assert {row["id"] for group in groups for row in group.rows} == chosen
        self.extended = chosen
        for job in chosen:
            self.model[job].queue_again(moment)
            self.model[job].limit = limit

    # -- the workers -----------------------------------------------------------------------------

    def claim(self, worker: int, numbers: set[int]) -> None:
        """A shard arrives: for the first time, again, or at a worker that was given up for dead."""
        self._claim(worker, [job for number, job in enumerate(self.model) if number in numbers])

    def claim_everything(self, worker: int) -> None:
        self._claim(worker, list(reversed(self.model)))

    def _claim(self, worker: int, shard: list[str]) -> None:
        due = [
            job
            for job in shard
            if self.model[job].claimable(self.clock()) and self.model[job].suspects is None
        ]
        claimed = self.claims[worker].claim(shard)
        assert [claim.job_id for claim in claimed] == due
        self._take(worker, claimed)
        assert self.claims[worker].claim(shard) == []  # delivered again

    def claim_suspects(self, worker: int, limit: int) -> None:
        """A whole group, or the first of it: the most urgent one, then the oldest."""
        groups: dict[int, list[str]] = {}
        for job, expected in self.model.items():
            if expected.suspects is not None and expected.claimable(self.clock()):
                groups.setdefault(expected.suspects, []).append(job)
        assert self.claims[worker].suspects_wait((None,)) is bool(groups)
        assert not self.claims[worker].suspects_wait(("another",))
        claimed = self.claims[worker].claim_suspects((None,), limit)
        rank = {(-max(self.model[job].priority for job in jobs), group) for group, jobs in groups.items()}
        chosen = sorted(groups[min(rank)[1]])[:limit] if groups else []
        assert [claim.job_id for claim in claimed] == chosen
        self._take(worker, claimed)

    def _take(self, worker: int, claimed: list[Claim]) -> None:
        for claim in claimed:
            expected = self.model[claim.job_id]
            expected.state, expected.worker = RUNNING, worker
            expected.attempt += 1
            assert claim.attempt == expected.attempt
            assert claim.saved == expected.saved
        self.claimed += [Held(worker, claim.job_id, claim.attempt) for claim in claimed]

    def finish(self, endings: list[tuple[int, StopReason, str]]) -> None:
        """Outcomes are written together; by a zombie, or for the second time, they change nothing."""
        group = [(claim, reason, text) for n, reason, text in endings if (claim := self._claimed(n))]
        one_each = {one[0].job: one for one in group if one[0].worker == group[0][0].worker}
        expected = self._finish_expected(list(one_each.values()))
        assert self._finish(list(one_each.values())) == expected

    def save(self, group: list[tuple[int, list[int]]]) -> None:
        """Tokens of several jobs are saved together; of jobs that the worker has lost, none are."""
        claims = [(claim, tuple(tokens)) for n, tokens in group if (claim := self._claimed(n))]
        one_each = {claim.job: (claim, ids) for claim, ids in claims if claim.worker == claims[0][0].worker}
        saved = [
            SavedTokens(job, claim.attempt, f"{len(ids)}" * 64, ids) for job, (claim, ids) in one_each.items()
        ]
        written = 0
        for one in saved:
            if self._ours(one_each[one.job_id][0]):
                self.model[one.job_id].saved = one
                written += 1
        if saved:
            assert self.claims[claims[0][0].worker].save(saved) == written

    def zombies_write(self, worker: int) -> None:
        """All that a worker ever claimed and lost is written, handed back and given up: nothing changes."""
        late = [claim for claim in self.claimed if claim.worker == worker and not self._ours(claim)]
        assert self._finish([(claim, StopReason.EOS, "late") for claim in late]) == 0
        assert self._finish([(claim, StopReason.ERROR, "late") for claim in late]) == 0
        assert self.claims[worker].save([SavedTokens(c.job, c.attempt, "late", (1,)) for c in late]) == 0
        pairs = [(claim.job, claim.attempt) for claim in late]
        assert self.claims[worker].hand_back(pairs) == []
        self.claims[worker].give_up(pairs, "late")

    def hand_back(self, number: int) -> None:
        claim = self._claimed(number)
        if claim is None:
            return
        expected, ours = self.model[claim.job], self._ours(claim)
        queued_again = ours and not expected.cancel_requested
        returned = self.claims[claim.worker].hand_back([(claim.job, claim.attempt)])
        assert returned == ([claim.job] if queued_again else [])
        if queued_again:
            expected.back_to_queue()
        elif ours:
            expected.end(StopReason.CANCELLED)

    def give_up(self, worker: int, most: int) -> None:
        """The last jobs that a worker claimed were in flight when its engine failed."""
        claims = [claim for claim in self.claimed if claim.worker == worker][-most:]
        ours = [claim.job for claim in claims if self._ours(claim)]
        self.claims[worker].give_up([(claim.job, claim.attempt) for claim in claims], "the engine failed")
        self._died(ours)

    def _died(self, jobs: list[str]) -> list[str]:
        """A worker died with these in flight; returns those that are queued again."""
        if len(jobs) == 1:
            self.model[jobs[0]].died_alone()
        else:
            for job in jobs:
                if self.model[job].cancel_requested:
                    self.model[job].end(StopReason.CANCELLED)
                else:
                    self.model[job].back_to_queue()
        left = sorted(job for job in jobs if self.model[job].state is QUEUED)
        middle = (len(left) + 1) // 2
        for half in (left[:middle], left[middle:]):
            self.groups += 1
            for job in half:
                self.model[job].suspects = self.groups
        return left

    def beat(self, worker: int) -> None:
        assert self.claims[worker].beat(WorkerState.READY) is self.alive[worker]
        self.alive[worker], self.beaten[worker] = True, self.clock()

    # -- time, and what any worker does for all --------------------------------------------------

    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)

    def rescue(self, worker: int) -> None:
        """Jobs of silent workers are queued again, apart; one that was alone is charged with a failure."""
        owners = {expected.worker for expected in self.model.values() if expected.state is RUNNING}
        queued = []
        for silent in range(WORKERS):
            stale = self.beaten[silent] < self.clock() - STALE_AFTER
            if not stale or not (self.alive[silent] or silent in owners):
                continue
            self.alive[silent] = False
            queued += self._died(
                [job for job, one in self.model.items() if one.state is RUNNING and one.worker == silent]
            )
        assert sorted(Sweep(self.claims[worker].database).rescue(STALE_AFTER)) == sorted(queued)

    def expire(self) -> None:
        late = [
            expected
            for expected in self.model.values()
            if expected.state is QUEUED and expected.deadline and expected.deadline <= self.clock()
        ]
        assert Sweep(self.claims[0].database).expire() == len(late)
        for expected in late:
            expected.end(StopReason.DEADLINE)

    def leave_queued(self, number: int) -> None:
        """A shard that a draining worker would not begin."""
        job = self._job(number)
        self.claims[0].leave_queued([job])
        if self.model[job].state is QUEUED:
            self.model[job].sent = False

    def sweep(self) -> None:
        """Each queued, due job that no message announces is announced once."""
        due = {
            job: expected
            for job, expected in self.model.items()
            if expected.state is QUEUED
            and expected.suspects is None
            and not expected.sent
            and (expected.scheduled is None or expected.scheduled <= self.clock())
        }
        announced = Sweep(self.claims[0].database).unsent(limit=1000)
        assert sorted(job for one in announced for job in one.job_ids) == sorted(due)
        for one in announced:
            assert {due[job].priority for job in one.job_ids} == {one.priority}
        for expected in due.values():
            expected.sent = True

    # -- what must hold --------------------------------------------------------------------------

    @invariant()
    def all_is_as_it_should_be(self) -> None:
        now = self._rows()
        self._tables_say_what_the_model_says(now)
        self._rules_of_a_jobs_life_are_kept(now)

    def _tables_say_what_the_model_says(self, now: dict[str, Any]) -> None:
        assert now.keys() == self.model.keys()
        for job, row in now.items():
            self.model[job].check_row(row)
        with self.database.read() as connection:
            saved = partials.find(connection, self.model)
        assert saved == {job: one.saved for job, one in self.model.items() if one.saved is not None}
        # Of ended jobs only those that were cut keep tokens.
        assert not any(now[job].stop_reason not in (None, StopReason.LENGTH) for job in saved)

    def _rules_of_a_jobs_life_are_kept(self, now: dict[str, Any]) -> None:
        for job, row in now.items():
            check_life(self.before.get(job), row, retried=job in self.retried, extended=job in self.extended)
        self.before, self.retried, self.extended = now, set(), set()

    def teardown(self) -> None:
        """Whatever happened: once everybody is silent for long, no job is left with an owner."""
        if not hasattr(self, "claims"):
            return
        self.clock.advance(STALE_AFTER.total_seconds() + 1)
        Sweep(self.database).rescue(STALE_AFTER)
        assert [job for job, row in self._rows().items() if row.state == RUNNING] == []

    # -- helpers ---------------------------------------------------------------------------------

    def _job(self, number: int) -> str:
        return list(self.model)[number % len(self.model)]

    def _claimed(self, number: int) -> Held | None:
        """A claim that was made, the latest first; None where there was none."""
        return self.claimed[-1 - number % len(self.claimed)] if self.claimed else None

    def _rows(self) -> dict[str, Any]:
        with self.database.read() as connection:
            return {row.id: row for row in connection.execute(select(JOBS).order_by(JobRow.id))}

    def _ours(self, claim: Held) -> bool:
        return self.model[claim.job].is_held_as(claim)

    def _finish(self, group: list[tuple[Held, StopReason, str]]) -> int:
        if not group:
            return 0
        outcomes = [
            Outcome(
                claim.job,
                claim.attempt,
                reason,
                text,
                3,
                4,
                "broke" if reason is StopReason.ERROR else None,
                f"that of worker {claim.worker}",
                saved=claim.kept if reason is StopReason.LENGTH else None,
            )
            for claim, reason, text in group
        ]
        return self.claims[group[0][0].worker].finish(outcomes)

    def _finish_expected(self, group: list[tuple[Held, StopReason, str]]) -> int:
        written = 0
        for claim, reason, text in group:
            expected = self.model[claim.job]
            if not self._ours(claim):
                continue
            written += 1
            expected.finish(claim, reason, text)
        return written
