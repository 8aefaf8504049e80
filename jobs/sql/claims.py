"""One worker's SQL about jobs: claim, finish, hand back. Every statement is fenced.

A claim raises `attempt`, which is the fencing token: whatever a worker writes about a job names the
attempt it claimed, so that a worker whose job was taken away cannot write any more. `failures` counts
the attempts that died while the job was alone in its worker (see `jobs.sql.suspects`); handing a job back
counts none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import starmap
from typing import Any

from sqlalchemy import Connection, Text, bindparam, cast, or_, select, update

from nightmill.jobs.contract import JobState, Markup, StopReason, WorkerState
from nightmill.jobs.job import Answer
from nightmill.jobs.sql import answers, logprobs, partials, suspects
from nightmill.jobs.sql.claimed import Claim, read_claim
from nightmill.jobs.sql.jobs import chunked, mark_unsent
from nightmill.jobs.sql.locks import lock_ids, lock_jobs
from nightmill.jobs.sql.partials import SavedTokens
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.tables import BATCH_CREATED_AT, QUEUED, RUNNING, JobRow, UtcDateTime, WorkerRow
from nightmill.jobs.sql.workers import RegisteredWorker

__all__ = ["Claim", "Claims", "Outcome", "hand_back"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a claimed job ended; what ResultWriter writes."""

    job_id: str
    attempt: int
    stop_reason: StopReason
    text: str  # of the first answer
    prompt_tokens: int
    completion_tokens: int  # of all answers
    error: str | None = None
    arithmetic: str | None = None  # by which the text was computed; None if nothing was
    prompt_digest: str | None = None  # of the prompt's token ids
    markup: Markup | None = None  # what the texts hold beside the answers
    answers: tuple[Answer, ...] = ()  # all of them, where the job was to have several
    logprobs: tuple[bytes | None, ...] = ()  # of the answers in order, where they were asked for


class Claims(RegisteredWorker):
    """One worker's side of the state machine of jobs; its own row is `RegisteredWorker`'s."""

    def claim(self, job_ids: Sequence[str]) -> list[Claim]:
        """Take those of `job_ids` that are queued, due and not past their deadline, in the order given.

        Suspects are left to `claim_suspects`, and jobs with several answers to `claim_several`: a worker must
        know how many before it takes them.
        """
        return self._claim_named(_CLAIM, job_ids)

    def claim_several(self, job_ids: Sequence[str]) -> list[Claim]:
        """As `claim`, but jobs with several answers, too."""
        return self._claim_named(_CLAIM_SEVERAL, job_ids)

    @retried
    def _claim_named(self, claiming: Any, job_ids: Sequence[str]) -> list[Claim]:
        now = self.database.now()
        with self.database.write() as connection:
            lock_jobs(connection, JobRow.id.in_(job_ids), JobRow.suspects.is_(None), QUEUED)
            taken = self._take(connection, claiming, now, job_ids=job_ids)
        place = {job_id: index for index, job_id in enumerate(job_ids)}
        return sorted(starmap(read_claim, taken), key=lambda claim: place[claim.job_id])

    def with_several_answers(self, job_ids: Sequence[str]) -> dict[str, int]:
        """Those of `job_ids` that `claim` leaves queued as they are to have several answers, and how many."""
        query = select(JobRow.id, JobRow.params).where(
            JobRow.id.in_(job_ids),
            JobRow.suspects.is_(None),
            _SEVERAL,
            *suspects.claimable(self.database.now()),
        )
        with self.database.read() as connection:
            found = {row.id: row.params for row in connection.execute(query)}
        # A row that a newer version wrote may say anything; whoever claims it says so.
        return {job_id: _answers(found[job_id]) for job_id in job_ids if job_id in found}

    def suspects_wait(self, models: Sequence[str | None]) -> bool:
        """Whether a group of suspects is queued for a worker that serves `models`."""
        now = self.database.now()
        with self.database.read() as connection:
            return suspects.next_group(connection, models, now) is not None

    def is_to_drain(self, models: Sequence[str | None]) -> bool:
        """Whether it is this worker that interrupts its work for the next group of suspects.

        One worker is enough: of those that live and serve every model of the group, the one with the lowest
        id. Two that see the table at different times may both think that they are: then one of them finds the
        group gone.
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
        """Take the next group of suspects, or the first `limit` of it, in the order of their ids.

        They must run with nothing else beside them. None if others were quicker.
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
        """Fail a queued job that cannot even be claimed; True if it was queued."""
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
            partials.forget_ended(connection, [job_id])
        return bool(done.rowcount)

    @retried
    def finish(self, outcomes: Sequence[Outcome]) -> int:
        """Write results in one transaction; returns how many were still ours to write."""
        now = self.database.now()
        plain = [outcome for outcome in outcomes if outcome.error is None]
        written = 0
        with self.database.write() as connection:
            lock_ids(connection, [outcome.job_id for outcome in outcomes])
            answers.write(
                connection,
                self.worker_id,
                {(outcome.job_id, outcome.attempt): outcome.answers for outcome in outcomes},
            )
            logprobs.write(
                connection,
                self.worker_id,
                {(outcome.job_id, outcome.attempt): outcome.logprobs for outcome in outcomes},
            )
            if plain:
                written += connection.execute(
                    _FINISH, [_finish_values(outcome, self.worker_id, now) for outcome in plain]
                ).rowcount
            for outcome in outcomes:
                if outcome.error is not None:
                    written += self._finish_with_error(connection, outcome, now)
            partials.forget_ended(connection, [outcome.job_id for outcome in outcomes])
        return written

    @retried
    def save(self, saved: Sequence[SavedTokens]) -> int:
        """Keep the tokens of running jobs for a later attempt; returns of how many, being still ours."""
        written = 0
        for group in chunked(saved):
            with self.database.write() as connection:
                lock_ids(connection, [one.job_id for one in group])
                written += partials.save(connection, self.worker_id, group, self.database.now())
        return written

    @retried
    def hand_back(self, claimed: Sequence[tuple[str, int]]) -> list[str]:
        """Queue (job id, attempt) pairs again, no attempt lost; returns the ids that were still ours."""
        now = self.database.now()
        returned = []
        with self.database.write() as connection:
            lock_ids(connection, [job_id for job_id, _ in claimed])
            for job_id, attempt in claimed:
                if hand_back(connection, self._ours(job_id, attempt), now):
                    returned.append(job_id)
            partials.forget_ended(connection, [job_id for job_id, _ in claimed])
        return returned

    def leave_queued(self, job_ids: Sequence[str]) -> None:
        """Of these unclaimed jobs, record that no message announces them."""
        mark_unsent(self.database, job_ids)

    @retried
    def give_up(self, claimed: Sequence[tuple[str, int]], reason: str) -> None:
        """The worker is at its end with these jobs in flight: see `suspects.charge`."""
        now, keys = self.database.now(), set(claimed)
        with self.database.write() as connection:
            rows = suspects.running_jobs(connection, self.worker_id)
            suspects.charge(connection, [row for row in rows if (row.id, row.attempt) in keys], reason, now)

    def running(self) -> dict[tuple[str, int], datetime]:
        """(job id, attempt) -> when it was claimed, of the jobs that the database says are ours."""
        with self.database.read() as connection:
            rows = connection.execute(
                select(JobRow.id, JobRow.attempt, JobRow.started_at).where(
                    JobRow.worker == self.worker_id, RUNNING
                )
            ).all()
        return {(row.id, row.attempt): row.started_at for row in rows}

    def cancel_requests(self) -> list[tuple[str, int]]:
        """(job id, attempt) of our running jobs that somebody asked to stop: one query for all."""
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
        """Run a statement of `_claiming`: rows for `read_claim` once the transaction is over, in no order."""
        rows = connection.execute(claiming, {"claimer": self.worker_id, "claimed_at": now, **named}).all()
        saved: dict[str, SavedTokens] = {}
        for chunk in chunked(row.id for row in rows):
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
        values = _finish_values(outcome, self.worker_id, now)
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
    """Claim the jobs that fit; its parameters are `claimer`, `claimed_at` and those of the conditions."""
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
        .returning(
            JobRow.id,
            JobRow.attempt,
            JobRow.prompt,
            JobRow.prompt_ids,
            JobRow.messages,
            JobRow.rendering,
            JobRow.params,
            JobRow.constrained,
            JobRow.seed,
            JobRow.priority,
            JobRow.deadline_at,
            JobRow.created_at,
            BATCH_CREATED_AT,
        )
    )


