"""What somebody puts into Redis by hand: it is removed, counted, logged once, and costs no worker."""

import base64
import json
import logging
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Consumer, Queue

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.messages.broker import queue_name
from nightmill.jobs.messages.shards import TASK
from nightmill.worker.app import make_worker_app
from tests.integration.worker.conftest import StartWorker, on_sqlite
from tests.support.servers import wait_until

PATIENCE = 120.0
JOB_ID = IdSource().draw()


def message(job_ids: Any = (JOB_ID,), *, body: Any = None, headers: Any = None, **changes: Any) -> bytes:
    """A message as a client of ours sends it, but for the changes."""
    content = json.dumps([[job_ids], {}, {"callbacks": None}]).encode()
    envelope = {
        "body": base64.b64encode(content).decode() if body is None else body,
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"task": TASK, "id": "e2f1", "lang": "py"} | (headers or {}),
        "properties": {
            "delivery_tag": "tag",
            "delivery_info": {"exchange": "nightmill", "routing_key": "nightmill"},
            "priority": 4,
            "body_encoding": "base64",
        },
    } | changes
    return json.dumps({name: value for name, value in envelope.items() if value is not ...}).encode()


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


PICKLED = {"content-type": "application/x-python-serialize"}

NOT_OURS = {
    "text": b"not json",
    "empty": b'""',
    "number": b"5",
    "list": b"[]",
    "null": b"null",
    "nothing": b"",
    "bytes": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "digits": b"9" * 10_000,
    "no headers": message(headers=None) .replace(b'"headers"', b'"footers"'),
    "headers are a list": message() .replace(b'"headers": {', b'"headers": [1], "x": {'),
    "another task": message(headers={"task": "celery.ping"}),
    "task is a list": message(headers={"task": [1]}),
    "no task": message(headers={"task": None}),
    "no body": message(body=""),
    "body is a number": message(body=7),
    "body lacks": message(body=None).replace(b'"body"', b'"hull"'),
    "body is not Base64": message(body="***"),
    "body is not JSON": message(body=encoded(b"\x00{")),
    "body is pickled": message(body=encoded(pickle.dumps([[[JOB_ID]], {}, {}])), **PICKLED),
    "body is deep": message(body=encoded(b"[" * 100_000)),
    "body without arguments": message(body=encoded(b"{}")),
    "body is null": message(body=encoded(b"null")),
    "no ids": message([]),
    "ids are a text": message(JOB_ID),
    "ids are an object": message({"a": 1}),
    "id is a number": message([1]),
    "id is an object": message([{"__type__": "uuid", "__value__": 1}]),
    "id is an endless text": message(["a" * 10_000_000]),
    "id in capitals": message([JOB_ID.upper()]),
    "too many ids": message([JOB_ID] * 1025),
}  # fmt: skip

# What is wrong with these is nothing that anybody looks at: they are remade of the ids that they name.
HARMLESS = {
    "id of the message is an object": message(headers={"id": {"a": 1}}),
    "an impossible time": message(headers={"eta": "soon", "expires": {}, "timelimit": "x", "retries": []}),
    "claims to be compressed": message(headers={"compression": "application/x-bz2"}),
    "claims to be pickled": message(**PICKLED),
    "unknown encoding": message(**{"content-encoding": {}}),
    "no properties": message(properties=...),
    "properties are a text": message(properties="x"),
    "goes elsewhere": message(
        properties={"delivery_tag": {}, "delivery_info": {"exchange": "x", "routing_key": 5}, "priority": "!"}
    ),
}


@contextmanager
def consumer(settings: Settings) -> Iterator[tuple[Any, list[Any], list[Any]]]:
    """A worker's way of taking messages: (connection, bodies, messages not acknowledged)."""
    app = make_worker_app()
    app.conf.broker_url = settings.broker_url
    bodies: list[Any] = []
    messages: list[Any] = []

    def receive(body: Any, message: Any) -> None:
        bodies.append(body)
        messages.append(message)

    with app.connection_for_read() as connection:
        channel = connection.channel()
        with Consumer(
            channel, [Queue(queue_name(None), channel=channel)], callbacks=[receive], accept=["json"]
        ):
            yield connection, bodies, messages


def drain(connection: Any, client: redis.Redis) -> None:
    while client.keys("nightmill*"):  # Redis keeps no empty lists
        with suppress(TimeoutError):
            connection.drain_events(timeout=0.1)


