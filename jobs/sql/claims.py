"""A worker's statements about jobs: claim, finish, hand back. Every statement is fenced.

A claim increments `attempt`, the fencing token: every write about a job names the claimed attempt, so a
worker that lost its job cannot write any more. `failures` counts the attempts that died while the job was
alone in its worker (see `jobs.sql.suspects`); handing a job back counts none.
"""

import threading
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import starmap
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection, bindparam, select, update

from nightmill.jobs.base.contract import JobState, StopReason, WorkerState
from nightmill.jobs.sql import answers, embeddings, followers, limits, logprobs, partials, suspects
from nightmill.jobs.sql.claimed import CLAIMED, Claim, read_claim
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.jobs import chunked, mark_unsent
from nightmill.jobs.sql.locks import lock_ids, lock_jobs
from nightmill.jobs.sql.named import among
from nightmill.jobs.sql.outcomes import (
    ADD_COST,
    ADDED,
    OF_THE_TEXT,
    Cost,
    Outcome,
    cost_values,
    finish,
    finish_values,
    told,
)
from nightmill.jobs.sql.partials import SavedTokens
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.tables import QUEUED, RUNNING, JobRow, WorkerRow
from nightmill.jobs.sql.types import UtcDateTime
from nightmill.jobs.sql.workers import RegisteredWorker

__all__ = ["Claim", "Claims", "Cost", "Outcome", "hand_back"]


