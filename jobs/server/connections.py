"""Limits on connections: their number, and how long a client may keep the server waiting.

uvicorn waits without limit for the head of a request, and for a client to read. An attacker could occupy
thousands of connections without sending anything.
"""

import asyncio
import logging
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""Limit for receiving the head of a request, from the connection or its first byte."""
WRITE_SECONDS = 60.0
"""Limit for a client to read some 48 KiB of pending output."""
MOST_FILES = 1 << 16
_FILES_OF_OUR_OWN = 512
"""Open files reserved for the server itself: databases, uploads, results, Redis."""
_CUT_OFF = "Cancel %s running task(s), timeout graceful shutdown"
_NO_NEWS = ("Invalid HTTP request received.", "Unsupported upgrade request.", "No supported WebSocket")


class Connection(H11Protocol):
    """A connection that is closed if it keeps the server waiting, or at once if there are more than
    `most`."""

    most = 1024

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the limit for the head, or refuse the connection."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
            return
        self._start("head", HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection."""
        for name in tuple(self._timers):
            self._stop(name)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive bytes of a request's head or body."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop("head")
        elif not self.transport.is_closing():
            self._start("head", HEAD_SECONDS)

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP. Within a body, its reader sees a disconnect."""
        under_way = self.cycle is not None and not self.cycle.response_complete
        if under_way and self.cycle.response_started:
            self.transport.abort()
            return
        super().send_400_response(msg)
        if under_way:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def pause_writing(self) -> None:
        """Start the limit for reading: too much output is pending."""
        super().pause_writing()
        self._start("write", WRITE_SECONDS)

    def resume_writing(self) -> None:
        """Stop the limit for reading."""
        self._stop("write")
        super().resume_writing()

    def _start(self, name: str, seconds: float) -> None:
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()


def allow_connections() -> None:
    """Raise the limit of open files as far as allowed, and set the most connections accordingly."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = MOST_FILES if soft == resource.RLIM_INFINITY else soft
    Connection.most = max(64, files - _FILES_OF_OUR_OWN)


def is_news(record: logging.LogRecord) -> bool:
    """Filter uvicorn's log: requests that any stranger can send do not deserve a line each.

    Answers cut off at the end of the server need no traceback, either: one sentence gives their number.
    """
    if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
        return False
    if record.msg.startswith(_CUT_OFF):
        record.msg = "the time for answers under way is over: %s cut off, whose jobs go on"
    return not record.getMessage().startswith(_NO_NEWS)
