"""Servers that are away: jobs are kept, messages say what to do, and no password is in any of them."""

import logging
import traceback
import warnings
from pathlib import Path

import pytest
from sqlalchemy import select

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import (
    BrokerError,
    BrokerUnreachableError,
    DatabaseUnreachableError,
    DeliveryDelayedWarning,
)
from nightmill.jobs.messages.broker import Broker
from nightmill.jobs.sql.sweep import Sweep
from nightmill.jobs.sql.tables import JobRow
from tests.support.servers import RedisServer, free_port, start_redis

SECRET = "hunter2"


def _sent(client: Client) -> list[bool]:
    with client.database.read() as connection:
        return [
            row is not None
            for row in connection.execute(select(JobRow.sent_at).order_by(JobRow.id)).scalars()
        ]


@pytest.fixture
def fragile(server_settings: Settings, redis_server: RedisServer) -> Settings:
    """Settings with a broker of the test's own."""
    return server_settings.model_copy(update={"broker_url": redis_server.url})


def test_jobs_are_kept_and_said_to_be_kept_while_the_broker_is_down(
    fragile: Settings, redis_server: RedisServer
) -> None:
    with Client(fragile) as client:
        redis_server.stop()
        with pytest.warns(DeliveryDelayedWarning) as caught:
            one = client.enqueue("prompt")
            many = client.enqueue_many(["prompt"] * 3)
        where = f"redis://127.0.0.1:{redis_server.port}/0"
        first, second = (str(warning.message) for warning in caught)
        assert first.startswith(
            "1 job is kept in the database, and a worker will fetch them from there once the broker is back: "
            f"the broker at {where} does not answer: "
        )
        assert first.endswith("Check that Redis runs and that NIGHTMILL_BROKER_URL is right")
        assert second.startswith("3 jobs are kept in the database")
        assert caught[0].filename == __file__, "the warning must point at the caller's line"
        assert [client.get(job_id).state for job_id in [one, *many]] == [JobState.QUEUED] * 4
        assert _sent(client) == [False] * 4
        (announcement,) = Sweep(client.database).unsent(10)
        assert announcement.job_ids == [one, *many]


def test_a_retry_while_the_broker_is_down_is_kept_too(fragile: Settings, redis_server: RedisServer) -> None:
    with Client(fragile) as client:
        job_id = client.enqueue("prompt")
        client.cancel(job_id)
        redis_server.stop()
        with pytest.warns(DeliveryDelayedWarning, match="1 job is kept"):
            assert client.retry(job_id).state is JobState.QUEUED
        assert _sent(client) == [False]


def test_a_broker_that_was_restarted_is_used_again_without_a_word(
    fragile: Settings, redis_server: RedisServer
) -> None:
    with Client(fragile) as client:
        client.enqueue("prompt")
        redis_server.restart()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            client.enqueue("prompt")
        assert client.broker.queue_length(None) == 2
        assert _sent(client) == [True, True]


@pytest.mark.parametrize("call", ["ping", "queue_length", "announce"])
def test_an_unreachable_broker_is_named_without_its_password(directory: Path, call: str) -> None:
    broker = Broker(Settings(data_dir=directory, broker_url=f"redis://:{SECRET}@127.0.0.1:{free_port()}/0"))
    arguments = {"ping": (), "queue_length": (None,), "announce": (["0" * 32], None, 5)}[call]
    with pytest.raises(
        BrokerUnreachableError, match=r"the broker at redis://:\*\*\*@127.0.0.1:\d+/0 does not"
    ) as caught:
        getattr(broker, call)(*arguments)
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    broker.close()


def test_a_wrong_password_is_an_error_that_does_not_show_it(directory: Path) -> None:
    with start_redis(directory / "locked", password="right") as server:
        url = server.url.replace("right", SECRET)
        broker = Broker(Settings(data_dir=directory, broker_url=url))
        with pytest.raises(BrokerError, match=r"refused a command: .*password") as caught:
            broker.ping()
        assert SECRET not in "".join(traceback.format_exception(caught.value))
        broker.close()
        right = Broker(Settings(data_dir=directory, broker_url=server.url))
        right.ping()
        assert right.queue_length(None) == 0
        right.close()


def test_an_unreachable_database_is_named_without_its_password(
    directory: Path, broker_url: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    port = free_port()
    settings = Settings(
        data_dir=directory,
        database_url=f"postgresql://miller:{SECRET}@127.0.0.1:{port}/mill",
        broker_url=broker_url,
    )
    with Client(settings) as client, pytest.raises(DatabaseUnreachableError) as caught:
        client.enqueue("prompt")
    assert str(caught.value).startswith(
        f"the database at postgresql+psycopg://miller:***@127.0.0.1:{port}/mill does not answer: "
    )
    assert str(caught.value).endswith("Check that it runs and that NIGHTMILL_DATABASE_URL is right")
    assert "\n" not in str(caught.value)
    shown = [*traceback.format_exception(caught.value), repr(caught.value), repr(settings), str(settings)]
    shown += [caplog.text, *capfd.readouterr()]
    assert SECRET not in "".join(shown)


def test_a_sqlite_file_in_no_directory_is_unreachable(directory: Path, broker_url: str) -> None:
    settings = Settings(
        data_dir=directory, database_url=f"sqlite:///{directory}/nowhere/x.db", broker_url=broker_url
    )
    with (
        Client(settings) as client,
        pytest.raises(DatabaseUnreachableError, match="unable to open database file"),
    ):
        client.list_jobs()
