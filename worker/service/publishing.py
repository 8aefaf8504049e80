"""Publishes the texts of jobs that somebody follows, while they are generated.

A thread of its own looks at who follows what, has the engine tell those texts, and sends what they have grown
by. It keeps each text that is followed, so that a follower that comes late, or comes again, has it from its
beginning. Nothing here decides what a text is: if Redis is away, followers get theirs from the row.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

from nightmill.jobs.base.contract import Markup, storable
from nightmill.jobs.errors import BrokerError
from nightmill.jobs.reply.answers import split_answer_id
from nightmill.jobs.reply.logprobs import Spell
from nightmill.jobs.streams.redis import (
    LOGPROBS_CHARACTERS,
    PIECE_CHARACTERS,
    Followers,
    TextChunk,
    wants_counts,
    wants_logprobs,
)
from nightmill.worker.engine.logprobs import Logprobs
from nightmill.worker.engine.request import Delta
from nightmill.worker.service.in_flight import InFlight
from nightmill.worker.service.logprobs import GrowingLogprobs
from nightmill.worker.watched import watched_thread

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.025  # from one look at who follows to the next, while there are jobs
EAGER_LOOK_SECONDS = 0.005
EAGER_SECONDS = 0.1  # after interactive jobs began: whoever waits for them is about to say so
MOST_TEXTS = 2048  # followed on one worker at once; the others come whole
_END_SECONDS = 10.0  # for an answer of Redis that is under way when the worker ends
_PAUSE_SECONDS = 1.0  # after a failure of Redis

Lines = Mapping[str, Mapping[str, str]]
"""{follower: {line: answer}}; an answer goes by the name that it has in the engine"""


class _Answered(NamedTuple):
    """An answer has ended with this text, and its job has not."""

    job_id: str
    text: str
    logprobs: Logprobs | None


class _Text:
    """A followed text as far as it is known, and how much of it each line was sent."""

    def __init__(self, spell: Spell) -> None:
        self.text = ""
        self.markup: Markup | None = None
        self.sent: dict[tuple[str, str], tuple[int, int]] = {}  # characters, tokens; by follower and line
        self._spell = spell
        self._logprobs = GrowingLogprobs(spell)
        self._counts: tuple[int, int] | None = None

    def grow(self, delta: Delta) -> None:
        if delta.start == 0:  # it began again: so does what is sent
            self.text = ""
            self.sent = dict.fromkeys(self.sent, (0, 0))
            self._logprobs = GrowingLogprobs(self._spell)
        if delta.start == len(self.text):  # else it is the rest of a telling that was ended
            self.text += delta.text
            self._counts = delta.counts
            if delta.logprobs is not None:
                self._logprobs.add(delta.logprobs)

    def end(self, whole: str, logprobs: Logprobs | None) -> None:
        if whole.startswith(self.text):
            self.text = whole
            if logprobs is not None:
                self._logprobs.end(logprobs)

    def keep(self, lines: set[tuple[str, str]]) -> None:
        """Forget what other lines were sent."""
        self.sent = {line: sent for line, sent in self.sent.items() if line in lines}

    def parts(self, follower: str, line: str) -> list[TextChunk]:
        """Return the chunks of the text that this line lacks, and count them as sent."""
        start, tokens = self.sent.get((follower, line), (0, 0))
        logprobs = wants_logprobs(line)
        size = LOGPROBS_CHARACTERS if logprobs else PIECE_CHARACTERS
        parts = []
        for place in range(start, len(self.text), size):
            text = self.text[place : place + size]
            packed = self._logprobs.packed(tokens, place + len(text)) if logprobs else None
            tokens += 0 if packed is None else len(packed.offsets)
            counts = self._counts if wants_counts(line) else None
            parts.append(TextChunk(line, place, text, self.markup, packed, counts))
        self.sent[follower, line] = len(self.text), tokens
        return parts


class Publisher:
    """Sends followed texts. What it is told, it is told on any thread and at once.

    in_flight  the jobs that this worker has
    follow     has the engine tell these texts, from now on, to `add_deltas`; false if it was not told
    spell      how tokens are spelt whose log-probabilities are told
    """

    def __init__(
        self,
        followers: Followers,
        in_flight: InFlight,
        follow: Callable[[Sequence[str]], bool],
        on_failure: Callable[[str], None],
        spell: Spell,
    ) -> None:
        self._followers = followers
        self._spell = spell
        self._in_flight = in_flight
        self._follow = follow
        self._news: SimpleQueue[list[Delta] | list[_Answered] | list[str] | None] = SimpleQueue()
        self._closing = threading.Event()
        self._lines: Lines = {}
        self._texts: dict[str, _Text] = {}  # by answer
        self._looked_at = 0.0
        self._eager_until = 0.0
        self._thread = watched_thread("publisher", self._run, on_failure)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def began(self, *, interactive: bool = False) -> None:
        """Jobs were claimed: see soon whether somebody follows them."""
        if interactive:
            self._eager_until = time.monotonic() + EAGER_SECONDS
        self._news.put([])

    def add_deltas(self, deltas: list[Delta]) -> None:
        """Followed texts have grown."""
        self._news.put(deltas)

    def answered(self, name: str, text: str, logprobs: Logprobs | None) -> None:
        """An answer has ended, and others of its job have not: whoever reads it need not wait for the row."""
        if self._lines:
            self._news.put([_Answered(name, storable(text), logprobs)])

    def ended(self, job_ids: list[str]) -> None:
        """The rows of these jobs say how they ended."""
        if self._lines:
            self._news.put(job_ids)

    def close(self) -> None:
        """Send what there is, and end the thread."""
        self._closing.set()
        self._news.put(None)
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)
        if not self._thread.is_alive():  # else it is still using the connection
            self._followers.close()

    def _run(self) -> None:
        while True:
            ended = self._take_news()
            try:
                self._look()
                self._send(ended)
            except BrokerError as error:
                log.debug("followed texts are not sent: %s", error)
                self._forget()
                self._closing.wait(_PAUSE_SECONDS)
            if self._closing.is_set():
                return

    def _take_news(self) -> set[str]:
        """Wait for news; returns the jobs that have ended."""
        ended: set[str] = set()
        try:
            news = self._news.get(timeout=self._patience())
            while True:
                for one in news or ():
                    if isinstance(one, str):
                        ended.add(one)
                    elif (text := self._texts.get(one.job_id)) is not None:
                        if isinstance(one, _Answered):
                            text.end(one.text, one.logprobs)
                        else:
                            text.grow(one)
                            text.markup = self._in_flight.markup(
                                (split_answer_id(one.job_id)[0], one.attempt)
                            )
                news = self._news.get_nowait()
        except Empty:
            return ended

    def _patience(self) -> float | None:
        """Without a job there is nothing to look for."""
        if self._in_flight.idle and not self._texts:
            return None
        return max(0.0, self._look_at() - time.monotonic())

    def _look_at(self) -> float:
        """When to look at the lists again."""
        eager = self._looked_at < self._eager_until
        return self._looked_at + (EAGER_LOOK_SECONDS if eager else LOOK_SECONDS)

    def _look(self) -> None:
        """See who follows what, and have the engine tell that."""
        now = time.monotonic()
        if now < self._look_at():
            return
        self._looked_at = now
        lines = self._followers.look()
        if lines != self._lines:
            self._lines = lines
            for text in self._texts.values():
                text.keep({(follower, line) for follower, own in lines.items() for line in own})
        if not lines and not self._texts:
            return
        held = self._in_flight.keys()
        ours = {job_id for job_id, _ in held}
        wanted = {name for own in lines.values() for name in own.values() if split_answer_id(name)[0] in ours}
        wanted = set(sorted(wanted)[:MOST_TEXTS])
        if wanted != self._texts.keys() and self._follow(sorted(wanted)):  # else it is tried at the next look
            self._texts = {name: self._texts.get(name) or _Text(self._spell) for name in wanted}

    def _send(self, ended: set[str]) -> None:
        letters: dict[str, list[TextChunk]] = {}
        for follower, lines in self._lines.items():
            parts: list[TextChunk] = []
            for line, name in lines.items():
                if (text := self._texts.get(name)) is not None:
                    parts += text.parts(follower, line)
                if split_answer_id(name)[0] in ended:
                    parts.append(TextChunk(line))
            if parts:
                letters[follower] = parts
        if letters:
            self._followers.send(letters)

    def _forget(self) -> None:
        """Forget what was sent, which is not known: once Redis is back, all is sent from its beginning."""
        self._followers.close()
        self._lines = {}
        if self._texts:
            self._texts = {}
            self._follow([])
