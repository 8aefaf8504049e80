"""Somebody's HTTP server that webhooks are sent to: it answers as a test says."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Received(NamedTuple):
    """A request."""

    path: str
    headers: dict[str, str]
    body: bytes


class Receiver(ThreadingHTTPServer):
    """Keeps what it was sent. It answers with `statuses`, one after the other, then with 204."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[Received] = []
        self.statuses: list[int] = []
        self.dripping = threading.Event()  # set: send one byte at a time, for ever

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.received.append(Received(self.path, headers, body))
        if self.server.dripping.is_set():
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
            with suppress(OSError):  # it was cut off
                while self.server.dripping.wait(0.02):
                    self.wfile.write(b"x")
                    time.sleep(0.02)
            return
        self.send_response(self.server.statuses.pop(0) if self.server.statuses else 204)
        self.send_header("Location", f"{self.server.url}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:  # nobody should
        self.server.received.append(Received(self.path, {}, b""))

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver on a free port."""
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.dripping.clear()
            server.shutdown()
            thread.join()