# Most rows do not say how many answers they are to have. As text, since a row may hold what is no JSON:
# SQLite would refuse the statement, and with it all other rows.
_SEVERAL = or_(*(cast(JobRow.params, Text).contains(said) for said in ('"n":', '"score":')))
_NAMED = (JobRow.id.in_(bindparam("job_ids", expanding=True)), JobRow.suspects.is_(None))
_CLAIM = _claiming(*_NAMED, ~_SEVERAL)
_CLAIM_SEVERAL = _claiming(*_NAMED)
_FINISH = (
    update(JobRow)
    .where(
        JobRow.id == bindparam("job_id"),
        JobRow.state == JobState.RUNNING,
        JobRow.attempt == bindparam("job_attempt"),
        JobRow.worker == bindparam("job_worker"),
    )
    .values(
        state=bindparam("new_state"),
        stop_reason=bindparam("new_stop_reason"),
        text=bindparam("new_text"),
        prompt_tokens=bindparam("new_prompt_tokens"),
        completion_tokens=bindparam("new_completion_tokens"),
        arithmetic=bindparam("new_arithmetic"),
        prompt_digest=bindparam("new_prompt_digest"),
        markup=bindparam("new_markup"),
        error=bindparam("new_error"),
        finished_at=bindparam("new_finished_at"),
    )
)


def _answers(params: object) -> int:
    said = params.get("n") if isinstance(params, Mapping) else None
    texts = params.get("score") if isinstance(params, Mapping) else None
    said = len(texts) if isinstance(texts, list) else said
    return said if type(said) is int and 0 < said < 1000 else 1


def _finish_values(outcome: Outcome, worker_id: str, now: datetime) -> dict[str, Any]:
    error = outcome.error
    if error is None and outcome.stop_reason is StopReason.DEADLINE:
        error = f"the deadline passed after {outcome.completion_tokens} tokens"
    return {
        "job_id": outcome.job_id,
        "job_attempt": outcome.attempt,
        "job_worker": worker_id,
        "new_state": outcome.stop_reason.state,
        "new_stop_reason": outcome.stop_reason,
        "new_text": outcome.text,
        "new_prompt_tokens": outcome.prompt_tokens,
        "new_completion_tokens": outcome.completion_tokens,
        "new_arithmetic": outcome.arithmetic,
        "new_prompt_digest": outcome.prompt_digest,
        "new_markup": None if outcome.markup is None else outcome.markup.values(),
        "new_error": error,
        "new_finished_at": now,
    }


def hand_back(connection: Connection, running: tuple[Any, ...], now: datetime) -> bool:
    """Queue the job that fits the conditions `running` as it was; True if it is queued again."""
    connection.execute(  # nobody would look at the request again once the job is queued
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
