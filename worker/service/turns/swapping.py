"""From one model to the next without a process that sleeps in between, and with an engine started ahead.

When a turn ends for another model, the next engine's process is started at once. While the old one drains
and ends, it imports what it needs, opens the model's file and reads its vocabulary, and leaves the GPU alone.
Once the old one is gone, with its memory there, the next model is chosen, and the new engine goes on. The
worker meanwhile becomes the program that serves that model (`os.execv`), which takes the engine over. If no
model is chosen, or none can be, the worker becomes the process that sleeps, which goes on choosing.
"""

import logging
import sys
from collections.abc import Sequence
from typing import Any

from nightmill.jobs.base.settings import MODEL_SCHEMES, Settings
from nightmill.jobs.errors import DatabaseError
from nightmill.worker.assembly.fetching import settings_of_turn
from nightmill.worker.assembly.model import served_name
from nightmill.worker.assembly.options import ENGINE, TURN, WOKEN
from nightmill.worker.link.launching import EngineAhead
from nightmill.worker.service.resting import RestRule
from nightmill.worker.service.sleeping import sleep_command, with_option, without_option
from nightmill.worker.service.turns.turning import Turn, named_models

__all__ = ["Swap", "next_command"]

log = logging.getLogger("nightmill.worker")


class Swap:
    """The end of a turn for that of another model; made, and used, on the main thread of the worker.

    rule   the reasons for which the worker would sleep rather than load another model
    """

    def __init__(self, settings: Settings, turn: Turn, rule: RestRule) -> None:
        self._settings = settings
        self._turn = turn
        self._rule = rule
        self._next: str | None = None
        self._expected = turn.gives_way_to
        self._engine = self._started(self._expected, waits=True)

    def begin_next(self) -> None:
        """Choose the next model, and have its engine load it: the old one's process is gone."""
        try:
            if self._rule.reason(float("inf")) is None:
                self._next = self._turn.choose_next()
        except DatabaseError as error:
            log.warning("%s", error)
        if self._next is None:
            return
        log.info("swaps to %s", self._next)
        if self._next != self._expected:  # more urgent rows have come
            self._engine.connection.close()
            self._engine = self._started(self._next, waits=False)
        elif self._engine.begun:
            self._engine.go()

    def _started(self, model: str | None, *, waits: bool) -> EngineAhead:
        """Start an engine, and tell it what to serve, unless that has to be fetched first."""
        started = EngineAhead.start()
        if model is not None and not named_models(self._settings)[model].startswith(MODEL_SCHEMES):
            started.begin(settings_of_turn(self._settings, model), waits=waits)
        return started

    def command(self, command: Sequence[str]) -> list[str] | None:
        """Return the worker's command with the next model and its engine; None if there is no next model."""
        if self._next is None:
            return None
        return with_option(with_option(command, TURN, self._next), ENGINE, self._engine.hand_on())


def next_command(settings: Settings, worker_id: str, swap: Swap | None) -> list[str]:
    """Return the command that a worker's process becomes: its own for the next model, or the one that sleeps.

    swap  if it ends for another model
    """
    options: dict[str, Any] = {"hours": settings.hours, "idle_seconds": settings.idle_seconds}
    command = with_option([sys.executable, *sys.orig_argv[1:]], "--id", worker_id)
    command = without_option(command, ENGINE)
    if WOKEN not in command:
        command.append(WOKEN)
    if settings.models is not None:
        options |= {name: getattr(settings, name) for name in ("models", "stay", "swap_for_interactive")}
        command = with_option(command, "--models", settings.models)
    swapped = None if swap is None else swap.command(command)
    return swapped or sleep_command(worker_id, served_name(settings), options, command)
