"""The filter that every message passes on its way into a worker: messages of others end here.

Redis holds whatever anybody put there. What Celery is given is therefore not the message that came, but one
made here of its job ids: no field that a stranger wrote reaches Celery, or is ever put back into the queue.
A message without well-formed job ids is gone from Redis once it was read, as BRPOP removes it.
"""

import logging
import time
from collections import Counter
from functools import partial
from typing import Any

import redis
from celery.app.amqp import AMQP
from kombu import Connection
from kombu.transport.redis import Channel, Transport

from nightmill.jobs.errors import MessageError
from nightmill.jobs.messages.shards import read_shard, task_message

log = logging.getLogger(__name__)

_SHOWN = 120  # bytes of a message that the log shows
_REFUSED_SECONDS = 3.0


class MessageFilter:
    """Lets messages in, remade; counts those that it removes."""

    def __init__(self, separator: str) -> None:
        self._separator = separator.encode()
        self._removed: Counter[str] = Counter()

    def admit(self, key: bytes, message: bytes) -> bytes | None:
        """The message from the Redis list `key` as Celery shall have it; None for one that is not ours."""
        try:
            job_ids = read_shard(message)
        except MessageError as fault:
            self._remove(str(fault), message)
            return None
        queue, _, priority = key.partition(self._separator)
        return task_message(job_ids, queue.decode(errors="replace"), int(priority or 0))

    def _remove(self, fault: str, message: bytes) -> None:
        """Log the first of each kind, then every tenth power of them."""
        self._removed[fault] += 1
        count = self._removed[fault]
        if str(count).strip("0") == "1":
            log.error(
                "a message that %s was removed (%d of this kind so far, of %d bytes); it begins: %s",
                fault, count, len(message), ascii(message[:_SHOWN]),
            )  # fmt: skip


class _FilteringClient(redis.Redis):
    """A connection whose BRPOP answers with what the filter admits; as after its time-out if it does not."""

    def __init__(self, *args: Any, message_filter: MessageFilter, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._filter = message_filter

    def parse_response(self, connection: Any, command_name: str, **options: Any) -> Any:
        """Read an answer off the wire."""
        try:
            answer = super().parse_response(connection, command_name, **options)  # type: ignore[no-untyped-call]
        except redis.exceptions.NoScriptError:
            raise  # the client then sends the script itself
        except redis.exceptions.ResponseError:
            time.sleep(_REFUSED_SECONDS)  # Celery would connect anew at once, for as long as it is refused
            raise
        if command_name != "BRPOP" or not answer:
            return answer
        key, message = answer
        admitted = self._filter.admit(key, message)
        return None if admitted is None else (key, admitted)


class _FilteringChannel(Channel):
    _plain: Any = None

    def _get_client(self) -> Any:
        return partial(_FilteringClient, message_filter=MessageFilter(self.sep))

    def _create_client(self, asynchronous: bool = False) -> Any:
        """Keep one client for all commands but BRPOP: Celery would make another for each message's end."""
        if asynchronous:
            return super()._create_client(asynchronous=True)
        if self._plain is None or self._plain.connection_pool is not self.pool:
            self._plain = super()._create_client()
        return self._plain


class _FilteringTransport(Transport):
    Channel = _FilteringChannel


class _FilteringConnection(Connection):
    def get_transport_cls(self) -> Any:
        """Also for URLs that name Redis in another way, as those of Unix sockets do."""
        return _FilteringTransport


class FilteringAMQP(AMQP):
    """For `Celery.amqp_cls`: consumers of such an app take messages through the filter."""

    Connection = _FilteringConnection
