"""Folders that fail, files that break off, servers that die over a file: what was computed can be had."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.batches import grouping
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.errors import BatchFileError, BatchFileUnavailableError
from nightmill.jobs.formats import InputFile
from nightmill.jobs.server import batch_processor
from nightmill.jobs.server.batch_processor import BatchProcessor
from nightmill.jobs.server.batches import batch_object
from nightmill.jobs.server.inputs import EndpointFile
from nightmill.jobs.server.validating import Validator
from nightmill.jobs.sql.batches import BatchStore
from nightmill.jobs.sql.http_batches import HttpBatch, HttpBatchStore, HttpStatus
from tests.support.servers import Clock, worker_env
from tests.unit.server.batch_world import COUNT, SILENCE, Death, World

Break = Callable[[World, HttpBatch, pytest.MonkeyPatch], object]


@pytest.fixture
def world(server_settings: Settings, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(grouping, "ROWS_PER_TRANSACTION", 8)
    monkeypatch.setattr(batch_processor, "_SLICE_SECONDS", 0.0)  # one row a slice
    monkeypatch.setattr(batch_processor, "_AGAIN_SECONDS", 0.0)
    with Client(server_settings, clock=clock) as client:
        yield World(client, clock)


def read_rows(world: World, keeper: BatchProcessor, batch: HttpBatch, rows: int) -> None:
    """Look until so many rows of it are entered."""
    while len(world.client.list_jobs(batch=batch.batch, limit=COUNT)) < rows:
        keeper.look()


def look_until(world: World, keeper: BatchProcessor, batch: HttpBatch, *statuses: HttpStatus) -> HttpBatch:
    for _ in range(10 * COUNT):
        keeper.look()
        found = world.store.get(batch.id)
        assert found is not None
        if found.status in statuses:
            return found
    raise AssertionError(f"the batch is {found.status}")


def rows_fail(number: int, error: Callable[[], Exception]) -> Callable[..., Any]:
    """What stands for the reading of rows: it breaks after so many."""
    real = InputFile._records

    def records(self: InputFile) -> Iterator[Any]:
        for read, record in enumerate(real(self)):
            if read == number:
                with self._errors():
                    raise error()
            yield record

    return records


def hide(world: World, batch: HttpBatch, patched: pytest.MonkeyPatch) -> None:
    path = world.folder.find(batch.input_file)
    path.rename(path.with_name("elsewhere"))


def shorten(world: World, batch: HttpBatch, patched: pytest.MonkeyPatch) -> None:
    path = world.folder.find(batch.input_file)
    path.with_name("elsewhere").write_bytes(path.read_bytes())
    os.truncate(path, path.stat().st_size // 2)


def fail_to_read(code: int) -> Break:
    def broken(world: World, batch: HttpBatch, patched: pytest.MonkeyPatch) -> None:
        patched.setattr(InputFile, "_records", rows_fail(20, lambda: OSError(code, os.strerror(code))))

    return broken


def fail_to_look(world: World, batch: HttpBatch, patched: pytest.MonkeyPatch) -> None:
    def stale(self: Any, file_id: str) -> Any:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    patched.setattr(type(world.folder), "find", stale)


FAULTS: dict[str, Break] = {
    "not in the folder": hide,
    "of its": shorten,
    "Stale file handle": fail_to_read(errno.ESTALE),
    "Input/output error": fail_to_read(errno.EIO),
    "No such file": fail_to_read(errno.ENOENT),
    "Stale": fail_to_look,
}


@pytest.mark.parametrize(
    ("server_settings", "after"), [("sqlite", 0), ("postgresql", 16)], indirect=["server_settings"]
)
@pytest.mark.parametrize("said", FAULTS)
def test_a_folder_that_fails_for_a_while_costs_time_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, said: str, after: int
) -> None:
    batch, keeper = world.hand_in(), world.keeper()
    read_rows(world, keeper, batch, after)
    with monkeypatch.context() as patched:
        FAULTS[said](world, batch, patched)
        keeper._drop(batch.id)  # as on another server, which has the file not open yet
        for _ in range(10 * COUNT):
            keeper.look()
            found = world.store.get(batch.id)
            if found is not None and found.note is not None:
                break
        assert found is not None and found.status is HttpStatus.VALIDATING and found.errors == []
        assert found.note is not None and said in found.note and "tries again" in found.note
        assert str(world.folder.path) not in found.note and "nightmill batch cancel" not in found.note
        shown = batch_object(found, [])["errors"]["data"]
        assert shown == [{"code": "delayed", "line": None, "message": found.note, "param": None}]
        assert found.attempts == 0  # nobody died
    if (hidden := world.folder.path / "elsewhere").exists():
        hidden.rename(world.folder.path / batch.input_file)
    look_until(world, keeper, batch, HttpStatus.IN_PROGRESS)
    monkeypatch.setattr(batch_processor, "_SLICE_SECONDS", 60.0)
    world.finish(batch, keeper)
    found = world.store.get(batch.id)
    assert found is not None and found.note is None


def test_the_command_says_what_keeps_a_batch_from_going_on(
    world: World, server_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, keeper = world.hand_in(), world.keeper()
    hide(world, batch, monkeypatch)
    keeper.look()
    run = CliRunner().invoke
    env = worker_env(server_settings)
    said = run(main, ["batch", "status", batch.batch], env=env).stdout
    assert said.startswith(
        f"{batch.batch}: no row is entered yet\n  over HTTP  validating\n  delayed    the file"
    )
    told = json.loads(run(main, ["batch", "status", batch.batch, "--json"], env=env).stdout)
    assert (told["state"], told["http"]["status"]) == (None, "validating")
    assert "not in the folder of this server" in told["http"]["note"]


def test_a_file_that_cannot_be_read_until_the_deadline_ends_with_what_there_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, keeper = world.hand_in(), world.keeper()
    with monkeypatch.context() as patched:
        fail_to_read(errno.ESTALE)(world, begun, patched)
        read_rows(world, keeper, begun, 16)
        world.run_rows()
        unread = world.hand_in()
        hide(world, unread, patched)
        world.clock.advance(days=1, seconds=1)
        for batch, succeeded, total in ((unread, 0, 0), (begun, 15, 16)):
            found = look_until(world, keeper, batch, HttpStatus.EXPIRED, HttpStatus.FAILED)
            assert found.status is HttpStatus.EXPIRED
            if total:
                assert found.errors[0]["code"] == "file_unavailable" and found.errors[0]["line"] is None
            assert (found.total, found.completed, bool(found.output_file)) == (total, succeeded, total > 0)


def test_a_file_that_breaks_off_ends_with_the_results_of_its_rows(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, keeper = world.hand_in(), world.keeper()
    monkeypatch.setattr(InputFile, "_records", rows_fail(30, lambda: EOFError("it ended early")))
    read_rows(world, keeper, batch, 8)
    world.run_rows()
    read_rows(world, keeper, batch, 24)
    found = look_until(world, keeper, batch, HttpStatus.FAILED)
    assert (found.total, found.completed, found.failed, found.completion_tokens) == (24, 7, 17, 14)
    assert [(error["line"], error["code"]) for error in found.errors] == [
        (None, "invalid_file"),
        (1, "invalid_value"),
    ]
    assert "it ended early" in found.errors[0]["message"]
    assert found.output_file and found.error_file
    assert len(world.lines(found.output_file)) == 7 and len(world.lines(found.error_file)) == 17
    status = world.client.get_batch(batch.batch).status()
    assert (status.row_count, status.states[JobState.CANCELLED]) == (24, 16)


def test_who_lost_the_claim_ends_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood still, and reads a broken file when it wakes up: another enters the rows meanwhile."""
    batch, slow, other = world.hand_in(), world.keeper(), world.keeper()
    read_rows(world, slow, batch, 8)
    world.clock.advance(SILENCE)
    for error in (BatchFileError("broken"), BatchFileUnavailableError("away")):
        other.look()
        found = world.store.get(batch.id)
        assert found is not None and found.keeper == other._name
        for late in (False, True):
            with monkeypatch.context() as patched:
                patched.setattr(Validator, "is_late", lambda self, batch, late=late: late)

                def broken(*args: Any, error: Exception = error, **options: Any) -> Any:
                    raise error

                patched.setattr(world.client.batches, "submitting", broken)
                stale = Validator(slow._client, world.folder, slow._name)
                with pytest.raises(Exception, match=r"away|^$"):
                    for _ in stale.steps(batch):
                        pass
    assert not HttpBatchStore(world.client.database).fail(batch, slow._name, HttpStatus.FAILED, [])
    jobs = world.client.list_jobs(batch=batch.batch, limit=COUNT)
    assert {job.state for job in jobs} == {JobState.QUEUED, JobState.FAILED}  # none is cancelled
    look_until(world, other, batch, HttpStatus.IN_PROGRESS)


