"""What lies in Redis: ids and nothing else, as JSON, in shards, by model, the urgent first."""

import base64
import json
from typing import Any

import pytest
import redis
from kombu import Consumer, Queue
from kombu.utils.functional import retry_over_time

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.messages.broker import DEFAULT_QUEUE, make_app, queue_name
from nightmill.jobs.messages.shards import TASK


def _raw(client: Client) -> dict[str, list[bytes]]:
    """Every list of messages in Redis, as the bytes that are there."""
    assert client.settings.broker_url is not None
    with redis.Redis.from_url(client.settings.broker_url) as connection:
        keys = [key for key in connection.scan_iter() if connection.type(key) == b"list"]
        return {key.decode(): connection.lrange(key, 0, -1) for key in keys}


def _shard(message: bytes) -> list[str]:
    body = json.loads(base64.b64decode(json.loads(message)["body"]))
    shard: list[str] = body[0][0]
    return shard


def _consume(client: Client, *names: str) -> list[list[str]]:
    """Shards in the order in which a worker's consumer gets them from these queues, one at a time."""
    shards: list[list[str]] = []

    def receive(body: Any, message: Any) -> None:
        shards.append(body[0][0])
        message.ack()

    with client.broker.connection() as connection:
        channel = connection.channel()
        channel.basic_qos(0, 1, False)
        queues = [Queue(name, channel=channel) for name in names]
        with Consumer(channel, queues, callbacks=[receive], accept=["json"]):
            while _raw(client):
                connection.drain_events(timeout=120)
    return shards


def test_a_message_is_json_and_holds_job_ids_only(sqlite_client: Client) -> None:
    job_id = sqlite_client.enqueue("a secret prompt", metadata={"secret": "metadata"}, stop=["secret stop"])
    ((message,),) = _raw(sqlite_client).values()
    envelope = json.loads(message)
    assert envelope["content-type"] == "application/json"
    assert envelope["headers"]["task"] == TASK
    arguments, keywords, embedded = json.loads(base64.b64decode(envelope["body"]))
    assert (arguments, keywords) == ([[job_id]], {})
    assert embedded == {}
    assert b"secret" not in message + base64.b64decode(envelope["body"])
    assert set(envelope["headers"]) == {"lang", "task", "id", "root_id"}


def test_nothing_but_json_is_accepted() -> None:
    app = make_app("redis://localhost")
    assert app.conf.accept_content == ["json"]
    assert app.conf.task_serializer == "json"
    assert app.conf.result_backend is None


def test_a_shard_is_of_one_from_enqueue_and_of_64_from_enqueue_many(sqlite_client: Client) -> None:
    single = sqlite_client.enqueue("prompt")
    many = list(sqlite_client.enqueue_many(["prompt"] * 150))
    (messages,) = _raw(sqlite_client).values()
    assert [_shard(message) for message in reversed(messages)] == [
        [single],
        many[:64],
        many[64:128],
        many[128:],
    ]


def test_the_size_of_shards_is_a_setting(sqlite_settings: Settings) -> None:
    with Client(sqlite_settings.model_copy(update={"shard_size": 2})) as client:
        client.enqueue_many(["prompt"] * 5)
        (messages,) = _raw(client).values()
        assert sorted(len(_shard(message)) for message in messages) == [1, 2, 2]


def test_jobs_for_a_model_have_a_queue_of_their_own(sqlite_client: Client) -> None:
    items = [{"prompt": "any"}, {"prompt": "one", "model": "one"}, {"prompt": "two", "model": "two"}]
    ids = list(sqlite_client.enqueue_many(items))
    assert (queue_name(None), queue_name("one")) == (DEFAULT_QUEUE, "nightmill.one")
    assert [sqlite_client.broker.queue_length(model) for model in (None, "one", "two", "none")] == [
        1,
        1,
        1,
        0,
    ]
    found = {
        key.split("\x06")[0]: [_shard(message) for message in raw] for key, raw in _raw(sqlite_client).items()
    }
    assert found == {"nightmill": [[ids[0]]], "nightmill.one": [[ids[1]]], "nightmill.two": [[ids[2]]]}


def test_the_most_urgent_is_popped_first_and_equals_in_order(sqlite_client: Client) -> None:
    enqueue = sqlite_client.enqueue
    order = (5, 0, 9, 4, 8, 1, 7, 3, 6, 2)
    expected = [(-one, [enqueue("prompt", priority=one)]) for one in order for _ in range(2)]
    assert sqlite_client.broker.queue_length(None) == 20
    assert _consume(sqlite_client, DEFAULT_QUEUE) == [shard for _, shard in sorted(expected)]


def test_jobs_for_any_model_and_jobs_for_one_take_turns_within_each_priority(sqlite_client: Client) -> None:
    """Many jobs of one kind must not keep a worker from those of the other."""
    kinds: dict[str, str | None] = {}
    for model in (None, "one"):
        for priority in (5, 5, 5, 5, 8, 8, 2, 2):
            kinds[sqlite_client.enqueue("prompt", model=model, priority=priority)] = model
    order = [job for shard in _consume(sqlite_client, DEFAULT_QUEUE, queue_name("one")) for job in shard]
    assert [sqlite_client.get(job).priority for job in order] == [8] * 4 + [5] * 8 + [2] * 4
    served = [kinds[job] for job in order]
    assert all(served[index] != served[index + 1] for index in range(len(served) - 1)), served


def test_the_heads_of_a_queue_are_the_shards_that_are_taken_next(sqlite_client: Client) -> None:
    assert sqlite_client.broker.heads(None) == {}
    first = list(sqlite_client.enqueue_many(["prompt"] * 3, priority=2))
    sqlite_client.enqueue("prompt", priority=2)
    urgent = sqlite_client.enqueue("prompt", priority=9)
    other = sqlite_client.enqueue("prompt", model="one")
    assert sqlite_client.broker.heads(None) == {2: first, 9: [urgent]}
    assert sqlite_client.broker.heads("one") == {5: [other]}
    with redis.Redis.from_url(str(sqlite_client.settings.broker_url)) as connection:
        (key,) = [key for key in connection.keys("nightmill*") if connection.llen(key) == 2]
        connection.rpush(key, b"not ours")
        assert sqlite_client.broker.heads(None)[2] == first  # the workers' gate will remove it
        connection.rpush(key, *[b"not ours"] * 10)
        assert sqlite_client.broker.heads(None)[2] == []


def test_a_worker_waits_for_its_broker_for_ever() -> None:
    attempts = 0

    def connect() -> str:
        nonlocal attempts
        attempts += 1
        if attempts <= 200:  # Celery's own limit is 100
            raise OSError
        return "there again"

    most = make_app("redis://localhost").conf.broker_connection_max_retries
    assert (
        retry_over_time(connect, (OSError,), max_retries=most, interval_start=0, interval_max=0)
        == "there again"
    )


def test_the_queue_can_be_asked_for_while_it_is_empty(sqlite_client: Client) -> None:
    assert sqlite_client.broker.queue_length(None) == 0
    sqlite_client.broker.ping()


@pytest.mark.parametrize("times", [1, 2])
def test_a_closed_broker_opens_again(sqlite_client: Client, times: int) -> None:
    for _ in range(times):
        sqlite_client.broker.close()
    sqlite_client.enqueue("prompt")
    assert sqlite_client.broker.queue_length(None) == 1
