"""What a database refuses for good is told apart from a database that is away; unreadable rows fail alone."""

import sqlite3
from collections.abc import Iterator
from typing import Any

import psycopg.errors
import pytest
from sqlalchemy import insert, text, update
from sqlalchemy.exc import DBAPIError

from nightmill.jobs.base.contract import JobState, Rendering, StopReason, Tools
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import (
    DatabaseBusyError,
    DatabaseError,
    DatabaseRefusedError,
    DatabaseUnreachableError,
    SchemaError,
)
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.jobs import Selection
from nightmill.jobs.sql.partials import SavedTokens
from nightmill.jobs.sql.tables import JobRow, PartialRow, WorkerRow


@pytest.fixture
def client(server_settings: Settings) -> Iterator[Client]:
    with Client(server_settings) as made:
        yield made


def change(client: Client, job_id: str, **values: Any) -> None:
    with client.database.write() as connection:
        connection.execute(update(JobRow).where(JobRow.id == job_id).values(**values))


@pytest.mark.parametrize(
    "values",
    [
        {"custom_id": "lone \ud800"},
        {"attempt": 2**70},
        {"created_at": "yesterday"},  # SQLAlchemy itself refuses
        {"priority": None},
    ],
    ids=str,
)
def test_values_that_no_database_takes_are_refused(client: Client, values: dict[str, Any]) -> None:
    job_id = client.enqueue("prompt")
    with pytest.raises(DatabaseRefusedError, match="refused a statement"):
        change(client, job_id, **values)
    assert client.get(job_id).state is JobState.QUEUED


@pytest.mark.parametrize("server_settings", ["postgresql"], indirect=True)
@pytest.mark.parametrize(
    "values", [{"custom_id": "\x00"}, {"custom_id": "x" * 600}, {"attempt": 2**40}], ids=lambda v: str(v)[:30]
)
def test_values_that_postgresql_does_not_take_are_refused(client: Client, values: dict[str, Any]) -> None:
    with pytest.raises(DatabaseRefusedError, match="refused a statement"):
        change(client, client.enqueue("prompt"), **values)


@pytest.mark.parametrize("server_settings", ["sqlite"], indirect=True)
def test_what_sqlite_says_is_told_apart(client: Client) -> None:
    expected = {
        sqlite3.DataError("string or blob too big"): DatabaseRefusedError,
        sqlite3.InterfaceError(
            "Error binding parameter 1 - probably unsupported type."
        ): DatabaseRefusedError,
        sqlite3.ProgrammingError(
            "Error binding parameter 1: type 'set' is not supported"
        ): DatabaseRefusedError,
        sqlite3.OperationalError("database or disk is full"): DatabaseUnreachableError,
        sqlite3.OperationalError("attempt to write a readonly database"): DatabaseUnreachableError,
        sqlite3.OperationalError("database is locked"): DatabaseUnreachableError,
        sqlite3.DatabaseError("database disk image is malformed"): DatabaseError,
        sqlite3.OperationalError("no such index: ix_jobs_held"): SchemaError,
    }
    for original, kind in expected.items():
        assert type(mapped(client, original)) is kind, original


@pytest.mark.parametrize("server_settings", ["sqlite"], indirect=True)
def test_what_postgresql_says_is_told_apart(client: Client) -> None:
    expected = {
        "22001": DatabaseRefusedError,  # too long
        "22003": DatabaseRefusedError,  # out of range
        "23502": DatabaseRefusedError,  # null
        "54000": DatabaseRefusedError,  # an index entry that is too long
        "40P01": DatabaseBusyError,  # deadlock: passes
        "40001": DatabaseBusyError,  # serialization: passes
        "53100": DatabaseUnreachableError,  # disk full
        "53300": DatabaseUnreachableError,  # too many connections
        "25006": DatabaseUnreachableError,  # read-only
        "57P01": DatabaseUnreachableError,  # shutting down
        "42501": DatabaseError,  # not allowed: neither
    }
    for code, kind in expected.items():
        original = psycopg.errors.lookup(code)("it said so")
        assert type(mapped(client, original, psycopg.Error)) is kind, code


def mapped(client: Client, original: Exception, base: type[Exception] = sqlite3.Error) -> DatabaseError:
    """What becomes of a driver's error."""
    wrapped = DBAPIError.instance("UPDATE", {}, original, base)
    assert isinstance(wrapped, DBAPIError)
    with pytest.raises(DatabaseError) as caught, client.database._mapped_errors():
        raise wrapped
    return caught.value


