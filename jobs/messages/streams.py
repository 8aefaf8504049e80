"""How texts travel while they are generated: what followers and workers leave for each other in Redis.

A follower is a process that reads texts as they grow. It leaves a list of what it follows, which is gone a
few seconds after the follower is, and has an inbox, a Redis stream of bounded length. Workers look at all
lists in one round trip, a few dozen times a second while they have jobs, and put what has grown into the
inboxes: one message for all texts of a step. A job that is on no list costs nothing, and who does not read
its inbox in time loses messages, notices the gap, and asks again.

On a list a text is a *line*: the name of the answer (its job's id, if it is the first) and a number, by which
the follower knows its reader; with a `t` behind it the reader wants the log-probabilities of tokens, too. A
worker that sees a new line sends the text from its beginning.
"""

import base64
import json
import re
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from nightmill.jobs.contract import Markup, unstorable
from nightmill.jobs.errors import BrokerError
from nightmill.jobs.logprobs import Packed
from nightmill.jobs.messages.broker import Broker

_FOLLOWERS = "nightmill.followers"
_LIST = "nightmill.following."
_INBOX = "nightmill.inbox."

LIST_SECONDS = 15  # how long a list outlives the follower
_RENEW_SECONDS = 5.0
INBOX_SECONDS = 60
INBOX_MESSAGES = 512
PIECE_CHARACTERS = 16_384
"""Of a longer text that is sent at once, each piece has so many; a message has about as many in all."""
TOLD_CHARACTERS = 1024
"""The same for a reader who wants log-probabilities, which take up to 800 bytes a token."""
_READ_AT_ONCE = 128
_ANSWER_SECONDS = 5.0  # after which a Redis that hangs counts as away
MOST_FOLLOWERS = 256
_LONGEST_LIST = 1 << 20  # bytes; room for 25,000 lines
_ID = re.compile(rb"[0-9a-f]{32}")
_LINE = re.compile(rb"([0-9a-f]{32}(?:\.[1-9][0-9]{0,2})?):[0-9]{1,12}t?")


class Part(NamedTuple):
    """A piece of a text, for a reader; without a text: the job has ended, and its row has the rest."""

    line: str
    start: int = 0
    text: str | None = None
    markup: Markup | None = None
    told: Packed | None = None


def wants_told(line: str) -> bool:
    """Whether the reader of a line wants the log-probabilities of tokens."""
    return line.endswith("t")


class Line:
    """A connection to Redis, made when it is needed and again after a failure. For one thread."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._connection: Any = None

    @contextmanager
    def open(self) -> Iterator[Any]:
        """The client; raises BrokerError."""
        with self._broker.mapped_errors():
            try:
                if self._connection is None:
                    self._connection = self._broker.connection(socket_timeout=_ANSWER_SECONDS)
                yield self._connection.default_channel.client
            except BaseException:  # also Ctrl-C: an answer may still be on its way
                self.close()
                raise

    def close(self) -> None:
        """Close it, if it is open."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()


class Inbox:
    """A follower's end. One thread uses it; every method raises BrokerError."""

    def __init__(self, broker: Broker) -> None:
        self._redis = Line(broker)
        self._id = uuid.uuid4().hex
        self._last = "0"  # the last message that was read
        self._left: bytes | None = None  # the list as it was left
        self._renew_at = 0.0

    def follow(self, lines: Collection[str]) -> None:
        """Leave this list for workers; does nothing if it is there already."""
        wanted = "\n".join(lines).encode()
        if wanted == self._left and time.monotonic() < self._renew_at:
            return
        with self._redis.open() as redis, redis.pipeline(transaction=True) as pipe:
            pipe.set(_LIST + self._id, wanted, ex=LIST_SECONDS)
            pipe.sadd(_FOLLOWERS, self._id)
            pipe.execute()
        self._left, self._renew_at = wanted, time.monotonic() + _RENEW_SECONDS

    def read(self, seconds: float) -> list[Part]:
        """What has come, waiting up to `seconds` for it."""
        key = _INBOX + self._id
        with self._redis.open() as redis:
            found = redis.xread({key: self._last}, count=_READ_AT_ONCE, block=max(1, int(seconds * 1000)))
        parts: list[Part] = []
        for _, messages in found or ():
            for message_id, fields in messages:
                self._last = message_id
                parts += _parts(fields.get(b"parts", b""))
        return parts

    def close(self) -> None:
        """Let workers know at once; never raises."""
        if self._left is None:
            return
        gone_soon = suppress(BrokerError)  # by itself
        with gone_soon, self._redis.open() as redis, redis.pipeline(transaction=True) as pipe:
            pipe.delete(_LIST + self._id, _INBOX + self._id)
            pipe.srem(_FOLLOWERS, self._id)
            pipe.execute()
        self._redis.close()


