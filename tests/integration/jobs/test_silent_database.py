"""A database that hangs, or a connection to it that is frozen, is a fault with an end."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import DatabaseUnreachableError, WaitTimeoutError
from nightmill.jobs.sql import patience
from tests.support.freezing import Freeze, FreezingProxy, suspended
from tests.support.servers import PostgresServer, postgres_address, scratch_database, start_postgres


@pytest.fixture
def proxy(postgres_server: PostgresServer) -> Iterator[FreezingProxy]:
    with FreezingProxy(postgres_address(postgres_server.admin_url)) as made:
        yield made


@pytest.fixture
def client(postgres_settings: Settings, proxy: FreezingProxy) -> Iterator[Client]:
    """A client whose connections go through the proxy."""
    with Client(through(proxy, postgres_settings)) as made:
        yield made


def through(proxy: FreezingProxy, settings: Settings) -> Settings:
    assert settings.database_url is not None
    url = make_url(settings.database_url).set(host="127.0.0.1", port=proxy.port, query={})
    return settings.model_copy(update={"database_url": url.render_as_string(hide_password=False)})


def ends(work: Callable[[], Any]) -> Any:
    """What `work` returns or raises; fails if it does neither for far longer than it may take."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(90.0)
    assert found, "it waits without end"
    return found[0]


@pytest.mark.parametrize("how", list(Freeze))
def test_a_statement_on_a_frozen_connection_ends(client: Client, proxy: FreezingProxy, how: Freeze) -> None:
    def work() -> None:
        with client.database.read() as connection, patience.patience(1.0):
            proxy.freeze(how)
            connection.execute(text("SELECT 1"))

    assert isinstance(ends(work), DatabaseUnreachableError)


@pytest.mark.parametrize("how", list(Freeze))
def test_frozen_connections_of_the_pool_are_found_out_and_replaced(
    client: Client, proxy: FreezingProxy, how: Freeze
) -> None:
    job_id = client.enqueue("a")
    assert proxy.freeze(how) > 0
    assert ends(lambda: client.get(job_id)).id == job_id


def test_a_host_that_is_gone_is_an_error_as_one_that_refuses(client: Client, proxy: FreezingProxy) -> None:
    job_id = client.enqueue("a")
    proxy.freeze(Freeze.SILENT, new=True)
    with patience.until(time.monotonic() + 2.0), pytest.raises(DatabaseUnreachableError):
        client.get(job_id)
    proxy.thaw()
    assert client.get(job_id).id == job_id


@pytest.mark.parametrize("new", [False, True])
def test_waiting_with_a_timeout_ends_with_it(client: Client, proxy: FreezingProxy, new: bool) -> None:
    job_id = client.enqueue("a")
    client.get(job_id)
    proxy.freeze(Freeze.ACKNOWLEDGED, new=new)
    assert isinstance(ends(lambda: client.wait(job_id, timeout=3.0)), WaitTimeoutError)
    if new:
        batch_error = ends(lambda: list(client.results([job_id], timeout=1.0)))
        assert isinstance(batch_error, WaitTimeoutError)


def test_rows_that_a_frozen_connection_has_locked_are_free_again(
    client: Client, proxy: FreezingProxy
) -> None:
    job_id = client.enqueue("a")

    def work() -> None:
        with client.database.write() as connection, patience.patience(1.0):
            connection.execute(
                text("SET idle_in_transaction_session_timeout = 3000")
            )  # sooner than it is set to
            connection.execute(text("SELECT id FROM jobs FOR UPDATE"))
            proxy.freeze(Freeze.ACKNOWLEDGED)
            connection.execute(text("SELECT 1"))

    assert isinstance(ends(work), DatabaseUnreachableError)
    assert ends(lambda: client.cancel(job_id)) is JobState.CANCELLED
    with client.database.read() as connection:
        limit = connection.execute(text("SHOW idle_in_transaction_session_timeout")).scalar_one()
    assert limit == "30s"


def test_rows_that_keep_coming_are_no_silence(client: Client) -> None:
    with client.database.read() as connection, patience.patience(3.0):
        slow = text("SELECT repeat('a', 100000), pg_sleep(1) FROM generate_series(1, 5)")
        assert len(connection.execute(slow).all()) == 5


def test_a_long_statement_goes_on_for_as_long_as_the_server_works_on_it(client: Client) -> None:
    @patience.long_lasting
    def work() -> None:
        with client.database.read() as connection, patience.patience(0.5):
            connection.execute(text("SELECT pg_sleep(2)"))

    work()
    with client.database.read() as connection, patience.patience(0.5), pytest.raises(OperationalError):
        connection.execute(text("SELECT pg_sleep(60)"))


@pytest.mark.parametrize("new", [False, True])
def test_a_long_statement_ends_if_the_server_does_not_work_on_it(
    client: Client, proxy: FreezingProxy, new: bool
) -> None:
    @patience.long_lasting
    def work() -> None:
        with client.database.read() as connection, patience.patience(1.0):
            proxy.freeze(Freeze.ACKNOWLEDGED, new=new)
            connection.execute(text("SELECT 1"))

    assert isinstance(ends(work), DatabaseUnreachableError)


def test_a_suspended_server_is_an_error_in_time_and_works_again(tmp_path: Path) -> None:
    with start_postgres() as server, scratch_database(server) as url:
        settings = Settings(data_dir=tmp_path, database_url=url)
        with Client(settings) as client:
            client.database.migrate()
            client.stats()
            with suspended(server.pid, children=True):
                error = ends(lambda: client.wait(batch="a", timeout=2.0))
                assert isinstance(error, WaitTimeoutError)
            assert client.stats()["prompt_tokens"] == 0


def test_a_writer_of_sqlite_waits_no_longer_than_its_caller(sqlite_settings: Settings) -> None:
    with Client(sqlite_settings) as holder, Client(sqlite_settings) as client:
        client.stats()
        with holder.database.write():
            began = time.monotonic()
            with patience.until(began + 1.0), pytest.raises(Exception, match="busy"):
                client.enqueue("a")
            assert time.monotonic() - began < patience.STATEMENT_SECONDS
        client.enqueue("a")
