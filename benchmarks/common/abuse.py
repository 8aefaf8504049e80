"""Kinds of abuse of a server over HTTP, each as fast as one process can: `benchmarks.endurance` runs them."""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import httpx2
import psutil

from nightmill.jobs.base.ids import IdSource
from tests.support.odd_requests import ODD_BODIES, ODD_HEADS, POSTED_TO

__all__ = ["HOST", "KEYS", "PARTS", "Server", "posting"]

HOST = "127.0.0.1"
KEYS = {"alice": "alice-has-a-long-key", "mallory": "mallory-has-one-too"}
HEADERS = {"Authorization": f"Bearer {KEYS['mallory']}"}
CONNECTIONS = 64  # that send as fast as they can
_CHUNK = 1 << 16


@dataclass
class Server:
    """The server, as others see it."""

    process: psutil.Process
    port: int
    answers: Counter[str] = field(default_factory=Counter)
    most: int = 0
    health: list[float] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://{HOST}:{self.port}"

    def memory(self) -> int:
        """Resident bytes."""
        resident: int = self.process.memory_info().rss
        self.most = max(self.most, resident)
        return resident


Part = Callable[[Server, float], Awaitable[None]]


async def idle(server: Server, scale: float) -> None:
    """Connect, and say nothing."""

    async def nothing(writer: asyncio.StreamWriter) -> None:
        pass

    await _connections(server, round(10_000 * scale), b"", nothing)


async def slow_heads(server: Server, scale: float) -> None:
    """A byte of a request each second."""

    async def drip(writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while not writer.is_closing():
                writer.write(b"X")
                await writer.drain()
                await asyncio.sleep(1.0)

    await _connections(
        server, round(2_000 * scale), b"POST /execute HTTP/1.1\r\nHost: localhost\r\nX: ", drip
    )


async def _connections(
    server: Server, count: int, first: bytes, then: Callable[..., Awaitable[object]]
) -> None:
    """So many that begin like this, kept open until the server closes them."""
    dripping: list[asyncio.Future[object]] = []
    opened = asyncio.Semaphore(200)

    async def one() -> None:
        async with opened:
            reader, writer = await asyncio.open_connection(HOST, server.port)
        began = time.monotonic()
        with suppress(OSError):
            writer.write(first)
            if first:
                dripping.append(asyncio.ensure_future(then(writer)))
            await reader.read()
        server.answers["closed after " + ("10 s or less" if time.monotonic() - began < 12 else "more")] += 1
        writer.close()

    await asyncio.gather(*(one() for _ in range(count)))
    for drip in dripping:
        drip.cancel()


async def large_bodies(server: Server, scale: float) -> None:
    """A gigabyte, announced or in chunks, as JSON or as a file."""
    size = round((1 << 30) * scale)
    form = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n' + (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="rows"\r\n\r\n'
    )
    kinds = [(path, "application/json", announced) for path in POSTED_TO for announced in (True, False)] + [
        ("/v1/files", "multipart/form-data; boundary=x", announced) for announced in (True, False)
    ]

    async def body(beginning: bytes) -> AsyncIterator[bytes]:
        yield beginning
        for _ in range(size // _CHUNK):
            yield b"a" * _CHUNK

    async def one(path: str, kind: str, announced: bool) -> None:
        beginning = form if "form" in kind else b'{"prompt": "'
        headers = HEADERS | {"Content-Type": kind}
        if announced:
            headers["Content-Length"] = str(len(beginning) + size // _CHUNK * _CHUNK)
        async with httpx2.AsyncClient(base_url=server.url, timeout=120) as http:
            try:
                answer = await http.post(path, headers=headers, content=body(beginning))
                server.answers[str(answer.status_code)] += 1
            except httpx2.TransportError:
                server.answers["closed while the body was sent"] += 1

    await asyncio.gather(*(one(*kind) for kind in kinds))


async def malformed(server: Server, scale: float) -> None:
    """As fast as they go: heads that are none, bodies that are none."""
    draw = random.Random(1)
    left = itertools.count()
    count = round(100_000 * scale)

    async def one() -> None:
        async with posting(server) as http:
            while next(left) < count:
                if draw.random() < 0.5:
                    await _raw(server, draw.choice(ODD_HEADS))
                    continue
                kind = draw.choice(("application/json", "text/plain"))
                posted = http.post(
                    draw.choice(POSTED_TO), content=draw.choice(ODD_BODIES), headers={"Content-Type": kind}
                )
                await _counted(server, posted)

    await asyncio.gather(*(one() for _ in range(CONNECTIONS)))


async def _counted(server: Server, asked: Awaitable[httpx2.Response]) -> None:
    """Note the answer. A connection that this end did not use for 5 s is closed by the server."""
    try:
        server.answers[str((await asked).status_code)] += 1
    except httpx2.TransportError:
        server.answers["closed"] += 1


async def _raw(server: Server, said: bytes) -> None:
    """Send some bytes, and close when something comes back, or nothing for a while."""
    reader, writer = await asyncio.open_connection(HOST, server.port)
    try:
        writer.write(said)
        writer.write_eof()
        begun = await asyncio.wait_for(reader.read(12), 30)
        server.answers[begun[9:12].decode("ascii", "replace") or "closed"] += 1
    except OSError:
        server.answers["closed"] += 1
    finally:
        writer.close()


async def forged(server: Server, scale: float) -> None:
    """Ids that nobody was told, with a key that is good for something else, or with none."""
    ids, left = IdSource(), itertools.count()
    count = round(20_000 * scale)
    paths = (
        "/v1/jobs/{}", "/v1/jobs/{}/events", "/v1/files/file-{}", "/v1/files/file-{}/content",
        "/v1/batches/batch_{}", "/v1/night/batch_{}",
    )  # fmt: skip

    async def one() -> None:
        async with posting(server) as http:
            while (number := next(left)) < count:
                path = paths[number % len(paths)].format(ids.draw())
                headers = {"Authorization": f"Bearer {number}"} if number % 3 == 0 else {}
                await _counted(server, http.get(path, headers=headers))

    await asyncio.gather(*(one() for _ in range(CONNECTIONS)))


@asynccontextmanager
async def posting(server: Server) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=server.url, timeout=60, headers=HEADERS) as http:
        yield http


PARTS: dict[str, tuple[str, Part]] = {
    "idle": ("10,000 connections that say nothing", idle),
    "slow": ("2,000 requests, a byte a second", slow_heads),
    "large": ("16 bodies of 1 GiB at once", large_bodies),
    "malformed": ("100,000 requests that are none", malformed),
    "forged": ("20,000 forged ids", forged),
}