class Claims(RegisteredWorker):
    """One worker's side of the state machine of jobs; `RegisteredWorker` writes the worker's own row."""

    def __init__(self, database: Database, worker_id: str) -> None:
        super().__init__(database, worker_id)
        self.followers_due = threading.Event()
        """Set once jobs are due that followed ended ones: they have no message yet."""

    def claim(self, job_ids: Sequence[str]) -> list[Claim]:
        """Claim those of `job_ids` that are queued, due and not past their deadline, in the given order.

        Suspects are left to `claim_suspects`.
        """
        return self.claim_within(job_ids, None)[0]

    @retried
    def claim_within(
        self, job_ids: Sequence[str], slots: int | None, most: int = 1 << 30
    ) -> tuple[list[Claim], dict[str, int]]:
        """Claim jobs like `claim`, as many as fit into `slots`; a job needs one slot per answer, up to
        `most`.

        The first claimable job is claimed even if it needs more slots than there are. Returns the claims, and
        the jobs that did not fit, with the slots that each needs.

        slots  number of free slots; None: unlimited
        """
        now = self.database.now()
        order = {job_id: index for index, job_id in enumerate(job_ids)}
        with self.database.write() as connection:
            found = connection.execute(_CLAIMABLE, {"job_ids": job_ids, "claimed_at": now}).all()
            needs = {job_id: max(1, min(answers, most)) for job_id, answers in found}
            taken, left = _fitting(sorted(needs.items(), key=lambda need: order[need[0]]), slots)
            rows = self._take(connection, _CLAIM, now, job_ids=taken) if taken else []
        claims = sorted(starmap(read_claim, rows), key=lambda claim: order[claim.job_id])
        return claims, left

    def jobs_wait(self, models: Sequence[str | None]) -> bool:
        """Return True if a job is queued, and due, for a worker that serves `models`."""
        query = select(JobRow.id).where(suspects.of_models(models), *suspects.claimable(self.database.now()))
        with self.database.read() as connection:
            return connection.execute(query.limit(1)).one_or_none() is not None

    def suspects_wait(self, models: Sequence[str | None]) -> bool:
        """Return True if a group of suspects is queued for a worker that serves `models`."""
        now = self.database.now()
        with self.database.read() as connection:
            return suspects.next_group(connection, models, now) is not None

    def is_to_drain(self, models: Sequence[str | None]) -> bool:
        """Return True if this worker should drain for the next group of suspects.

        One worker is enough: the one with the lowest id among live workers that serve every model of the
        group. If two see the table at different times, both may drain; then one of them finds the group gone.
        """
        now = self.database.now()
        stale = timedelta(seconds=self.database.settings.stale_seconds)
        with self.database.read() as connection:
            group = suspects.next_group(connection, models, now)
            if group is None:
                return False
            named = select(JobRow.model).where(JobRow.suspects == group, JobRow.model.is_not(None), QUEUED)
            model = connection.execute(named.limit(1)).scalar_one_or_none()
            before = select(WorkerRow.id).where(
                WorkerRow.id < self.worker_id,
                WorkerRow.state == WorkerState.READY,
                WorkerRow.heartbeat_at > self.database.clock_time(ago=stale),
                *([] if model is None else [WorkerRow.model == model]),
            )
            return connection.execute(before.limit(1)).one_or_none() is None

    @retried
    def claim_suspects(self, models: Sequence[str | None], limit: int) -> list[Claim]:
        """Claim the next group of suspects, or its first `limit` jobs, in the order of their ids.

        They must run with nothing else. Empty if another worker was faster.
        """
        now = self.database.now()
        with self.database.write() as connection:
            group = suspects.next_group(connection, models, now)
            if group is None:
                return []
            of_group = (JobRow.suspects == group, suspects.of_models(models), *suspects.claimable(now))
            first = select(JobRow.id).where(*of_group).order_by(JobRow.id).limit(limit)
            ids = connection.execute(first).scalars().all()
            if not ids:
                return []
            of_group = (*of_group, JobRow.id <= ids[-1])
            lock_jobs(connection, *of_group)
            taken = self._take(connection, _claiming(*of_group), now)
        return sorted(starmap(read_claim, taken), key=lambda claim: claim.job_id)

    @retried
    def refuse(self, job_id: str, reason: str) -> bool:
        """Fail a queued job that cannot be claimed; returns True if it was queued."""
        now = self.database.now()
        with self.database.write() as connection:
            done = connection.execute(
                update(JobRow)
                .where(JobRow.id == job_id, JobRow.state == JobState.QUEUED)
                .values(
                    state=JobState.FAILED,
                    stop_reason=StopReason.ERROR,
                    error=reason,
                    finished_at=now,
                )
            )
            followers.ended(connection, [job_id], now)
            if done.rowcount:
                limits.count_failed(connection, job_id, now)
        return bool(done.rowcount)

    @retried
    def finish(self, outcomes: Sequence[Outcome]) -> int:
        """Write results in one transaction; returns the number of jobs that this worker still owned."""
        now = self.database.now()
        plain = [outcome for outcome in outcomes if outcome.error is None]
        written = 0
        with self.database.write() as connection:
            lock_ids(connection, [outcome.job_id for outcome in outcomes])
            limited = limits.before_end(connection, [outcome.job_id for outcome in outcomes])
            answers.write(
                connection,
                self.worker_id,
                {(outcome.job_id, outcome.attempt): outcome.answers for outcome in outcomes},
            )
            logprobs.write(
                connection,
                self.worker_id,
                {(outcome.job_id, outcome.attempt): told(outcome) for outcome in outcomes},
            )
            embeddings.write(
                connection,
                self.worker_id,
                {(outcome.job_id, outcome.attempt): outcome.embedding for outcome in outcomes},
            )
            if cut := [outcome.saved for outcome in plain if outcome.saved is not None]:
                partials.save(connection, self.worker_id, cut, now)
            if plain:
                written += finish(connection, plain, self.worker_id, now)
            for outcome in outcomes:
                if outcome.error is not None:
                    written += self._finish_with_error(connection, outcome, now)
            limits.count_ended(connection, limited, now)
            due = followers.ended(connection, [outcome.job_id for outcome in outcomes], now)
        if due:  # they are committed
            self.followers_due.set()
        return written

    @retried
    def save(self, saved: Sequence[SavedTokens]) -> int:
        """Save the tokens of running jobs for a later attempt; returns the number of jobs that this worker
        still owned."""
        written = 0
        for group in chunked(saved):
            with self.database.write() as connection:
                lock_ids(connection, [tokens.job_id for tokens in group])
                written += partials.save(connection, self.worker_id, group, self.database.now())
        return written

    @retried
    def hand_back(
        self, claimed: Sequence[tuple[str, int]], costs: Mapping[tuple[str, int], Cost] = MappingProxyType({})
    ) -> list[str]:
        """Queue (job id, attempt) pairs again without counting a failure; returns the ids that this worker
        still owned.

        costs  what these attempts cost, as far as that is known
        """
        now = self.database.now()
        returned = []
        with self.database.write() as connection:
            lock_ids(connection, [job_id for job_id, _ in claimed])
            limited = limits.before_end(connection, [job_id for job_id, _ in claimed])
            spent: list[dict[str, Any]] = []
            for job_id, attempt in claimed:
                if hand_back(connection, self._ours(job_id, attempt), now):
                    returned.append(job_id)
                    if (cost := costs.get((job_id, attempt))) is not None:
                        spent.append({"job_id": job_id, "job_attempt": attempt, **cost_values(*cost)})
            if spent:
                connection.execute(ADD_COST, spent)
            limits.count_ended(connection, limited, now)
            followers.ended(connection, [job_id for job_id, _ in claimed], now)
        return returned

    def fall_asleep(self, reason: str) -> list[str]:
        """Say that this worker sleeps, and why: it holds no job then.

        Returns the ids of the jobs that it had still, as an outage had kept it from ending them or handing
        them back: they are queued again. Raises DatabaseError.
        """
        returned = self.hand_back([*self.running()])
        self.beat(WorkerState.SLEEPING, reason)
        return returned

    def leave_queued(self, job_ids: Sequence[str]) -> None:
        """Record that no message announces these unclaimed jobs."""
        mark_unsent(self.database, job_ids)

    @retried
    def give_up(self, claimed: Sequence[tuple[str, int]], reason: str) -> None:
        """Charge the worker's death to these jobs in flight; see `suspects.charge`."""
        now, keys = self.database.now(), set(claimed)
        with self.database.write() as connection:
            rows = suspects.running_jobs(connection, self.worker_id)
            suspects.charge(connection, [row for row in rows if (row.id, row.attempt) in keys], reason, now)

    def running(self) -> dict[tuple[str, int], datetime]:
        """Return the claim time of the jobs that this worker owns in SQL, by (job id, attempt)."""
        with self.database.read() as connection:
            rows = connection.execute(
                select(JobRow.id, JobRow.attempt, JobRow.started_at).where(
                    JobRow.worker == self.worker_id, RUNNING
                )
            ).all()
        return {(row.id, row.attempt): row.started_at for row in rows}

    def cancel_requests(self) -> list[tuple[str, int]]:
        """Return (job id, attempt) of this worker's running jobs that were asked to stop, with one query."""
        with self.database.read() as connection:
            rows = connection.execute(
                select(JobRow.id, JobRow.attempt).where(
                    JobRow.worker == self.worker_id,
                    RUNNING,
                    JobRow.cancel_requested_at.is_not(None),
                )
            )
            return [(row.id, row.attempt) for row in rows]

    def _take(
        self, connection: Connection, claiming: Any, now: datetime, **named: Any
    ) -> list[tuple[Any, SavedTokens | None]]:
        """Execute a statement of `_claiming`; returns rows for `read_claim` after the transaction,
        unordered."""
        rows = connection.execute(claiming, {"claimer": self.worker_id, "claimed_at": now, **named}).all()
        saved: dict[str, SavedTokens] = {}
        again = [row.id for row in rows if row.attempt > 1]  # no attempt before the first has left any
        for chunk in chunked(again):
            saved |= partials.find(connection, chunk)
        return [(row, saved.get(row.id)) for row in rows]

    def _ours(self, job_id: str, attempt: int) -> tuple[Any, ...]:
        return (
            JobRow.id == job_id,
            JobRow.state == JobState.RUNNING,
            JobRow.attempt == attempt,
            JobRow.worker == self.worker_id,
        )

    def _finish_with_error(self, connection: Connection, outcome: Outcome, now: datetime) -> int:
        row = connection.execute(
            select(JobRow.__table__).where(*self._ours(outcome.job_id, outcome.attempt))
        ).one_or_none()
        if row is None:
            return 0
        values = finish_values(outcome, now)
        if not outcome.text and row.text:  # the text of before it was extended, which nothing replaces
            for name in OF_THE_TEXT:
                values[f"new_{name}"] = getattr(row, name)
        for name in ADDED:
            before, new = getattr(row, name), values[f"new_{name}"]
            values[f"new_{name}"] = before if new is None else new + (before or 0.0)
        return connection.execute(
            update(JobRow)
            .where(*self._ours(outcome.job_id, outcome.attempt))
            .values(
                {
                    name.removeprefix("new_"): value
                    for name, value in values.items()
                    if name.startswith("new_")
                }
                | {"errors": suspects.history(row, outcome.error or "", now)}
            )
        ).rowcount


