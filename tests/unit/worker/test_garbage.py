"""The engine's process collects garbage when it is told to, and not in between."""

import gc
import weakref

import pytest

from nightmill.worker.link.garbage import BUSY_SECONDS, IDLE_SECONDS, QuietCollector
from tests.unit.engine.scripted import Clock


class Thing:
    """Something that can refer to itself."""

    def __init__(self) -> None:
        self.me = self


def garbage() -> "weakref.ref[Thing]":
    """What only a collection frees."""
    return weakref.ref(Thing())


@pytest.mark.parametrize(("idle", "seconds"), [(True, IDLE_SECONDS), (False, BUSY_SECONDS)])
def test_garbage_is_collected_after_some_time_and_not_before(idle: bool, seconds: float) -> None:
    clock = Clock()
    with QuietCollector(clock) as collector:
        thing = garbage()
        many: list[list[int]] = [[] for _ in range(100_000)]  # for which Python starts a collection
        clock.now += seconds - 1
        collector.look(idle=idle)
        assert thing() is not None, len(many)
        clock.now += 1
        collector.look(idle=idle)
        assert thing() is None
        later = garbage()
        collector.look(idle=idle)
        assert later() is not None


@pytest.mark.parametrize("frozen", [0, 1_000])
def test_pythons_own_collections_are_back_afterwards(frozen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was frozen before stays so, as all that the tests' modules hold."""
    thawed: list[int] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen)
    monkeypatch.setattr(gc, "unfreeze", lambda: thawed.append(frozen))
    with pytest.raises(KeyError), QuietCollector():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
    assert thawed == ([] if frozen else [0])


def test_what_is_alive_at_the_start_is_not_visited() -> None:
    frozen = gc.get_freeze_count()
    held = [[number] for number in range(1_000)]
    with QuietCollector():
        assert gc.get_freeze_count() >= frozen + len(held)
