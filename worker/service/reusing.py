"""Answers that stand for others: from SQL, or of jobs that this worker computes at the moment.

Of claimed jobs with equal content one leads and is computed; the others follow, hold their places, and get
its answer. Where it ends without one that may stand for theirs, the next of them leads. Each outcome goes
through the fenced writer and names the job that the text was computed for.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.errors import DatabaseError
from nightmill.jobs.request.reuse import Reuse
from nightmill.jobs.sql.claims import Claim, Outcome
from nightmill.jobs.sql.reusing import COMPLETE, Wanted
from nightmill.worker.engine.request import Request
from nightmill.worker.service.in_flight import InFlight, JobKey

log = logging.getLogger(__name__)

Identity = tuple[str, str, str | None]  # mode, key of the content, digest of the prompt
Made = tuple[Claim, list[Request]]


@dataclass(slots=True)
class _Leader:
    """A job that is computed, with those that wait for its answer."""

    claim: Claim
    requests: list[Request]
    twins: list[Made] = field(default_factory=list)
    outcome: Outcome | None = None  # once it has ended with an answer

    @property
    def key(self) -> JobKey:
        return self.claim.job_id, self.claim.attempt


class Reusing:
    """Finds claimed jobs that need not be computed. Safe to share between threads.

    find  looks for answers in SQL
    drop  forgets the requests of a job that is not computed
    put   has an outcome written
    """

    def __init__(
        self,
        find: Callable[[Sequence[Wanted]], list[Outcome]],
        in_flight: InFlight,
        drop: Callable[[JobKey], None],
        put: Callable[[Outcome], None],
    ) -> None:
        self._find = find
        self._in_flight = in_flight
        self._drop = drop
        self._put = put
        self._lock = threading.Lock()
        self._leaders: dict[Identity, _Leader] = {}
        self._identities: dict[JobKey, Identity] = {}  # of leaders and twins

    def to_compute(self, made: Sequence[Made]) -> list[Request]:
        """Return the requests that are to be computed; the other jobs get the answers of others."""
        requests: list[Request] = []
        leading: list[_Leader] = []
        ready: list[tuple[Claim, Outcome]] = []
        with self._lock:
            for claim, ours in made:
                identity = self._identity(claim)
                leader = None if identity is None else self._leaders.get(identity)
                if identity is None or (leader is not None and not _may_follow(claim, leader.claim)):
                    requests += ours
                elif leader is None:
                    leading.append(_Leader(claim, ours))
                    self._leaders[identity] = leading[-1]
                    self._identities[leading[-1].key] = identity
                elif leader.outcome is not None:
                    ready.append((claim, leader.outcome))
                else:
                    leader.twins.append((claim, ours))
                    self._identities[claim.job_id, claim.attempt] = identity
        for claim, outcome in ready:
            self._stands_for(outcome, claim)
        found = self._found([leader.claim for leader in leading])
        for leader in leading:
            if (there := found.get(leader.key)) is None:
                requests += leader.requests
            else:
                self._drop(leader.key)
                self.ended(there)
        if reused := len(found) + len(ready):
            log.info("%d answers were there before", reused)
        return requests

    def ended(self, outcome: Outcome) -> None:
        """Have the end of a job written, and its answer as that of those that follow it."""
        # Those that follow leave the leader first: the writer may be done with it before this goes on.
        twins = self._twins_of(outcome)
        self._put(outcome)
        for claim, answer in twins:
            self._stands_for(answer, claim)

    def _twins_of(self, outcome: Outcome) -> list[tuple[Claim, Outcome]]:
        """Return the jobs that get this answer, with it; none where it may not stand for theirs."""
        key = outcome.job_id, outcome.attempt
        with self._lock:
            identity = self._identities.get(key)
            leader = None if identity is None else self._leaders.get(identity)
            if leader is None or leader.key != key or leader.outcome is not None:
                return []
            if outcome.error is not None or outcome.stop_reason not in COMPLETE:
                return []
            twins, leader.twins = leader.twins, []
            if leader.claim.reuse == Reuse.ANY and outcome.seed is None:
                outcome = replace(outcome, seed=leader.claim.seed)
            leader.outcome = outcome
            return [(claim, outcome) for claim, _ in twins]

    def written(self, keys: Sequence[JobKey]) -> list[Request]:
        """Forget jobs whose ends are in SQL, where others find their answers.

        Where the answer of one that leads may not stand for those that follow, the next of them leads:
        returns its requests, to be computed. (Not earlier: what reads completions from the engine must not
        wait until it reads requests.)
        """
        requests: list[Request] = []
        with self._lock:
            for key in keys:
                identity = self._identities.pop(key, None)
                leader = None if identity is None else self._leaders.get(identity)
                if identity is None or leader is None or leader.key != key:
                    continue
                del self._leaders[identity]
                if leader.twins:
                    (claim, ours), *rest = leader.twins
                    self._leaders[identity] = _Leader(claim, ours, rest)
                    requests += ours
        return requests

    def withdraw(self, key: JobKey) -> bool:
        """Cancel a job that follows another; returns False if it does not."""
        with self._lock:
            identity = self._identities.get(key)
            leader = None if identity is None else self._leaders.get(identity)
            if leader is None:
                return False
            left = [one for one in leader.twins if (one[0].job_id, one[0].attempt) != key]
            if len(left) == len(leader.twins):
                return False
            leader.twins = left
        self._drop(key)
        self._put(Outcome(*key, StopReason.CANCELLED, "", 0, 0))
        return True

    def _identity(self, claim: Claim) -> Identity | None:
        """Name what an answer depends on; None for a job that goes on by itself."""
        if claim.reuse is None or claim.content_key is None or claim.saved is not None:
            return None
        digest = self._in_flight.prompt_digest((claim.job_id, claim.attempt))
        return claim.reuse, claim.content_key, digest

    def _found(self, claims: Sequence[Claim]) -> dict[JobKey, Outcome]:
        """Return the answers in SQL; without a database there are none."""
        if not claims:
            return {}
        wanted = [
            Wanted(
                claim.job_id,
                claim.attempt,
                str(claim.reuse),
                str(claim.content_key),
                self._in_flight.prompt_digest((claim.job_id, claim.attempt)),
                self._in_flight.markup((claim.job_id, claim.attempt)),
                several=claim.params.answers > 1,
                tells=claim.params.logprobs is not None or claim.params.tells_beside,
                embeds=claim.params.gives_numbers,
            )
            for claim in claims
        ]
        try:
            return {(one.job_id, one.attempt): one for one in self._find(wanted)}
        except DatabaseError as error:
            log.warning("%d answers are computed without a look for earlier ones: %s", len(claims), error)
        except Exception:  # a row of before that cannot be read must not keep others from being computed
            log.exception("%d answers are computed without a look for earlier ones", len(claims))
        return {}

    def _stands_for(self, outcome: Outcome, claim: Claim) -> None:
        """Have an answer of another job written as this one's."""
        key = claim.job_id, claim.attempt
        self._drop(key)
        saved = outcome.saved
        self._put(
            replace(
                outcome,
                job_id=claim.job_id,
                attempt=claim.attempt,
                cached_tokens=outcome.prompt_tokens,
                reused_from=outcome.reused_from or outcome.job_id,
                saved=saved and replace(saved, job_id=claim.job_id, attempt=claim.attempt),
            )
        )


def _may_follow(claim: Claim, leader: Claim) -> bool:
    """Return whether a job may wait for another: that is as urgent, and ends by the same time."""
    return claim.priority <= leader.priority and claim.deadline_at == leader.deadline_at
