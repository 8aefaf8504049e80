"""The duties of a worker beside generating: heartbeat, cancellations, saving, rescue, sweep, followers.

Every live worker sweeps for all: it takes jobs from silent workers, ends jobs past their deadline, and
sends messages for queued jobs that have none. Sweeps of several workers do not disturb one another.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial

from nightmill.jobs.base.contract import WorkerState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.base.shares import QUEUE_MESSAGES
from nightmill.jobs.base.silence import Silence
from nightmill.jobs.errors import BrokerError, DatabaseError
from nightmill.jobs.messages.broker import Broker
from nightmill.jobs.request.fields import INTERACTIVE
from nightmill.jobs.sql.activity import ActivityStore
from nightmill.jobs.sql.claims import Claims
from nightmill.jobs.sql.flows import Announcement, Flows
from nightmill.jobs.sql.sweep import Sweep
from nightmill.worker.runners.gpu.device.nvml import GpuProbe
from nightmill.worker.service.activity import LOOK_SECONDS as ACTIVITY_SECONDS
from nightmill.worker.service.activity import Activity
from nightmill.worker.service.heart import Heart
from nightmill.worker.service.load import Load
from nightmill.worker.service.shards import Service
from nightmill.worker.service.suspects import LOOK_SECONDS, SuspectsTurn
from nightmill.worker.watched import Rounds, end_threads, watched_thread

log = logging.getLogger(__name__)

CANCEL_POLL_SECONDS = 0.2
FOLLOWERS_SECONDS = 0.2  # from the end of a job to the message of those that follow it
REST_SECONDS = 1.0
TOP_UP_SECONDS = 0.5  # after a claim, if much of a queue is gone; it holds seconds of work
LEAST_TOP_UP_SECONDS = 2.0  # after a claim, however little is gone
TOP_UP_PART = 8  # of a queue: if so much is gone, that is much
REPORT_SECONDS = 10.0
SWEEP_LIMIT = 4096  # jobs announced in one transaction
SWEEP_TRANSACTIONS = 16  # in one round, of each kind; the next round sends more
END_SECONDS = 20.0  # for all chores together, when the worker ends
ROUND_SECONDS = 900.0  # a chore that is at it for longer hangs, where nobody thought that it could
DEAF_SECONDS = 120.0  # an idle worker that hears nothing for so long, while messages wait, is broken


class TopUpRule:
    """Says when a worker that takes rows from queues looks at the flows again.

    A look costs as much as ten rows or more, so few rows are not looked after: with 1,000 rows a second it
    comes once a second. Others may take rows, too: eight workers do not empty a queue between their looks.
    """

    def __init__(self, shard_size: int) -> None:
        self._many = max(1, QUEUE_MESSAGES * shard_size // TOP_UP_PART)
        self._ended, self._looked_at = 0, float("-inf")

    def due(self, ended: int, now: float) -> bool:
        """Return whether to look, after `ended` rows in all, at a time in seconds; if so, it is done."""
        if ended - self._ended < self._many and now - self._looked_at < LEAST_TOP_UP_SECONDS:
            return False
        self._ended, self._looked_at = ended, now
        return True


class Housekeeper:
    """Ten chores, each on a thread of its own, so that a broker that hangs delays no cancellation.

    Database and broker failures are logged once and tried again in the next round. `rest` looks whether the
    worker is to sleep (`resting.py`).
    """

    def __init__(
        self,
        service: Service,
        claims: Claims,
        heart: Heart,
        broker: Broker,
        settings: Settings,
        model: str,
        probe: GpuProbe | None = None,
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        self._service = service
        self._claims = claims
        self._heart = heart
        self._sweep = Sweep(claims.database)
        self._broker = broker
        self._settings = settings
        self._hearing = {
            queue: Silence(DEAF_SECONDS, 2 * settings.heartbeat_seconds) for queue in (None, model)
        }
        self._last_shard_at = service.last_shard_at
        self._suspects = SuspectsTurn(
            claims, service, (None, model), settings.stale_seconds, self._announce_unsent
        )
        self._models = (None, model)
        self._flows = Flows(claims.database, settings.weights_of_owners)
        self._topping_up = threading.Lock()
        self._topped_up_after = service.last_shard_at
        self._top_up_rule = TopUpRule(settings.shard_size)
        probe = probe or GpuProbe(None)
        self._load = Load(service, probe, settings)
        self._activity = Activity(ActivityStore(claims.database), claims.worker_id, model, service)
        self._closing = threading.Event()
        self._has_beaten = threading.Event()
        self._rounds = Rounds(ROUND_SECONDS, self._closing, service.fail)
        self._reported = (time.monotonic(), 0)
        beat = settings.heartbeat_seconds
        chores = [
            (CANCEL_POLL_SECONDS, service.poll_cancellations),
            (settings.save_seconds, service.save_partials),
            (beat, probe.refresh),  # apart from the heartbeat, which no driver may hold up
            (beat, self.beat),
            (beat, self.sweep),
            (FOLLOWERS_SECONDS, self._announce_followers),
            (TOP_UP_SECONDS, self._top_up_after_claims),
            (ACTIVITY_SECONDS, self._activity.look),
            (LOOK_SECONDS, self._look_for_suspects),
            (REST_SECONDS, rest),
        ]
        self._threads = [
            watched_thread("housekeeper", partial(self._repeat, *chore), service.fail) for chore in chores
        ]

    def start(self) -> None:
        """Begin; the first heartbeat and the first sweep are at once.

        Suspects come before any other job, and the heartbeat before them: whoever sees a job of this worker
        end sees the worker as ready.
        """
        self._service.in_flight.pause()  # ends with the first look for suspects
        for thread in self._threads:
            thread.start()
        self._rounds.start()

    def close(self) -> None:
        """End the threads after what they are doing, in END_SECONDS at most."""
        self._closing.set()
        end_threads(self._threads, END_SECONDS)
        with suppress(DatabaseError):  # the last minute is not worth waiting for a database
            self._activity.write()

    def _repeat(self, seconds: float, chore: Callable[[], None]) -> None:
        complaint = ""
        while True:
            try:
                # A group of suspects may take hours to run; the threads that run it have limits of their own.
                with nullcontext() if chore == self._look_for_suspects else self._rounds.one(chore.__name__):
                    chore()
                complaint = ""
            except (DatabaseError, BrokerError) as error:
                if str(error) != complaint:  # once, not in every round
                    complaint = str(error)
                    log.warning("%s", error)
            if self._closing.wait(seconds):
                return

    def beat(self) -> None:
        """Say that this worker lives, and see which jobs are still its own."""
        state = WorkerState.DRAINING if self._service.draining else WorkerState.READY
        try:
            known = self._heart.beat(state, stats=self._load.read())
        finally:
            self._has_beaten.set()  # one that failed, too: a database that was away keeps no job waiting
        if not known:
            log.warning("this worker had been given up for dead; its jobs went to others")
        self._service.reconcile()
        self._report()

    def _look_for_suspects(self) -> None:
        if self._has_beaten.wait(LOOK_SECONDS):
            self._suspects.look()

    def sweep(self) -> None:
        """Rescue, expire, send: what any live worker does for all jobs."""
        if self._heart.steady:
            stale = timedelta(seconds=self._settings.stale_seconds)
            rescued = self._sweep.rescue(stale, rescuer=self._claims.worker_id)
            if rescued:
                log.warning("%d jobs of workers that fell silent are queued again", len(rescued))
        expired = self._sweep.expire()
        if expired:
            log.info("%d queued jobs passed their deadline", expired)
        self._sweep.settle_followers()
        if stopped := self._sweep.end_stopped():
            log.info("%d queued jobs ended, as a limit stopped their batch", stopped)
        try:
            self._announce_unsent()
            self._look_into_queues()
        except BrokerError:  # nobody hears anything from a broker that is away
            for silence in self._hearing.values():
                silence.broken()
            raise

    def _look_into_queues(self) -> None:
        """Send what the queues have lost, and see whether this worker still hears of what is in them."""
        service = self._service
        heard, self._last_shard_at = service.last_shard_at != self._last_shard_at, service.last_shard_at
        busy = heard or service.draining or service.in_flight.yields or not service.in_flight.idle
        age = timedelta(seconds=self._settings.resend_seconds)
        for model, silence in self._hearing.items():
            heads = self._broker.heads(model)
            self._announce(lambda: self._sweep.unanswered(model, age, SWEEP_LIMIT, heads))  # noqa: B023
            if busy or not heads:
                silence.broken()
            elif silence.too_long():
                silence.broken()  # once said is enough
                service.fail(
                    f"messages wait in the queue of {model or 'any model'}, and none reached this idle "
                    f"worker for {silence.limit:.0f} s: its broker connection is dead"
                )

    def _report(self) -> None:
        """Say in the log how it goes, while there is anything to say."""
        stats = self._service.engine.stats
        moment, tokens = self._reported
        seconds = time.monotonic() - moment
        if seconds < REPORT_SECONDS or stats.generated_tokens == tokens:
            return
        self._reported = (time.monotonic(), stats.generated_tokens)
        log.info(
            "%d sequences running, %d waiting; %.0f tokens/s; %d of %d KV pages free",
            stats.running,
            stats.waiting,
            (stats.generated_tokens - tokens) / seconds,
            stats.free_pages,
            stats.pages,
        )

    def _announce_followers(self) -> None:
        """Send messages for the followers of what this worker has finished."""
        due = self._claims.followers_due
        if due.is_set():
            due.clear()
            self._announce_unsent()

    def _announce_unsent(self) -> None:
        """Send what has no message: interactive jobs of all models, others by the shares of their flows."""
        self._announce(lambda: self._sweep.unsent(SWEEP_LIMIT, (INTERACTIVE,)))
        self._top_up()

    def _top_up_after_claims(self) -> None:
        """Fill the queues up again soon after this worker took something from them."""
        if self._topped_up_after == self._service.last_shard_at or not self._has_beaten.is_set():
            return
        if self._top_up_rule.due(self._service.tally.written(), time.monotonic()):
            self._topped_up_after = self._service.last_shard_at
            self._top_up()

    def _top_up(self) -> None:
        if self._topping_up.acquire(blocking=False):  # otherwise another thread is at it
            try:
                self._send(self._flows.top_up(self._models, self._settings.shard_size))
            finally:
                self._topping_up.release()

    def _announce(self, take: Callable[[], list[Announcement]]) -> None:
        """Send messages for what `take` takes, until that is all."""
        for _ in range(SWEEP_TRANSACTIONS):
            announcements = take()
            self._send(announcements)
            if sum(len(item.job_ids) for item in announcements) < SWEEP_LIMIT:
                return

    def _send(self, announcements: list[Announcement]) -> None:
        for index, item in enumerate(announcements):
            try:
                self._broker.announce(item.job_ids, item.model, item.priority)
            except BrokerError:
                for unsent in announcements[index:]:
                    self._claims.leave_queued(unsent.job_ids)
                raise