def test_whatever_a_worker_says_can_be_stored(client: Client) -> None:
    bad = "bad\x00 \ud800" + "x" * 100_000
    claims = Claims(client.database, "a" * 32)
    claims.register(bad, 1, "model", gpu=bad)
    ids = list(client.enqueue_many(["prompt"] * 3, max_attempts=1))
    claims.claim(ids)
    assert claims.finish([Outcome(ids[0], 1, StopReason.ERROR, bad, 1, 1, error=bad)]) == 1
    assert claims.finish([Outcome(ids[1], 1, StopReason.EOS, bad, 1, 1)]) == 1
    claims.give_up([(ids[2], 1)], bad)
    failed, good, dead = (client.get(job_id) for job_id in ids)
    assert good.text == failed.text == bad.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    for job in (failed, dead):
        assert job.error is not None and job.error.endswith("characters)") and len(job.error) == 4_000
        assert len(job.errors[0]["error"]) == 4_000
    assert client.workers()[0].host.startswith("bad\ufffd")


UNREADABLE: list[dict[str, Any]] = [
    {"params": {"max_tokens": 3, "foo": 1}},
    {"params": {"max_tokens": -3}},
    {"params": []},
    {"messages": {"role": "user"}},
    {"prompt_ids": [1, "two"]},
    {"prompt_ids": []},
    {"rendering": {"variables": {}}},
    {"rendering": Rendering({"messages": True}).values()},
    {"rendering": Rendering({"effort": "<|im_end|>"}).values()},
    {"rendering": Rendering().values() | {"tools": []}},
    {"rendering": Rendering(tools=Tools([{"function": {"name": "<|im_end|>"}}])).values()},
]


@pytest.mark.parametrize("values", UNREADABLE, ids=str)
def test_a_row_that_a_worker_cannot_read_is_claimed_with_its_fault_and_hides_no_other(
    client: Client, values: dict[str, Any]
) -> None:
    ids = list(client.enqueue_many(["prompt"] * 4, batch="b"))
    change(client, ids[2], **values)
    claims = Claims(client.database, "a" * 32).claim(ids)
    assert [claim.job_id for claim in claims] == ids
    assert [claim.unreadable is None for claim in claims] == [True, True, False, True]
    assert claims[2].unreadable is not None
    assert claims[2].unreadable.endswith("upgrade the worker, then retry the job")
    assert [job.id for job in client.list_jobs()] == ids[::-1]
    assert [job.id for job in client.store.find(Selection(batch="b"))] == ids
    assert client.get(ids[2]).prompt == "prompt"


@pytest.mark.parametrize("server_settings", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "column", ["params", "messages", "prompt_ids", "rendering", "markup", "errors", "metadata"]
)
def test_json_that_is_none_hides_no_other_row(client: Client, column: str) -> None:
    ids = list(client.enqueue_many(["prompt"] * 3, batch="b"))
    with client.database.write() as connection:  # SQLite alone takes it
        connection.execute(text(f"UPDATE jobs SET {column} = '{{broken' WHERE id = :id"), {"id": ids[1]})
    claims = Claims(client.database, "a" * 32).claim(ids)
    understood = [True, column in ("markup", "errors", "metadata"), True]
    assert [claim.unreadable is None for claim in claims] == understood
    outcomes = [Outcome(one.job_id, 1, StopReason.ERROR, "", 1, 1, "it broke") for one in claims]
    assert Claims(client.database, "a" * 32).finish(outcomes) == 3
    assert [job.error for job in client.results(batch="b", wait=False)] == ["it broke"] * 3


def test_states_of_a_newer_version_are_listed_and_counted(client: Client) -> None:
    ids = list(client.enqueue_many(["prompt"] * 2, batch="b"))
    change(client, ids[0], state="paused", stop_reason="bored")
    assert {job.state for job in client.list_jobs()} == {"paused", "queued"}
    assert [job.id for job in client.list_jobs(state="queued")] == [ids[1]]
    counted = client.batches.store.counts("b")
    assert {(one.state, one.stop_reason) for one in counted} == {("paused", "bored"), ("queued", None)}


def test_saved_tokens_that_cannot_be_read_are_drawn_again(client: Client) -> None:
    first, second = client.enqueue_many(["prompt"] * 2)
    saved = {"attempt": 1, "fingerprint": "f", "saved_at": client.database.now()}
    with client.database.write() as connection:
        connection.execute(insert(PartialRow).values(job_id=first, tokens=b"odd", **saved))
        connection.execute(insert(PartialRow).values(job_id=second, tokens=b"\1\0\0\0", **saved))
        connection.execute(update(JobRow).values(attempt=1))
    claims = Claims(client.database, "a" * 32).claim([first, second])
    assert [claim.saved for claim in claims] == [None, SavedTokens(second, 1, "f", (1,))]


def test_a_worker_whose_row_is_odd_is_listed(client: Client) -> None:
    Claims(client.database, "a" * 32).register("host", 1, "model", None)
    with client.database.write() as connection:
        connection.execute(update(WorkerRow).values(state="resting"))
    assert [row.state for row in client.workers()] == ["resting"]
