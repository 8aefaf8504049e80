"""Rows that older versions wrote are read by this one, and stay where it is taken back."""

from array import array
from dataclasses import replace

import pytest
from alembic import command
from sqlalchemy import text

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.reply.job import Answer
from nightmill.jobs.reply.logprobs import TokenLogprob, pack
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.files import FileStore, StoredFile
from nightmill.jobs.sql.http_batches import HttpBatch, HttpBatchStore
from nightmill.jobs.sql.jobs import Selection, Store
from tests.integration.jobs.migrating import old_rows

FAILED = {"state": "failed", "attempt": 1, "prompt": "kept"}


def test_rows_from_before_the_arithmetic_was_kept_have_none(empty_database: Database) -> None:
    old_rows(empty_database, "0004", {"state": "succeeded", "attempt": 1, "text": "kept"})
    empty_database.migrate()
    with empty_database.read() as connection:
        assert connection.execute(text("SELECT text, arithmetic FROM jobs")).all() == [("kept", None)]


def test_rows_from_before_there_were_owners_are_nobodys(empty_database: Database) -> None:
    old_rows(empty_database, "0005", {})
    empty_database.migrate()
    assert [(job.id, job.owner) for job in Store(empty_database).find(Selection())] == [("old", None)]


def test_rows_from_before_answers_could_be_held_to_a_schema_ask_for_nothing(empty_database: Database) -> None:
    config = old_rows(empty_database, "0006", FAILED)
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
    config = old_rows(empty_database, before, FAILED)
    empty_database.migrate()
    (old,) = Store(empty_database).find(Selection())
    assert (old.prompt, getattr(old, column)) == ("kept", None)
    assert Store(empty_database).retry("old").state == "queued"
    with empty_database.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, before)
        assert connection.execute(text("SELECT prompt FROM jobs")).scalars().all() == ["kept"]


def test_what_there_was_before_files_and_batches_over_http_stays(empty_database: Database) -> None:
    config = old_rows(empty_database, "0010", FAILED)
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
    config = old_rows(empty_database, "0010", done | {"seed": 6}, {"id": "2", "prompt": "p"})
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
    config = old_rows(empty_database, "0024", *rows)
    empty_database.migrate()
    with empty_database.read() as connection:
        found = connection.execute(text("SELECT answers FROM jobs ORDER BY id")).scalars().all()
    assert found == [3, 2, 1, 1, 1, 1]
    with empty_database.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0024")


def test_rows_from_before_log_probabilities_were_kept_have_none(empty_database: Database) -> None:
    done = {"id": "1", "state": "succeeded", "stop_reason": "eos", "text": "kept", "completion_tokens": 4}
    config = old_rows(empty_database, "0016", done, {"id": "2", "prompt": "p", "params": '{"logprobs": 0}'})
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
