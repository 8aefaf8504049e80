"""Which name `nightmill run` gives a model file that a worker serves under another name."""

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import update

from nightmill.jobs.base.contract import StopReason, WorkerState
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import SettingsError
from nightmill.jobs.formats import InputFile
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.tables import JobRow
from nightmill.worker.commands.served_file import ServedFile
from tests.unit.engine.scripted import ARITHMETIC

pytestmark = pytest.mark.heavy
DIGEST = "0123456789abcdef" * 4


@pytest.fixture
def source(tmp_path: Path) -> InputFile:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p"}\n')
    return InputFile(tmp_path / "rows.jsonl")


def serve(client: Client, worker_id: str, model: str, digest: str = DIGEST) -> Claims:
    claims = Claims(client.database, worker_id * 32)
    claims.register("host", 1, model, None)
    arithmetic = replace(ARITHMETIC, model=digest[:16])
    claims.beat(WorkerState.READY, stats={"arithmetic": str(arithmetic)})
    return claims


def test_a_worker_with_the_same_file_is_found_whatever_it_calls_it(
    sqlite_client: Client, source: InputFile
) -> None:
    file = ServedFile(sqlite_client, DIGEST, "own")
    rows = {"model": "own", "max_tokens": 3}
    assert file.name_for(source, rows, None) == ("own", None)  # nobody serves it: nothing is read
    serve(sqlite_client, "c", "another-file", "f" * 64)
    assert file.name_for(source, rows, None) == ("own", None)
    worker = serve(sqlite_client, "a", "smol")
    model, name = file.name_for(source, rows, None)
    assert (model, str(name)[:5]) == ("smol", "rows-")
    assert file.name_for(source, rows, "tonight") == ("smol", "tonight")
    own = serve(sqlite_client, "b", "own")
    assert file.name_for(source, rows, None) == ("own", name)
    own.sign_off()
    worker.sign_off()
    assert file.name_for(source, rows, None) == ("own", name)  # one that has ended takes no rows


def test_the_same_command_goes_on_with_the_batch_that_is_there(
    sqlite_client: Client, source: InputFile
) -> None:
    file = ServedFile(sqlite_client, DIGEST, "own")
    worker = serve(sqlite_client, "a", "smol")
    model, name = file.name_for(source, {"model": "own"}, None)
    sqlite_client.submit_batch(source.path, name=name, model=model)
    worker.sign_off()
    assert file.name_for(source, {"model": "own"}, None) == ("smol", name)  # our own is started as smol
    sqlite_client.batches.submit(source, {"model": "own"}, name="b", check_model=lambda _: None)
    serve(sqlite_client, "d", "smol")
    assert file.name_for(source, {"model": "own"}, "b") == ("own", "b")


def test_a_file_is_refused_whose_name_a_worker_has_given_to_another(
    sqlite_client: Client, source: InputFile
) -> None:
    file = ServedFile(sqlite_client, DIGEST, "own")
    rows = {"model": "own"}
    Claims(sqlite_client.database, "9" * 32).register(
        "host", 1, "own", None
    )  # it starts: it says nothing yet
    serve(sqlite_client, "a", "own")
    serve(sqlite_client, "b", "another", "f" * 64)
    file.check_name("own", source, rows, None)
    other = serve(sqlite_client, "c", "own", "f" * 64)
    with pytest.raises(
        SettingsError, match="worker cccccccc on host serves another file as 'own'"
    ) as refused:
        file.check_name("own", source, rows, None)
    assert "--model-name" in str(refused.value)
    batch = sqlite_client.batches.submit(source, rows, name=None, check_model=lambda _: None)
    with pytest.raises(SettingsError):  # it has rows that this worker would answer
        file.check_name("own", source, rows, None)
    batch.cancel()
    file.check_name("own", source, rows, None)  # all have ended: the same command writes the results
    file.check_name("own", source, rows, batch.name)
    with pytest.raises(SettingsError):
        file.check_name("own", source, rows, "a new one")
    other.sign_off()
    file.check_name("own", source, rows, "a new one")


def test_a_file_does_not_go_on_with_a_batch_that_another_of_its_name_has_answered(
    sqlite_client: Client, source: InputFile
) -> None:
    first, second = (ServedFile(sqlite_client, digest, "own") for digest in (DIGEST, "f" * 64))
    rows = {"model": "own"}
    batch = sqlite_client.batches.submit(source, rows, name=None, check_model=lambda _: None)
    second.check_name("own", source, rows, None)  # nothing is answered yet
    worker = serve(sqlite_client, "a", "own")
    (claim,) = worker.claim([job.id for job in sqlite_client.list_jobs(batch=batch.name)])
    arithmetic = str(replace(ARITHMETIC, model=DIGEST[:16]))
    worker.finish([Outcome(claim.job_id, claim.attempt, StopReason.EOS, "b", 1, 2, arithmetic=arithmetic)])
    worker.sign_off()
    first.check_name("own", source, rows, None)
    with pytest.raises(SettingsError) as refused:
        second.check_name("own", source, rows, None)
    assert str(refused.value) == (
        f"batch {batch.name!r} has answers of another model file that was called 'own', too: give this file "
        "another name (--model-name), or the answers of this file a batch of their own (--name)"
    )
    with pytest.raises(SettingsError, match=r"give the answers of this file a batch of their own \(--name\)"):
        second.check_name("own", source, rows, batch.name)
    second.check_name("own", source, rows, "another")
    second.check_name("other", source, {"model": "other"}, None)
    with sqlite_client.database.write() as connection:  # as with --reuse any, of whatever file that was
        connection.execute(update(JobRow).where(JobRow.id == claim.job_id).values(reused_from="9" * 32))
    second.check_name("own", source, rows, None)


def test_a_file_is_read_once_for_its_name_and_again_if_it_changes(
    sqlite_client: Client, source: InputFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    hashing = InputFile.hashing

    def counted(file: InputFile) -> Generator[None, None, str]:
        read.append((yield from hashing(file)))
        return read[-1]

    monkeypatch.setattr(InputFile, "hashing", counted)
    name = sqlite_client.batches.name_of(source, {"model": "own"})
    assert sqlite_client.batches.name_of(source, {"model": "own"}) == name and len(read) == 1
    source.path.write_text('{"prompt": "another"}\n')
    assert sqlite_client.batches.name_of(source, {"model": "own"}) != name and len(set(read)) == 2
