"""Options for limits of a batch, and `nightmill batch budget`, which changes them."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from nightmill.jobs.base.printable import printable
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.job_options import given
from nightmill.jobs.commands.options import json_option
from nightmill.jobs.commands.printing import counted
from nightmill.jobs.commands.terminal import echo, echo_json
from nightmill.jobs.request.limits import HELP, LIMIT_KEYS

Command = TypeVar("Command", bound=Callable[..., Any])

_METAVARS = {"budget": "AMOUNT", "max_failures": "SHARE"}
_OPTIONS = tuple(
    click.option(f"--{name.replace('_', '-')}", name, metavar=_METAVARS[name], help=HELP[name])
    for name in LIMIT_KEYS
)


def limit_options(command: Command) -> Command:
    """Add the options for limits of a batch."""
    for option in _OPTIONS if isinstance(command, click.Command) else reversed(_OPTIONS):
        command = option(command)
    return command


def limits_taken(options: dict[str, Any]) -> dict[str, Any]:
    """The limits that were given, taken out of all options."""
    return {name: value for name in LIMIT_KEYS if (value := options.pop(name, None)) is not None}


@click.command()
@click.argument("name")
@limit_options
@click.option("--deadline", help="A deadline of the rows that are queued again; by default the batch's.")
@json_option
def budget(name: str, deadline: str | None, as_json: bool, **options: Any) -> None:
    """Change the limits of a batch: its budget, and the share of rows that may fail.

    What is not given stays; none removes a limit. Rows that a limit had ended are queued again, if no limit
    is met any more. With less than the batch has used already, it stops.

    \b
      nightmill batch budget tonight --budget 40M-tokens
      nightmill batch budget tonight --budget none --max-failures 10%
    """
    limits = limits_taken(options)
    with Client() as client:
        done = client.get_batch(name).set_limits(**limits, **given({"deadline": deadline}))
    if as_json:
        echo_json(done.values())
        return
    said = f"{counted(done.queued, 'row')} queued again"
    if done.stopped_because is not None:
        said = f"it is stopped: {printable(done.stopped_because)}"
    echo(f"{printable(name)}: {said}")
