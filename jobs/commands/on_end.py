"""`--on-end COMMAND`: a command to be run once a batch has ended."""

import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import click

from nightmill.jobs.base.settings import END_PREFIX
from nightmill.jobs.commands.terminal import to_json
from nightmill.jobs.errors import InvalidRequestError
from nightmill.jobs.reply.batch_status import BatchStatus, status_values

Command = TypeVar("Command", bound=Callable[..., Any])

ON_END_SECONDS = 600.0


def on_end_options(command: Command) -> Command:
    """Add --on-end, --on-end-seconds and --webhook."""
    for option in (
        click.option(
            "--webhook",
            metavar="URL",
            help="Have this URL called once the batch has ended; NIGHTMILL_WEBHOOK_URLS must allow it.",
        ),
        click.option(
            "--on-end-seconds",
            type=click.FloatRange(0, min_open=True),
            default=ON_END_SECONDS,
            show_default=True,
            help="How long that command may take.",
        ),
        click.option(
            "--on-end",
            metavar="COMMAND",
            help="Run this once the batch has ended, with its status as JSON on standard input. Split into "
            "words as a shell does, but run without one.",
        ),
    ):
        command = option(command)
    return command


def words_of(command: str) -> list[str]:
    """Split a command into program and arguments. Raises InvalidRequestError."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InvalidRequestError(f"--on-end: cannot be split into words: {error}", field="on_end") from None
    if not words:
        raise InvalidRequestError("--on-end: names no command", field="on_end")
    return words


_KILLED_SECONDS = 10.0  # for a killed command to end


def run_on_end(
    words: list[str],
    status: BatchStatus,
    seconds: float,
    say: Callable[[str], object],
    *,
    results: str | None = None,
    errors: str | None = None,
) -> int | None:
    """Run the command; returns its exit code, None if it could not be run or took too long.

    It reads the status in the form of `batch status --json` and writes to this process's standard error. Its
    result is reported and does not affect the batch.
    """
    named = {"BATCH": status.name, "STATE": str(status.state), "RESULTS": results, "ERRORS": errors}
    numbers = {"ROWS": status.rows, "SUCCEEDED": status.succeeded, "UNSUCCESSFUL": status.unsuccessful}
    environment = {f"{END_PREFIX}{name}": str(value) for name, value in named.items() if value is not None}
    environment |= {f"{END_PREFIX}{name}": str(value) for name, value in numbers.items()}
    try:
        code = _run(words, to_json(status_values(status)).encode(), os.environ | environment, seconds)
    except OSError as error:
        say(f"--on-end: {words[0]} cannot be run: {error.strerror or error}")
        return None
    except subprocess.TimeoutExpired:
        say(f"--on-end: {words[0]} took longer than {seconds:g} s, and was killed (--on-end-seconds)")
        return None
    if code:
        how = f"exited with {code}" if code > 0 else f"was killed by signal {-code}"
        say(f"--on-end: {words[0]} {how}")
    return code


def _run(words: list[str], said: bytes, environment: Mapping[str, str], seconds: float) -> int:
    process = subprocess.Popen(
        words,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=2,  # standard output is reserved for this command's own output
        start_new_session=True,  # so that its children can be killed with it
    )
    try:
        process.communicate(said, timeout=seconds)
    except BaseException:  # Ctrl-C must not leave it behind, either
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # stuck in the kernel, which is harmless
            process.wait(_KILLED_SECONDS)
        raise
    return process.returncode
