"""One reader of a growing text: it puts pieces from workers and the end from the row in order."""

import logging
import threading
import time
from collections.abc import Callable

from nightmill.jobs.base.contract import JobState, Markup
from nightmill.jobs.errors import (
    InvalidParameterError,
    NightmillError,
    StreamChangedError,
)
from nightmill.jobs.reply.answers import answer_id
from nightmill.jobs.reply.job import Job
from nightmill.jobs.reply.logprobs import Packed, TokenLogprob
from nightmill.jobs.streams.pieces import Cursor, GapError, Piece, TextPosition
from nightmill.jobs.streams.redis import TextChunk

log = logging.getLogger(__name__)

_ASK_AGAIN_SECONDS = 1.0


class Reader:
    """A reader of one text. `wake` is called on another thread when `take` has news.

    with_logprobs  whether pieces come with the log-probabilities of their tokens
    with_counts    whether pieces come with the numbers of tokens
    """

    def __init__(
        self,
        job_id: str,
        place: TextPosition,
        wake: Callable[[], None],
        answer: int = 0,
        *,
        with_logprobs: bool = False,
        with_counts: bool = False,
    ) -> None:
        self.job_id = job_id
        self.with_logprobs = with_logprobs
        self.with_counts = with_counts
        self.name = answer_id(job_id, answer)
        self._answer = answer
        self.subscription = ""
        self.job: Job | None = None  # once it has ended
        self._wake = wake
        self._lock = threading.Lock()
        self._cursor = Cursor(place)
        self._pending: list[Piece] = []
        self._tokens: list[TokenLogprob] = []  # received and not taken yet
        self._tokens_read = 0
        self._markup: Markup | None = None
        self._counts: tuple[int, int] | None = None
        self._error: NightmillError | None = None
        self._asked_at = time.monotonic()

    @property
    def ended(self) -> bool:
        """True if nothing more can come."""
        return self.job is not None or self._error is not None

    def take(self) -> tuple[Piece | None, bool]:
        """Return (what has come since the last call, whether that is the end); raises the error that ended
        the stream."""
        with self._lock:
            pieces, self._pending = self._pending, []
            if pieces:
                tokens, self._tokens = tuple(self._tokens), []
                place, counts = pieces[-1].place, self._counts
                return Piece("".join(pieces), place, self._markup, tokens, counts), False
            if self._error is not None:
                raise self._error
            return None, self.job is not None

    def give(self, chunk: TextChunk) -> bool:
        """Add a piece from a worker; False if the reader must request the text again."""
        with self._lock:
            if self.ended:
                return True
            self._markup = chunk.markup
            try:
                piece = self._cursor.read(chunk.start, chunk.text or "")
                self._counts = chunk.counts or self._counts
                if chunk.logprobs is not None:
                    self._add_tokens(chunk.logprobs)
                self._add(piece)
            except GapError:
                return False
            except StreamChangedError as error:
                self._end(error=error)
            return True

    def finish(self, job: Job) -> None:
        """Add the rest of the text from the row of the ended job."""
        with self._lock:
            self._markup = job.markup
            try:
                text = self._text_of(job)
                cut = job.state is not JobState.SUCCEEDED and len(text) < self._cursor.place.characters
                # The row of a job that ended early has the text saved last, which may be less than the reader
                # has read.
                piece = None if cut else self._cursor.finish(text)
                if piece is not None and self.with_logprobs and self._answer < len(job.answers):
                    self._tokens += (job.answers[self._answer].logprobs or ())[self._tokens_read :]
                if self.with_counts and self._answer < len(job.answers):
                    ended = job.answers[self._answer]
                    self._counts = (job.prompt_tokens or 0, ended.completion_tokens)
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
        """Make `take` raise this error after the pieces received before."""
        with self._lock:
            self._end(error=error)

    def asks_again(self) -> bool:
        """Return True if the text should be requested again now."""
        now = time.monotonic()
        if now < self._asked_at + _ASK_AGAIN_SECONDS:
            return False
        self._asked_at = now
        return True

    def _add_tokens(self, logprobs: Packed) -> None:
        """Add the new ones among tokens that may repeat. If some are missing, the row will have the rest."""
        if logprobs.first <= self._tokens_read:
            fresh = logprobs.tokens()[self._tokens_read - logprobs.first :]
            self._tokens += fresh
            self._tokens_read += len(fresh)

    def _add(self, piece: Piece | None) -> None:
        if piece is not None:
            self._pending.append(piece)
            if len(self._pending) == 1:  # otherwise it was woken already and has not taken yet
                self._wake()

    def _end(self, job: Job | None = None, error: NightmillError | None = None) -> None:
        if not self.ended:
            self.job, self._error = job, error
            self._wake()
