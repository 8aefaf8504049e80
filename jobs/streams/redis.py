"""The protocol of streams in Redis, between followers (processes that read texts) and workers.

A follower writes a list of its subscriptions, which expires a few seconds after the follower ends, and has an
inbox, a Redis stream of bounded length. Workers read all lists in one round trip, a few dozen times a second
while they have jobs, and write new text into the inboxes: one message for all texts of a step. A job without
subscribers costs nothing. A follower that does not read its inbox in time loses messages, notices the gap,
and asks again.

A *subscription* is a line of the list: the answer's id (`answer_id`) and a number that identifies the reader,
followed by `t` if the reader wants log-probabilities and by `u` if it wants the numbers of tokens. A worker
that sees a new subscription sends the text from its beginning.
"""

import base64
import json
import re
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from nightmill.jobs.base.contract import Markup, unstorable
from nightmill.jobs.errors import BrokerError
from nightmill.jobs.messages.broker import Broker
from nightmill.jobs.reply.logprobs import Packed

_FOLLOWERS = "nightmill.followers"
_LIST = "nightmill.following."
_INBOX = "nightmill.inbox."

LIST_SECONDS = 15  # lifetime of a list after its follower ended
_RENEW_SECONDS = 5.0
INBOX_SECONDS = 60
INBOX_MESSAGES = 512
PIECE_CHARACTERS = 16_384
"""Most characters of a chunk, and roughly of a message; longer texts are split."""
LOGPROBS_CHARACTERS = 1024
"""Most characters of a chunk with log-probabilities, which take up to 800 bytes a token."""
_READ_AT_ONCE = 128
_ANSWER_SECONDS = 5.0  # after which a hanging Redis counts as unreachable
MOST_FOLLOWERS = 256
_LONGEST_LIST = 1 << 20  # bytes, for 25,000 subscriptions
_ID = re.compile(rb"[0-9a-f]{32}")
_SUBSCRIPTION = re.compile(rb"([0-9a-f]{32}(?:\.[1-9][0-9]{0,2})?):[0-9]{1,12}t?u?")


class TextChunk(NamedTuple):
    """A chunk of a text for a reader. Without a text: the job has ended, and its row has the rest."""

    subscription: str
    start: int = 0
    text: str | None = None
    markup: Markup | None = None
    logprobs: Packed | None = None
    counts: tuple[int, int] | None = None  # prompt tokens, and tokens generated so far


def subscription_of(name: str, number: int, *, logprobs: bool, counts: bool) -> str:
    """Return the subscription of a reader of this answer."""
    return f"{name}:{number}{'t' if logprobs else ''}{'u' if counts else ''}"


def wants_logprobs(subscription: str) -> bool:
    """Return True if the subscription asks for log-probabilities."""
    return subscription.removesuffix("u").endswith("t")


def wants_counts(subscription: str) -> bool:
    """Return True if the subscription asks for the numbers of tokens."""
    return subscription.endswith("u")


class RedisConnection:
    """A lazy connection to Redis that is renewed after a failure. For one thread."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._connection: Any = None

    @contextmanager
    def open(self) -> Iterator[Any]:
        """Provide the client; raises BrokerError."""
        with self._broker.mapped_errors():
            try:
                if self._connection is None:
                    self._connection = self._broker.connection(socket_timeout=_ANSWER_SECONDS)
                yield self._connection.default_channel.client
            except BaseException:  # including Ctrl-C: a response may still be in flight
                self.close()
                raise

    def close(self) -> None:
        """Close the connection, if it is open."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()


class Subscriber:
    """The follower's side. For one thread; every method raises BrokerError."""

    def __init__(self, broker: Broker) -> None:
        self._redis = RedisConnection(broker)
        self._id = uuid.uuid4().hex
        self._last = "0"  # id of the last message read
        self._left: bytes | None = None  # the list as written last
        self._renew_at = 0.0

    def follow(self, subscriptions: Collection[str]) -> None:
        """Write the list of subscriptions for workers, unless it is there already."""
        wanted = "\n".join(subscriptions).encode()
        if wanted == self._left and time.monotonic() < self._renew_at:
            return
        with self._redis.open() as redis, redis.pipeline(transaction=True) as pipe:
            pipe.set(_LIST + self._id, wanted, ex=LIST_SECONDS)
            pipe.sadd(_FOLLOWERS, self._id)
            pipe.execute()
        self._left, self._renew_at = wanted, time.monotonic() + _RENEW_SECONDS

    def read(self, seconds: float) -> list[TextChunk]:
        """Return new chunks, waiting up to `seconds` for them."""
        key = _INBOX + self._id
        with self._redis.open() as redis:
            found = redis.xread({key: self._last}, count=_READ_AT_ONCE, block=max(1, int(seconds * 1000)))
        chunks: list[TextChunk] = []
        for _, messages in found or ():
            for message_id, fields in messages:
                self._last = message_id
                chunks += _chunks(fields.get(b"parts", b""))
        return chunks

    def close(self) -> None:
        """Unsubscribe from everything at once; never raises."""
        if self._left is None:
            return
        gone_soon = suppress(BrokerError)  # they expire by themselves
        with gone_soon, self._redis.open() as redis, redis.pipeline(transaction=True) as pipe:
            pipe.delete(_LIST + self._id, _INBOX + self._id)
            pipe.srem(_FOLLOWERS, self._id)
            pipe.execute()
        self._redis.close()


