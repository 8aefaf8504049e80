"""Celery's entry point: `celery -A nightmill.worker.app worker --pool=threads --model FILE`.

`nightmill worker` starts exactly this. A bootstep of the *worker* builds the engine before the consumer
takes its first message (bootsteps of the consumer would run again at every reconnect).
"""

import atexit
import gc
import logging
import os
import signal
import socket
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, NoReturn

from celery import Celery, bootsteps, signals
from celery.concurrency.thread import TaskPool

from nightmill.jobs.base.hours import Hours
from nightmill.jobs.base.last_resort import END_SECONDS, LastResort
from nightmill.jobs.base.logs import fit
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.batches.batches import Batches
from nightmill.jobs.commands.terminal import echo
from nightmill.jobs.errors import NightmillError
from nightmill.jobs.messages.announcing import Announcer
from nightmill.jobs.messages.broker import Broker, make_app, queue_name, resolve_broker_url, set_broker
from nightmill.jobs.reply.job import UNTIL
from nightmill.jobs.sql.activity import ActivityStore
from nightmill.jobs.sql.batches import BatchStore
from nightmill.jobs.sql.claims import Claims
from nightmill.jobs.sql.database import Database
from nightmill.jobs.streams.redis import Followers
from nightmill.jobs.webhooks.delivering import Courier
from nightmill.worker.assembly.engine import describe
from nightmill.worker.assembly.fetching import with_files, with_model_file
from nightmill.worker.assembly.model import LoadedModel, load_model, served_name
from nightmill.worker.assembly.options import (
    gpu_name,
    merge_options,
    process_options,
    turn_options,
    worker_options,
)
from nightmill.worker.assembly.sizes import (
    capacity,
    gpu_index,
    hang_seconds,
    interactive_slots,
    max_sequences,
)
from nightmill.worker.link.launching import EngineAhead, launch_engine
from nightmill.worker.link.link import EngineLink
from nightmill.worker.runners.gpu.device.nvml import GpuProbe
from nightmill.worker.service import celery_flags, tasks
from nightmill.worker.service.celery_chatter import silence_chatter
from nightmill.worker.service.heart import LOADING, Heart
from nightmill.worker.service.housekeeper import Housekeeper
from nightmill.worker.service.interactive import InteractiveConsumer
from nightmill.worker.service.message_filter import FilteringAMQP
from nightmill.worker.service.metrics import WorkerMetrics, serve_metrics
from nightmill.worker.service.reaching import reach_broker, reach_database
from nightmill.worker.service.resting import Resting, RestRule
from nightmill.worker.service.room import RoomStep
from nightmill.worker.service.service_options import ServiceOptions
from nightmill.worker.service.shards import Service
from nightmill.worker.service.sleeping import END_SIGNALS, become
from nightmill.worker.service.turns.swapping import Swap, next_command
from nightmill.worker.service.turns.turning import Turn, named_models, register_turn

log = logging.getLogger("nightmill.worker")

TASK_THREADS = 256  # shards in hand at once; threads are made as they are needed


