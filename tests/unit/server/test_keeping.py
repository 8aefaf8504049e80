"""Whenever a server dies: another goes on with its batches, and no row is lost or there twice."""

import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.batches import grouping
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import InvalidTransitionError
from nightmill.jobs.formats import ResultFile
from nightmill.jobs.server import batch_processor
from nightmill.jobs.server.batch_processor import BatchProcessor
from nightmill.jobs.server.folder import Folder
from nightmill.jobs.server.validating import Validator
from nightmill.jobs.sql.batches import BatchStore
from nightmill.jobs.sql.claims import Claims
from nightmill.jobs.sql.claims import Outcome as RowOutcome
from nightmill.jobs.sql.files import FileStore, StoredFile
from nightmill.jobs.sql.http_batches import HttpBatch, HttpBatchStore, HttpStatus
from tests.support.servers import Clock

COUNT = 40
SILENCE = Settings().stale_seconds + 1
IDS = IdSource()


class Death(BaseException):
    """A process ends like this: nothing that comes after is done."""


class World:
    """A database, a folder, and servers that come and go."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self.client = client
        self.clock = clock
        self.folder = Folder(client.settings.resolved_files_dir)
        self.files = FileStore(client.database)
        self.store = HttpBatchStore(client.database)
        self.claims = Claims(client.database, "a" * 32)
        self.claims.register("host", 1, "model", None)

    def keeper(self) -> BatchProcessor:
        return BatchProcessor(self.client, self.folder)

    def hand_in(self, count: int = COUNT, bad: int = 1, owner: str | None = None) -> HttpBatch:
        content = "".join(
            json.dumps(
                {
                    "custom_id": f"r{number}",
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": {"prompt": "x" if number >= bad else 5},
                }
            )
            + "\n"
            for number in range(count)
        )
        file_id, now = IDS.draw(), self.clock()
        self.folder.coming(file_id).write_text(content)
        assert self.files.add(StoredFile(file_id, owner, "batch", "x", len(content), now), 1 << 30)
        self.folder.settle(file_id)
        made = HttpBatch(
            IDS.draw(),
            owner,
            file_id,
            now,
            endpoint="/v1/completions",
            deadline_at=now + timedelta(days=1),
        )
        added = self.store.add(made)
        assert added == made
        return made

    def run_rows(self) -> None:
        """What a worker would do."""
        ids = [job.id for job in self.client.list_jobs(state="queued", limit=10 * COUNT)]
        claimed = self.claims.claim(ids)
        self.claims.finish(
            [RowOutcome(one.job_id, one.attempt, StopReason.EOS, "text", 1, 2) for one in claimed]
        )

    def status(self, batch: HttpBatch) -> HttpStatus:
        found = self.store.get(batch.id)
        assert found is not None
        return found.status

    def finish(self, batch: HttpBatch, keeper: BatchProcessor) -> None:
        """Work on as another server, once claims have run out, until the batch has ended; look at it all."""
        for _ in range(6):
            self.clock.advance(SILENCE)
            keeper.look()
            if self.status(batch).final:
                break
            self.run_rows()
        assert self.status(batch) is HttpStatus.COMPLETED
        self.check(batch)

    def check(self, batch: HttpBatch) -> None:
        """Every row is in one of the two files, once, and the folder holds nothing else."""
        found = self.store.get(batch.id)
        assert found is not None and found.output_file and found.error_file
        rows = [self.lines(file) for file in (found.output_file, found.error_file)]
        assert [row["custom_id"] for row in rows[0]] == [f"r{number}" for number in range(1, COUNT)]
        assert [row["custom_id"] for row in rows[1]] == ["r0"]
        assert (found.total, found.completed, found.failed) == (COUNT, COUNT - 1, 1)
        assert (found.prompt_tokens, found.completion_tokens) == (COUNT - 1, 2 * (COUNT - 1))
        assert [(one["line"], one["param"]) for one in found.errors] == [(1, "body.prompt")]
        assert len(self.client.list_jobs(batch=batch.batch, limit=10 * COUNT)) == COUNT
        whole = {path.name for path in self.folder.path.iterdir() if path.suffix != ".coming"}
        assert whole == self.files.known(whole)  # what nobody knows of is never under such a name

    def lines(self, file_id: str) -> list[dict[str, Any]]:
        with self.folder.open(file_id) as content:
            return [json.loads(line) for line in content]


@pytest.fixture
def world(server_settings: Settings, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(grouping, "ROWS_PER_TRANSACTION", 8)
    monkeypatch.setattr(batch_processor, "_SLICE_SECONDS", 60.0)  # the work of a test is done in one slice
    with Client(server_settings, clock=clock) as client:
        yield World(client, clock)


def dies(monkeypatch: pytest.MonkeyPatch, thing: Any, name: str, at: int, *, after: bool = False) -> None:
    """Die at the call of this number, before or after it does anything; later calls work as ever."""
    real, calls = getattr(thing, name), iter(range(1, 1000))

    def dying(*args: Any, **options: Any) -> Any:
        number = next(calls)
        if number == at and not after:
            raise Death
        result = real(*args, **options)
        if number == at:
            raise Death
        return result

    monkeypatch.setattr(thing, name, dying)


def test_a_server_may_die_at_any_step(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for thing, name, at, after in (
        (HttpBatchStore, "claim", 1, True),
        (BatchStore, "insert_rows", 1, False),
        (BatchStore, "insert_rows", 2, True),
        (BatchStore, "complete", 1, True),
        (HttpBatchStore, "begin", 1, True),
        (HttpBatchStore, "finalize", 1, True),
        (ResultFile, "flush", 1, True),
        (ResultFile, "close", 2, True),
        (HttpBatchStore, "end", 1, False),
        (HttpBatchStore, "end", 1, True),
        (Folder, "settle", 2, True),
    ):
        batch = world.hand_in()
        with monkeypatch.context() as patched:
            dies(patched, thing, name, at, after=after)
            dead = world.keeper()
            with pytest.raises(Death):
                for _ in range(6):
                    dead.look()
                    world.run_rows()
        world.finish(batch, world.keeper())
        world.client.get_batch(batch.batch).delete()


def test_a_server_that_stood_still_changes_nothing_afterwards(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claim ran out in the middle of a step, and another did the step meanwhile."""
    batch, slow, other = world.hand_in(), world.keeper(), world.keeper()
    overtaking: list[str] = []

    def overtaken(name: str, thing: Any) -> None:
        real = getattr(thing, name)

        def run(*args: Any, **options: Any) -> Any:
            if name not in overtaking:
                overtaking.append(name)
                world.clock.advance(SILENCE)
                other.look()
            return real(*args, **options)

        monkeypatch.setattr(thing, name, run)

    overtaken("begin", HttpBatchStore)
    slow.look()
    assert overtaking == ["begin"] and world.status(batch) is HttpStatus.IN_PROGRESS
    world.run_rows()
    overtaken("end", HttpBatchStore)
    for _ in range(4):
        slow.look()
    assert overtaking == ["begin", "end"]
    world.check(batch)


