"""Migrations lead to exactly the declared schema, may be run at any time, and refuse the unknown."""

import multiprocessing
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import DatabaseBusyError, DatabaseError, DatabaseUnreachableError, SchemaError
from nightmill.jobs.sql import database as database_module
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.declared import METADATA
from nightmill.jobs.sql.probing import try_writing
from nightmill.jobs.sql.tables import SCHEMA_REVISION
from tests.integration.jobs.migrating import alembic_config, old_rows
from tests.support.servers import PostgresServer


def _differences(database: Database) -> list[object]:
    """What Alembic would change; types and server defaults included."""
    with database.engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        return list(compare_metadata(context, METADATA))


def _indexes(database: Database) -> dict[str, str]:
    """Every index as the database writes it down: with its condition, which Alembic does not compare."""
    query = (
        "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
        if database.is_sqlite
        else "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'"
    )
    with database.engine.connect() as connection:
        found = dict(tuple(row) for row in connection.execute(text(query)))
    return {name: definition for name, definition in found.items() if not name.startswith("alembic")}


def test_migrated_schema_is_the_declared_schema(empty_database: Database) -> None:
    empty_database.migrate()
    assert _differences(empty_database) == []
    migrated = _indexes(empty_database)
    assert {name.split("_")[0] for name in migrated} >= {"ix", "uq"}
    with empty_database.engine.begin() as connection:
        METADATA.drop_all(connection)
        METADATA.create_all(connection)
    assert _indexes(empty_database) == migrated


def test_downgrade_to_nothing_and_back_leads_to_the_same_schema(empty_database: Database) -> None:
    empty_database.migrate()
    config = alembic_config()
    with empty_database.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    assert set(inspect(empty_database.engine).get_table_names()) == {"alembic_version"}
    assert empty_database.revision() is None
    empty_database.migrate()
    assert _differences(empty_database) == []


def test_the_revision_that_the_code_wants_is_the_last_one() -> None:
    assert ScriptDirectory.from_config(alembic_config()).get_heads() == [SCHEMA_REVISION]


def test_migrating_twice_changes_nothing(empty_database: Database) -> None:
    empty_database.migrate()
    with empty_database.write() as connection:
        connection.execute(
            text("INSERT INTO batches (name, metadata, created_at) VALUES ('b', '{}', '2026-01-01')")
        )
    empty_database.migrate()
    with empty_database.read() as connection:
        assert connection.execute(text("SELECT name FROM batches")).scalars().all() == ["b"]
    assert empty_database.revision() == SCHEMA_REVISION


def test_threads_of_a_program_migrate_a_database_each(tmp_path: Path) -> None:
    """Alembic knows of one migration in a process at a time."""
    settings = [Settings(data_dir=tmp_path / name) for name in "abc"]
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        databases = [stack.enter_context(closing(Database(one))) for one in settings]
        list(threads.map(Database.migrate, databases))
        assert [one.revision() for one in databases] == [SCHEMA_REVISION] * 3


