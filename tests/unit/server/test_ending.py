"""A server that ends cancels what is under way: who has no answer yet is asked to come again."""

import asyncio
import json
from typing import Any

import pytest

from nightmill.jobs.client import Client
from nightmill.jobs.server.app import make_app
from nightmill.jobs.server.desk import Desk
from nightmill.jobs.server.guards import Unanswered
from nightmill.jobs.server.keys import Keys
from nightmill.jobs.settings import Settings

SCOPE = {
    "type": "http",
    "http_version": "1.1",
    "method": "POST",
    "path": "/v1/completions",
    "raw_path": b"/v1/completions",
    "root_path": "",
    "query_string": b"",
    "headers": [(b"host", b"127.0.0.1:1"), (b"content-type", b"application/json")],
    "client": ("127.0.0.1", 1),
    "server": ("127.0.0.1", 1),
    "scheme": "http",
}


async def _cancelled(app: Any, waiting: asyncio.Event) -> list[dict[str, Any]]:
    """What is sent to a caller whose request is cancelled once it waits."""
    sent: list[dict[str, Any]] = []
    body = json.dumps({"model": "m", "prompt": "x"}).encode()
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await asyncio.sleep(3600)
        raise AssertionError("unreachable")

    async def send(message: Any) -> None:
        sent.append(message)

    task = asyncio.ensure_future(app(SCOPE, receive, send))
    await asyncio.wait({task, asyncio.ensure_future(waiting.wait())}, return_when=asyncio.FIRST_COMPLETED)
    task.cancel()
    await asyncio.wait({task})
    return sent


def test_who_waits_for_an_answer_when_the_server_ends_is_asked_to_come_again(
    sqlite_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ended() -> list[dict[str, Any]]:
        waiting = asyncio.Event()

        async def never(desk: Desk, *args: Any) -> str:
            waiting.set()
            await asyncio.sleep(3600)
            return ""

        monkeypatch.setattr(Desk, "enqueue", never)
        with Client(sqlite_settings) as client:
            return await _cancelled(make_app(client, Keys.parse(None)), waiting)

    start, body = asyncio.run(ended())
    assert start["status"] == 503
    assert (b"retry-after", b"2") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == "ending"


def test_an_answer_that_has_begun_is_broken_off_and_gets_no_second_head() -> None:
    async def ended() -> list[dict[str, Any]]:
        waiting = asyncio.Event()

        async def streaming(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            waiting.set()
            await asyncio.sleep(3600)

        return await _cancelled(Unanswered(streaming), waiting)

    assert [message["type"] for message in asyncio.run(ended())] == ["http.response.start"]