def test_what_is_no_message_of_ours_is_gone_and_told_once_for_each_kind(
    sqlite_settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    assert sqlite_settings.broker_url is not None
    with redis.Redis.from_url(sqlite_settings.broker_url) as client, consumer(sqlite_settings) as taken:
        connection, bodies, _ = taken
        for _ in range(3):
            client.lpush("nightmill", *NOT_OURS.values())
        with caplog.at_level(logging.ERROR, "nightmill.worker.service.message_filter"):
            drain(connection, client)
            client.lpush("nightmill", *[b"not json"] * 97)
            drain(connection, client)
        assert bodies == []
        assert client.hlen("unacked") == 0 == client.zcard("unacked_index")
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if "b'not json'" in line and "(1 of this kind" in line]
    counts = [line for line in said if "is not JSON was removed (100 of this kind so far" in line]
    assert len(counts) == 1
    assert all(len(line) < 400 and line.isascii() and "\n" not in line for line in said)
    faults = {line.partition(" was removed")[0] for line in said}
    assert len(said) <= 3 * len(faults)  # the first, the tenth, the hundredth


def test_of_a_message_that_names_job_ids_nothing_else_is_believed(sqlite_settings: Settings) -> None:
    assert sqlite_settings.broker_url is not None
    with redis.Redis.from_url(sqlite_settings.broker_url) as client, consumer(sqlite_settings) as taken:
        connection, bodies, messages = taken
        client.lpush("nightmill\x06\x164", *HARMLESS.values())
        drain(connection, client)
        assert bodies == [[[[JOB_ID]], {}, {}]] * len(HARMLESS)
        assert {message.headers["task"] for message in messages} == {TASK}
        assert {frozenset(message.headers) for message in messages} == {
            frozenset(["lang", "task", "id", "root_id"])
        }
        assert client.hlen("unacked") == len(HARMLESS)  # none shares its tag with another
        for message in messages:
            message.reject(requeue=True)
        assert client.llen("nightmill\x06\x164") == len(HARMLESS)  # back to where they came from
        drain(connection, client)
        for message in messages[len(HARMLESS) :]:
            message.ack()
        assert client.hlen("unacked") == 0 == client.zcard("unacked_index")


def test_what_a_worker_of_an_earlier_version_left_unacknowledged_comes_through_the_gate(
    sqlite_settings: Settings,
) -> None:
    assert sqlite_settings.broker_url is not None
    forged = [json.loads(HARMLESS["id of the message is an object"]), json.loads(NOT_OURS["another task"])]
    with redis.Redis.from_url(sqlite_settings.broker_url) as client, consumer(sqlite_settings) as taken:
        connection, bodies, messages = taken
        for tag, one in enumerate(forged):
            client.hset("unacked", str(tag), json.dumps([one, "", "nightmill"]))
            client.zadd("unacked_index", {str(tag): time.time() - 48 * 3600})
        connection.default_channel.qos.restore_visible(interval=1)
        assert client.llen("nightmill\x06\x164") == 2
        drain(connection, client)
        assert bodies == [[[[JOB_ID]], {}, {}]]
        messages[0].ack()
        assert client.hlen("unacked") == 0 == client.zcard("unacked_index")


def test_only_a_redis_that_refuses_commands_is_asked_more_slowly(
    sqlite_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that Redis does not know yet is no refusal: each worker's first lock begins with one."""
    assert sqlite_settings.broker_url is not None
    pauses: list[float] = []
    monkeypatch.setattr("nightmill.worker.service.message_filter.time.sleep", pauses.append)
    with redis.Redis.from_url(sqlite_settings.broker_url) as client, consumer(sqlite_settings) as taken:
        client.script_flush()
        gated = taken[0].default_channel.client
        with gated.lock("anything", timeout=5):
            pass
        assert pauses == []
        client.set("text", "no list")
        with pytest.raises(redis.exceptions.ResponseError):
            gated.lpush("text", "x")
        assert len(pauses) == 1


@on_sqlite
def test_a_worker_outlives_whatever_lies_in_its_queues_and_goes_on_to_the_jobs(
    jobs_client: Client, start_worker: StartWorker, tmp_path: Path
) -> None:
    assert jobs_client.settings.broker_url is not None
    with redis.Redis.from_url(jobs_client.settings.broker_url) as client:
        forged = [*NOT_OURS.values(), *HARMLESS.values()]
        client.lpush("nightmill", *forged)
        client.lpush("nightmill.nightmill-demo\x06\x169", *forged)
        with start_worker("a") as process:
            ids = [
                jobs_client.enqueue("Count from 1 to 3", model=name, max_tokens=2)
                for name in (None, "nightmill-demo")
            ]
            client.publish("/0.celeryev", b"not json")
            client.publish("/0.celery.pidbox", b"[]")
            jobs_client.wait(ids, timeout=PATIENCE)
            wait_until(
                lambda: not client.keys("nightmill*") and not client.exists("unacked", "unacked_index"),
                PATIENCE,
            )
            assert process.poll() is None
    assert {job.state for job in jobs_client.results(ids)} == {JobState.SUCCEEDED}
    said = (tmp_path / "a.log").read_text()
    assert "Traceback" not in said
    assert len({row.id for row in jobs_client.workers()}) == 1
