"""Celery messages for job ids: the app, the queue names, and the mapping of broker errors."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import kombu.exceptions
import kombu.pools
import redis.exceptions
from celery import Celery
from kombu import Queue

from nightmill.jobs.base.forking import Forkable
from nightmill.jobs.base.ids import is_job_id
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import BrokerError, BrokerUnreachableError, MessageError
from nightmill.jobs.messages.embedded import EmbeddedRedis
from nightmill.jobs.messages.hanging import ANSWER_SECONDS, HangGuard, SilentBrokerError
from nightmill.jobs.messages.shards import read_shard, task_message
from nightmill.jobs.messages.tls import split_tls
from nightmill.jobs.request.fields import HIGHEST_PRIORITY, INTERACTIVE

DEFAULT_QUEUE = "nightmill"
_DAY = 24 * 60 * 60
_LANE = "nightmill:interactive"
_PROBE = "nightmill.probe"
_SENT_AT_ONCE = 128  # messages in one command
_LOOK_AT = 4  # messages read at the head of a queue to find a valid one


def queue_name(model: str | None) -> str:
    """Return the queue of jobs for `model`; jobs without a model share one that every worker serves."""
    return DEFAULT_QUEUE if model is None else f"{DEFAULT_QUEUE}.{model}"


def lane_name(model: str | None) -> str:
    """Return the Redis list of interactive jobs for `model`, whose entries are single job ids.

    Workers read it directly, since they take no Celery message while their slots for batches are full.
    """
    return _LANE if model is None else f"{_LANE}:{model}"


def set_broker(conf: Any, broker_url: str) -> None:
    """Set the broker in a Celery app's configuration, with the verification of its certificate."""
    address, tls = split_tls(broker_url)
    conf.broker_url, conf.broker_use_ssl = address, tls or False


def make_app(broker_url: str | None) -> Celery:
    """Create the Celery app of client and worker. Messages are JSON; nothing else is accepted."""
    app = Celery("nightmill", set_as_current=False)
    if broker_url is not None:
        set_broker(app.conf, broker_url)
    app.conf.update(
        accept_content=["json"],
        task_serializer="json",
        result_backend=None,
        task_ignore_result=True,
        task_default_queue=DEFAULT_QUEUE,
        task_create_missing_queues=True,
        # A message stays in Redis until its jobs are final. Fenced SQL makes a redelivery harmless.
        task_acks_late=True,
        task_acks_on_failure_or_timeout=True,
        worker_prefetch_multiplier=1,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_hijack_root_logger=False,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        # A worker that is started has asked the broker before; one that swaps or wakes waits for it.
        broker_connection_retry_on_startup=True,
        broker_connection_timeout=5,
        broker_channel_error_retry=True,  # a Redis that refuses commands may have memory again later
        broker_connection_max_retries=None,  # a broker may be down for a night; 100, the default, are 47 min
        broker_transport_options={
            # Age at which Redis redelivers unacknowledged messages: long, as it is only a second safety net.
            "visibility_timeout": _DAY,
            # One Redis list for each priority, emptied in order.
            "priority_steps": list(range(HIGHEST_PRIORITY + 1)),
            # Whose queue was served last is asked last, within each priority: jobs for any model and jobs for
            # one share a worker.
            "queue_order_strategy": "round_robin",
            # A hanging Redis counts as unreachable. Celery's own BRPOP waits for a second only.
            "socket_timeout": ANSWER_SECONDS,
            "socket_connect_timeout": ANSWER_SECONDS,
            "socket_keepalive": True,
            "max_retries": 1,
            "interval_start": 0,
            "interval_step": 0.1,
            "interval_max": 0.2,
        },
    )
    return app