class EngineStep(bootsteps.StartStopStep):
    """Builds the service when the worker starts, drains it when the worker stops."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self.options = options
        self.woken = bool(options.get("woken"))
        self.service: Service | None = None
        self.registry: Any = None  # of metrics, if they are asked for
        self.told_to_end = False
        self.rest_reason: str | None = None  # why it is to sleep; a signal to end comes before that
        self.turn: Turn | None = None  # of a worker with several models, the one that this process serves
        self.swap: Swap | None = None  # the end of that turn, if it is for another model
        self.obj = self  # a step without an object is not started

    def create(self, parent: Any) -> "EngineStep":
        """Celery calls this before any step starts; a pool of processes must not even begin."""
        if not issubclass(parent.pool_cls, TaskPool):
            echo(  # logging is not set up yet
                "nightmill: a worker shares one engine between threads: start Celery with --pool=threads",
                err=True,
            )
            raise SystemExit(1)
        # Celery's ways of workers to know of each other; ours is the table. What they hear comes from Redis,
        # where anybody can put anything, past the message filter.
        parent.options.update(without_gossip=True, without_mingle=True, without_heartbeat=True)
        return self

    def start(self, parent: Any) -> None:
        """Load the model, build the engine, register the worker. A failure ends the process, with reasons."""
        try:
            self._start(parent)
        except NightmillError as error:
            log.critical("%s", error)
            raise SystemExit(1 if self.rest_reason is None else 0) from error

    def terminate(self, parent: Any) -> None:
        """A cold shutdown: hand everything back at once."""
        if self.service is not None:
            self.service.drain_seconds = 0.0
        self.stop(parent)

    def stop(self, parent: Any) -> None:
        """Drain, write, hand back, sign off."""
        if self.service is None:
            return
        if self.turn is not None and self.turn.gives_way_to is not None and self.goes_to_sleep:
            self.swap = Swap(self.settings, self.turn, self.rule)  # which prepares while this model drains
        self.service.drain()
        self.service.engine.begin_stop()  # it ends while the others do
        self.interactive.close()
        self.courier.stop()
        self.housekeeper.close()
        try:
            self.housekeeper.sweep()  # announces what was handed back
            if self.turn is not None:
                self.turn.end()
        except NightmillError as error:
            log.warning("%s", error)
        if not (sleeps := self.goes_to_sleep):
            self._take_leave()
        done = self.service.engine.stats
        self.service.close()
        self.service = None
        if sleeps:  # shown only now that the engine's process, and its GPU memory, are gone
            self._take_leave()
        if sleeps and self.swap is not None:
            self.swap.begin_next()
        self.broker.close()
        self.database.close()
        log.info(
            "stopped; %d tokens drawn, %d resumed; %d prompt tokens computed, %d shared",
            done.generated_tokens, done.resumed_tokens, done.prompt_tokens, done.shared_tokens,
        )  # fmt: skip

    def _rest(self, resting: Resting) -> None:
        """End in order, to sleep, if there is a reason to. Raises DatabaseError."""
        assert self.service is not None
        if self.service.draining:
            return
        reason = resting.look()
        if reason is None and self.turn is not None:
            reason = self.turn.look(self.service.in_flight)
            self.service.in_flight.set_yields(self.turn.yields())
        if reason is None:
            return
        log.info("going to sleep: %s", reason)
        self.rest_reason = reason
        self.service.begin_drain()
        if not celery_flags.told_to_end():
            celery_flags.end_in_order()

    def _sleep(self, settings: Settings) -> None:
        """Become the process that sleeps, or that serves the next model: the last that this one does.

        Whoever told it to end meanwhile gets that: the flag was set by a signal, not by `_rest` alone.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)  # those from now on are for what it becomes
        if not self.goes_to_sleep or celery_flags.ends_otherwise():
            return
        become(next_command(settings, self.claims.worker_id, self.swap), blocked=True)

    def _start(self, parent: Any) -> None:
        silence_chatter()

        def tell(_: str) -> None:
            celery_flags.exit_if_told()

        turn: str | None = self.options.get("turn")
        handed_on: str | None = self.options.get("engine")
        ahead = None if handed_on is None else EngineAhead.inherit(handed_on)
        settings = with_files(merge_options(Settings.from_env(), self.options), turn, tell)
        atexit.register(self._sleep, settings)
        if settings.models is not None and turn is None:
            self._sleep_at_once(settings)  # which chooses the first model
        if isinstance(settings.model, str):
            settings = self._fetch_for_turn(settings, tell)
        if settings.hours is not None and not Hours.parse(settings.hours).open_at(datetime.now(UTC)):
            self._sleep_at_once(settings)
        if settings.metrics_port is not None:
            self.registry = serve_metrics(settings.metrics_host, settings.metrics_port)
            log.info("metrics at http://%s:%d/metrics", settings.metrics_host, settings.metrics_port)
        # It loads the model while this process goes on.
        hangs, ledger = partial(hang_seconds, settings), self.options.get("ledger")
        engine = launch_engine(settings, hang_seconds=hangs, ledger=ledger, ahead=ahead)
        LastResort(celery_flags.told_to_end, settings.drain_seconds + END_SECONDS, engine.kill).start()
        try:
            self._serve(parent, settings, engine)
        except BaseException:  # Ctrl-C too must not leave the engine's process behind
            engine.stop()
            raise

    def _fetch_for_turn(self, settings: Settings, tell: Callable[[str], None]) -> Settings:
        """Fetch the model of this turn, which could not be had when the worker started."""
        self._register(settings, LOADING)
        try:
            return with_model_file(settings, tell=tell)
        except NightmillError as error:
            self._not_loaded(error)
            raise

    def _register(self, settings: Settings, detail: str) -> str | None:
        """Open the database, and write this worker's row; returns the name of its GPU."""
        self.database = Database(settings)
        reach_database(self.database, woken=self.woken)
        self.claims = Claims(self.database, self.options.get("worker_id") or uuid.uuid4().hex)
        named = None if (gpu := gpu_index(settings)) is None else gpu_name(gpu)
        self.claims.register(socket.gethostname(), os.getpid(), served_name(settings), named, detail)
        if settings.models is not None:
            given = self.options.get("turn"), self.options.get("group")
            self.turn = register_turn(self.claims, settings, *given)
        return named

    def _sleep_at_once(self, settings: Settings) -> NoReturn:
        """Sleep without having loaded anything: outside its hours, or before it has chosen a model."""
        with closing(Broker(settings)) as broker:  # a mistake in its URL is found now, not at night
            reach_broker(broker, woken=self.woken)
        self._register(settings, LOADING)
        reason = RestRule(self.claims, settings, ()).reason(0.0)
        if reason is None:  # the database's clock may be ahead
            reason = f"{UNTIL}its hours begin" if settings.models is None else "chooses a model"
        self.claims.fall_asleep(reason)
        self.rest_reason = reason
        self.database.close()
        log.info("going to sleep: %s", self.rest_reason)
        raise SystemExit(0)

    def _serve(self, parent: Any, settings: Settings, engine: EngineLink) -> None:
        self.broker = Broker(settings)
        reach_broker(self.broker, woken=self.woken)
        named = self._register(settings, LOADING)
        began = self.database.now()
        heart = Heart(self.claims, settings.stale_seconds)
        try:
            with heart.while_loading(settings.heartbeat_seconds) as tell:
                model = load_model(settings)
                if (fault := model.template_fault()) is not None:
                    log.warning("%s: %s", model.name, fault)
                self.service = self._wait_for_engine(settings, model, engine, tell)
        except BaseException as error:  # a load that is interrupted, too, is no longer shown as a worker
            with suppress(NightmillError):  # what happened first is what matters
                self._not_loaded(error)
            raise
        self._record_load(model.name, began)
        probe = GpuProbe(gpu_index(settings))
        self.settings, self.rule = settings, RestRule(self.claims, settings, (None, model.name))
        resting = Resting(self.rule, self.service.in_flight)
        self.housekeeper = Housekeeper(
            self.service, self.claims, heart, self.broker, settings, model.name, probe,
            lambda: self._rest(resting),
        )  # fmt: skip
        if self.registry is not None:
            models = tuple(named_models(settings))
            self.registry.register(WorkerMetrics(self.service, model.name, named, probe, models))
        tasks.register(parent.app, self.service.run_shard)
        parent.app.amqp.queues.select([queue_name(None), queue_name(model.name)])
        service = self.service
        # The signal arrives in a signal handler: set a field there, and nothing else.
        self._on_shutdown = lambda **_: self._told(service)
        signals.worker_shutting_down.connect(self._on_shutdown, weak=False)
        signal.signal(signal.SIGQUIT, lambda *_: self._hand_back(service))
        self.interactive = InteractiveConsumer(
            self.broker,
            (None, model.name),
            service.in_flight,
            lambda job_ids: service.take(job_ids, interactive=True),
            service.fail,
        )
        self.housekeeper.start()
        self.interactive.start()
        announcer = Announcer(self.database, self.broker)
        self.courier = Courier(Batches(BatchStore(self.database), announcer, settings), settings)
        self.courier.start()
        gc.collect()
        gc.freeze()  # what is alive now stays: collections need not visit its 130,000 objects (0.1 s)
        if self.turn is not None:
            self.turn.ready()
        log.info("ready: %s", describe(settings, model, engine.stats))

    def _record_load(self, model: str, began: datetime) -> None:
        """Say how long it took to load the model, for the report of the night."""
        now = self.database.now()
        spent = {"loading": max(0.0, (now - began).total_seconds())}
        with suppress(NightmillError):  # a report is no reason not to serve
            ActivityStore(self.database).record(self.claims.worker_id, model, began, now, spent)

    def _not_loaded(self, error: BaseException) -> None:
        """Take leave, or sleep and load another model if only this one fails. Raises DatabaseError."""
        reason = None if self.turn is None else self.turn.failed(error)
        if reason is None:
            self.claims.withdraw()
        else:
            self.claims.fall_asleep(reason)
            self.rest_reason = reason

    @property
    def goes_to_sleep(self) -> bool:
        """True if this worker ends in order to sleep, and nobody has told it to end altogether."""
        return self.rest_reason is not None and not self.told_to_end

    def _take_leave(self) -> None:
        """Be shown as sleeping, or as stopped."""
        try:
            if self.rest_reason is not None and self.goes_to_sleep:
                self.claims.fall_asleep(self.rest_reason)
            else:
                self.claims.sign_off()
        except NightmillError as error:
            log.warning("%s", error)

    def _told(self, service: Service) -> None:
        """A signal has told this worker to end: it does not sleep, also if it was about to."""
        self.told_to_end = True
        service.begin_drain()
        signal.signal(signal.SIGINT, lambda *_: self._hand_back(service))

    def _hand_back(self, service: Service) -> None:
        """End in order, but now: SIGQUIT, and a second Ctrl-C. Celery would try to kill its threads."""
        self.told_to_end = True
        service.begin_drain(at_once=True)
        celery_flags.end_in_order()

    def _wait_for_engine(
        self, settings: Settings, model: LoadedModel, engine: EngineLink, tell: Callable[[str], None]
    ) -> Service:
        def while_loading(news: str | None) -> None:
            celery_flags.exit_if_told()  # nobody looks at them before
            if news is not None:
                tell(news)

        running = max_sequences(settings)
        service = Service(
            self.claims,
            engine,
            model,
            ServiceOptions(
                capacity=capacity(running),
                reserved_slots=interactive_slots(running),
                drain_seconds=settings.drain_seconds,
            ),
            followers=Followers(self.broker),
            on_fatal=celery_flags.end_as_failed,
            while_loading=while_loading,
        )
        running = engine.stats.sequences  # fewer, where memory has no room for the states of all
        service.in_flight.resize(capacity(running), interactive_slots(running))
        return service


def make_worker_app() -> Celery:
    """The app with the worker's options and steps; the broker is looked up when a worker starts."""
    worker_app = make_app(None)
    worker_app.amqp_cls = FilteringAMQP
    worker_app.conf.update(worker_pool="threads", worker_concurrency=TASK_THREADS)
    worker_app.user_options["worker"].update([*worker_options(), *turn_options(), *process_options()])
    worker_app.steps["worker"].add(EngineStep)
    worker_app.steps["consumer"].add(RoomStep)
    return worker_app


app = make_worker_app()


@signals.celeryd_init.connect
def _find_broker(conf: Any = None, **_: Any) -> None:
    """Fill in the broker before the worker connects, with one clear line where that fails."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)  # a worker that became this one blocked them
    try:
        set_broker(conf, resolve_broker_url(Settings.from_env()))
    except NightmillError as error:
        echo(f"nightmill: {error}", err=True)  # logging is not set up yet
        raise SystemExit(1) from error


@signals.after_setup_logger.connect
def _keep_the_log_readable(logger: Any = None, **_: Any) -> None:
    """Errors quote prompts, templates, names and URLs, which may hold anything."""
    settings = Settings.from_env()
    fit(logger.handlers, settings.log_format, settings.scrubbed)
