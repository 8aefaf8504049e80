"""What strangers may do to a server over HTTP, and what it costs the server: memory, and others' time.

    python -m benchmarks.abuse [--part idle ...] [--scale 1.0]

A real `nightmill serve` with keys, on Redis and SQLite of its own, and no worker. For each kind of abuse: how
the server answered, its memory before, at most and afterwards, and how long GET /health took for others.
Prints Markdown for RESULTS.md; fails if the server has died, failed or grown without bound. The part `doors`
needs no server: it prints for each of them how long n, 2n and 4n of what strangers write take to be read.
"""

import argparse
import asyncio
import itertools
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import httpx2
import psutil

from benchmarks import doors
from benchmarks.servers import durable_client
from nightmill.jobs.client import Client
from nightmill.jobs.ids import IdSource
from nightmill.jobs.spec import JobSpec
from tests.servers import free_port, wait_until, worker_env
from tests.unit.server.odd_requests import ODD_BODIES, ODD_HEADS, POSTED_TO

HOST = "127.0.0.1"
KEYS = {"alice": "alice-has-a-long-key", "mallory": "mallory-has-one-too"}
HEADERS = {"Authorization": f"Bearer {KEYS['mallory']}"}
MOST_GROWTH = 256 << 20
"""Bytes that the server's memory may grow by in any part."""
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


def main() -> None:
    """Each part on one server, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=(*PARTS, DOORS))
    parser.add_argument("--scale", type=float, default=1.0, help="of all numbers")
    options = parser.parse_args()
    chosen = options.part or [*PARTS, DOORS]
    if parts := [name for name in chosen if name != DOORS]:
        abuse(parts, options.scale)
    if DOORS in chosen:
        doors.show()


def abuse(parts: list[str], scale: float) -> None:
    """These parts on one server."""
    print("| | answers | took | MiB before / most / after | ms of /health p50 / p99 |")
    print("| --- | --- | --- | --- | --- |")
    with durable_client(sqlite=True) as (client, home):
        alices = client.enqueue_spec(JobSpec.parse("A secret"), owner="alice")
        port = free_port()
        environment = worker_env(
            client.settings, api_keys=",".join(f"{name}={key}" for name, key in KEYS.items())
        )
        with (home / "server.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "nightmill", "serve", "--port", str(port)],
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            server = Server(psutil.Process(process.pid), port)
            wait_until(lambda: _lives(server))
            for name in parts:
                asyncio.run(measure(name, server, scale))
            asyncio.run(_knows_nothing(server, client, alices))
            print(f"\nlog of the server: {(home / 'server.log').stat().st_size:,} bytes")
        finally:
            process.terminate()
            process.wait(60)


async def measure(name: str, server: Server, scale: float) -> None:
    """One part; prints a row of the table."""
    says, part = PARTS[name]
    before, began = server.memory(), time.monotonic()
    server.answers, server.most, server.health = Counter(), before, []
    watching = asyncio.ensure_future(_watch(server))
    try:
        await part(server, scale)
    finally:
        watching.cancel()
    seconds = time.monotonic() - began
    await asyncio.sleep(1.0)
    assert _lives(server), "the server does not answer any more"
    after = server.memory()
    health = sorted(server.health)
    answers = ", ".join(f"{count:,} {what}" for what, count in sorted(server.answers.items()))
    p50, p99 = (health[min(len(health) - 1, len(health) * part // 100)] * 1000 for part in (50, 99))
    sizes = " / ".join(f"{size / 2**20:.0f}" for size in (before, server.most, after))
    print(f"| {says} | {answers} | {seconds:.0f} s | {sizes} | {p50:.0f} / {p99:.0f} |", flush=True)
    assert server.most - before < MOST_GROWTH, "the server grew without bound"
    failed = [what for what in server.answers if what.startswith("5") and what != "503"]
    assert not failed, f"the server failed: {failed}"


async def _watch(server: Server) -> None:
    """Ask as somebody else does, and look at the memory."""
    async with httpx2.AsyncClient(base_url=server.url, timeout=60) as http:
        while True:
            began = time.monotonic()
            with suppress(httpx2.TransportError):
                await http.get("/health")
            server.health.append(time.monotonic() - began)
            server.memory()
            await asyncio.sleep(0.05)


def _lives(server: Server) -> bool:
    with suppress(httpx2.TransportError):
        return httpx2.get(f"{server.url}/health", timeout=30).status_code == 200
    return False


# -- parts ---------------------------------------------------------------------------------------


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
        async with _posting(server) as http:
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
        async with _posting(server) as http:
            while (number := next(left)) < count:
                path = paths[number % len(paths)].format(ids.draw())
                headers = {"Authorization": f"Bearer {number}"} if number % 3 == 0 else {}
                await _counted(server, http.get(path, headers=headers))

    await asyncio.gather(*(one() for _ in range(CONNECTIONS)))


@asynccontextmanager
async def _posting(server: Server) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=server.url, timeout=60, headers=HEADERS) as http:
        yield http


async def _knows_nothing(server: Server, client: Client, alices: str) -> None:
    """Another's job is as unknown as one that never was, and still hers."""
    async with _posting(server) as http:
        answers = [await http.get(f"/v1/jobs/{job_id}") for job_id in (alices, IdSource().draw())]
        assert [answer.status_code for answer in answers] == [404, 404]
        said = [answer.json()["error"]["message"].partition("'")[0] for answer in answers]
        assert said[0] == said[1], said
    assert client.get(alices).owner == "alice"


PARTS: dict[str, tuple[str, Part]] = {
    "idle": ("10,000 connections that say nothing", idle),
    "slow": ("2,000 requests, a byte a second", slow_heads),
    "large": ("16 bodies of 1 GiB at once", large_bodies),
    "malformed": ("100,000 requests that are none", malformed),
    "forged": ("20,000 forged ids", forged),
}

DOORS = "doors"

if __name__ == "__main__":
    main()
