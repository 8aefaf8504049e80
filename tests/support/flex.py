"""Flex calls from many connections beside interactive ones, against a real `nightmill serve`."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from nightmill.jobs.client.client import Client
from tests.support.servers import http_server

__all__ = ["DAY", "NIGHT", "Answers", "body", "call", "flex_calls", "http_client", "running_server"]

NIGHT = "a-key-for-the-test"
"""The key of who calls in bulk: flex unless a call says otherwise."""
DAY = f"{NIGHT}-2"
"""The key of who waits for each answer."""
Answers = Counter[tuple[int, str]]


@contextmanager
def running_server(client: Client, log: Path) -> Iterator[str]:
    """`nightmill serve` on a free port, whose URL this gives; it knows the two keys."""
    with http_server(client.settings, log, {"NIGHTMILL_API_KEYS": f"night:flex={NIGHT}, day={DAY}"}) as url:
        yield url


def http_client(url: str, key: str, connections: int) -> httpx2.AsyncClient:
    """A client with so many connections, which stay open."""
    limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections)
    headers = {"Authorization": f"Bearer {key}"}
    return httpx2.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=900.0)


async def flex_calls(
    client: httpx2.AsyncClient, calls: int, connections: int, max_tokens: int = 8,
    report: Callable[[int], None] = lambda ended: None,
) -> Answers:  # fmt: skip
    """All of them, each connection with one at a time; `report` gets how many have ended, after each."""
    numbers, answers = iter(range(calls)), Answers()

    async def work() -> None:
        for number in numbers:
            answers[await call(client, number, max_tokens)] += 1
            report(answers.total())

    await asyncio.gather(*(work() for _ in range(connections)))
    return answers


async def call(client: httpx2.AsyncClient, number: int, max_tokens: int = 8) -> tuple[int, str]:
    """One chat completion: its status and its tier."""
    answer = await client.post("/v1/chat/completions", json=body(number, max_tokens))
    return answer.status_code, answer.json().get("service_tier", "none")


def body(number: int, max_tokens: int) -> dict[str, object]:
    """The body of one chat completion; each number asks for another text."""
    messages = [{"role": "user", "content": f"Write a haiku about the number {number}"}]
    return {"messages": messages, "max_tokens": max_tokens}
