"""A shard's way through a worker: claim, tokenise, generate, write; and how a worker stops.

Threads: Celery's task threads call `run_shard`; the engine's link receives what the engine's process
completes; the writer thread writes; the publisher's sends texts that are followed; the housekeeper's polls.
What they share is in `InFlight`, behind one lock.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.errors import (
    DatabaseError,
    DatabaseRefusedError,
    InvalidRequestError,
    NightmillError,
    RunnerError,
)
from nightmill.jobs.sql.claims import Claim, Claims, Outcome
from nightmill.jobs.sql.jobs import chunked
from nightmill.jobs.sql.partials import SavedTokens
from nightmill.jobs.sql.reusing import find
from nightmill.jobs.sql.settling import AHEAD
from nightmill.jobs.streams.redis import Followers
from nightmill.worker.engine.request import Completion, DrawnTokens, Request
from nightmill.worker.link.link import EngineLink
from nightmill.worker.service.answering import Answering, costs_of, key_of
from nightmill.worker.service.in_flight import InFlight, JobKey
from nightmill.worker.service.prompting import Prompting
from nightmill.worker.service.publishing import Publisher
from nightmill.worker.service.requesting import Requesting
from nightmill.worker.service.resume import SAVE_GROUP, SAVE_TOKENS
from nightmill.worker.service.reusing import Reusing
from nightmill.worker.service.service_options import ServiceOptions
from nightmill.worker.service.tally import Tally
from nightmill.worker.service.writer import ResultWriter
from nightmill.worker.watched import describe

log = logging.getLogger(__name__)

CLAIMS_AT_ONCE = 4
"""Shards whose claims are under way. When a night begins dozens arrive together; more at once would each wait
longer for the interpreter, for SQLite's one writer, and for connections beyond the pool's."""
_CLAIM_SETTLED = timedelta(seconds=30)
_CLAIM_PATIENCE = 35.0  # SQLite waits 30 s for its write lock


class Service:
    """Runs shards of jobs on one engine, which it starts and stops; raises RunnerError where it does not."""

    def __init__(
        self,
        claims: Claims,
        engine: EngineLink,
        prompting: Prompting,
        options: ServiceOptions,
        *,
        followers: Followers,
        on_fatal: Callable[[str], None],
        while_loading: Callable[[str | None], None] = lambda news: None,
    ) -> None:
        self.claims = claims
        self.in_flight = InFlight(options.capacity, self._hand_back, reserved_slots=options.reserved_slots)
        self._answering = Answering(self.in_flight, prompting.spell_token)
        self._requesting = Requesting(
            self.in_flight,
            self._answering,
            prompting,
            arithmetic=lambda: engine.arithmetic,
            now=claims.database.now,
        )
        self.drain_seconds = options.drain_seconds
        self.last_shard_at = time.monotonic()
        self._on_fatal = on_fatal
        self._drain_until: float | None = None
        self._cancels_sent: set[JobKey] = set()
        self._cancelling = threading.Lock()
        self._claiming = threading.Semaphore(CLAIMS_AT_ONCE)
        self.tally = Tally()
        self._writer = ResultWriter(
            self.tally.writes.timed(claims.finish), self._forget, self._cannot_be_written, self.fail
        )
        self._reusing = Reusing(
            lambda wanted: find(claims.database, wanted, engine.arithmetic),
            self.in_flight, self._answering.drop, self._to_be_written,
        )  # fmt: skip
        self._publisher = Publisher(
            followers, self.in_flight, engine.follow, self.fail, prompting.spell_token
        )
        self.engine = engine
        engine.start(
            self._on_completion, self._on_engine_failure, while_loading, on_deltas=self._publisher.add_deltas
        )
        self._publisher.start()

    # -- shards ----------------------------------------------------------------------------------

    def run_shard(self, job_ids: Sequence[str]) -> None:
        """Claim and run what can be claimed of a shard; returns when every job of it has ended.

        A draining worker leaves the rest of a shard queued, to be announced again. Never raises: Celery would
        drop the message, and leave the jobs claimed.
        """
        self.last_shard_at = time.monotonic()
        try:
            self.in_flight.wait_for_end(self.take(job_ids))
        except Exception as error:
            log.critical("a shard could not be run", exc_info=True)
            self.fail(f"a shard could not be run: {describe(error)}")

    def take(self, job_ids: Sequence[str], *, interactive: bool = False) -> list[JobKey]:
        """Claim and begin what can be claimed of these jobs, as there is room; returns which those are."""
        ours: list[JobKey] = []
        left = dict.fromkeys(job_ids, 1)  # with the slots that each needs, as far as that is known
        while left:
            slots = self.in_flight.reserve(sum(left.values()), interactive=interactive)
            if slots == 0:
                self._leave_queued(list(left))
                break
            ids = list(left)
            claimed, waiting = self._start(ids[:slots], slots, interactive=interactive)
            ours += claimed
            left = waiting | {job_id: left[job_id] for job_id in ids[slots:]}
        return ours

    def _start(
        self, job_ids: Sequence[str], slots: int, *, interactive: bool = False
    ) -> tuple[list[JobKey], dict[str, int]]:
        """Claim and begin what can be claimed of these jobs, and has room in the reserved slots.

        Returns what was begun, and the slots that each of the jobs needs for which there was no room.
        """
        claims: list[Claim] = []
        left: dict[str, int] = {}
        late = False
        try:
            with nullcontext() if interactive else self._claiming:
                late = self.in_flight.closed
                if not late:
                    claims, left = self._claim(job_ids, slots)
        finally:
            ours = self.in_flight.fill(slots, claims, interactive=interactive)
        if late:
            self._leave_queued(job_ids)
        return self.begin(claims) if ours else [], left

    def _claim(self, job_ids: Sequence[str], slots: int) -> tuple[list[Claim], dict[str, int]]:
        """Claim a shard. Where a row of it makes that fail, its halves, until this row is alone and fails."""
        claim = self.tally.claims.timed(self.claims.claim_within)
        try:
            return claim(job_ids, slots, self.in_flight.most)
        except Exception as error:
            if isinstance(error, DatabaseError) and not isinstance(error, DatabaseRefusedError):
                log.warning("%d jobs stay queued, to be announced again: %s", len(job_ids), error)
                return [], {}
            log.exception("%d jobs could not be claimed", len(job_ids))
            fault = describe(error)
        if len(job_ids) > 1:
            middle = len(job_ids) // 2
            claims, left = self._claim(job_ids[:middle], slots)
            others = self._claim(job_ids[middle:], slots)
            return claims + others[0], left | others[1]
        self._refuse(job_ids[0], f"the job could not be claimed: {fault}")
        return [], {}

    def begin(self, claims: Sequence[Claim]) -> list[JobKey]:
        """Tokenise claimed jobs and give them to the engine; one that cannot be fails alone."""
        prompts = iter(self._requesting.prompts([claim for claim in claims if claim.unreadable is None]))
        made: list[tuple[Claim, list[Request]]] = []
        for claim in claims:
            key = claim.job_id, claim.attempt
            prompt = next(prompts) if claim.unreadable is None else NightmillError(claim.unreadable)
            if isinstance(prompt, NightmillError):
                self._fail_job(key, str(prompt))
                continue
            try:
                made.append((claim, self._requesting.requests(claim, prompt)))
            except InvalidRequestError as error:
                self._fail_job(key, str(error))
            except Exception as error:
                log.exception("job %s could not be submitted", claim.job_id)
                self._fail_job(key, _not_submitted(error))
        if requests := self._reusing.to_compute(made):
            self._submit(requests)
            self._publisher.began(interactive=any(request.interactive for request in requests))
        if resumed := [len(request.generated_ids) for request in requests if request.generated_ids]:
            log.info("%d answers go on from %d tokens that were saved", len(resumed), sum(resumed))
        return [(claim.job_id, claim.attempt) for claim in claims]

    def _submit(self, requests: Sequence[Request]) -> None:
        """Give requests to the engine together; where one makes that fail, each by itself."""
        try:
            self.engine.submit(requests)
        except Exception as error:
            log.exception("%d jobs could not be submitted", len(requests))
            if len(requests) > 1:
                for request in requests:
                    self._submit([request])
            else:
                self._fail_job(key_of(requests[0]), _not_submitted(error))
            return
        with self._cancelling:  # one that was sent before the engine knew the job had no effect
            if self._cancels_sent:
                self._cancels_sent.difference_update(map(key_of, requests))

    def _fail_job(self, key: JobKey, error: str) -> None:
        self._answering.drop(key)
        self._reusing.ended(Outcome(*key, StopReason.ERROR, "", 0, 0, error=error))

    def _refuse(self, job_id: str, reason: str) -> None:
        try:
            self.claims.refuse(job_id, reason)
        except DatabaseError as error:  # its message comes again
            log.warning("job %s stays queued: %s", job_id, error)

    def _cannot_be_written(self, outcome: Outcome, reason: str) -> None:
        """Not even the failure of this job can be written: charge it as if it had killed a worker, alone."""
        try:
            self.claims.give_up([(outcome.job_id, outcome.attempt)], reason)
        except DatabaseError as error:  # it is handed back once it is known that nobody runs it
            log.error("job %s stays as it is for now: %s", outcome.job_id, error)

    def _leave_queued(self, job_ids: Sequence[str]) -> None:
        try:
            self.claims.leave_queued(job_ids)
        except DatabaseError as error:  # the sweep finds them all the same, once their message is old
            log.warning("%d jobs stay queued: %s", len(job_ids), error)

    # -- what the engine says --------------------------------------------------------------------

    def _on_completion(self, completion: Completion) -> None:
        outcome = self._answering.completed(completion, str(self.engine.arithmetic))
        if outcome is not None:
            self._reusing.ended(outcome)
        else:
            self._publisher.answered(completion.job_id, completion.text, completion.logprobs)

    def _to_be_written(self, outcome: Outcome) -> None:
        self.in_flight.answered((outcome.job_id, outcome.attempt))
        self._writer.put(outcome)

    def _on_engine_failure(self, error: RunnerError) -> None:
        self.fail(f"the engine failed: {error}")

    def fail(self, reason: str) -> None:
        """This worker is of no use any more: give its jobs to others and end the process. Never raises."""
        self.in_flight.close()
        keys = self.in_flight.keys()
        try:
            self.claims.give_up(keys, reason)
        except Exception as error:
            expected = isinstance(error, DatabaseError)
            log.error("%d jobs wait for another worker's rescue: %s", len(keys), error, exc_info=not expected)
        self.in_flight.remove(keys)
        self._on_fatal(reason)

    def _forget(self, outcomes: Sequence[Outcome]) -> None:
        self.last_shard_at = time.monotonic()  # it was not deaf, but busy
        self.tally.ended(outcome.stop_reason for outcome in outcomes)
        self._publisher.ended([outcome.job_id for outcome in outcomes])
        keys = [(outcome.job_id, outcome.attempt) for outcome in outcomes]
        left = self._reusing.written(keys)
        self.in_flight.remove(keys)
        if left:
            self._submit(left)

    # -- what the housekeeper asks for -----------------------------------------------------------

    def poll_cancellations(self) -> None:
        """Stop the running jobs that somebody cancelled: one query for all, one command for each."""
        if self.in_flight.keys():
            asked = set(self.claims.cancel_requests())
            with self._cancelling:
                fresh = asked - self._cancels_sent
                self._cancels_sent = asked
            for key in fresh:
                if not self._cancel(key):
                    with self._cancelling:
                        self._cancels_sent.discard(key)

    def _cancel(self, key: JobKey) -> bool:
        if self._reusing.withdraw(key):
            return True
        return all(self.engine.cancel(name) for name in self._answering.names([key]))

    def save_partials(self) -> None:
        """Save the tokens of the jobs that have grown, so that they are not drawn again if this worker dies.

        Raises DatabaseError. The engine is asked for few jobs at a time, so that its next step is not late;
        writing is the caller's time.
        """
        for group in chunked(self._answering.names(self.in_flight.keys()), SAVE_GROUP):
            self._save(self.engine.progress(group, SAVE_TOKENS))

    def _save(self, reports: Sequence[DrawnTokens]) -> None:
        saved = [
            SavedTokens(report.job_id, report.attempt, mark, report.token_ids)
            for report in self._answering.gather(reports)
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
        for key in (before & after) - running.keys():
            self._cancel(key)  # its completion, if it makes one, is fenced off
        now = self.claims.database.now()
        # One that we knew before has ended since. Of a claim that lies ahead, the clock was set back since.
        strays = [
            key
            for key, since in running.items()
            if key not in before | after and not now - _CLAIM_SETTLED <= since <= now + AHEAD
        ]
        if strays:
            log.warning("%d claims that this worker lost sight of are handed back", len(strays))
            self.claims.hand_back(strays)

    def set_aside(self) -> dict[JobKey, int]:
        """Queue all jobs again that the engine computes, with their tokens; returns how many each had.

        A job that has completed, or not reached the engine yet, stays. `reconcile` repeats what SQL missed.
        """
        unfinished = self.engine.abandon(self.engine.hang_seconds)
        if unfinished is None:
            if self.engine.alive:  # it may drop the jobs at any time, and would never complete them
                self.fail("the engine did not answer when its jobs were to be set aside")
            return {}
        self._save_last(unfinished)
        tokens = self._answering.dropped(unfinished)
        self._hand_back(list(tokens), unfinished)
        self.in_flight.remove(list(tokens))
        return tokens

    def _save_last(self, unfinished: Sequence[DrawnTokens]) -> None:
        try:
            self._save(unfinished)
        except DatabaseError as error:
            log.warning("the tokens of %d texts were not saved: %s", len(unfinished), error)

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
        unfinished = self.engine.abandon() or []
        self._writer.close()  # what completed before is written first
        self._publisher.close()
        left = self.in_flight.end()  # a claim that is still under way is handed back by who made it
        if left:
            self._save_last(unfinished)
        self._hand_back(left, unfinished)
        self.in_flight.remove(left)
        if not self.in_flight.wait_for_claims(_CLAIM_PATIENCE):
            log.error("a claim is still under way; its jobs wait to be rescued by another worker")

    def _hand_back(self, keys: Sequence[JobKey], unfinished: Sequence[DrawnTokens] = ()) -> None:
        if not keys:
            return
        try:
            returned = self.claims.hand_back(keys, costs_of(unfinished))
            log.info("%d unfinished jobs were handed back to the queue", len(returned))
        except DatabaseError as error:
            log.error("%d jobs wait to be rescued by another worker: %s", len(keys), error)

    def close(self) -> None:
        """Stop the engine; call `drain` first."""
        self.engine.stop()


def _not_submitted(error: Exception) -> str:
    return f"the job could not be submitted to the engine: {describe(error)}"