@pytest.mark.parametrize("entered", [0, 16])
def test_a_file_over_which_servers_die_is_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch, entered: int
) -> None:
    batch, innocent = world.hand_in(), world.hand_in(bad=0)
    real = BatchStore.insert_rows

    def deadly(self: BatchStore, name: str, rows: Any) -> bool:
        if name == batch.batch and rows[0]["row"] > entered:
            raise Death
        return real(self, name, rows)

    monkeypatch.setattr(BatchStore, "insert_rows", deadly)
    deaths = 0
    for _ in range(40 * COUNT):
        keeper = world.keeper()
        try:
            for _ in range(10 * COUNT):
                keeper.look()
                found = world.store.get(batch.id)
                assert found is not None
                if found.status.final:
                    break
            break
        except Death:
            deaths += 1
            world.clock.advance(SILENCE)
    assert deaths == 3
    assert found.status is HttpStatus.FAILED and found.errors[0]["code"] == "file_too_costly"
    assert "3 servers ended while they read the file" in found.errors[0]["message"]
    assert (found.total, bool(found.error_file)) == (entered, entered > 0)
    after = look_until(world, keeper, innocent, HttpStatus.IN_PROGRESS)
    assert after.attempts == 0 and after.invalid == 0


def test_servers_that_end_in_order_or_get_further_are_not_counted(world: World) -> None:
    batch = world.hand_in()
    for _ in range(5):
        keeper = world.keeper()
        keeper.look()
        keeper._drop(batch.id)
        world.store.let_go(keeper._name)
        found = world.store.get(batch.id)
        assert found is not None and found.attempts == 0
    for rows in (8, 16, 24, 32):  # each dies after new rows
        keeper = world.keeper()
        read_rows(world, keeper, batch, rows)
        world.clock.advance(SILENCE)
    look_until(world, world.keeper(), batch, HttpStatus.IN_PROGRESS)


