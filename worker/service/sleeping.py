"""A worker that sleeps: a small process without model and GPU, which becomes the worker again in time.

    python -m nightmill.worker.service.sleeping --id ID --model NAME -- COMMAND...

The worker replaces itself by this (`os.execv`), and this replaces itself by the worker's command: process id,
row in `workers` and standard streams stay, so supervisors and people see one worker. Nothing of the model,
and no memory on the GPU, is left meanwhile.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

import click

from nightmill.jobs.base.contract import WorkerState
from nightmill.jobs.base.logs import fit
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.commands.terminal import echo
from nightmill.jobs.errors import DatabaseError, NightmillError
from nightmill.jobs.sql.claims import Claims
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.sweep import Sweep
from nightmill.worker.service.heart import Heart
from nightmill.worker.service.parent import END_WITH_STDIN, end_with_stdin
from nightmill.worker.service.resting import RestRule

log = logging.getLogger("nightmill.worker")

_MODULE = "nightmill.worker.service.sleeping"
LOOK_SECONDS = 1.0
"""How often a sleeping worker looks whether it is to wake."""


END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


class Sleeper:
    """Beats as a sleeping worker until there is no reason left to sleep.

    rule      the reasons
    heart     of the worker's row
    """

    def __init__(self, rule: RestRule, heart: Heart, sweep: Sweep, heartbeat_seconds: float) -> None:
        self._rule = rule
        self._heart = heart
        self._sweep = sweep
        self._heartbeat_seconds = heartbeat_seconds
        self._beaten_at = -heartbeat_seconds
        self._complaint = ""

    def look(self, now: float) -> bool:
        """Beat if it is time to; return True once the worker is to wake.

        now  seconds of a monotonic clock
        """
        try:
            # It has been without jobs for as long as it sleeps, which is long enough.
            reason = self._rule.reason(float("inf"))
            if reason is None:
                return True
            if now - self._beaten_at >= self._heartbeat_seconds:
                self._heart.beat(WorkerState.SLEEPING, reason, self._rule.stats())
                self._beaten_at = now
                self._sweep.expire()  # whoever is awake does as much; there may be nobody
                self._sweep.end_stopped()
            self._complaint = ""
        except DatabaseError as error:
            if str(error) != self._complaint:  # once, not each second
                self._complaint = str(error)
                log.warning("%s", error)
        return False


def sleep_command(worker_id: str, model: str, options: dict[str, Any], command: Sequence[str]) -> list[str]:
    """Return the command that sleeps, and later runs `command` as the worker of this id.

    options  the worker's settings `hours` and `idle_seconds`, as far as they are given
    """
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
    named = [sys.executable, "-P", "-m", _MODULE, "--id", worker_id, "--model", model]
    return [*named, *given, "--", *command]


def with_id(command: Sequence[str], worker_id: str) -> list[str]:
    """Return a worker's command with its id, so that it has the same row again."""
    command = list(command)
    return command if "--id" in command else [*command, "--id", worker_id]


def become(command: Sequence[str], *, blocked: bool = False) -> NoReturn:
    """Replace this process by a command; `blocked`: signals to end wait until it unblocks them."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a terminal that is gone
            stream.flush()
    if blocked:
        signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    os.execv(command[0], list(command))  # noqa: S606 - the worker's own command, or the sleeper


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--id", "worker_id", required=True)
@click.option("--model", required=True)
@click.option("--hours")
@click.option("--idle-seconds", type=float)
@click.argument("command", nargs=-1, required=True)
def main(
    worker_id: str, model: str, hours: str | None, idle_seconds: float | None, command: tuple[str, ...]
) -> None:
    """Sleep as the worker ID until it is to serve again; then become COMMAND."""
    try:
        settings = Settings.from_env().model_copy(update={"hours": hours, "idle_seconds": idle_seconds})
        logging.basicConfig(level=logging.INFO, format="[%(asctime)s: %(levelname)s] %(message)s")
        fit(logging.getLogger().handlers, settings.log_format, settings.scrubbed)
        _sleep(settings, worker_id, model, command)
    except NightmillError as error:
        echo(f"nightmill: {error}", err=True)
        raise SystemExit(1) from error
    log.info("waking up")
    become(command)


def _sleep(settings: Settings, worker_id: str, model: str, command: Sequence[str]) -> None:
    """Return when the worker is to wake. A signal to end signs it off, and ends the process."""
    database = Database(settings)
    claims = Claims(database, worker_id)
    for number in END_SIGNALS:
        signal.signal(number, _end)
    if END_WITH_STDIN in command:
        end_with_stdin()
    rule = RestRule(claims, settings, (None, model))
    sleeper = Sleeper(
        rule, Heart(claims, settings.stale_seconds), Sweep(database), settings.heartbeat_seconds
    )
    try:
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, END_SIGNALS
        )  # `become` blocked them until somebody listens
        while not sleeper.look(time.monotonic()):
            _reap()
            time.sleep(LOOK_SECONDS)
    except _Ended:
        claims.sign_off()
        log.info("stopped while asleep")
        raise SystemExit(0) from None
    finally:
        database.close()


def _reap() -> None:
    """Let go of the worker's helpers, which end with it but are this process's children."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


class _Ended(BaseException):
    """A signal has asked the process to end."""


def _end(_number: int, _frame: FrameType | None) -> None:
    raise _Ended


if __name__ == "__main__":
    main()
