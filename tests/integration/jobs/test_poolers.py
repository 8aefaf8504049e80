"""PostgreSQL behind a pooler in transaction mode (a real pgbouncer), or with defaults of its own."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.errors import BatchNotFoundError, SchemaError, SettingsError
from nightmill.jobs.sql import patience
from nightmill.jobs.sql.failures import mapped
from tests.support.pgbouncer import pgbouncer
from tests.support.servers import worker_env

ROWS, THREADS = 400, 8
DEFAULTS = {
    "datestyle": "SQL, DMY", "timezone": "Asia/Kathmandu", "standard_conforming_strings": "off",
    "intervalstyle": "iso_8601", "client_encoding": "LATIN1", "extra_float_digits": "-15",
    "statement_timeout": "300", "default_transaction_isolation": "serializable",
}  # fmt: skip


@pytest.fixture
def pooled(postgres_settings: Settings) -> Iterator[Settings]:
    """Settings of a database behind a pooler that has fewer connections than its callers."""
    assert postgres_settings.database_url is not None
    with pgbouncer(postgres_settings.database_url) as url:
        yield postgres_settings.model_copy(update={"database_url": url})


@pytest.fixture
def odd_defaults(postgres_settings: Settings) -> Settings:
    """Settings of a database that gives its sessions what nobody expects."""
    url = make_url(postgres_settings.database_url or "")
    with psycopg.connect(_plain(url), autocommit=True) as connection:
        for name, value in DEFAULTS.items():
            connection.execute(f"ALTER DATABASE {url.database} SET {name} = '{value}'")
    return postgres_settings


def _plain(url: Any) -> str:
    return str(url.set(drivername="postgresql").render_as_string(hide_password=False))


def prompts(folder: Path, rows: int = ROWS) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"é {n}", "max_tokens": 4}) + "\n" for n in range(rows)))
    return path


@pytest.mark.parametrize("pooler", ["auto", "transaction"])
def test_batches_and_jobs_pass_through_a_pooler(pooled: Settings, tmp_path: Path, pooler: str) -> None:
    settings = pooled.model_copy(update={"database_pooler": pooler})
    with Client(settings) as client:
        batch = client.submit_batch(prompts(tmp_path), name="a")
        assert batch.status().rows == ROWS
        with ThreadPoolExecutor(THREADS) as pool:
            ids = list(pool.map(lambda n: client.enqueue(f"o {n}"), range(20 * THREADS)))
            assert [job.prompt for job in pool.map(client.get, ids)] == [f"o {n}" for n in range(len(ids))]
            assert set(pool.map(client.cancel, ids)) == {JobState.CANCELLED}
        assert batch.cancel() == (ROWS, 0)
        assert batch.delete() == ROWS
        with client.database.read() as connection:
            assert connection.execute(text("SELECT count(*) FROM pg_prepared_statements")).scalar_one() == 0


def test_a_pooler_is_migrated_and_found_without_a_setting(empty_postgres_url: str, tmp_path: Path) -> None:
    with (
        pgbouncer(empty_postgres_url) as url,
        Client(Settings(data_dir=tmp_path, database_url=url)) as client,
    ):
        client.database.migrate()
        assert client.database.pooled
        client.stats()
    with Client(Settings(data_dir=tmp_path, database_url=empty_postgres_url)) as client:
        assert not client.database.pooled


def test_check_says_that_there_is_a_pooler(pooled: Settings) -> None:
    for settings, found in ((pooled, True), (pooled.model_copy(update={"database_pooler": "none"}), False)):
        result = CliRunner().invoke(main, ["check"], env=worker_env(settings))
        assert ("a pooler in transaction mode, so without prepared" in result.output) is found, result.output


def test_a_long_statement_goes_on_behind_a_pooler(pooled: Settings) -> None:
    @patience.long_lasting
    def work() -> None:
        with client.database.read() as connection, patience.patience(0.5):
            connection.execute(text("SELECT pg_sleep(2)"))

    with Client(pooled) as client:
        client.stats()
        work()


def test_what_a_connection_relies_on_does_not_depend_on_the_database(
    odd_defaults: Settings, tmp_path: Path
) -> None:
    with Client(odd_defaults) as client:
        _live(client, tmp_path)


def test_neither_does_it_behind_a_pooler_nor_is_it_left_to_others(
    odd_defaults: Settings, tmp_path: Path
) -> None:
    url = odd_defaults.database_url or ""
    with pgbouncer(url) as through:
        with Client(odd_defaults.model_copy(update={"database_url": through})) as client:
            threads = [threading.Thread(target=_live, args=[client, tmp_path, n]) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(240)
            assert len(client.list_jobs(limit=50)) == len(threads)
        found = set()
        for _ in range(6):  # each of the pooler's connections in turn
            with psycopg.connect(_plain(make_url(through))) as other:
                found.add(tuple(other.execute(f"SHOW {name}").fetchone() for name in _LEFT))  # type: ignore[arg-type]
        assert found == {(("300ms",), ("iso_8601",), ("0",))}


_LEFT = ("statement_timeout", "intervalstyle", "idle_in_transaction_session_timeout")


def _live(client: Client, folder: Path, number: int = 0) -> None:
    job = client.get(client.enqueue("Schrödinger €", temperature=0.1 + 0.2))
    assert job.prompt == "Schrödinger €" and job.params.temperature == 0.1 + 0.2
    assert abs((client.database.now() - job.created_at).total_seconds()) < 60
    with client.database.read() as connection:
        connection.execute(text("SELECT pg_sleep(0.5)"))
        assert connection.execute(text("SHOW transaction_isolation")).scalar_one() == "read committed"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("prepare_threshold=x", "has a prepare_threshold that is not a whole number, or none: never"),
        ("connect_timeout=soon", "has a connect_timeout that is not a whole number"),
        ("sslmode=yes", "has a sslmode that is not one of disable, allow"),
        ("autocommit=1", "has autocommit after its ?, which is no parameter"),
        ("sslmode=require&sslmode=disable", "has the same parameter twice"),
    ],
)
def test_parameters_of_a_url_that_the_driver_would_choke_on_are_refused(query: str, message: str) -> None:
    with pytest.raises(SettingsError, match="NIGHTMILL_DATABASE_URL") as caught:
        Settings.from_env({"NIGHTMILL_DATABASE_URL": f"postgresql://me:x@host/db?{query}"})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("query", "prepared"), [("prepare_threshold=0", True), ("prepare_threshold=none", False)]
)
def test_a_threshold_for_preparing_is_the_drivers(
    postgres_settings: Settings, query: str, prepared: bool
) -> None:
    url = make_url(postgres_settings.database_url or "").update_query_string(query)
    settings = postgres_settings.model_copy(
        update={"database_url": url.render_as_string(hide_password=False)}
    )
    with Client(settings) as client, client.database.read() as connection:
        count = text("SELECT count(*) > 0 FROM pg_prepared_statements")
        connection.execute(count)
        assert connection.execute(count).scalar_one() is prepared


def test_a_threshold_does_not_prepare_behind_a_pooler(pooled: Settings) -> None:
    with Client(
        pooled.model_copy(update={"database_url": f"{pooled.database_url}?prepare_threshold=0"})
    ) as client:
        for _ in range(20):
            client.stats()


def test_a_statement_that_another_session_has_prepared_names_the_setting(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    for error in (
        psycopg.errors.InvalidSqlStatementName('prepared statement "_pg3_3" does not exist'),
        psycopg.errors.DuplicatePreparedStatement('prepared statement "_pg3_0" already exists'),
    ):
        found = mapped(DBAPIError.instance("x", None, error, psycopg.Error), settings)  # type: ignore[arg-type]
        assert "NIGHTMILL_DATABASE_POOLER=transaction" in str(found)
        assert not isinstance(found, SchemaError)
    lacks = psycopg.errors.UndefinedTable('relation "jobs" does not exist')
    assert isinstance(mapped(DBAPIError.instance("x", None, lacks, psycopg.Error), settings), SchemaError)  # type: ignore[arg-type]


def test_a_submission_that_fails_before_its_first_row_leaves_nothing(
    settings: Settings,
) -> None:
    def rows() -> Iterator[str]:
        raise RuntimeError("the source has failed")
        yield ""

    with Client(settings) as client:
        with pytest.raises(RuntimeError, match="the source has failed"):
            client.submit_batch(rows(), name="a")
        with pytest.raises(BatchNotFoundError):
            client.get_batch("a")
        client.submit_batch([], name="empty")
        assert client.get_batch("empty").status().rows == 0

        def some() -> Iterator[str]:
            yield from ["a"] * 3000
            raise RuntimeError("the source has failed")

        with pytest.raises(RuntimeError, match="the source has failed"):
            client.submit_batch(some(), name="b")
        assert client.get_batch("b").store.last_row("b") > 0  # what was committed stays
