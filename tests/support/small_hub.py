"""A small Hub on loopback, which serves files as the real one does, and misbehaves as servers do."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Request:
    """What a client asked."""

    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class SmallHub:
    """`repos` are files by their names by `OWNER/REPO`; `files` are served by their paths, as anywhere."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    commit: str = COMMIT
    token: str | None = None
    """Needed for everything, if given."""
    refuses: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    """Status and headers for paths that hold this."""
    refusals: int = 1_000_000
    """How many times; after that it answers."""
    redirects_to: "SmallHub | None" = None
    """Another server that has the content, as the Hub's does."""
    ignores_ranges: bool = False
    cuts: list[int] = field(default_factory=list)
    """Bytes of content after which the connection is cut: of the first answer, the second, ..."""
    digests: dict[str, str] = field(default_factory=dict)
    """A file's sha256, where it is to be wrong."""
    hold: threading.Event | None = None
    """Content waits for it, after its first half."""
    asked: list[Request] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def contents(self) -> list[Request]:
        """The requests for content."""
        return [one for one in self.asked if one.method == "GET" and "/api/" not in one.path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> SmallHub:
        return cast(SmallHub, self.server.hub)  # type: ignore[attr-defined]

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        hub.asked.append(Request(self.command, path, self.headers.get("Range"), token))
        for part, (status, headers) in hub.refuses.items():
            if part in path and hub.refusals > 0:
                hub.refusals -= 1
                return self._send(status, headers)
        if hub.token is not None and token != hub.token:
            return self._send(401, {"X-Error-Code": "RepoNotFound"})
        if path.startswith("/api/models/"):
            return self._repo("/".join(path.split("/")[3:5]))
        parts = path.split("/")
        if len(parts) > 5 and parts[3] == "resolve":
            return self._file("/".join(parts[1:3]), "/".join(parts[5:]))
        if path in hub.files:
            return self._content(hub.files[path], {"ETag": f'"{hashlib.md5(hub.files[path]).hexdigest()}"'})
        return self._send(404, {})

    def _repo(self, repo: str) -> None:
        if repo not in self.hub.repos:
            return self._send(404, {"X-Error-Code": "RepoNotFound"})
        names = [{"rfilename": name} for name in self.hub.repos[repo]]
        about = {"id": repo, "sha": self.hub.commit, "siblings": names}
        return self._send(200, {"Content-Type": "application/json"}, json.dumps(about).encode())

    def _file(self, repo: str, name: str) -> None:
        hub = self.hub
        content = hub.repos.get(repo, {}).get(name)
        if content is None:
            return self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": hub.commit})
        digest = hub.digests.get(name, hashlib.sha256(content).hexdigest())
        headers = {
            "X-Repo-Commit": hub.commit,
            "X-Linked-Etag": f'"{digest}"',
            "X-Linked-Size": str(len(content)),
            "ETag": f'"{hashlib.md5(content).hexdigest()}"',
        }
        if hub.redirects_to is None:
            return self._content(content, headers)
        path = f"/blobs/{digest}"
        hub.redirects_to.files[path] = content
        return self._send(302, headers | {"Location": hub.redirects_to.url + path})

    def _content(self, content: bytes, headers: dict[str, str]) -> None:
        hub, status, start = self.hub, 200, 0
        asked = self.headers.get("Range")
        if asked and not hub.ignores_ranges:
            start, status = int(asked.removeprefix("bytes=").rstrip("-")), 206
            if start >= len(content):
                return self._send(416, {"Content-Range": f"bytes */{len(content)}"})
            headers = headers | {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content) - start)}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return None
        body = content[start:]
        if hub.cuts:
            self.wfile.write(body[: hub.cuts.pop(0)])
            self.close_connection = True
            return None
        half = len(body) // 2
        self.wfile.write(body[:half])
        if hub.hold is not None:
            self.wfile.flush()
            hub.hold.wait(30)
        self.wfile.write(body[half:])
        return None

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@contextmanager
def serving(hub: SmallHub) -> Iterator[SmallHub]:
    """The hub, answering on a port of its own."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = hub  # type: ignore[attr-defined]
    server.daemon_threads = True
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        if hub.hold is not None:
            hub.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()