class Followers:
    """The worker's side: reads subscriptions and sends chunks. For one thread; raises BrokerError."""

    def __init__(self, broker: Broker) -> None:
        self._redis = RedisConnection(broker)
        self._lists: dict[str, bytes] = {}
        self._subscriptions: dict[str, dict[str, str]] = {}

    def look(self) -> Mapping[str, Mapping[str, str]]:
        """Read all subscriptions: {follower: {subscription: answer id}}. Unchanged entries are the same
        objects."""
        with self._redis.open() as redis:
            known = list(self._lists)
            ids, lists = self._ask(redis, known)
            if fresh := [follower for follower in ids if follower not in self._lists]:
                lists |= self._ask(redis, fresh)[1]
            if gone := [follower for follower in lists if not lists[follower]]:
                redis.srem(_FOLLOWERS, *gone)
        self._subscriptions = {
            follower: self._subscriptions[follower]
            if follower in self._subscriptions and self._lists[follower] == said
            else _subscriptions(said)
            for follower, said in lists.items()
            if said
        }
        self._lists = {follower: said for follower, said in lists.items() if said}
        return self._subscriptions

    def send(self, chunks: Mapping[str, Iterable[TextChunk]]) -> None:
        """Write chunks into the inboxes of followers."""
        with self._redis.open() as redis, redis.pipeline(transaction=False) as pipe:
            for follower, own in chunks.items():
                key = _INBOX + follower
                for message in _messages(own):
                    pipe.xadd(key, {"parts": message}, maxlen=INBOX_MESSAGES, approximate=False)
                pipe.expire(key, INBOX_SECONDS)
            pipe.execute()

    def close(self) -> None:
        """Close the connection, and forget all subscriptions."""
        self._redis.close()
        self._lists, self._subscriptions = {}, {}

    @staticmethod
    def _ask(redis: Any, followers: list[str]) -> tuple[list[str], dict[str, bytes]]:
        """Return the ids of all followers, and the lists of the given ones; empty for those that are gone."""
        with redis.pipeline(transaction=False) as pipe:
            pipe.srandmember(_FOLLOWERS, MOST_FOLLOWERS)
            for follower in followers:
                pipe.getrange(_LIST + follower, 0, _LONGEST_LIST - 1)
            ids, *lists = pipe.execute()
        found = [follower.decode() for follower in ids if _ID.fullmatch(follower)]
        return found, dict(zip(followers, lists, strict=True))


def _subscriptions(said: bytes) -> dict[str, str]:
    """Parse a list of subscriptions; invalid lines are skipped."""
    found = (_SUBSCRIPTION.fullmatch(subscription) for subscription in said.split(b"\n"))
    return {subscription[0].decode(): subscription[1].decode() for subscription in found if subscription}


def _messages(chunks: Iterable[TextChunk]) -> Iterator[str]:
    message: list[Any] = []
    room = PIECE_CHARACTERS
    for chunk in chunks:
        size = len(chunk.text or "") + (0 if chunk.logprobs is None else len(chunk.logprobs.data))
        if message and size > room:
            yield json.dumps(message, ensure_ascii=False)
            message, room = [], PIECE_CHARACTERS
        message.append(_said(chunk))
        room -= size
    if message:
        yield json.dumps(message, ensure_ascii=False)


def _said(chunk: TextChunk) -> list[Any]:
    if chunk.text is None:
        return [chunk.subscription]
    said = [chunk.subscription, chunk.start, chunk.text]
    if chunk.markup is None and chunk.logprobs is None and chunk.counts is None:
        return said
    said.append(None if chunk.markup is None else chunk.markup.values())
    if chunk.logprobs is not None:
        said += [chunk.logprobs.first, chunk.logprobs.offsets, base64.b64encode(chunk.logprobs.data).decode()]
    return said if chunk.counts is None else [*said, chunk.counts]


def _chunks(message: bytes) -> Iterator[TextChunk]:
    """Parse the chunks of a message; invalid ones are skipped."""
    try:
        found = json.loads(message)
    except (ValueError, RecursionError):
        return
    for item in found if isinstance(found, list) else ():
        match item:
            case [str(subscription)]:
                yield TextChunk(subscription)
            case [str(subscription), int(start), str(text)] if start >= 0 and text and not unstorable(text):
                yield TextChunk(subscription, start, text)
            case [str(subscription), int(start), str(text), markup, *more] if (
                start >= 0 and text and not unstorable(text)
            ):
                logprobs, counts = _counts(more)
                markup = Markup.read(markup)
                yield TextChunk(subscription, start, text, markup, _logprobs(logprobs), counts)


def _counts(said: list[Any]) -> tuple[list[Any], tuple[int, int] | None]:
    """Split off the numbers of tokens at the end."""
    match said:
        case [*before, [int(prompt), int(drawn)]] if len(before) in (0, 3):
            return before, (prompt, drawn)
    return said, None


def _logprobs(said: list[Any]) -> Packed | None:
    match said:
        case [int(first), list(offsets), str(data)] if first >= 0 and all(
            type(offset) is int for offset in offsets
        ):
            with suppress(ValueError):
                return Packed(first, tuple(offsets), base64.b64decode(data, validate=True))
    return None
