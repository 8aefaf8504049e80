"""Flex calls from 64 connections at once: none is turned away or too late, nor is who calls beside them."""

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.request.fields import INTERACTIVE
from nightmill.jobs.sql.jobs import Selection
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.commands.process import running_worker
from tests.support import instant_worker
from tests.support.servers import free_port, wait_until, worker_env

pytestmark = pytest.mark.heavy
CALLS, CONNECTIONS, ALONE = 400, 64, 10
KEY = "a-key-for-the-test"
Answers = Counter[tuple[int, str]]


@contextmanager
def running_server(client: Client, log: Path) -> Iterator[str]:
    """`nightmill serve` on a free port, whose URL this gives."""
    port = free_port()
    environment = worker_env(client.settings, api_keys=f"night:flex={KEY}, day={KEY}-2")
    command = [sys.executable, "-m", "nightmill", "serve", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: _answers(url), 60.0)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/ready").status_code == 200
    except httpx2.TransportError:
        return False


async def measure(url: str) -> tuple[Answers, Answers]:
    """Answers to the flex calls, and to interactive ones, ALONE before these and the others beside them."""
    async with http_client(url, f"{KEY}-2", 1) as day, http_client(url, KEY, CONNECTIONS) as night:
        beside = Answers([await call(day, number) for number in range(ALONE)])
        flood = asyncio.ensure_future(flex_calls(night))
        while not flood.done():
            beside[await call(day, beside.total())] += 1
            await asyncio.sleep(0.05)
        return await flood, beside


def http_client(url: str, key: str, connections: int) -> httpx2.AsyncClient:
    """A client with so many connections, which stay open."""
    limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections)
    headers = {"Authorization": f"Bearer {key}"}
    return httpx2.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=900.0)


async def flex_calls(client: httpx2.AsyncClient) -> Answers:
    """All of them, each connection with one at a time."""
    numbers = iter(range(CALLS))

    async def work() -> list[tuple[int, str]]:
        return [await call(client, number) for number in numbers]

    return Answers(
        [one for part in await asyncio.gather(*(work() for _ in range(CONNECTIONS))) for one in part]
    )


async def call(client: httpx2.AsyncClient, number: int) -> tuple[int, str]:
    """One chat completion: its status and its tier."""
    messages = [{"role": "user", "content": f"Write a haiku about the number {number}"}]
    answer = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8})
    return answer.status_code, answer.json().get("service_tier", "none")


def test_flex_calls_from_many_connections_end_well(sqlite_settings: Settings, directory: Path) -> None:
    settings = sqlite_settings.model_copy(update={"model": demo_model()})
    with (
        Client(settings) as client,
        running_worker(client, directory / "worker.log", command=instant_worker.COMMAND),
        running_server(client, directory / "server.log") as url,
    ):
        flex, beside = asyncio.run(measure(url))
        assert flex == {(200, "flex"): CALLS}
        assert {status for status, _ in beside} == {200}
        assert beside.total() > ALONE
        jobs = list(client.store.find(Selection(states=[JobState.SUCCEEDED]), limit=10_000))
        ranks = [job.priority for job in jobs if job.owner == "night"]
        assert ranks == [5] * CALLS
        assert {job.priority for job in jobs if job.owner == "day"} == {INTERACTIVE}
