"""Connections: how many at once, and how long one may keep the server waiting.

uvicorn waits for the head of a request, and for a client to read, as long as that takes. Somebody who opens
thousands of connections and says nothing would hold them all.
"""

import asyncio
import logging
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""For the head of a request, from the connection or from its first byte on."""
WRITE_SECONDS = 60.0
"""For a client to read some 48 KiB of what waits for it."""
MOST_FILES = 1 << 16
_FILES_OF_OUR_OWN = 512
"""Of the files that a process may have open: databases, uploads, results, Redis."""
_NO_NEWS = ("Invalid HTTP request received.", "Unsupported upgrade request.", "No supported WebSocket")


class Connection(H11Protocol):
    """One that is ended if it keeps the server waiting; beyond `most` it is closed at once."""

    most = 1024

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
            return
        self._start("head", HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        for name in tuple(self._timers):
            self._stop(name)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes of a request, of its head or of its body."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop("head")
        elif not self.transport.is_closing():
            self._start("head", HEAD_SECONDS)

    def send_400_response(self, msg: str) -> None:
        """What came is not HTTP. If it is the middle of a body, whoever reads that has lost the client."""
        under_way = self.cycle is not None and not self.cycle.response_complete
        if under_way and self.cycle.response_started:
            self.transport.abort()
            return
        super().send_400_response(msg)
        if under_way:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def pause_writing(self) -> None:
        """More waits for the client than it should."""
        super().pause_writing()
        self._start("write", WRITE_SECONDS)

    def resume_writing(self) -> None:
        """It has read."""
        self._stop("write")
        super().resume_writing()

    def _start(self, name: str, seconds: float) -> None:
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()


def allow_connections() -> None:
    """Let as many be open as this process may have files, less what it needs itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = MOST_FILES if soft == resource.RLIM_INFINITY else soft
    Connection.most = max(64, files - _FILES_OF_OUR_OWN)


def is_news(record: logging.LogRecord) -> bool:
    """A filter of uvicorn's log: what any stranger may send is not worth a line each time."""
    return not record.getMessage().startswith(_NO_NEWS)
