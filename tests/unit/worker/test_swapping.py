"""A worker that swaps: which engine is started ahead, when it may go on, and what the worker becomes."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import DatabaseUnreachableError
from nightmill.worker.service.turns import swapping
from nightmill.worker.service.turns.swapping import Swap, next_command

SETTINGS = Settings(models="one=/m/one.gguf,other=/m/other.gguf,far=hf:o/r:Q8_0", model="/m/one.gguf")


@dataclass
class Started:
    """An engine in place of a process: what it was told."""

    told: list[Any] = field(default_factory=list)
    begun: bool = False

    @property
    def connection(self) -> SimpleNamespace:
        return SimpleNamespace(close=lambda: self.told.append("dropped"))

    def begin(self, settings: Settings, *, waits: bool) -> None:
        self.begun = True
        self.told.append((settings.model_name, str(settings.model), waits))

    def go(self) -> None:
        self.told.append("go")

    def hand_on(self) -> str:
        return "7:8"


@dataclass
class Rests:
    """A turn that gives way to a model, and a choice."""

    gives_way_to: str
    chosen: Any
    reasons: str | None = None

    def choose_next(self) -> str | None:
        if isinstance(self.chosen, Exception):
            raise self.chosen
        return self.chosen  # type: ignore[no-any-return]

    def reason(self, idle_for: float) -> str | None:
        return self.reasons


def swapped(rests: Rests, monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[Any]], list[str]]:
    """What each engine was told, and the command that follows."""
    engines: list[Started] = []

    def start() -> Started:
        engines.append(Started())
        return engines[-1]

    monkeypatch.setattr(swapping, "EngineAhead", SimpleNamespace(start=start))
    swap = Swap(SETTINGS, rests, rests)  # type: ignore[arg-type]
    assert len(engines) == 1 and "go" not in engines[0].told, "the old engine still has the GPU"
    swap.begin_next()
    monkeypatch.setattr(
        "sys.orig_argv", ["python", "-m", "nightmill", "worker", "--engine", "1:2", "--turn", "one"]
    )
    return [one.told for one in engines], next_command(SETTINGS, "id", swap)


def test_the_expected_model_goes_on_once_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    told, command = swapped(Rests("other", "other"), monkeypatch)
    assert told == [[("other", "/m/other.gguf", True), "go"]]
    assert command[1:6] == ["-m", "nightmill", "worker", "--id", "id"]
    assert command[-4:] == ["--turn", "other", "--engine", "7:8"] and command.count("--engine") == 1


def test_if_more_urgent_rows_came_another_engine_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    told, command = swapped(Rests("other", "one"), monkeypatch)
    assert told == [[("other", "/m/other.gguf", True), "dropped"], [("one", "/m/one.gguf", False)]]
    assert command[-4:-2] == ["--turn", "one"]


def test_a_model_that_is_still_to_be_fetched_is_begun_by_the_next_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, command = swapped(Rests("far", "far"), monkeypatch)
    assert told == [[]] and command[-4:] == ["--turn", "far", "--engine", "7:8"]


@pytest.mark.parametrize(
    "rests",
    [
        Rests("other", None),
        Rests("other", "other", "paused, until it is resumed"),
        Rests("other", DatabaseUnreachableError("the database is away")),
    ],
    ids=["nothing waits", "paused", "no database"],
)
def test_without_a_next_model_the_worker_sleeps(rests: Rests, monkeypatch: pytest.MonkeyPatch) -> None:
    told, command = swapped(rests, monkeypatch)
    assert told == [[("other", "/m/other.gguf", True)]]
    assert command[2:4] == ["-m", "nightmill.worker.service.sleeping"]
    assert "--engine" not in command and command[-2:] == ["--models", SETTINGS.models]
