"""Migrations lead to exactly the declared schema, may be run at any time, and refuse the unknown."""

import multiprocessing
import sqlite3
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import DatabaseBusyError, DatabaseError, DatabaseUnreachableError, SchemaError
from nightmill.jobs.reply.job import Answer
from nightmill.jobs.reply.logprobs import TokenLogprob, pack
from nightmill.jobs.sql import database as database_module
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.database import Database, migrations_dir
from nightmill.jobs.sql.declared import METADATA
from nightmill.jobs.sql.files import FileStore, StoredFile
from nightmill.jobs.sql.http_batches import HttpBatch, HttpBatchStore
from nightmill.jobs.sql.jobs import Selection, Store
from nightmill.jobs.sql.tables import SCHEMA_REVISION


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database(request: pytest.FixtureRequest, directory: Path) -> Iterator[Database]:
    """A configured database without tables."""
    if request.param == "sqlite":
        url = f"sqlite:///{directory}/empty.db"
    else:
        url = request.getfixturevalue("empty_postgres_url")
    database = Database(Settings(database_url=url, data_dir=directory))
    yield database
    database.close()


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations_dir()))
    return config


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
    config = _alembic()
    with empty_database.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    assert set(inspect(empty_database.engine).get_table_names()) == {"alembic_version"}
    assert empty_database.revision() is None
    empty_database.migrate()
    assert _differences(empty_database) == []


def test_the_revision_that_the_code_wants_is_the_last_one() -> None:
    assert ScriptDirectory.from_config(_alembic()).get_heads() == [SCHEMA_REVISION]


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
    _old_rows(database, "0014", {})
    with database.engine.begin() as reader:
        reader.execute(text("SELECT id FROM jobs")).all()
        with pytest.raises(DatabaseBusyError, match=r"not migrated, and is as it was: .* Stop workers"):
            database.migrate()
    assert database.revision() == "0014"
    database.migrate()
    assert database.revision() == SCHEMA_REVISION
    database.close()


def _old_rows(database: Database, revision: str, *rows: dict[str, object]) -> Config:
    """Tables of that revision with rows in `jobs`, of which only what matters is said; for Alembic."""
    config = _alembic()
    usual = {
        "id": "old", "state": "queued", "params": "{}", "seed": 1, "attempt": 0, "failures": 0,
        "max_attempts": 3, "priority": 5, "created_at": "2026-01-01",
    }  # fmt: skip
    with database.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
        for row in rows:
            values = usual | row
            names = ", ".join(values), ", ".join(f":{name}" for name in values)
            connection.execute(text(f"INSERT INTO jobs ({names[0]}) VALUES ({names[1]})"), values)
    return config


FAILED = {"state": "failed", "attempt": 1, "prompt": "kept"}


def test_rows_from_before_the_arithmetic_was_kept_have_none(empty_database: Database) -> None:
    _old_rows(empty_database, "0004", {"state": "succeeded", "attempt": 1, "text": "kept"})
    empty_database.migrate()
    with empty_database.read() as connection:
        assert connection.execute(text("SELECT text, arithmetic FROM jobs")).all() == [("kept", None)]


def test_rows_from_before_there_were_owners_are_nobodys(empty_database: Database) -> None:
    _old_rows(empty_database, "0005", {})
    empty_database.migrate()
    assert [(job.id, job.owner) for job in Store(empty_database).find(Selection())] == [("old", None)]


def test_rows_from_before_answers_could_be_held_to_a_schema_ask_for_nothing(empty_database: Database) -> None:
    config = _old_rows(empty_database, "0006", FAILED)
    empty_database.migrate()
    with empty_database.read() as connection:
        assert connection.execute(text("SELECT prompt, constrained FROM jobs")).all() == [("kept", None)]
    (old,) = Store(empty_database).find(Selection())
    assert (old.prompt, old.constrained, old.parsed) == ("kept", None, None)
    assert Store(empty_database).retry("old").state == "queued"
    with empty_database.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0006")
        assert connection.execute(text("SELECT prompt FROM jobs")).scalars().all() == ["kept"]


@pytest.mark.parametrize(
    ("before", "column"),
    [("0007", "prompt_ids"), ("0009", "rendering"), ("0014", "markup")],
    ids=["token ids", "rendering", "markup"],
)
def test_rows_from_before_a_column_hold_nothing_there(
    empty_database: Database, before: str, column: str
) -> None:
    config = _old_rows(empty_database, before, FAILED)
    empty_database.migrate()
    (old,) = Store(empty_database).find(Selection())
    assert (old.prompt, getattr(old, column)) == ("kept", None)
    assert Store(empty_database).retry("old").state == "queued"
    with empty_database.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, before)
        assert connection.execute(text("SELECT prompt FROM jobs")).scalars().all() == ["kept"]


