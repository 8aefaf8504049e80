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
from nightmill.jobs.reply.job import IDLE
from nightmill.jobs.sql.claims import Claims
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.loads import Loads
from nightmill.jobs.sql.sweep import Sweep
from nightmill.worker.assembly.options import TURN
from nightmill.worker.service.heart import Heart
from nightmill.worker.service.parent import END_WITH_STDIN, end_with_stdin
from nightmill.worker.service.resting import RestRule
from nightmill.worker.service.turns.turning import LOOK_SHARE, Turning, named_models, rules_of

log = logging.getLogger("nightmill.worker")

_MODULE = "nightmill.worker.service.sleeping"
LOOK_SECONDS = 1.0
"""Seconds between the looks of a sleeping worker whether it is to wake."""


END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


class Sleeper:
    """Beats as a sleeping worker until there is no reason left to sleep.

    rule     the reasons
    claims   of the worker, which holds none while it sleeps
    heart    of the worker's row
    turning  of a worker with several models, which wakes for one of them
    """

    def __init__(
        self,
        rule: RestRule,
        claims: Claims,
        heart: Heart,
        sweep: Sweep,
        heartbeat_seconds: float,
        turning: Turning | None = None,
    ) -> None:
        self.turn: str | None = None
        """The model to wake for, of a worker with several."""
        self._rule = rule
        self._turning = turning
        self._claims = claims
        self._heart = heart
        self._sweep = sweep
        self._heartbeat_seconds = heartbeat_seconds
        self._beaten_at = -heartbeat_seconds
        self._choose_at = 0.0
        self._complaint = ""
        self._falls_asleep = True

    def look(self, now: float) -> bool:
        """Beat if it is time to; return True once the worker is to wake.

        now  seconds of a monotonic clock
        """
        try:
            if self._falls_asleep:  # the worker could not say so while its database was away
                self._hand_back()
                self._heart.beat(WorkerState.SLEEPING)
                self._falls_asleep = False
            # It has been without jobs for as long as it sleeps, which is long enough.
            reason = self._rule.reason(float("inf"))
            if reason is None and self._turning is not None:
                if now >= self._choose_at:
                    began = time.monotonic()
                    self.turn = self._turning.choose()
                    self._choose_at = now + LOOK_SHARE * (time.monotonic() - began)
                reason = None if self.turn is not None else self._turning.trouble or IDLE
            if reason is None:
                return True
            if now - self._beaten_at >= self._heartbeat_seconds:
                self._hand_back()
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

    def _hand_back(self) -> None:
        """Queue the jobs that the worker could not hand back when it went to sleep: a database was away.

        Nobody else would, as the worker is alive.
        """
        if left := list(self._claims.running()):
            self._claims.hand_back(left)
            log.warning("%d jobs that were still this worker's are handed back", len(left))


def sleep_command(worker_id: str, model: str, options: dict[str, Any], command: Sequence[str]) -> list[str]:
    """Return the command that sleeps, and later runs `command` as the worker of this id.

    options  those settings of the worker that say when it sleeps, and what for
    """
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
    named = [sys.executable, "-P", "-m", _MODULE, "--id", worker_id, "--model", model]
    return [*named, *given, "--", *command]


def with_option(command: Sequence[str], name: str, value: str) -> list[str]:
    """Return a command with this option, in place of what it says of it."""
    return [*without_option(command, name), name, value]


def without_option(command: Sequence[str], name: str) -> list[str]:
    """Return a command without this option and its value."""
    kept: list[str] = []
    skipped = False
    for word in command:
        if not (skipped or word == name or word.startswith(f"{name}=")):
            kept.append(word)
        skipped = word == name and not skipped
    return kept


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
@click.option("--models")
@click.option("--stay", default="10m")
@click.option("--swap-for-interactive", type=bool, default=False)
@click.argument("command", nargs=-1, required=True)
def main(worker_id: str, model: str, command: tuple[str, ...], **options: Any) -> None:
    """Sleep as the worker ID until it is to serve again; then become COMMAND."""
    try:
        settings = Settings.from_env().model_copy(update=options)
        logging.basicConfig(level=logging.INFO, format="[%(asctime)s: %(levelname)s] %(message)s")
        fit(logging.getLogger().handlers, settings.log_format, settings.scrubbed)
        turn = _sleep(settings, worker_id, model, command)
    except NightmillError as error:
        echo(f"nightmill: {error}", err=True)
        raise SystemExit(1) from error
    if turn is None:
        log.info("waking up")
        become(command)
    log.info("waking up for %s", turn)
    become(with_option(command, TURN, turn))


def _sleep(settings: Settings, worker_id: str, model: str, command: Sequence[str]) -> str | None:
    """Return when the worker is to wake: of several models, the one to load.

    A signal to end signs it off, and ends the process.
    """
    database = Database(settings)
    claims = Claims(database, worker_id)
    for number in END_SIGNALS:
        signal.signal(number, _end)
    if END_WITH_STDIN in command:
        end_with_stdin()
    models = named_models(settings)
    rule = RestRule(claims, settings, (None, *models) if models else (None, model))
    heart, loads = Heart(claims, settings.stale_seconds), Loads(database, worker_id)
    turning = Turning(loads, models, rules_of(settings)) if models else None
    sleeper = Sleeper(rule, claims, heart, Sweep(database), settings.heartbeat_seconds, turning)
    try:
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, END_SIGNALS
        )  # `become` blocked them until somebody listens
        while not sleeper.look(time.monotonic()):
            _reap()
            time.sleep(LOOK_SECONDS)
        return sleeper.turn
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
