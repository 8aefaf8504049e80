"""Readers of growing texts: pieces come from workers through Redis, the end from the row in SQL.

All readers of a client share two threads, which end shortly after the last reader. One receives messages from
Redis and hands each piece to its reader. The other polls the rows: at the end, a reader gets the rest of its
text from there, or all of it if Redis does not answer. So a text is complete even if messages were lost.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from nightmill.jobs.base.forking import Forkable
from nightmill.jobs.base.ids import is_job_id
from nightmill.jobs.errors import (
    BrokerError,
    DatabaseError,
    InvalidParameterError,
    JobNotFoundError,
    NightmillError,
    WaitTimeoutError,
)
from nightmill.jobs.messages.broker import Broker
from nightmill.jobs.request.parameters import MAX_ANSWERS
from nightmill.jobs.sql.jobs import Store, chunked
from nightmill.jobs.streams.pieces import START, Piece, TextPosition
from nightmill.jobs.streams.reader import Reader
from nightmill.jobs.streams.redis import Subscriber, TextChunk, subscription_of

log = logging.getLogger(__name__)

LISTEN_SECONDS = 0.01  # delay until workers see a new reader
LOOK_SECONDS = 0.5  # delay until the end of a job is seen whose worker cannot report it
LINGER_SECONDS = 5.0  # how long the threads wait for another reader
PATIENCE_SECONDS = 30.0  # for a database that does not answer
_BROKER_PAUSE = 0.5
_END_SECONDS = 1.0
_CLOSED = "the client is closed: follow the text with another, which goes on at the last piece's place"


class StreamReaders(Forkable):
    """The readers of a client. Safe to share between threads."""

    def __init__(self, store: Store, broker: Broker) -> None:
        self._store = store
        self._broker = broker
        self.after_fork_in_child()
        self.watch_forks()

    def after_fork_in_child(self) -> None:
        """Start over without the parent's readers and threads."""
        self._changed = threading.Condition()
        self._readers: dict[str, Reader] = {}  # by subscription
        self._numbers = itertools.count(1)
        self._threads: dict[str, threading.Thread] = {}  # by name
        self._due: set[str] = set()  # jobs whose rows are to be polled now
        self._closed = False

    def close(self) -> None:
        """End the threads. Current and later readers fail with an error that says so."""
        with self._changed:
            self._closed = True
            threads, readers = list(self._threads.values()), list(self._readers.values())
            self._changed.notify_all()
        for reader in readers:
            reader.fail(NightmillError(_CLOSED))
        for thread in threads:
            thread.join(_END_SECONDS)

    def pieces(
        self, job_id: str, place: TextPosition = START, timeout: float | None = None, answer: int = 0
    ) -> Iterator[Piece]:
        """Yield the text of a job from `place` on as it grows; raises like `Client.stream`."""
        give_up_at = _moment(timeout)
        news = threading.Event()
        with self.reading(job_id, place, news.set, answer) as reader:
            over = False
            while not over:
                if not news.wait(_seconds_to(give_up_at)):
                    raise _too_late()
                news.clear()
                piece, over = reader.take()
                while piece is not None:
                    yield piece
                    piece, over = reader.take()

    async def pieces_async(
        self,
        job_id: str,
        place: TextPosition = START,
        timeout: float | None = None,
        answer: int = 0,
        *,
        with_logprobs: bool = False,
        with_counts: bool = False,
    ) -> AsyncIterator[Piece]:
        """Do the same as `pieces` for asyncio, without a thread per reader."""
        give_up_at = _moment(timeout)
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed, so nobody reads any more
                loop.call_soon_threadsafe(news.set)

        wanted = {"with_logprobs": with_logprobs, "with_counts": with_counts}
        with self.reading(job_id, place, wake, answer, **wanted) as reader:
            over = False
            while not over:
                try:
                    await asyncio.wait_for(news.wait(), _seconds_to(give_up_at))
                except TimeoutError:
                    raise _too_late() from None
                news.clear()
                piece, over = reader.take()
                while piece is not None:
                    yield piece
                    piece, over = reader.take()

    @contextmanager
    def reading(
        self,
        job_id: str,
        place: TextPosition,
        wake: Callable[[], None],
        answer: int = 0,
        *,
        with_logprobs: bool = False,
        with_counts: bool = False,
    ) -> Iterator[Reader]:
        """Provide a reader of a job's text from `place` on; raises NightmillError if the client is closed."""
        if not is_job_id(job_id):
            raise JobNotFoundError(f"there is no job {job_id!r}")
        if not isinstance(answer, int) or not 0 <= answer < MAX_ANSWERS:
            said = f"answer: must be 0 to {MAX_ANSWERS - 1} (got {str(answer)[:100]!r})"
            raise InvalidParameterError(said, field="answer")
        reader = Reader(job_id, place, wake, answer, with_logprobs=with_logprobs, with_counts=with_counts)
        with self._changed:
            if self._closed:
                raise NightmillError(_CLOSED)
            self._enter(reader)
            self._due.add(job_id)
            for name, work in (("streams", self._listen), ("ends of streams", self._look)):
                if name not in self._threads:
                    thread = threading.Thread(target=self._run, args=(name, work), name=name, daemon=True)
                    self._threads[name] = thread
                    thread.start()
            self._changed.notify_all()
        try:
            yield reader
        finally:
            with self._changed:
                self._readers.pop(reader.subscription, None)

    def _enter(self, reader: Reader) -> None:
        """Give a reader a new subscription, so that the worker sends the text from its beginning."""
        self._readers.pop(reader.subscription, None)
        number = next(self._numbers)
        reader.subscription = subscription_of(
            reader.name, number, logprobs=reader.with_logprobs, counts=reader.with_counts
        )
        self._readers[reader.subscription] = reader

    def _run(self, name: str, work: Callable[[], None]) -> None:
        """Run a thread; an unexpected exception fails all readers, so that none waits for ever."""
        try:
            work()
        except Exception as error:
            log.exception("texts can no longer be followed")
            with self._changed:
                self._threads.pop(name, None)
                readers = list(self._readers.values())
            for reader in readers:
                reader.fail(NightmillError(f"the text can no longer be followed: {error}"))

    def _read(self, name: str) -> list[Reader]:
        """Return all readers; empty if there were none for a while, and the thread of this name must end."""
        with self._changed:
            self._changed.wait_for(lambda: self._readers or self._closed, LINGER_SECONDS)
            if self._closed or not self._readers:
                self._threads.pop(name, None)
                return []
            return list(self._readers.values())

    # -- pieces ----------------------------------------------------------------------------------

    def _listen(self) -> None:
        subscriber = Subscriber(self._broker)
        try:
            while readers := self._read("streams"):
                try:
                    subscriber.follow([reader.subscription for reader in readers])
                    for part in subscriber.read(LISTEN_SECONDS):
                        self._take(part)
                except BrokerError as error:
                    log.debug("texts come when they are whole: %s", error)
                    subscriber.close()
                    subscriber = Subscriber(
                        self._broker
                    )  # a new follower for workers, to which nothing was sent yet
                    with self._changed:
                        self._changed.wait_for(lambda: self._closed, _BROKER_PAUSE)
        finally:
            subscriber.close()

    def _take(self, part: TextChunk) -> None:
        reader = self._readers.get(part.subscription)
        if reader is None:
            return
        if part.text is None:
            with self._changed:
                self._due.add(reader.job_id)
                self._changed.notify_all()
        elif not reader.give(part) and reader.asks_again():
            with self._changed:
                if part.subscription in self._readers:
                    self._enter(reader)

    # -- ends ------------------------------------------------------------------------------------

    def _look(self) -> None:
        trouble_since: float | None = None
        look_at_all = 0.0
        while readers := self._read("ends of streams"):
            by_job: dict[str, list[Reader]] = {}
            for reader in readers:
                if not reader.ended:
                    by_job.setdefault(reader.job_id, []).append(reader)
            now = time.monotonic()
            with self._changed:
                due, self._due = self._due, set()
            if now >= look_at_all:
                due, look_at_all = set(by_job), now + LOOK_SECONDS
            try:
                self._find_ends(due & by_job.keys(), by_job)
                trouble_since = None
            except DatabaseError as error:
                trouble_since = now if trouble_since is None else trouble_since
                if now - trouble_since > PATIENCE_SECONDS:
                    for reader in readers:
                        reader.fail(error)
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._closed, _seconds_to(look_at_all))

    def _find_ends(self, job_ids: Iterable[str], by_job: Mapping[str, Sequence[Reader]]) -> None:
        for chunk in chunked(job_ids):
            states = self._store.states(chunk)
            for job_id in chunk:
                if job_id in states and not states[job_id].final:
                    continue
                try:
                    job = self._store.get(job_id)
                except JobNotFoundError as error:
                    for reader in by_job[job_id]:
                        reader.fail(error)
                    continue
                if job.state.final:
                    for reader in by_job[job_id]:
                        reader.finish(job)


def _moment(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _seconds_to(moment: float | None) -> float | None:
    return None if moment is None else max(0.0, moment - time.monotonic())


def _too_late() -> WaitTimeoutError:
    return WaitTimeoutError("the job is not finished in the time given; it goes on")