def test_what_there_was_before_files_and_batches_over_http_stays(empty_database: Database) -> None:
    config = _old_rows(empty_database, "0010", FAILED)
    empty_database.migrate()
    files, batches, now = FileStore(empty_database), HttpBatchStore(empty_database), empty_database.now()
    assert files.add(StoredFile("0" * 32, None, "batch", "x", 1, now), 1)
    batch = HttpBatch("1" * 32, None, "0" * 32, now, idempotency_key="k", deadline_at=now)
    assert batches.add(batch) == batches.get(batch.id) == batch and batches.open() == [batch]
    assert batches.add(replace(batch, id="2" * 32)) == batch
    assert batches.add(HttpBatch("3" * 32, None, "4" * 32, now)) is None
    assert [job.prompt for job in Store(empty_database).find(Selection())] == ["kept"]
    with empty_database.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0010")
        assert connection.execute(text("SELECT prompt FROM jobs")).scalars().all() == ["kept"]


def test_rows_from_before_there_were_several_answers_have_one(empty_database: Database) -> None:
    done = {"id": "1", "state": "succeeded", "stop_reason": "eos", "text": "kept", "completion_tokens": 4}
    config = _old_rows(empty_database, "0010", done | {"seed": 6}, {"id": "2", "prompt": "p"})
    empty_database.migrate()
    old, waiting = Store(empty_database).find(Selection())
    assert old.answers == (Answer("kept", StopReason.EOS, 4, 6),)
    assert (waiting.answers, waiting.params.n) == ((), 1)
    claims = Claims(empty_database, "a" * 32)
    assert [claim.params.n for claim in claims.claim(["2"])] == [1]
    assert claims.finish([Outcome("2", 1, StopReason.LENGTH, "new", 3, 9)]) == 1
    with empty_database.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0010")
        found = connection.execute(text("SELECT text FROM jobs ORDER BY id")).scalars().all()
        assert found == ["kept", "new"]


def test_rows_get_the_number_of_answers_that_their_parameters_name(empty_database: Database) -> None:
    said = ['{"n": 3}', '{"score": [" a", " b"]}', '{"max_tokens": 5}', '{"n": "9"}', '{"n": -1}', '["n"]']
    rows = [{"id": str(number), "prompt": "p", "params": params} for number, params in enumerate(said)]
    config = _old_rows(empty_database, "0024", *rows)
    empty_database.migrate()
    with empty_database.read() as connection:
        found = connection.execute(text("SELECT answers FROM jobs ORDER BY id")).scalars().all()
    assert found == [3, 2, 1, 1, 1, 1]
    with empty_database.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0024")


def test_rows_from_before_log_probabilities_were_kept_have_none(empty_database: Database) -> None:
    done = {"id": "1", "state": "succeeded", "stop_reason": "eos", "text": "kept", "completion_tokens": 4}
    config = _old_rows(empty_database, "0016", done, {"id": "2", "prompt": "p", "params": '{"logprobs": 0}'})
    empty_database.migrate()
    old, waiting = Store(empty_database).find(Selection())
    assert (old.text, old.logprobs, waiting.params.logprobs) == ("kept", None, 0)
    claims = Claims(empty_database, "a" * 32)
    (claim,) = claims.claim(["2"])
    data = pack([7], array("f", [-0.5]).tobytes(), 0, lambda token: (b"x", ""))
    failed = Outcome("2", claim.attempt, StopReason.ERROR, "x", 1, 1, "e", logprobs=(data,))
    assert claims.finish([failed]) == 1
    assert Store(empty_database).get("2").logprobs == (TokenLogprob("x", -0.5, b"x", 7, 0),)
    assert Store(empty_database).retry("2").logprobs is None
    with empty_database.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM logprobs")).scalar_one() == 0
    with empty_database.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0016")
        found = connection.execute(text("SELECT id FROM jobs ORDER BY id")).scalars().all()
        assert found == ["1", "2"]


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
        f"has schema 9999, this version of Nightmill needs {SCHEMA_REVISION}: run `nightmill migrate`"
        in str(caught.value)
    )


def test_a_database_of_a_newer_version_is_not_migrated(empty_database: Database) -> None:
    empty_database.migrate()
    _set_revision(empty_database, "9999")
    with pytest.raises(
        SchemaError, match="cannot be migrated: Can't locate revision identified by '9999'"
    ) as caught:
        empty_database.migrate()
    assert "newer version of Nightmill" in str(caught.value)
    assert empty_database.revision() == "9999"


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
