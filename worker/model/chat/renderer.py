"""The handle on the process that renders chat templates: starts, asks and ends it, and says who was to blame.

A chat at which the process dies or overstays is answered by a ChatTemplateError; a new process renders the
others. Threads take turns in the order in which they came, and a thread's turn ends with such a loss: so the
chats of other threads wait for one hostile chat of each thread before them, whatever else those bring.
"""

import json
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import jinja2
import markupsafe

from nightmill.jobs.errors import ChatTemplateError, RunnerError
from nightmill.worker.confined import TRIES, ConfinedProcess, LostError, Words

PROGRAM: Final = Path(__file__).with_name("renderer_process.py")
MAX_SOURCE: Final = 1 << 20  # characters of a template
_GROUP_BYTES: Final = 1 << 20  # sent at once, and more only if a single chat has more
_MAX_ERROR: Final = 1000  # characters of an error's text: it is stored with the job
_WORDS: Final = Words(
    process="the process that renders chat templates",
    slow="the template takes too much time with these messages",
    crashed="the template crashes Python with these messages ({signal})",
)

_FIRST_CHAT: Final = {"messages": [{"role": "user", "content": "Hello"}], "add_generation_prompt": True}
_LENGTH = struct.Struct("<I")
_ANSWER = struct.Struct("<cI")
_READ_AT_ONCE = 1 << 16  # bytes
_ENCODE: Final = json.JSONEncoder(default=dict).encode  # which `json.dumps` would make anew for each chat
_TEXT, _REFUSED, _EXHAUSTED = b"T", b"R", b"X"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on a template's time, memory and output.

    The text of 100 words takes 0.0001 s; the process itself has 20 MB.
    """

    memory: int = 512 << 20  # bytes of address space
    compile_seconds: float = 2.0  # of processor time
    render_seconds: float = 0.25  # of processor time for a chat, and
    seconds_per_byte: float = 1e-6  # for each byte of its messages
    wall_seconds: float = 20.0  # for an answer, beside four times the processor time that it may take
    answer_bytes: int = 1 << 24  # of text for a chat, beside four times the bytes of its messages


class Renderer:
    """One template in a process of its own. Safe to use from several threads."""

    def __init__(self, source: str, variables: Mapping[str, Any], limits: Limits, label: str) -> None:
        """Start the process, compile the template and try it on a chat that every model understands.

        `variables`: for every chat. `label`: what errors call the template. Raises ChatTemplateError if
        the template cannot be compiled, or ends its process even so; RunnerError if none can be started.
        """
        self._limits = limits
        self._label = label
        self._turns = _Turns()
        self._child: _Child | None = None
        if len(source) > MAX_SOURCE:
            raise ChatTemplateError(
                f"{label}: the template has {len(source):,} characters, more than {MAX_SOURCE:,}"
            )
        self._begin = json.dumps({"template": source, "variables": variables, **asdict(limits)}).encode()
        for last in (*[False] * (TRIES - 1), True):
            try:
                self._child = self._start()
                list(self._ask([json.dumps({"chat": _FIRST_CHAT, "time": _as_sent(None)}).encode()]))
                return
            except LostError as lost:
                self._drop()
                if last or lost.convicts:
                    raise ChatTemplateError(f"{label}: {lost}") from lost

    def render_all(
        self, chats: Sequence[Mapping[str, Any]], times: Sequence[datetime | None] | None = None
    ) -> list[str | ChatTemplateError]:
        """The text of each chat (the template's variables), or why it has none.

        times  what `strftime_now` shows in each, in UTC; None: now

        Raises RunnerError if the process cannot be started.
        """
        told = times or [None] * len(chats)
        sent = {time: _as_sent(time) for time in set(told)}  # one for all rows of a batch
        lines: list[bytes | ChatTemplateError] = [
            self._line(chat, sent[time]) for chat, time in zip(chats, told, strict=True)
        ]
        answers = iter(self._answers([line for line in lines if isinstance(line, bytes)]))
        return [next(answers) if isinstance(line, bytes) else line for line in lines]

    def close(self) -> None:
        """End the process. It also ends when this one does."""
        with self._turns.mine():
            self._drop()

    @property
    def pid(self) -> int | None:
        """The process, if it runs."""
        return None if self._child is None else self._child.process.pid

    def _line(self, chat: Mapping[str, Any], time: str) -> bytes | ChatTemplateError:
        try:
            return _ENCODE({"chat": chat, "time": time}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            return ChatTemplateError(f"the messages cannot be given to the model's chat template: {error}")

    def _answers(self, lines: Sequence[bytes]) -> list[str | ChatTemplateError]:
        answers: list[str | ChatTemplateError] = []
        losses = 0
        while len(answers) < len(lines):
            with self._turns.mine():
                try:
                    for answer in self._ask(list(_group(lines[len(answers) :]))):
                        answers.append(answer)
                        losses = 0
                except LostError as lost:
                    self._drop()
                    losses += 1
                    if lost.convicts or losses == TRIES:
                        answers.append(ChatTemplateError(f"{self._label}: {lost}"))
                        losses = 0
                except BaseException:  # or the next chats would get the answers to these
                    self._drop()
                    raise
        return answers

    def _ask(self, lines: Sequence[bytes]) -> Iterator[str | ChatTemplateError]:
        """Answers in order, as many as the process gives; raises LostError at the first that it does not."""
        limits = self._limits
        try:
            child = self._child = self._child or self._start()
        except (ChatTemplateError, LostError) as error:  # not these chats' fault: it was compiled before
            raise LostError(f"the template cannot be compiled again: {error}") from error
        child.send(b"\n".join(lines), limits.wall_seconds)
        for line in lines:
            seconds = limits.render_seconds + limits.seconds_per_byte * len(line)
            most = limits.answer_bytes + 4 * len(line)
            kind, data = child.receive(most, limits.wall_seconds + 4 * seconds)
            if kind == _EXHAUSTED:
                raise LostError("the template needs too much memory with these messages", convicts=True)
            if kind != _TEXT:
                yield self._error(kind, data)
                continue
            try:
                yield data.decode("utf-8", "surrogatepass")
            except UnicodeDecodeError as error:
                raise LostError("the process that renders the template is damaged", convicts=True) from error

    def _error(self, kind: bytes, data: bytes) -> ChatTemplateError:
        text = data.decode("utf-8", "replace").replace("\x00", "\ufffd")[:_MAX_ERROR]
        if kind == _REFUSED:
            return ChatTemplateError(f"the model's chat template refuses these messages: {text}")
        return ChatTemplateError(f"{self._label}: {text}")

    def _start(self) -> "_Child":
        """A process that has compiled the template."""
        limits = self._limits
        child = _Child()
        try:
            child.send(self._begin, limits.wall_seconds)
            kind, data = child.receive(limits.answer_bytes, limits.wall_seconds + 4 * limits.compile_seconds)
            if kind != _TEXT:
                raise self._error(kind, data)
        except BaseException:  # Ctrl-C too must not leave the process behind
            child.close()
            raise
        return child

    def _drop(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


class _Child:
    """The process and our end of its socket."""

    def __init__(self) -> None:
        """Start it; raises RunnerError if that fails."""
        self._socket, theirs = socket.socketpair()
        self._unread = bytearray()
        number = theirs.fileno()
        try:
            # Its environment is empty: no secret, no locale, no time zone.
            self.process = ConfinedProcess(PROGRAM, [jinja2, markupsafe], _WORDS, stdin=number, stdout=number)
        except RunnerError:
            self._socket.close()
            raise
        finally:
            theirs.close()

    def send(self, frame: bytes, seconds: float) -> None:
        with self._within(seconds):
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame)

    def receive(self, most: int, seconds: float) -> tuple[bytes, bytes]:
        """The kind and text of an answer of up to `most` bytes."""
        unread, begin, give_up_at = self._unread, _ANSWER.size, time.monotonic() + seconds
        self._read(begin, seconds, give_up_at)
        kind, length = _ANSWER.unpack_from(unread)
        if length > most:
            raise LostError(f"the template writes {length:,} bytes of text", convicts=True)
        self._read(begin + length, seconds, give_up_at)
        data = bytes(unread[begin : begin + length])
        del unread[: begin + length]
        return kind, data

    def close(self) -> None:
        self._socket.close()
        self.process.kill()

    def _read(self, count: int, seconds: float, give_up_at: float) -> None:
        """Read until so many bytes are there; most answers come with the one before."""
        unread = self._unread
        if len(unread) >= count:
            return
        with self._within(seconds):
            while len(unread) < count:
                self._socket.settimeout(max(give_up_at - time.monotonic(), 1e-6))
                part = self._socket.recv(_READ_AT_ONCE)  # of several answers, if they are there
                if not part:
                    raise EOFError
                unread += part

    @contextmanager
    def _within(self, seconds: float) -> Iterator[None]:
        """Runs its body for so long at most; says how the process was lost, if it was."""
        self._socket.settimeout(seconds)
        try:
            yield
        except TimeoutError as error:
            raise LostError(f"the template does not end within {seconds:g} s") from error
        except (OSError, EOFError) as error:
            raise self.process.lost() from error


class _Turns:
    """A lock that threads get in the order in which they ask. threading.Lock may starve those that wait."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._taken = False

    @contextmanager
    def mine(self) -> Iterator[None]:
        turn = threading.Lock()
        with self._mutex:
            if self._taken:
                turn.acquire()
                self._waiting.append(turn)
            self._taken = True
        with turn:
            pass
        try:
            yield
        finally:
            with self._mutex:
                if self._waiting:
                    self._waiting.popleft().release()
                else:
                    self._taken = False


def _as_sent(time: datetime | None) -> str:
    """In UTC, whatever zone this machine is in: a prompt is the same on all."""
    return (time or datetime.now(UTC)).astimezone(UTC).isoformat()


def _group(lines: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the first lines, as many as are sent at once, at least one."""
    room = _GROUP_BYTES
    for line in lines:
        yield line
        room -= len(line)
        if room <= 0:
            return
