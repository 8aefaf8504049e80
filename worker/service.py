"""A shard's way through a worker: claim, tokenise, generate, write; and how a worker stops.

Threads: Celery's task threads call `run_shard`; the engine's link receives what the engine's process
completes; the writer thread writes; the housekeeper's thread polls. What they share is in `InFlight`, behind
one lock.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from jobs.claims import Claim, Claims, Outcome
from jobs.contract import StopReason
from jobs.errors import DatabaseError, NightmillError, RunnerError
from jobs.partials import SavedTokens
from jobs.store import chunked
from worker.engine.request import Completion, Progress, Request
from worker.engine_link import EngineLink
from worker.resume import SAVE_GROUP, SAVE_TOKENS, fingerprint, tokens_to_resume
from worker.writer import ResultWriter

log = logging.getLogger(__name__)

_CLAIM_SETTLED = timedelta(seconds=30)
_CLAIM_PATIENCE = 35.0  # SQLite waits 30 s for its write lock

JobKey = tuple[str, int]  # job id, attempt

Tokenize = Callable[[Claim], tuple[int, ...]]


class InFlight:
    """The claimed jobs of this worker, and how many more it may claim.

    Claiming only what the engine can soon take leaves the rest of a queue to other workers. Jobs that were
    claimed when it was too late go to `hand_back`.
    """

    def __init__(
        self, capacity: int, hand_back: Callable[[Sequence[JobKey]], None] = lambda keys: None
    ) -> None:
        self.capacity = capacity
        self._hand_back = hand_back
        self._changed = threading.Condition()
        self._reserved = 0
        self._jobs: dict[JobKey, str] = {}  # with the fingerprint of its prompt, once that is known
        self._closed = False
        self._ended = False

    def reserve(self, wanted: int) -> int:
        """Wait for room and take up to `wanted` places; 0 once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.room > 0)
            if self._closed:
                return 0
            taken = min(wanted, self.room)
            self._reserved += taken
            return taken

    def fill(self, reserved: int, claims: Sequence[Claim]) -> bool:
        """Turn reserved places into claimed jobs; the places of jobs that could not be claimed are free.

        False where it is too late: then the jobs have been handed back.
        """
        keys = [(claim.job_id, claim.attempt) for claim in claims]
        with self._changed:
            ours = not self._ended
            if ours:
                self._jobs.update(dict.fromkeys(keys, ""))
        try:
            if not ours:
                self._hand_back(keys)
        finally:
            with self._changed:
                self._reserved -= reserved
                self._changed.notify_all()
        return ours

    def mark(self, key: JobKey, fingerprint: str) -> None:
        """Note what saved tokens of a job depend on."""
        with self._changed:
            if key in self._jobs:
                self._jobs[key] = fingerprint

    def fingerprint(self, key: JobKey) -> str:
        """What `mark` noted; empty where the job is not in flight."""
        with self._changed:
            return self._jobs.get(key, "")

    def remove(self, keys: Sequence[JobKey]) -> None:
        """These jobs are not this worker's any more."""
        with self._changed:
            for key in keys:
                self._jobs.pop(key, None)
            self._changed.notify_all()

    def wait_for_end(self, keys: Sequence[JobKey]) -> None:
        """Return when none of `keys` is in flight."""
        with self._changed:
            self._changed.wait_for(lambda: not any(key in self._jobs for key in keys))

    def close(self) -> None:
        """Let nobody reserve any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def end(self) -> list[JobKey]:
        """Take no claimed job any more; returns those that are in flight for good."""
        with self._changed:
            self._closed = self._ended = True
            self._changed.notify_all()
            return list(self._jobs)

    def wait_for_claims(self, seconds: float) -> bool:
        """Return when no claim is under way any more; False where one still is after `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._reserved == 0, seconds)

    @property
    def idle(self) -> bool:
        """True where no job is in flight and no claim under way."""
        with self._changed:
            return self._reserved == 0 and not self._jobs

    def keys(self) -> list[JobKey]:
        """The jobs now in flight."""
        with self._changed:
            return list(self._jobs)

    @property
    def room(self) -> int:
        """Places that are neither filled nor reserved."""
        return self.capacity - self._reserved - len(self._jobs)


class Service:
    """Runs shards of jobs on one engine, which it starts and stops; raises RunnerError where it does not.

    `model_digest` tells its model from others of the same name.
    """

    def __init__(
        self,
        claims: Claims,
        engine: EngineLink,
        tokenize: Tokenize,
        *,
        model_digest: str,
        capacity: int,
        drain_seconds: float,
        on_fatal: Callable[[str], None],
        while_loading: Callable[[str | None], None] = lambda news: None,
    ) -> None:
        self.claims = claims
        self.in_flight = InFlight(capacity, self._hand_back)
        self.drain_seconds = drain_seconds
        self.last_shard_at = time.monotonic()
        self._tokenize = tokenize
        self._model_digest = model_digest
        self._on_fatal = on_fatal
        self._drain_until: float | None = None
        self._cancels_sent: set[JobKey] = set()
        self._cancelling = threading.Lock()
        self._writer = ResultWriter(claims.finish, self._forget)
        self.engine = engine
        engine.start(self._on_completion, self._on_engine_failure, while_loading)

    # -- shards ----------------------------------------------------------------------------------

    def run_shard(self, job_ids: Sequence[str]) -> None:
        """Claim and run what can be claimed of a shard; returns when every job of it has ended.

        A draining worker leaves the rest of a shard queued, to be announced again.
        """
        self.last_shard_at = time.monotonic()
        ours: list[JobKey] = []
        left = list(job_ids)
        while left:
            places = self.in_flight.reserve(len(left))
            if places == 0:
                self._leave_queued(left)
                break
            taken, left = left[:places], left[places:]
            ours += self._start(taken)
        self.in_flight.wait_for_end(ours)

    def _start(self, job_ids: Sequence[str]) -> list[JobKey]:
        claims: list[Claim] = []
        try:
            claims = self.claims.claim(job_ids)
        except DatabaseError as error:
            log.warning("%d jobs stay queued, to be announced again: %s", len(job_ids), error)
        finally:
            ours = self.in_flight.fill(len(job_ids), claims)
        if not ours:
            return []
        resumed = [count for claim in claims if (count := self._submit(claim))]
        if resumed:
            log.info("%d jobs go on from %d tokens that were saved", len(resumed), sum(resumed))
        return [(claim.job_id, claim.attempt) for claim in claims]

    def _submit(self, claim: Claim) -> int:
        """Give a job to the engine; returns how many tokens it goes on from."""
        try:
            prompt_ids = self._tokenize(claim)
        except NightmillError as error:
            self._writer.put(
                Outcome(claim.job_id, claim.attempt, StopReason.ERROR, "", 0, 0, error=str(error))
            )
            return 0
        mark = fingerprint(self._model_digest, self.engine.arithmetic, prompt_ids)
        self.in_flight.mark((claim.job_id, claim.attempt), mark)
        generated_ids = tokens_to_resume(claim.saved, mark)
        deadline = None
        if claim.deadline_at is not None:  # the engine counts on this host's clock, the row on the database's
            deadline = time.time() + (claim.deadline_at - self.claims.database.now()).total_seconds()
        assert claim.params.seed is not None
        self.engine.submit(
            Request(
                job_id=claim.job_id,
                attempt=claim.attempt,
                prompt_ids=prompt_ids,
                params=claim.params,
                seed=claim.params.seed,
                deadline=deadline,
                priority=claim.priority,
                generated_ids=generated_ids,
            )
        )
        with self._cancelling:  # one that was sent before the engine knew the job had no effect
            self._cancels_sent.discard((claim.job_id, claim.attempt))
        return len(generated_ids)

    def _leave_queued(self, job_ids: Sequence[str]) -> None:
        try:
            self.claims.leave_queued(job_ids)
        except DatabaseError as error:  # the sweep finds them all the same, once their message is old
            log.warning("%d jobs stay queued: %s", len(job_ids), error)

    # -- what the engine says --------------------------------------------------------------------

    def _on_completion(self, completion: Completion) -> None:
        self._writer.put(
            Outcome(
                job_id=completion.job_id,
                attempt=completion.attempt,
                stop_reason=completion.stop_reason,
                text=completion.text,
                prompt_tokens=completion.prompt_tokens,
                completion_tokens=completion.completion_tokens,
                error=completion.error,
            )
        )

    def _on_engine_failure(self, error: RunnerError) -> None:
        self.fail(f"the engine failed: {error}")

    def fail(self, reason: str) -> None:
        """This worker is of no use any more: give its jobs to others and end the process."""
        self.in_flight.close()
        keys = self.in_flight.keys()
        try:
            self.claims.give_up(keys, reason)
        except DatabaseError as database_error:
            log.error("%d jobs wait to be rescued by another worker: %s", len(keys), database_error)
        self.in_flight.remove(keys)
        self._on_fatal(reason)

    def _forget(self, outcomes: Sequence[Outcome]) -> None:
        self.in_flight.remove([(outcome.job_id, outcome.attempt) for outcome in outcomes])

    # -- what the housekeeper asks for -----------------------------------------------------------

    def poll_cancellations(self) -> None:
        """Stop the running jobs that somebody cancelled: one query for all, one command for each."""
        if self.in_flight.keys():
            asked = set(self.claims.cancel_requests())
            with self._cancelling:
                fresh = asked - self._cancels_sent
                self._cancels_sent = asked
            for key in fresh:
                if not self.engine.cancel(key[0]):
                    with self._cancelling:
                        self._cancels_sent.discard(key)

    def save_partials(self) -> None:
        """Save the tokens of the jobs that have grown, so that they are not drawn again if this worker dies.

        Raises DatabaseError. The engine is asked for few jobs at a time, so that its next step is not late;
        writing is the caller's time.
        """
        for group in chunked(self.in_flight.keys(), SAVE_GROUP):
            self._save(self.engine.progress([job_id for job_id, _ in group], SAVE_TOKENS))

    def _save(self, reports: Sequence[Progress]) -> None:
        saved = [
            SavedTokens(report.job_id, report.attempt, mark, report.token_ids)
            for report in reports
            if report.token_ids and (mark := self.in_flight.fingerprint((report.job_id, report.attempt)))
        ]
        if saved:
            self.claims.save(saved)

    def reconcile(self) -> None:
        """Bring this worker and the database to one opinion on which jobs are this worker's.

        Jobs that were taken from us are dropped. Jobs that we hold without knowing it (the claim's answer
        got lost on the way) are handed back.
        """
        before = set(self.in_flight.keys())
        running = self.claims.running()
        after = set(self.in_flight.keys())
        for job_id, _attempt in (before & after) - running.keys():
            self.engine.cancel(job_id)  # its completion, if it makes one, is fenced off
        long_ago = self.claims.database.now() - _CLAIM_SETTLED
        strays = [key for key, since in running.items() if key not in after and since < long_ago]
        if strays:
            log.warning("%d claims that this worker lost sight of are handed back", len(strays))
            self.claims.hand_back(strays)

    # -- the end ---------------------------------------------------------------------------------

    def begin_drain(self, *, at_once: bool = False) -> None:
        """Take no more jobs; `at_once`: nor go on with those in hand. Only sets a field: signals call it."""
        if at_once:
            self._drain_until = time.monotonic()
        elif self._drain_until is None:
            self._drain_until = time.monotonic() + self.drain_seconds

    @property
    def draining(self) -> bool:
        """True once the worker is to stop."""
        return self._drain_until is not None

    def drain(self) -> None:
        """Finish what can be finished in time, hand the rest back with no attempt lost."""
        self.begin_drain()
        assert self._drain_until is not None
        self.in_flight.close()
        while not self.in_flight.idle and self.engine.alive and time.monotonic() < self._drain_until:
            time.sleep(0.02)
        unfinished = self.engine.abandon()
        self._writer.close()  # what completed before is written first
        left = self.in_flight.end()  # a claim that is still under way is handed back by who made it
        if left:
            try:
                self._save(unfinished)
            except DatabaseError as error:
                log.warning("the tokens of %d jobs were not saved: %s", len(left), error)
        self._hand_back(left)
        self.in_flight.remove(left)
        if not self.in_flight.wait_for_claims(_CLAIM_PATIENCE):
            log.error("a claim is still under way; its jobs wait to be rescued by another worker")

    def _hand_back(self, keys: Sequence[JobKey]) -> None:
        if not keys:
            return
        try:
            returned = self.claims.hand_back(keys)
            log.info("%d unfinished jobs were handed back to the queue", len(returned))
        except DatabaseError as error:
            log.error("%d jobs wait to be rescued by another worker: %s", len(keys), error)

    def close(self) -> None:
        """Stop the engine; call `drain` first."""
        self.engine.stop()
