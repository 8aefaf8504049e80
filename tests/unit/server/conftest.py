"""A real server on a free port, and a worker in this process whose texts tests know beforehand."""

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import httpx2
import pytest
import uvicorn
from openai import AsyncOpenAI, OpenAI

from nightmill.jobs.base.contract import WorkerState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.batches import grouping
from nightmill.jobs.client.client import Client
from nightmill.jobs.server import batch_processor
from nightmill.jobs.server.app import make_app
from nightmill.jobs.server.connections import Connection
from nightmill.jobs.server.job_service import ServerLimits
from nightmill.jobs.server.keys import ApiKeys
from tests.support.servers import Clock, free_port, wait_until
from tests.unit.engine.by_definition import expected
from tests.unit.engine.scripted import ARITHMETIC, ScriptedRunner, make_request
from tests.unit.server.batch_world import World
from tests.unit.worker.bench import PROMPT, Bench, stop

ALICE, BOB, EVE, OPS = "alice-has-a-long-key", "bob-has-a-long-key", "eve-reads-all-jobs", "ops-does-anything"
KEYS = f"alice={ALICE}, bob={BOB}, eve:read={EVE}, ops:admin={OPS}"


STATS = {"context": 200, "arithmetic": str(ARITHMETIC)}
"""What the worker says of itself."""


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """Clients of HTTP read 140 certificates when they are made, a third of a test, and use none here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


class Slow(ScriptedRunner):
    """Takes its time for each step, as a GPU does, and stops before the launch that a test names."""

    seconds = 0.002
    pause_at = 1 << 30

    def launch(self, batch: Any) -> None:
        time.sleep(self.seconds)
        wait_until(lambda: len(self.batches) < self.pause_at, 60.0, "the end of a pause")
        super().launch(batch)


def text_of(seed: int, **params: Any) -> str:
    """What the worker answers to any prompt."""
    return expected(make_request("j", PROMPT, seed=seed, **params), 200)[1]


class Server:
    """Where it is, and clients for it."""

    def __init__(self, client: Client, bench: Bench, port: int) -> None:
        self.client = client
        self.bench = bench
        self.url = f"http://127.0.0.1:{port}"

    def openai(self, key: str = ALICE, **options: Any) -> OpenAI:
        """The unmodified client of OpenAI."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, **({"max_retries": 0} | options))

    def openai_async(self, key: str = ALICE, **options: Any) -> AsyncOpenAI:
        """The same for asyncio."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, **({"max_retries": 0} | options))

    def http(self, key: str | None = ALICE) -> httpx2.Client:
        """Plain HTTP."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=240)

    def left(self, path: str, body: dict[str, Any], jobs: int = 1) -> None:
        """Ask, and go away without a word as soon as the request has become so many jobs."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ALICE}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        address = ("127.0.0.1", int(self.url.rpartition(":")[2]))
        with socket.create_connection(address) as connection:
            connection.sendall(head.encode() + content)
            wait_until(lambda: len(self.client.list_jobs()) == jobs)


@contextmanager
def working(client: Client, bench: Bench) -> Iterator[None]:
    """Run whatever is queued, as messages would have it."""
    over = threading.Event()

    def pump() -> None:
        begun: set[tuple[str, int]] = set()
        while not over.wait(0.02):  # more often, and looking takes the time of the tests
            bench.claims.beat(WorkerState.READY, stats=STATS)
            queued = [job for job in client.list_jobs(state="queued") if (job.id, job.attempt) not in begun]
            begun.update((job.id, job.attempt) for job in queued)
            if queued:
                bench.run([job.id for job in queued])

    bench.claims.beat(WorkerState.READY, stats=STATS)
    thread = threading.Thread(target=pump, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(120)


@contextmanager
def listening(
    client: Client, keys: str | None, limits: ServerLimits | None = None, origins: Sequence[str] = ()
) -> Iterator[int]:
    """A server on a free port, which this gives."""
    port = free_port()
    app = make_app(client, ApiKeys.parse(keys), limits, origins)
    config = uvicorn.Config(app, port=port, log_config=None, timeout_graceful_shutdown=5, http=Connection)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(120)


@pytest.fixture
def start(sqlite_settings: Settings) -> Iterator[Callable[..., Any]]:
    """Starts servers: `with start(keys=..., limits=..., worker=True, **settings) as server`."""

    @contextmanager
    def started(
        keys: str | None = KEYS,
        limits: ServerLimits | None = None,
        worker: bool = True,
        origins: Sequence[str] = (),
        **settings: Any,
    ) -> Iterator[Server]:
        with Client(sqlite_settings.model_copy(update=settings)) as client:
            bench = Bench(client, Slow())
            try:
                with listening(client, keys, limits, origins) as port:
                    if worker:
                        with working(client, bench):
                            yield Server(client, bench, port)
                    else:
                        yield Server(client, bench, port)
            finally:
                stop(bench)

    yield started


@pytest.fixture
def server(start: Callable[..., Any]) -> Iterator[Server]:
    """A server with keys and a worker."""
    with start() as made:
        yield made


@pytest.fixture
def alone(start: Callable[..., Any]) -> Iterator[Server]:
    """A server without keys, of which everybody sees all, and without a worker."""
    with start(keys=None, worker=False) as made:
        yield made


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers look for batches as soon as these are there."""
    monkeypatch.setattr(batch_processor, "_LOOK_SECONDS", 0.05)


@pytest.fixture
def world(server_settings: Settings, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(grouping, "ROWS_PER_TRANSACTION", 8)
    monkeypatch.setattr(batch_processor, "_SLICE_SECONDS", 60.0)  # the work of a test is done in one slice
    with Client(server_settings, clock=clock) as client:
        yield World(client, clock)
