"""A folder that hangs, in place of failing, costs the batches that need it time, and no other anything."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nightmill.jobs.server import batch_processor
from nightmill.jobs.server.folder import Folder
from nightmill.jobs.server.running import Running
from nightmill.jobs.sql.http_batches import HttpBatch, HttpStatus
from tests.support.servers import wait_until
from tests.unit.server.batch_world import World


class Hanging:
    """Files that nobody can find, as behind a server of files that is away, until they are let go."""

    def __init__(self, folder: Folder) -> None:
        self.ids: set[str] = set()
        self.waiting: set[str] = set()
        self.let_go = threading.Event()
        self._find = folder.find

    def find(self, file_id: str) -> Path:
        if file_id in self.ids:
            self.waiting.add(file_id)
            assert self.let_go.wait(240)
        return self._find(file_id)


@pytest.fixture
def hanging(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    made = Hanging(world.folder)
    monkeypatch.setattr(world.folder, "find", made.find)
    monkeypatch.setattr(batch_processor, "_SLICE_SECONDS", 0.25)
    monkeypatch.setattr(batch_processor, "_PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(batch_processor, "_SHORT_SECONDS", 0.1)
    yield made
    made.let_go.set()


def status(world: World, batch: HttpBatch) -> Any:
    return world.store.get(batch.id)


def test_batches_of_others_go_on_while_a_file_hangs_and_it_goes_on_when_that_answers(
    world: World, hanging: Hanging
) -> None:
    first, second = world.hand_in(owner="alice"), world.hand_in(owner="bob")
    hanging.ids.add(first.input_file)
    keeper = world.keeper()
    keeper.look()
    keeper.look()
    wait_until(lambda: (keeper.look(), status(world, second).status is HttpStatus.IN_PROGRESS)[1])
    assert status(world, first).status is HttpStatus.VALIDATING
    assert "have not answered" in status(world, first).note
    assert hanging.waiting == {first.input_file}
    other = world.keeper()
    other.look()  # the claim is kept: it would only hang there, too
    assert len([one for one in threading.enumerate() if one.name == "slice"]) == 1
    hanging.let_go.set()
    wait_until(lambda: (keeper.look(), status(world, first).status is HttpStatus.IN_PROGRESS)[1])
    assert status(world, first).note is None and status(world, first).attempts == 0
    assert (
        world.client.get_batch(first.batch).status().rows
        == world.client.get_batch(second.batch).status().rows
    )


def test_a_batch_whose_file_hangs_can_be_cancelled(world: World, hanging: Hanging) -> None:
    batch = world.hand_in(owner="alice")
    hanging.ids.add(batch.input_file)
    keeper = world.keeper()
    keeper.look()
    assert world.store.cancel(batch.id)
    wait_until(lambda: (keeper.look(), status(world, batch).status is HttpStatus.CANCELLED)[1])
    hanging.let_go.set()
    wait_until(lambda: (keeper.look(), not keeper._away)[1])
    assert status(world, batch).status is HttpStatus.CANCELLED
    assert world.client.list_jobs(state="queued") == []


def test_after_a_while_another_server_may_take_it_and_no_death_is_counted(
    world: World, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = world.hand_in(owner="alice")
    hanging.ids.add(batch.input_file)
    monkeypatch.setattr(batch_processor, "_RELEASE_SECONDS", 0.0)
    keeper = world.keeper()
    keeper.look()
    keeper.look()
    now = status(world, batch)
    assert (now.keeper, now.attempts) == (None, 0) and "have not answered" in now.note
    keeper.look()  # it is not taken up twice here
    assert len([one for one in threading.enumerate() if one.name == "slice"]) == 1
    hanging.ids.clear()
    monkeypatch.setattr(batch_processor, "_PATIENCE_SECONDS", 30.0)
    other = world.keeper()
    wait_until(lambda: (other.look(), status(world, batch).status is HttpStatus.IN_PROGRESS)[1])
    hanging.let_go.set()
    wait_until(lambda: (keeper.look(), not keeper._away)[1])
    assert status(world, batch).status is HttpStatus.IN_PROGRESS
    assert world.client.get_batch(batch.batch).status().rows == 40


def test_no_more_threads_hang_than_there_is_room_for(
    world: World, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_processor, "_MOST_AWAY", 2)
    batches = [world.hand_in(owner=owner) for owner in "abc"]
    hanging.ids.update(batch.input_file for batch in batches)
    keeper = world.keeper()
    for _ in range(3):
        keeper.look()
    assert len(hanging.waiting) == len(keeper._away) == 2


def test_a_call_is_left_behind_and_comes_back() -> None:
    gate = threading.Event()
    running = Running(lambda: gate.wait(240) and 5, "test")
    began = time.monotonic()
    assert not running.wait(0.01) and not running.over and time.monotonic() - began < 30
    gate.set()
    assert running.wait(120) and running.outcome() == 5

    def broken() -> None:
        raise OSError("away")

    failed = Running(broken, "test")
    assert failed.wait(120)
    with pytest.raises(OSError, match="away"):
        failed.outcome()