def test_servers_side_by_side_do_everything_once(world: World) -> None:
    batches = [world.hand_in() for _ in range(3)]
    keepers = [world.keeper() for _ in range(4)]
    for _ in range(4):
        threads = [threading.Thread(target=keeper.look) for keeper in keepers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if world.status(batches[0]) is HttpStatus.IN_PROGRESS:
            assert len(world.client.list_jobs(limit=1000)) == 3 * COUNT
        world.run_rows()
    assert {world.status(batch) for batch in batches} == {HttpStatus.COMPLETED}
    written = world.files.page(owner=None, purpose="batch_output", after=None, oldest_first=True, limit=99)
    assert len(written) == 6


def test_a_file_is_not_deleted_while_it_is_read_and_one_that_is_not_here_is_left_to_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = world.hand_in()
    with pytest.raises(InvalidTransitionError, match=f"is being read for {batch.batch}"):
        world.files.delete(batch.input_file, lambda: None)
    hidden = world.folder.path / "elsewhere"
    world.folder.find(batch.input_file).rename(hidden)
    here = world.keeper()
    here.look()
    assert world.status(batch) is HttpStatus.VALIDATING
    hidden.rename(world.folder.find(batch.input_file))
    world.finish(batch, world.keeper())
    assert world.files.delete(batch.input_file, lambda: world.folder.remove(batch.input_file))


def test_cancelling_in_every_status(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    before = world.hand_in()
    assert world.store.cancel(before.id)
    world.keeper().look()
    assert (world.status(before), world.client.list_jobs()) == (HttpStatus.CANCELLED, [])

    entering = world.hand_in()
    keeper = world.keeper()
    with monkeypatch.context() as patched:
        patched.setattr(batch_processor, "_SLICE_SECONDS", 0.0)
        while len(world.client.list_jobs(batch=entering.batch, limit=COUNT)) < 16:
            keeper.look()
    assert world.store.cancel(entering.id)
    keeper.look()
    found = world.store.get(entering.id)
    assert found is not None and found.status is HttpStatus.CANCELLED
    assert (found.total, found.completed) == (16, 0) and found.output_file is None and found.error_file
    assert len(world.lines(found.error_file)) == 16

    deleted = world.hand_in()
    keeper.look()
    world.run_rows()
    world.client.get_batch(deleted.batch).delete()
    for _ in range(3):
        keeper.look()
    found = world.store.get(deleted.id)
    assert found is not None and (found.status, found.errors[0]["code"]) == (HttpStatus.FAILED, "deleted")
    assert not world.store.cancel(deleted.id)


def test_files_and_batches_that_were_kept_for_long_enough_are_deleted(world: World) -> None:
    old = world.hand_in()
    world.finish(old, world.keeper())
    world.clock.advance(days=29)
    young, entering = world.hand_in(), world.hand_in()
    world.keeper().look()
    world.run_rows()
    world.clock.advance(days=2)
    world.keeper().forget()
    assert len(list(world.folder.path.iterdir())) == 5
    keeper = BatchProcessor(world.client, world.folder, timedelta(days=30))
    keeper.forget()
    assert world.store.get(old.id) is None and world.store.get(young.id) is not None
    left = world.files.page(owner=None, purpose=None, after=None, oldest_first=True, limit=99)
    assert [file.id for file in left] == [young.input_file, entering.input_file]
    assert {path.name for path in world.folder.path.iterdir()} == {file.id for file in left}
    reading = world.hand_in()
    world.clock.advance(days=31)
    keeper.forget()
    left = world.files.page(owner=None, purpose=None, after=None, oldest_first=True, limit=99)
    assert [file.id for file in left] == [reading.input_file]


def test_a_step_that_fails_harms_no_other_batch(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken, good = world.hand_in(), world.hand_in()
    real = Validator.steps

    def steps(self: Validator, batch: HttpBatch) -> Iterator[bool]:
        if batch.id == broken.id:
            raise RuntimeError("nobody expected this")
        yield from real(self, batch)

    monkeypatch.setattr(Validator, "steps", steps)
    keeper = world.keeper()
    for _ in range(4):
        keeper.look()
        world.run_rows()
    assert (world.status(broken), world.status(good)) == (HttpStatus.VALIDATING, HttpStatus.COMPLETED)
    assert caplog.text.count("a step failed") == 1  # and not at every look
    monkeypatch.setattr(Validator, "steps", real)
    world.finish(broken, world.keeper())


def test_results_for_which_there_is_no_room_leave_none_behind(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each try would take as much again of a disk that is full already."""
    batch, keeper, real = world.hand_in(), world.keeper(), ResultFile.__init__

    def open_file(self: ResultFile, *args: Any, errors: bool) -> None:
        if errors:
            raise OSError(28, "No space left on device")
        real(self, *args, errors=errors)

    with monkeypatch.context() as full:
        full.setattr(ResultFile, "__init__", open_file)
        for _ in range(3):
            keeper.look()
            world.run_rows()
    assert world.status(batch) is HttpStatus.FINALIZING and "No space left" in caplog.text
    assert [path.name for path in world.folder.path.iterdir()] == [batch.input_file]
    found = world.store.get(batch.id)
    assert found is not None and found.note is not None
    assert found.note.startswith("the results cannot be written: No space left on device; the server tries")
    world.finish(batch, world.keeper())