def test_contents_of_the_folder_are_not_looked_at_for_changes_and_the_mode_of_a_file_is_none(
    world: World, tmp_path: Path
) -> None:
    batch = world.hand_in()
    uploaded = EndpointFile(world.folder.find(batch.input_file), None)
    uploaded.fingerprint()
    os.utime(uploaded.path)
    assert not uploaded.changed()

    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n')
    file = InputFile(path)
    before = file.fingerprint()
    path.chmod(0o600)
    os.link(path, tmp_path / "backup")
    assert not file.changed() and not file.changed(before)
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_text('{"prompt": "b"}\n')
    os.utime(path, ns=times)
    assert file.changed() and file.changed(before)


def test_files_of_one_owner_do_not_hold_up_those_of_another(world: World) -> None:
    """However long they are, a row of another owner is entered and written in a few rounds."""
    large = [world.hand_in(owner="a") for _ in range(3)]
    keeper = world.keeper()
    read_rows(world, keeper, large[0], 8)
    small = world.hand_in(2, owner="b")
    for _ in range(8):  # rounds, each of a row of either owner
        keeper.look()
    assert world.status(small) is HttpStatus.IN_PROGRESS
    assert {world.status(batch) for batch in large} == {HttpStatus.VALIDATING}
    world.run_rows()
    for _ in range(12):
        keeper.look()
    assert world.status(small) is HttpStatus.COMPLETED
    assert HttpStatus.VALIDATING in {world.status(batch) for batch in large}
    assert len([work for work in keeper._works.values() if work.reads]) == 1  # of each owner one file is open
    for batch in large:
        look_until(world, keeper, batch, HttpStatus.IN_PROGRESS)


def test_a_file_is_read_once_however_many_slices_that_takes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[InputFile] = []
    real = InputFile._records

    def records(self: InputFile) -> Iterator[Any]:
        opened.append(self)
        return real(self)

    monkeypatch.setattr(InputFile, "_records", records)
    look_until(world, world.keeper(), world.hand_in(), HttpStatus.IN_PROGRESS)
    assert len(opened) == 1