class Followers:
    """A worker's end: who follows what, and the way to them. One thread uses it; it raises BrokerError."""

    def __init__(self, broker: Broker) -> None:
        self._redis = Line(broker)
        self._lists: dict[str, bytes] = {}
        self._lines: dict[str, dict[str, str]] = {}

    def look(self) -> Mapping[str, Mapping[str, str]]:
        """What each follower follows: {follower: {line: answer}}. The same objects where nothing changed."""
        with self._redis.open() as redis:
            known = list(self._lists)
            ids, lists = self._ask(redis, known)
            if fresh := [one for one in ids if one not in self._lists]:
                lists |= self._ask(redis, fresh)[1]
            if gone := [one for one in lists if not lists[one]]:
                redis.srem(_FOLLOWERS, *gone)
        self._lines = {
            one: self._lines[one] if one in self._lines and self._lists[one] == said else _lines(said)
            for one, said in lists.items()
            if said
        }
        self._lists = {one: said for one, said in lists.items() if said}
        return self._lines

    def send(self, parts: Mapping[str, Iterable[Part]]) -> None:
        """Put parts into the inboxes of followers."""
        with self._redis.open() as redis, redis.pipeline(transaction=False) as pipe:
            for follower, own in parts.items():
                key = _INBOX + follower
                for message in _messages(own):
                    pipe.xadd(key, {"parts": message}, maxlen=INBOX_MESSAGES, approximate=False)
                pipe.expire(key, INBOX_SECONDS)
            pipe.execute()

    def close(self) -> None:
        """Close the connection, and forget who follows."""
        self._redis.close()
        self._lists, self._lines = {}, {}

    @staticmethod
    def _ask(redis: Any, followers: list[str]) -> tuple[list[str], dict[str, bytes]]:
        """The ids of all followers, and the lists of these; empty if there is none any more."""
        with redis.pipeline(transaction=False) as pipe:
            pipe.srandmember(_FOLLOWERS, MOST_FOLLOWERS)
            for one in followers:
                pipe.getrange(_LIST + one, 0, _LONGEST_LIST - 1)
            ids, *lists = pipe.execute()
        found = [one.decode() for one in ids if _ID.fullmatch(one)]
        return found, dict(zip(followers, lists, strict=True))


def _lines(said: bytes) -> dict[str, str]:
    """The lines of a list; what is no line is left out."""
    found = (_LINE.fullmatch(line) for line in said.split(b"\n"))
    return {line[0].decode(): line[1].decode() for line in found if line}


def _messages(parts: Iterable[Part]) -> Iterator[str]:
    message: list[Any] = []
    room = PIECE_CHARACTERS
    for part in parts:
        size = len(part.text or "") + (0 if part.told is None else len(part.told.data))
        if message and size > room:
            yield json.dumps(message, ensure_ascii=False)
            message, room = [], PIECE_CHARACTERS
        message.append(_said(part))
        room -= size
    if message:
        yield json.dumps(message, ensure_ascii=False)


def _said(part: Part) -> list[Any]:
    if part.text is None:
        return [part.line]
    said = [part.line, part.start, part.text]
    if part.markup is None and part.told is None:
        return said
    said.append(None if part.markup is None else part.markup.values())
    if part.told is not None:
        said += [part.told.first, part.told.offsets, base64.b64encode(part.told.data).decode()]
    return said


def _parts(message: bytes) -> Iterator[Part]:
    """The parts of a message. Nothing in it is believed: what is no part is left out."""
    try:
        found = json.loads(message)
    except (ValueError, RecursionError):
        return
    for one in found if isinstance(found, list) else ():
        match one:
            case [str(line)]:
                yield Part(line)
            case [str(line), int(start), str(text)] if start >= 0 and text and not unstorable(text):
                yield Part(line, start, text)
            case [str(line), int(start), str(text), markup, *told] if (
                start >= 0 and text and not unstorable(text)
            ):
                yield Part(line, start, text, Markup.read(markup), _told(told))


def _told(said: list[Any]) -> Packed | None:
    match said:
        case [int(first), list(offsets), str(data)] if first >= 0 and all(
            type(one) is int for one in offsets
        ):
            with suppress(ValueError):
                return Packed(first, tuple(offsets), base64.b64decode(data, validate=True))
    return None