class Broker(Forkable):
    """The client's side of the message queue."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._guard = HangGuard()
        self._app: Celery | None = None
        self._inherited: list[Any] = []
        self.watch_forks()

    @property
    def app(self) -> Celery:
        """The Celery app. Starts the embedded broker if it does not run."""
        if not self._lock.acquire(timeout=ANSWER_SECONDS):  # another thread waits for the embedded broker
            raise SilentBrokerError(f"the broker at {self.settings.safe_broker_url} does not answer")
        try:
            if self._app is None or self.settings.embedded_broker:
                url = resolve_broker_url(self.settings)
                self._app = self._app or make_app(url)
            return self._app
        finally:
            self._lock.release()

    def prepare(self) -> None:
        """Start the embedded broker if it does not run; raises NightmillError if that fails.

        A hanging broker is not an error, since jobs can be stored without it.
        """
        if self.settings.embedded_broker and self._app is None:  # otherwise `app` starts it
            with suppress(SilentBrokerError), self._guard.passing():
                _ = self.app

    def announce(self, job_ids: Sequence[str], model: str | None, priority: int) -> None:
        """Send messages for `job_ids`, one per shard; raises BrokerError, at once if the broker hung
        recently."""
        size = self.settings.shard_size
        with (
            self._guard.passing(),
            self.mapped_errors(),
            self.app.producer_pool.acquire(block=True, timeout=ANSWER_SECONDS) as producer,
        ):
            if priority == INTERACTIVE:
                producer.channel.client.lpush(lane_name(model), *job_ids)
                return
            # Celery's own way of sending takes a millisecond of Python for each message.
            channel, queue, step = producer.channel, queue_name(model), HIGHEST_PRIORITY - priority
            shards = [job_ids[start : start + size] for start in range(0, len(job_ids), size)]
            for first in range(0, len(shards), _SENT_AT_ONCE):
                some = shards[first : first + _SENT_AT_ONCE]
                messages = [task_message(shard, queue, step) for shard in some]
                channel.client.lpush(channel._q_for_pri(queue, step), *messages)

    def queue_length(self, model: str | None) -> int:
        """Return the number of messages in the queue of `model`."""
        name = queue_name(model)
        with self.mapped_errors(), self.connection() as connection:
            channel = connection.default_channel
            try:
                return int(Queue(name, channel=channel).queue_declare(passive=True).message_count)
            except channel.connection.client.channel_errors:
                return 0  # Redis deletes empty lists, so an empty queue does not exist

    def heads(self, model: str | None) -> dict[int, list[str]]:
        """Return the job ids of the next message in the queue of `model`, by priority, for priorities with
        messages.

        The list is empty if the next few messages are invalid; workers remove those.
        """
        name = queue_name(model)
        with self.mapped_errors(), self.connection() as connection:
            channel = connection.default_channel
            with channel.client.pipeline(transaction=False) as pipe:
                for step in channel.priority_steps:
                    pipe.lrange(channel._q_for_pri(name, step), -_LOOK_AT, -1)
                pipe.lrange(lane_name(model), -_LOOK_AT, -1)
                *found, lane = pipe.execute()
        heads = {
            HIGHEST_PRIORITY - step: next(filter(None, map(_job_ids, reversed(messages))), [])
            for step, messages in enumerate(found)
            if messages
        }
        if lane:
            heads[INTERACTIVE] = next(([job_id] for job_id in map(read_lane, reversed(lane)) if job_id), [])
        return heads

    def ping(self) -> None:
        """Raise BrokerUnreachableError unless the broker answers."""
        with self.mapped_errors(), self.connection() as connection:
            connection.ensure_connection(max_retries=1, timeout=ANSWER_SECONDS)

    def try_writing(self, *, worker: bool = False) -> None:
        """Write to the keys of messages and undo it in one transaction, so that nobody sees it.

        worker  also write to the keys of messages taken by a worker

        Raises BrokerError if the broker accepts no writes (it is read-only or full), though it answers pings.
        """
        with (
            self._guard.passing(),
            self.mapped_errors(),
            self.app.producer_pool.acquire(block=True, timeout=ANSWER_SECONDS) as producer,
            producer.channel.client.pipeline(transaction=True) as pipe,
        ):
            pipe.lpush(_PROBE, "")
            pipe.delete(_PROBE)
            pipe.sadd(f"_kombu.binding.{_PROBE}", "")
            pipe.delete(f"_kombu.binding.{_PROBE}")
            if worker:
                pipe.hset("unacked", _PROBE, "")
                pipe.hdel("unacked", _PROBE)
                pipe.zadd("unacked_index", {_PROBE: 0})
                pipe.zrem("unacked_index", _PROBE)
            pipe.execute()

    def refusal(self) -> BrokerError | None:
        """Return the error of a broker that answers and accepts no writes; None if it accepts them, hangs or
        is unreachable."""
        try:
            self.try_writing()
        except BrokerUnreachableError:
            return None
        except BrokerError as error:
            return error
        return None

    def eviction_policy(self) -> str:
        """Return Redis's `maxmemory-policy`, or "unknown" if it cannot be read.

        Raises BrokerError.
        """
        with self.mapped_errors(), self.connection() as connection:
            try:
                memory = connection.default_channel.client.info("memory")
            except redis.exceptions.ResponseError:  # this user may not ask
                return "unknown"
            return str(memory.get("maxmemory_policy", "unknown"))

    def connection(self, **transport_options: Any) -> Any:
        """Open a new kombu Connection; close it, or use it in a `with`."""
        return self.app.connection_for_write(transport_options=transport_options)

    def close(self) -> None:
        """Close pooled connections."""
        with self._lock:
            if self._app is not None:
                self._app.close()
                self._app = None

    def disconnect(self) -> None:
        """Close the connections that kombu keeps for this URL, whichever client of this process has them."""
        with self._lock:
            if self._app is not None:
                connection = self._app.connection_for_write()
                for pools in (kombu.pools.producers, kombu.pools.connections):
                    pools[connection].force_close_all()
                    del pools[connection]

    def after_fork_in_child(self) -> None:
        """Abandon the parent's connections, and forget kombu's pools for this URL."""
        self._lock = threading.Lock()
        self._guard = HangGuard()
        if self._app is None:
            return
        connection = self._app.connection_for_write()
        for pools in (kombu.pools.producers, kombu.pools.connections):
            self._inherited.append(pools[connection])
            del pools[connection]
        self._inherited.append(self._app)
        self._app = None

    @contextmanager
    def mapped_errors(self) -> Iterator[None]:
        """Map errors of kombu and redis to BrokerError in this block."""
        try:
            yield
        except (
            kombu.exceptions.KombuError,
            redis.exceptions.RedisError,
            ConnectionError,
            TimeoutError,
        ) as error:
            where, said = self.settings.safe_broker_url, self._said(error)
            if _is_loading(error):
                raise BrokerUnreachableError(f"the broker at {where} takes nothing yet: {said}") from error
            if _is_refusal(error):
                remedy = _remedy(error)
                raise BrokerError(f"the broker at {where} refused a command: {said}{remedy}") from error
            raise BrokerUnreachableError(
                f"the broker at {where} does not answer: {said}. Check that Redis runs and that "
                "NIGHTMILL_BROKER_URL is right"
            ) from error

    def _said(self, error: Exception) -> str:
        return self.settings.scrubbed(error).rstrip(". ")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_loading(error: BaseException) -> bool:
    return any(isinstance(cause, redis.exceptions.BusyLoadingError) for cause in _causes(error))


def is_forbidden(error: BrokerError) -> bool:
    """Return True if the user of Redis lacks a right, which does not pass by itself."""
    return any(isinstance(cause, redis.exceptions.NoPermissionError) for cause in _causes(error))


def _remedy(error: BaseException) -> str:
    """Say what to do about a refusal, if a setting is at fault."""
    for cause in _causes(error):
        if isinstance(cause, redis.exceptions.AuthenticationError):
            return ". Check user and password in NIGHTMILL_BROKER_URL"
        if isinstance(cause, redis.exceptions.NoPermissionError):
            return ". Give its user the rights that docs/operations.md lists"
        if isinstance(cause, redis.exceptions.ResponseError) and "DB index" in str(cause):
            return ". Check the number at the end of NIGHTMILL_BROKER_URL"
    return ""


def _is_refusal(error: BaseException) -> bool:
    """Return True if Redis answered with an error, even where kombu reports an outage."""
    for cause in _causes(error):
        if isinstance(cause, redis.exceptions.ResponseError | redis.exceptions.AuthenticationError):
            return True
        if isinstance(cause, redis.exceptions.RedisError | OSError):
            return not isinstance(
                cause, redis.exceptions.ConnectionError | redis.exceptions.TimeoutError | OSError
            )
    return not isinstance(error, kombu.exceptions.OperationalError)


def read_lane(entry: bytes) -> str | None:
    """Parse an entry of a list of interactive jobs; None if it is not a job id."""
    try:
        said = entry.decode("ascii")
    except UnicodeDecodeError:
        return None
    return said if is_job_id(said) else None


def _job_ids(message: bytes) -> list[str]:
    try:
        return read_shard(message)
    except MessageError:
        return []


def resolve_broker_url(settings: Settings) -> str:
    """Return the broker's URL; starts the embedded broker if none is configured."""
    if settings.broker_url is not None:
        return settings.broker_url
    return EmbeddedRedis(settings.data_dir).ensure()
