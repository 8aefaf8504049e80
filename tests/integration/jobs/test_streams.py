"""What followers and workers leave for each other in Redis: in order, bounded, and never believed."""

import json
import threading
import time
from collections.abc import Iterator

import pytest
import redis as redis_client

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import BrokerError, BrokerUnreachableError
from nightmill.jobs.messages.broker import Broker
from nightmill.jobs.reply.logprobs import Packed
from nightmill.jobs.streams import reader as following
from nightmill.jobs.streams import redis as streams
from nightmill.jobs.streams.redis import Followers, Subscriber, TextChunk
from tests.support.servers import RedisServer, wait_until

JOB, OTHER = "0" * 32, "f" * 32
LINE = f"{JOB}:1"


@pytest.fixture
def broker(redis_server: RedisServer, sqlite_settings: Settings) -> Iterator[Broker]:
    broker = Broker(sqlite_settings.model_copy(update={"broker_url": redis_server.url}))
    yield broker
    broker.close()


@pytest.fixture
def redis(redis_server: RedisServer) -> Iterator[redis_client.Redis]:
    with redis_server.client() as client:
        yield client


def test_parts_arrive_in_order_at_who_asked_for_them(broker: Broker) -> None:
    first, second, worker = Subscriber(broker), Subscriber(broker), Followers(broker)
    assert worker.look() == {}
    first.follow([LINE, f"{OTHER}:2"])
    second.follow([f"{OTHER}:1"])
    seen = worker.look()
    assert sorted(map(sorted, seen.values())) == [[LINE, f"{OTHER}:2"], [f"{OTHER}:1"]]  # type: ignore[type-var]
    assert worker.look() == seen
    (follower,) = [one for one, lines in seen.items() if LINE in lines]
    assert seen[follower] == {LINE: JOB, f"{OTHER}:2": OTHER}
    long = "é" * 40_000
    sent = [
        TextChunk(LINE, 0, "a\n"),
        TextChunk(LINE, 2, "€"),
        TextChunk(f"{OTHER}:2", 0, long),
        TextChunk(LINE),
    ]
    sent.insert(2, TextChunk(LINE, 3, "x", None, Packed(7, (3, 3), b"\x00\xff")))
    worker.send({follower: sent})
    worker.send({follower: [TextChunk(LINE, 3, "b")]})
    assert [*first.read(1.0), *first.read(0.001)] == [*sent, TextChunk(LINE, 3, "b")]
    assert second.read(0.001) == []
    first.follow([])
    assert set(worker.look()) == {follower} ^ set(seen)
    second.close()
    assert worker.look() == {}
    first.close()


def test_who_does_not_come_back_is_forgotten_and_leaves_nothing(
    broker: Broker, redis: redis_client.Redis
) -> None:
    inbox, worker = Subscriber(broker), Followers(broker)
    inbox.follow([LINE])
    (follower,) = worker.look()
    worker.send({follower: [TextChunk(LINE, 0, "a")]})
    assert redis.dbsize() == 3
    longest = max(streams.LIST_SECONDS, streams.INBOX_SECONDS)
    for key in {*redis.scan_iter()} - {b"nightmill.followers"}:
        assert 0 < redis.ttl(key) <= longest
        redis.expire(key, 0)  # as that time passes
    assert worker.look() == {} and redis.dbsize() == 0
    inbox._renew_at = time.monotonic()  # it was only slow
    inbox.follow([LINE])
    assert list(worker.look()) == [follower]


def test_an_inbox_that_nobody_reads_is_bounded_and_its_reader_asks_again(
    broker: Broker, redis: redis_client.Redis, sqlite_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_ASK_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(streams, "INBOX_MESSAGES", 10)
    settings = sqlite_settings.model_copy(update={"broker_url": broker.settings.broker_url})
    with Client(settings) as client:
        job_id = client.enqueue("prompt")
        pieces, worker = client.stream(job_id, timeout=240), Followers(broker)
        read = Subscriber.read
        monkeypatch.setattr(Subscriber, "read", lambda self, seconds: time.sleep(seconds) or [])
        first: list[str] = []
        reader = threading.Thread(target=lambda: first.append(next(pieces)))
        reader.start()
        ((follower, lines),) = wait_until(worker.look).items()
        (line,) = lines
        for place in range(100):
            worker.send({follower: [TextChunk(line, place, "x")]})
        assert redis.xlen(f"nightmill.inbox.{follower}") == 10
        monkeypatch.setattr(Subscriber, "read", read)
        (again,) = wait_until(lambda: [one for one in worker.look()[follower] if one != line])
        worker.send({follower: [TextChunk(again, 0, "x" * 100)]})
        reader.join(240)
        assert first == ["x" * 100]


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"a": 1}',
        b"[1, null, [], [1], [1, 2, 3], {}]",
        json.dumps(
            [[LINE, -1, "a"], [LINE, 0, ""], [LINE, "0", "a"], [LINE, 0, "\ud800"], [LINE, 0]]
        ).encode(),
        "\ud800".encode("utf-8", "surrogatepass"),
    ],
)
def test_messages_that_are_none_are_left_out(
    broker: Broker, redis: redis_client.Redis, message: bytes
) -> None:
    inbox, worker = Subscriber(broker), Followers(broker)
    inbox.follow([LINE])
    (follower,) = worker.look()
    redis.xadd(f"nightmill.inbox.{follower}", {"parts": message})
    redis.xadd(f"nightmill.inbox.{follower}", {"others": message})
    worker.send({follower: [TextChunk(LINE, 0, "a")]})
    assert inbox.read(1.0) == [TextChunk(LINE, 0, "a")]


def test_lists_that_are_none_are_left_out(broker: Broker, redis: redis_client.Redis) -> None:
    follower = "a" * 32
    redis.sadd("nightmill.followers", follower, "short", b"\xff" * 32, "A" * 32)
    redis.set(f"nightmill.following.{follower}", b"\n\xff\n0:1\n" + LINE.encode() + b"\n" + b"0" * 33)
    worker = Followers(broker)
    assert worker.look() == {follower: {LINE: JOB}}
    redis.delete(f"nightmill.following.{follower}")
    redis.sadd(f"nightmill.following.{follower}", "not a text")
    with pytest.raises(BrokerError, match="refused a command"):
        worker.look()
    redis.flushall()
    assert worker.look() == {}


def test_a_redis_that_is_away_is_said_to_be(broker: Broker, redis_server: RedisServer) -> None:
    inbox, worker = Subscriber(broker), Followers(broker)
    inbox.follow([LINE])
    (follower,) = worker.look()
    redis_server.stop()
    for command in (
        lambda: inbox.read(0.001),
        worker.look,
        lambda: worker.send({follower: [TextChunk(LINE)]}),
    ):
        with pytest.raises(BrokerUnreachableError, match="does not answer"):
            command()  # type: ignore[no-untyped-call]
    inbox.close()
    redis_server.start()
    assert inbox.read(0.001) == []