def _claiming(*conditions: Any) -> Any:
    """Build the claiming UPDATE; its parameters are `claimer`, `claimed_at` and those of the conditions."""
    now = bindparam("claimed_at", type_=UtcDateTime())
    return (
        update(JobRow)
        .where(*conditions, *suspects.claimable(now))
        .values(
            state=JobState.RUNNING,
            attempt=JobRow.attempt + 1,
            worker=bindparam("claimer"),
            started_at=now,
        )
        .returning(*CLAIMED)
    )


_NAMED = (among(JobRow.id, "job_ids"), JobRow.suspects.is_(None))
# Locked in the order of their ids, before the transaction changes several of them (see `jobs.sql.locks`).
_CLAIMABLE = (
    select(JobRow.id, JobRow.answers)
    .where(*_NAMED, *suspects.claimable(bindparam("claimed_at", type_=UtcDateTime())))
    .order_by(JobRow.id)
    .with_for_update()
)
_CLAIM = _claiming(*_NAMED)


def _fitting(needs: Sequence[tuple[str, int]], slots: int | None) -> tuple[list[str], dict[str, int]]:
    """Split (job id, slots needed) into the first jobs, for which there is room, and the others."""
    taken: list[str] = []
    left: dict[str, int] = {}
    for job_id, needed in needs:
        if slots is None or not taken or (not left and needed <= slots):
            taken.append(job_id)
            slots = None if slots is None else slots - needed
        else:
            left[job_id] = needed
    return taken, left


def hand_back(connection: Connection, running: tuple[Any, ...], now: datetime) -> bool:
    """Queue the job that matches the conditions `running` as it was; returns True if it is queued again."""
    connection.execute(  # a queued job's cancel request would never be read
        update(JobRow)
        .where(*running, JobRow.cancel_requested_at.is_not(None))
        .values(state=JobState.CANCELLED, stop_reason=StopReason.CANCELLED, finished_at=now)
    )
    done = connection.execute(
        update(JobRow)
        .where(*running)
        .values(state=JobState.QUEUED, worker=None, sent_at=None, started_at=None)
    )
    return bool(done.rowcount)
