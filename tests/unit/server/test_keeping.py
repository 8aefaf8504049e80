"""Whenever a server dies: another goes on with its batches, and no row is lost or there twice."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from nightmill.jobs.errors import InvalidTransitionError
from nightmill.jobs.formats import ResultFile
from nightmill.jobs.formats.layout import Layout
from nightmill.jobs.server import batch_processor
from nightmill.jobs.server.batch_processor import BatchProcessor
from nightmill.jobs.server.folder import Folder
from nightmill.jobs.server.validating import Validator
from nightmill.jobs.sql.batches import BatchStore
from nightmill.jobs.sql.http_batches import HttpBatch, HttpBatchStore, HttpStatus
from tests.unit.server.batch_world import COUNT, SILENCE, Death, World


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

    def open_file(self: ResultFile, *args: Any, layout: Layout) -> None:
        if layout.errors:
            raise OSError(28, "No space left on device")
        real(self, *args, layout=layout)

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
