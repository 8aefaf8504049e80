"""`nightmill check` writes: what answers and takes nothing is found, and is not called silent."""

import re

import psycopg
import pytest
import redis.exceptions
from click.testing import CliRunner
from sqlalchemy.engine import make_url

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.errors import BrokerError, BrokerUnreachableError, DatabaseUnreachableError
from nightmill.jobs.messages.broker import Broker
from nightmill.jobs.sql.declared import METADATA
from nightmill.jobs.sql.probing import try_writing
from tests.support.servers import worker_env


def checked(settings: Settings) -> str:
    return CliRunner().invoke(main, ["check"], env=worker_env(settings)).output


def plain(settings: Settings) -> str:
    url = make_url(settings.database_url or "").set(drivername="postgresql")
    return url.render_as_string(hide_password=False)


def test_nothing_is_left_of_what_is_written(settings: Settings) -> None:
    assert re.search(r"ok +database", checked(settings)) and re.search(r"ok +broker", checked(settings))
    with Client(settings) as client:
        try_writing(client.database, tables=True)
        client.broker.try_writing(worker=True)
        assert client.list_jobs(limit=5) == []
        with client.database.read() as connection:
            for table in METADATA.sorted_tables:
                assert connection.execute(table.select()).all() == [], table.name
        with client.broker.connection() as connection:
            assert not [key for key in connection.default_channel.client.scan_iter() if b"probe" in key]


def test_a_database_that_is_read_only_is_found(server_settings: Settings) -> None:
    url = make_url(server_settings.database_url or "")
    settings = server_settings
    if url.get_backend_name() == "sqlite":
        read_only = {"database_url": f"sqlite:///file:{url.database}?mode=ro&uri=true"}
        settings = server_settings.model_copy(update=read_only)
    else:
        with psycopg.connect(plain(server_settings), autocommit=True) as connection:
            connection.execute(f"ALTER DATABASE {url.database} SET default_transaction_read_only = on")
    found = checked(settings)
    assert re.search(r"FAIL database .*accepts no writes now: .*read-?only", found), found
    assert "does not answer" not in found
    with Client(settings) as client, pytest.raises(DatabaseUnreachableError, match="accepts no writes now"):
        client.enqueue("a")


@pytest.mark.parametrize("right", ["INSERT", "UPDATE", "DELETE"])
def test_a_right_that_lacks_on_one_table_is_found(postgres_settings: Settings, right: str) -> None:
    role = f"limited_{right.lower()}"
    url = make_url(postgres_settings.database_url or "").set(username=role)
    settings = postgres_settings.model_copy(
        update={"database_url": url.render_as_string(hide_password=False)}
    )
    with psycopg.connect(plain(postgres_settings), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN")
        try:
            every = "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO"
            connection.execute(f"{every} {role}")
            assert re.search(r"ok +database", checked(settings))
            connection.execute(f"REVOKE {right} ON webhooks FROM {role}")
            found = checked(settings)
            assert re.search(r"FAIL database .*permission denied for table webhooks", found), found
        finally:
            connection.execute(f"DROP OWNED BY {role}")
            connection.execute(f"DROP ROLE {role}")


def test_a_connection_that_is_refused_is_not_called_silent(postgres_settings: Settings) -> None:
    url = make_url(postgres_settings.database_url or "").set(username="nobody_of_this_name")
    settings = postgres_settings.model_copy(
        update={"database_url": url.render_as_string(hide_password=False)}
    )
    assert re.search(r"FAIL database .*refuses the connection: .*FATAL", checked(settings))


def test_a_database_without_a_free_connection_is_told(postgres_settings: Settings) -> None:
    url = make_url(postgres_settings.database_url or "").set(username="crowded")
    settings = postgres_settings.model_copy(
        update={"database_url": url.render_as_string(hide_password=False)}
    )
    with psycopg.connect(plain(postgres_settings), autocommit=True) as connection:
        connection.execute("CREATE ROLE crowded LOGIN CONNECTION LIMIT 0")
        try:
            found = checked(settings)
        finally:
            connection.execute("DROP ROLE crowded")
    assert re.search(r"FAIL database .*has no connection left: .*too many .*a pooler before it", found), found


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (redis.exceptions.ClusterDownError("CLUSTERDOWN Hash slot not served"), BrokerError, "refused"),
        (redis.exceptions.OutOfMemoryError("OOM command not allowed"), BrokerError, "refused a command: OOM"),
        (
            redis.exceptions.NoPermissionError("NOPERM no key"),
            BrokerError,
            "NOPERM no key. Give its user the",
        ),
        (redis.exceptions.AuthenticationError("WRONGPASS"), BrokerError, "WRONGPASS. Check user and pass"),
        (
            redis.exceptions.ResponseError("DB index is out of range"),
            BrokerError,
            "range. Check the number at",
        ),
        (redis.exceptions.BusyLoadingError("loading"), BrokerUnreachableError, "takes nothing yet: loading"),
        (redis.exceptions.ConnectionError("refused"), BrokerUnreachableError, "does not answer"),
        (redis.exceptions.TimeoutError("slow"), BrokerUnreachableError, "does not answer"),
        (OSError("gone"), BrokerUnreachableError, "does not answer"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_redis_says_is_a_refusal_and_silence_is_none(
    error: Exception, kind: type[BrokerError], said: str, wrapped: bool
) -> None:
    broker = Broker(Settings(broker_url="redis://127.0.0.1:1/0"))
    with pytest.raises(BrokerError) as caught, broker.mapped_errors():
        if not wrapped:
            raise error if type(error) is not OSError else ConnectionError(*error.args)
        import kombu.exceptions

        raise kombu.exceptions.OperationalError(str(error)) from error
    assert type(caught.value) is kind and said in str(caught.value)