def test_a_migration_does_not_wait_for_ever_behind_an_open_transaction(
    empty_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever came later would wait behind it."""
    monkeypatch.setattr(database_module, "MIGRATION_LOCK_SECONDS", 1)
    database = Database(Settings(database_url=empty_postgres_url))
    old_rows(database, "0014", {})
    with database.engine.begin() as reader:
        reader.execute(text("SELECT id FROM jobs")).all()
        with pytest.raises(DatabaseBusyError, match=r"not migrated, and is as it was: .* Stop workers"):
            database.migrate()
    assert database.revision() == "0014"
    database.migrate()
    assert database.revision() == SCHEMA_REVISION
    database.close()


def test_a_configured_database_without_tables_says_how_to_make_them(empty_database: Database) -> None:
    with pytest.raises(SchemaError) as caught, empty_database.read():
        pass
    where = empty_database.settings.safe_database_url
    assert str(caught.value) == f"the database at {where} has no Nightmill tables: run `nightmill migrate`"


def test_a_look_at_a_file_that_is_not_there_does_not_make_it(tmp_path: Path) -> None:
    mistaken = Database(Settings(database_url=f"sqlite:///{tmp_path}/mistaken.db"))
    with pytest.raises(SchemaError, match=r"mistaken\.db has no Nightmill tables: run `nightmill migrate`"):
        mistaken.ensure_schema()
    assert not list(tmp_path.iterdir())
    mistaken.migrate()
    mistaken.ensure_schema()
    mistaken.close()
    nowhere = Database(Settings(database_url=f"sqlite:///{tmp_path}/none/jobs.db"))
    with pytest.raises(
        DatabaseUnreachableError, match=r"cannot be opened: .*\. There is no folder .*/none: make"
    ):
        nowhere.migrate()


def test_a_database_of_another_version_is_refused_by_programs(empty_database: Database) -> None:
    empty_database.migrate()
    _set_revision(empty_database, "9999")
    with pytest.raises(SchemaError) as caught, empty_database.write():
        pass
    assert (
        f"has schema 9999, of a newer version of Nightmill; this version needs {SCHEMA_REVISION}: install"
        in str(caught.value)
    )
    _set_revision(empty_database, "0001")
    with pytest.raises(SchemaError) as caught, empty_database.write():
        pass
    assert (
        f"has schema 0001, this version of Nightmill needs {SCHEMA_REVISION}: run `nightmill migrate`"
        in str(caught.value)
    )


def test_a_database_of_a_newer_version_is_not_migrated(empty_database: Database) -> None:
    empty_database.migrate()
    _set_revision(empty_database, "9999")
    with pytest.raises(SchemaError, match=r"has schema 9999, of a newer version of Nightmill; .*: install"):
        empty_database.migrate()
    assert empty_database.revision() == "9999"


@pytest.mark.parametrize("heads", [["27c6a30d7c24"], ["0005", "0004"]])
def test_a_database_of_another_program_with_alembic_is_left_alone(
    empty_database: Database, heads: list[str]
) -> None:
    with empty_database.engine.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)"))
        for head in heads:
            connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": head})
    for act in (empty_database.migrate, empty_database.ensure_schema):
        with pytest.raises(SchemaError, match=rf"another program's: .*{heads[0]}.* a database of its own"):
            act()
    assert inspect(empty_database.engine).get_table_names() == ["alembic_version"]


def test_tables_of_another_program_are_in_a_migrations_way(empty_database: Database) -> None:
    with empty_database.engine.begin() as connection:
        connection.execute(text("CREATE TABLE jobs (id INTEGER)"))
    with pytest.raises(
        SchemaError, match=r"was not migrated, .*jobs.* already exists.* a database of its own"
    ):
        empty_database.migrate()
    assert inspect(empty_database.engine).get_table_names() == ["jobs"]


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_database_that_cannot_hold_every_answer_is_refused(
    postgres_server: PostgresServer, encoding: str
) -> None:
    name = f"nightmill_{encoding.lower()}"
    made = f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'"
    url = postgres_server.admin_url.set(database=name).render_as_string(hide_password=False)
    with postgres_server._engine.connect() as connection:
        connection.execute(text(made))
    with closing(Database(Settings(database_url=url))) as database:
        try:
            with pytest.raises(SchemaError, match=rf"has the encoding {encoding}, .*ENCODING 'UTF8'"):
                database.migrate()
            assert database.revision() is None
        finally:
            postgres_server.drop_database(url)


def test_a_database_in_use_whose_encoding_is_another_is_found_by_check(
    empty_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upgrades go on: what it holds is held."""
    with closing(Database(Settings(database_url=empty_postgres_url))) as database:
        database.migrate()
        monkeypatch.setattr("nightmill.jobs.sql.versions._ENCODING", "another")
        database.migrate()
        with pytest.raises(SchemaError, match=r"has the encoding UTF8, .*"):
            try_writing(database, tables=True)


def test_what_a_migrated_database_lacks_is_named(empty_database: Database) -> None:
    """Otherwise a statement that fails for want of it would send people to `migrate`, which did nothing."""
    empty_database.migrate()
    with empty_database.engine.begin() as connection:
        connection.execute(text("DROP TABLE loads"))
        connection.execute(text("ALTER TABLE jobs DROP COLUMN uncounted_attempts"))
    with pytest.raises(SchemaError, match=r"lacks loads, jobs\.uncounted_attempts: .* Restore a backup"):
        empty_database.migrate()


def test_an_embedded_database_of_a_newer_version_is_refused(directory: Path, sqlite_template: Path) -> None:
    (directory / "nightmill.db").write_bytes(sqlite_template.read_bytes())
    with sqlite3.connect(directory / "nightmill.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    database = Database(Settings(data_dir=directory))
    with pytest.raises(SchemaError, match="newer version of Nightmill"), database.read():
        pass
    database.close()


def test_a_table_that_vanished_is_a_schema_error(empty_database: Database) -> None:
    empty_database.migrate()
    with empty_database.write() as connection:
        for name in ("partials", "answers", "logprobs", "embeddings"):  # which refer to it
            connection.execute(text(f"DROP TABLE {name}"))
        connection.execute(text("DROP TABLE jobs"))
    missing = pytest.raises(SchemaError, match=r"lacks a table \(.*jobs.*\): run `nightmill migrate`")
    with missing, empty_database.read() as connection:
        connection.execute(text("SELECT * FROM jobs"))


def test_a_statement_that_is_refused_is_named_so(empty_database: Database) -> None:
    empty_database.migrate()
    statement = text("INSERT INTO batches (name, metadata) VALUES ('b', '{}')")  # without created_at
    with (
        pytest.raises(DatabaseError, match=r"refused a statement: .*created_at"),
        empty_database.write() as connection,
    ):
        connection.execute(statement)


def _use_first(settings: Settings, barrier: object, said: object) -> None:
    try:
        with Client(settings) as client:
            barrier.wait(240)  # type: ignore[attr-defined]
            if not settings.embedded_database:
                client.database.migrate()
            said.put(client.enqueue("prompt"))  # type: ignore[attr-defined]
    except BaseException as error:
        said.put(repr(error))  # type: ignore[attr-defined]
        raise


@pytest.mark.parametrize("kind", ["embedded", "postgresql"])
def test_processes_that_use_a_new_database_at_once_all_succeed(
    kind: str, request: pytest.FixtureRequest, directory: Path, broker_url: str
) -> None:
    url = None if kind == "embedded" else request.getfixturevalue("empty_postgres_url")
    settings = Settings(data_dir=directory / "new" / "data", database_url=url, broker_url=broker_url)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nightmill.jobs.client.client", "alembic.command"])
    count = 4
    barrier, said = context.Barrier(count), context.Queue()
    processes = [context.Process(target=_use_first, args=(settings, barrier, said)) for _ in range(count)]
    for process in processes:
        process.start()
    ids = [said.get(timeout=240) for _ in processes]
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * count, ids
    with Client(settings) as client:
        assert [job.id for job in client.list_jobs()] == sorted(ids, reverse=True)


def test_an_embedded_database_is_private_and_keeps_a_write_ahead_log(
    directory: Path, broker_url: str
) -> None:
    settings = Settings(data_dir=directory / "data", broker_url=broker_url)
    with Client(settings) as client, client.database.write() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar_one() == "wal"
        assert connection.execute(text("PRAGMA foreign_keys")).scalar_one() == 1
    assert (directory / "data").stat().st_mode & 0o777 == 0o700


def test_an_in_memory_sqlite_is_refused() -> None:
    with pytest.raises(
        DatabaseError, match="in-memory SQLite, which other processes cannot see: name a file"
    ):
        Database(Settings(database_url="sqlite://"))


def _set_revision(database: Database, revision: str) -> None:
    with database.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
    database._schema_revision = None
