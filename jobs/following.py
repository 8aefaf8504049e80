"""Reading texts while they are generated: pieces from workers through Redis, and the end from the row in SQL.

All readers of a client share two threads, which end a little after the last reader has. One listens to the
inbox and hands each piece to its reader. The other looks at the rows: what a reader lacks at the end comes
from there, all of the text where Redis does not answer. So a text is whole whatever got lost on the way.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from nightmill.jobs.answers import answer_id
from nightmill.jobs.contract import JobState, Markup
from nightmill.jobs.errors import (
    BrokerError,
    DatabaseError,
    InvalidParameterError,
    JobNotFoundError,
    NightmillError,
    StreamChangedError,
    WaitTimeoutError,
)
from nightmill.jobs.forking import Forkable
from nightmill.jobs.ids import is_job_id
from nightmill.jobs.job import Job
from nightmill.jobs.logprobs import Packed, TokenLogprob
from nightmill.jobs.messages.broker import Broker
from nightmill.jobs.messages.streams import Inbox, Part
from nightmill.jobs.parameters import MAX_ANSWERS
from nightmill.jobs.pieces import START, Cursor, GapError, Piece, Place
from nightmill.jobs.sql.jobs import Store, chunked

log = logging.getLogger(__name__)

LISTEN_SECONDS = 0.01  # how soon workers hear of a new reader
LOOK_SECONDS = 0.5  # how soon the end of a job is seen whose worker cannot say so
LINGER_SECONDS = 5.0  # how long the threads wait for another reader
PATIENCE_SECONDS = 30.0  # with a database that does not answer
_BROKER_PAUSE = 0.5
_END_SECONDS = 1.0
_ASK_AGAIN_SECONDS = 1.0
_CLOSED = "the client is closed: follow the text with another, which goes on at the last piece's place"


class Reader:
    """One reader of one text. `wake` is called, on another's thread, when `take` has something new to say.

    told  it wants log-probabilities of tokens with the pieces
    """

    def __init__(
        self, job_id: str, place: Place, wake: Callable[[], None], answer: int = 0, *, told: bool = False
    ) -> None:
        self.job_id = job_id
        self.told = told
        self.name = answer_id(job_id, answer)
        self._answer = answer
        self.line = ""
        self.job: Job | None = None  # once it has ended
        self._wake = wake
        self._lock = threading.Lock()
        self._cursor = Cursor(place)
        self._pending: list[Piece] = []
        self._tokens: list[TokenLogprob] = []  # that came and were not taken
        self._tokens_read = 0
        self._markup: Markup | None = None
        self._error: NightmillError | None = None
        self._asked_at = time.monotonic()

    @property
    def ended(self) -> bool:
        """Whether nothing more can come."""
        return self.job is not None or self._error is not None

    def take(self) -> tuple[Piece | None, bool]:
        """What has come since the last call, and whether that is the end; raises what went wrong."""
        with self._lock:
            pieces, self._pending = self._pending, []
            if pieces:
                tokens, self._tokens = tuple(self._tokens), []
                return Piece("".join(pieces), pieces[-1].place, self._markup, tokens), False
            if self._error is not None:
                raise self._error
            return None, self.job is not None

    def give(self, start: int, text: str, markup: Markup | None = None, told: Packed | None = None) -> bool:
        """Hand it a piece from a worker; False if it has to ask for the text again."""
        with self._lock:
            if self.ended:
                return True
            self._markup = markup
            try:
                piece = self._cursor.read(start, text)
                if told is not None:
                    self._add_tokens(told)
                self._add(piece)
            except GapError:
                return False
            except StreamChangedError as error:
                self._end(error=error)
            return True

    def finish(self, job: Job) -> None:
        """Hand it the row of its job, which has ended."""
        with self._lock:
            self._markup = job.markup
            try:
                text = self._text_of(job)
                cut = job.state is not JobState.SUCCEEDED and len(text) < self._cursor.place.characters
                # A job that was ended early has what was saved, which is less than its reader may have read.
                piece = None if cut else self._cursor.finish(text)
                if piece is not None and self.told and self._answer < len(job.answers):
                    self._tokens += (job.answers[self._answer].logprobs or ())[self._tokens_read :]
                self._add(piece)
                self._end(job)
            except (StreamChangedError, InvalidParameterError) as error:
                self._end(error=error)

    def _text_of(self, job: Job) -> str:
        count = job.params.answers
        if self._answer >= count:
            had = f"{count} answers" if count > 1 else "one answer"
            raise InvalidParameterError(f"answer: the job has {had}, counted from 0", field="answer")
        if self._answer == 0:
            return job.text or ""
        return job.answers[self._answer].text if self._answer < len(job.answers) else ""

    def fail(self, error: NightmillError) -> None:
        """Let `take` raise this, once it has handed out what came before."""
        with self._lock:
            self._end(error=error)

    def asks_again(self) -> bool:
        """Whether it is time to ask for the text again."""
        now = time.monotonic()
        if now < self._asked_at + _ASK_AGAIN_SECONDS:
            return False
        self._asked_at = now
        return True

    def _add_tokens(self, told: Packed) -> None:
        """What is new of tokens that may come twice. If some are missing, the row will have the rest."""
        if told.first <= self._tokens_read:
            fresh = told.tokens()[self._tokens_read - told.first :]
            self._tokens += fresh
            self._tokens_read += len(fresh)

    def _add(self, piece: Piece | None) -> None:
        if piece is not None:
            self._pending.append(piece)
            if len(self._pending) == 1:  # else it has been woken, and was not here yet
                self._wake()

    def _end(self, job: Job | None = None, error: NightmillError | None = None) -> None:
        if not self.ended:
            self.job, self._error = job, error
            self._wake()


class Following(Forkable):
    """The readers of a client. Safe to share between threads."""

    def __init__(self, store: Store, broker: Broker) -> None:
        self._store = store
        self._broker = broker
        self.after_fork_in_child()
        self.watch_forks()

    def after_fork_in_child(self) -> None:
        """Begin anew: the parent's readers and threads are the parent's."""
        self._changed = threading.Condition()
        self._readers: dict[str, Reader] = {}  # by line
        self._numbers = itertools.count(1)
        self._threads: dict[str, threading.Thread] = {}  # by name
        self._due: set[str] = set()  # jobs whose rows are to be looked at now
        self._closed = False

    def close(self) -> None:
        """End the threads. Readers that are still there, and those that come, are told that it is closed."""
        with self._changed:
            self._closed = True
            threads, readers = list(self._threads.values()), list(self._readers.values())
            self._changed.notify_all()
        for reader in readers:
            reader.fail(NightmillError(_CLOSED))
        for thread in threads:
            thread.join(_END_SECONDS)

    def pieces(
        self, job_id: str, place: Place = START, timeout: float | None = None, answer: int = 0
    ) -> Iterator[Piece]:
        """The text of a job from `place` on, as it comes; raises as `Client.stream` does."""
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
        place: Place = START,
        timeout: float | None = None,
        answer: int = 0,
        *,
        told: bool = False,
    ) -> AsyncIterator[Piece]:
        """As `pieces`, for asyncio: holds no thread while it waits. `told`: see `Reader`."""
        give_up_at = _moment(timeout)
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                loop.call_soon_threadsafe(news.set)

        with self.reading(job_id, place, wake, answer, told=told) as reader:
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
        self, job_id: str, place: Place, wake: Callable[[], None], answer: int = 0, *, told: bool = False
    ) -> Iterator[Reader]:
        """A reader of a job's text, from `place` on; raises NightmillError if it is closed."""
        if not is_job_id(job_id):
            raise JobNotFoundError(f"there is no job {job_id!r}")
        if not isinstance(answer, int) or not 0 <= answer < MAX_ANSWERS:
            said = f"answer: must be 0 to {MAX_ANSWERS - 1} (got {str(answer)[:100]!r})"
            raise InvalidParameterError(said, field="answer")
        reader = Reader(job_id, place, wake, answer, told=told)
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
                self._readers.pop(reader.line, None)

    def _enter(self, reader: Reader) -> None:
        """Give a reader a line that no worker has seen: who has the job sends the text from its beginning."""
        self._readers.pop(reader.line, None)
        reader.line = f"{reader.name}:{next(self._numbers)}{'t' if reader.told else ''}"
        self._readers[reader.line] = reader

    def _run(self, name: str, work: Callable[[], None]) -> None:
        """A thread. What it raises was expected by nobody, and readers must not wait for ever."""
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
        """All readers; none if nobody has come for a while, and the thread of this name is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._readers or self._closed, LINGER_SECONDS)
            if self._closed or not self._readers:
                self._threads.pop(name, None)
                return []
            return list(self._readers.values())

    # -- pieces ----------------------------------------------------------------------------------

    def _listen(self) -> None:
        inbox = Inbox(self._broker)
        try:
            while readers := self._read("streams"):
                try:
                    inbox.follow([reader.line for reader in readers])
                    for part in inbox.read(LISTEN_SECONDS):
                        self._take(part)
                except BrokerError as error:
                    log.debug("texts come when they are whole: %s", error)
                    inbox.close()
                    inbox = Inbox(self._broker)  # to workers another follower, to whom nothing was sent yet
                    with self._changed:
                        self._changed.wait_for(lambda: self._closed, _BROKER_PAUSE)
        finally:
            inbox.close()

    def _take(self, part: Part) -> None:
        reader = self._readers.get(part.line)
        if reader is None:
            return
        if part.text is None:
            with self._changed:
                self._due.add(reader.job_id)
                self._changed.notify_all()
        elif not reader.give(part.start, part.text, part.markup, part.told) and reader.asks_again():
            with self._changed:
                if part.line in self._readers:
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
