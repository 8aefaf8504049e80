"""A server that ends cancels what is under way: who has no answer yet is asked to come again."""

import asyncio
import json
import logging
import threading
from contextlib import suppress
from typing import Any

import httpx2
import pytest
import uvicorn

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.server.app import make_app
from nightmill.jobs.server.connections import Connection, is_news
from nightmill.jobs.server.guards import Unanswered
from nightmill.jobs.server.job_service import JobService
from nightmill.jobs.server.keys import ApiKeys
from tests.support.servers import free_port, wait_until

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

        async def never(service: JobService, *args: Any) -> str:
            waiting.set()
            await asyncio.sleep(3600)
            return ""

        monkeypatch.setattr(JobService, "enqueue_request", never)
        with Client(sqlite_settings) as client:
            return await _cancelled(make_app(client, ApiKeys.parse(None)), waiting)

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


def test_a_stream_that_is_open_when_the_grace_ends_is_one_sentence_in_the_log(
    sqlite_settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    uvicorn_log = logging.getLogger("uvicorn.error")
    with Client(sqlite_settings) as client:
        job_id = client.enqueue("a text that nobody generates")
        config = uvicorn.Config(
            make_app(client, ApiKeys.parse(None)),
            port=free_port(),
            log_config=None,
            http=Connection,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        uvicorn_log.addFilter(is_news)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            wait_until(lambda: server.started)
            url = f"http://127.0.0.1:{config.port}/v1/jobs/{job_id}/events"
            with httpx2.Client(timeout=240) as http, http.stream("GET", url) as answer:
                assert answer.status_code == 200
                server.should_exit = True
                with suppress(httpx2.TransportError):
                    answer.read()
            thread.join(120)
        finally:
            uvicorn_log.removeFilter(is_news)
            server.should_exit = True
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == ["the time for answers under way is over: 1 cut off, whose jobs go on"]
    assert not any(record.exc_info for record in caplog.records)
