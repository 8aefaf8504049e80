"""Enqueue inside a caller's own SQLAlchemy session: rows and messages appear with the commit, or never."""

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy.orm import Session

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import IdempotencyConflictError, JobNotFoundError
from nightmill.jobs.messages.announcing import DeliveryDelayedWarning
from tests.support.servers import RedisServer


@pytest.fixture
def session(client: Client) -> Iterator[Session]:
    """A session of the caller's, on the same database."""
    with Session(client.database.engine) as made:
        yield made


@pytest.fixture
def messages(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of jobs in the order in which they were announced; the broker gets them as well."""
    announced: list[str] = []
    announce = client.broker.announce

    def record(job_ids: list[str], model: str | None, priority: int) -> None:
        announced.extend(job_ids)
        announce(job_ids, model, priority)

    monkeypatch.setattr(client.broker, "announce", record)
    return announced


def _exists(client: Client) -> Callable[[str], bool]:
    def exists(job_id: str) -> bool:
        try:
            client.get(job_id)
        except JobNotFoundError:
            return False
        return True

    return exists


def test_nothing_is_seen_before_the_commit_and_all_after_it(
    client: Client, session: Session, messages: list[str]
) -> None:
    first = client.enqueue("one", session=session)
    second = client.enqueue("two", session=session)
    many = client.enqueue_many(["three", "four"], session=session)
    exists = _exists(client)
    assert not any(exists(job_id) for job_id in [first, second, *many])
    assert messages == []
    assert client.broker.queue_length(None) == 0
    session.commit()
    assert all(exists(job_id) for job_id in [first, second, *many])
    assert messages == [first, second, *many]
    assert client.broker.queue_length(None) == 3  # enqueue_many sends one shard


def test_nothing_remains_after_a_rollback(client: Client, session: Session, messages: list[str]) -> None:
    job_id = client.enqueue("one", session=session)
    session.rollback()
    session.commit()
    assert not _exists(client)(job_id)
    assert messages == []


def test_nothing_remains_of_a_session_that_is_closed_without_a_commit(
    client: Client, session: Session, messages: list[str]
) -> None:
    job_id = client.enqueue("one", session=session)
    session.close()
    kept = client.enqueue("two", session=session)
    session.commit()
    assert not _exists(client)(job_id)
    assert messages == [kept]


def test_a_session_may_be_used_for_one_transaction_after_another(
    client: Client, session: Session, messages: list[str]
) -> None:
    first = client.enqueue("one", session=session)
    session.commit()
    assert messages == [first]
    client.enqueue("two", session=session)
    session.rollback()
    third = client.enqueue("three", session=session)
    session.commit()
    session.commit()
    assert messages == [first, third]
    assert [job.prompt for job in client.list_jobs()] == ["three", "one"]


def test_a_released_savepoint_sends_nothing_before_the_outer_commit(
    client: Client, session: Session, messages: list[str]
) -> None:
    before = client.enqueue("before", session=session)
    with session.begin_nested():
        inside = client.enqueue("inside", session=session)
    assert messages == []
    session.commit()
    assert messages == [before, inside]


def test_a_savepoint_that_is_rolled_back_takes_its_messages_along(
    client: Client, session: Session, messages: list[str]
) -> None:
    before = client.enqueue("before", session=session)
    savepoint = session.begin_nested()
    lost = client.enqueue("lost", session=session)
    with session.begin_nested():  # released, and then undone with the one around it
        lost_too = client.enqueue("lost too", session=session)
    savepoint.rollback()
    after = client.enqueue("after", session=session)
    session.commit()
    assert messages == [before, after]
    exists = _exists(client)
    assert [exists(job_id) for job_id in (before, lost, lost_too, after)] == [True, False, False, True]


def test_rolling_back_around_a_released_savepoint_sends_nothing(
    client: Client, session: Session, messages: list[str]
) -> None:
    with session.begin_nested():
        client.enqueue("inside", session=session)
    session.rollback()
    session.commit()
    assert messages == []


def test_two_sessions_do_not_know_of_each_other(client: Client, messages: list[str]) -> None:
    if client.database.is_sqlite:  # one writer at a time: one after the other
        with Session(client.database.engine) as one:
            first = client.enqueue("one", session=one)
            one.rollback()
        with Session(client.database.engine) as two:
            second = client.enqueue("two", session=two)
            two.commit()
    else:
        with Session(client.database.engine) as one, Session(client.database.engine) as two:
            first = client.enqueue("one", session=one)
            second = client.enqueue("two", session=two)
            two.commit()
            one.rollback()
    assert messages == [second]
    assert not _exists(client)(first)


def test_a_conflicting_key_in_a_session_leaves_the_items_before_it(
    client: Client, session: Session, messages: list[str]
) -> None:
    client.enqueue("taken", idempotency_key="k")
    messages.clear()
    items = [{"prompt": "a"}, {"prompt": "b", "idempotency_key": "k"}, {"prompt": "c"}]
    with pytest.raises(IdempotencyConflictError) as caught:
        client.enqueue_many(items, session=session)
    session.commit()
    assert messages == list(caught.value.enqueued)
    assert [client.get(job_id).prompt for job_id in messages] == ["a"]
    assert sorted(str(job.prompt) for job in client.list_jobs()) == ["a", "taken"]


def test_a_broker_that_is_down_at_the_commit_delays_and_does_not_undo(
    server_settings: Settings, redis_server: RedisServer
) -> None:
    settings = server_settings.model_copy(update={"broker_url": redis_server.url})
    with Client(settings) as client, Session(client.database.engine) as session:
        job_id = client.enqueue("one", session=session)
        redis_server.stop()
        with pytest.warns(DeliveryDelayedWarning, match="1 job is kept in the database"):
            session.commit()
        assert client.get(job_id).state is JobState.QUEUED
