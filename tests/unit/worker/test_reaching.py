"""What a worker does at its start about a database or a broker that is away."""

from collections.abc import Callable

import pytest

from nightmill.jobs.errors import BrokerError, BrokerUnreachableError, DatabaseUnreachableError, SchemaError
from nightmill.worker.service import celery_flags, reaching
from nightmill.worker.service.reaching import reach_broker, reach_database


class _Away:
    """A server that is away for some calls, and then answers, or refuses."""

    def __init__(self, error: Exception, times: int, then: Exception | None = None) -> None:
        self.asked = 0
        self._error = error
        self._times = times
        self._then = then

    def ensure_schema(self) -> None:
        self.asked += 1
        if self.asked <= self._times:
            raise self._error
        if self._then is not None:
            raise self._then

    ping = ensure_schema


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(reaching.time, "sleep", found.append)
    return found


def test_a_worker_that_is_started_refuses(waits: list[float]) -> None:
    database = _Away(DatabaseUnreachableError("away"), 1)
    with pytest.raises(DatabaseUnreachableError):
        reach_database(database, woken=False)  # type: ignore[arg-type]
    with pytest.raises(BrokerUnreachableError):
        reach_broker(_Away(BrokerUnreachableError("away"), 1), woken=False)  # type: ignore[arg-type]
    assert waits == []


def test_a_worker_that_wakes_waits_and_says_so_once(
    waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    database = _Away(DatabaseUnreachableError("the database is away"), 3)
    reach_database(database, woken=True)  # type: ignore[arg-type]
    assert len(waits) == 3 and caplog.messages == ["the database is away"]
    broker = _Away(BrokerUnreachableError("away"), 1)
    reach_broker(broker, woken=True)  # type: ignore[arg-type]
    assert broker.asked == 0


def test_a_broker_that_is_full_may_have_room_later(caplog: pytest.LogCaptureFixture) -> None:
    class Full(_Away):
        def try_writing(self, *, worker: bool) -> None:
            assert worker
            raise BrokerError("the broker is full")

    reach_broker(Full(BrokerUnreachableError("away"), 0), woken=False)  # type: ignore[arg-type]
    assert caplog.messages == ["the broker is full"]


def test_another_version_is_not_waited_for(waits: list[float]) -> None:
    database = _Away(DatabaseUnreachableError("away"), 1, SchemaError("another version"))
    with pytest.raises(SchemaError):
        reach_database(database, woken=True)  # type: ignore[arg-type]
    assert len(waits) == 1


def test_a_signal_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> None:
        raise SystemExit(0)

    answers: list[Callable[[], None]] = [lambda: None, told]
    monkeypatch.setattr(celery_flags, "exit_if_told", lambda: answers.pop(0)())
    database = _Away(DatabaseUnreachableError("away"), 9)
    with pytest.raises(SystemExit):
        reach_database(database, woken=True)  # type: ignore[arg-type]
    assert database.asked == 2
