"""`nightmill batch extend` and `nightmill batch retry`: ended rows again, with other parameters."""

from typing import Any

import click

from nightmill.jobs.base.printable import printable
from nightmill.jobs.batches.requeueing import CHANGEABLE, QueuedAgain
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.job_options import given, job_options
from nightmill.jobs.commands.options import json_option
from nightmill.jobs.commands.printing import counted
from nightmill.jobs.commands.terminal import echo, echo_err, echo_json

_DEADLINE = click.option("--deadline", help="A new deadline: 06:00, 2026-11-22T06:00, 8h; by default none.")


@click.command()
@click.argument("name")
@click.option("--max-tokens", type=int, required=True, help="Most tokens of an answer from now on.")
@_DEADLINE
@json_option
def extend(name: str, max_tokens: int, deadline: str | None, as_json: bool) -> None:
    """Continue the rows whose answers were cut at their limit.

    The rows that stopped by `length` are queued again, under their ids and seeds, with the larger limit.
    Their tokens were kept, so that continuing costs no more than reading the prompt and the text so far. A
    longer text begins with the shorter one, and is what the larger limit would have given at once; `nightmill
    show` tells both, and `nightmill verify` computes it again. Rows whose limit is as large, or that ended in
    another way, are not changed.

    \b
      nightmill batch extend tonight --max-tokens 4096
    """
    with Client() as client:
        done = client.get_batch(name).extend(max_tokens, **given({"deadline": deadline}))
        _say(done, name, as_json, "none was cut at a lower limit")


def _where(_: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, list[str]]:
    """`state=failed,code=error` as a mapping; a name may come several times."""
    found: dict[str, list[str]] = {}
    for part in (part for value in values for part in value.split(",")):
        name, equals, wanted = part.partition("=")
        if not (name and equals and wanted):
            raise click.BadParameter(f"{part!r} is not NAME=VALUE, such as state=failed", param=parameter)
        found.setdefault(name.strip(), []).append(wanted.strip())
    return found


@click.command()
@click.argument("name")
@click.option(
    "--where",
    metavar="NAME=VALUE,...",
    multiple=True,
    callback=_where,
    help="Only rows of this state (failed, cancelled) and code (error, deadline, cancelled).",
)
@click.option("--new-seeds", is_flag=True, help="Give each row a new random seed.")
@job_options(*CHANGEABLE, defaults=False)
@_DEADLINE
@json_option
def retry(
    name: str,
    where: dict[str, list[str]],
    new_seeds: bool,
    deadline: str | None,
    as_json: bool,
    **changes: Any,
) -> None:
    """Queue rows again that failed, expired or were cancelled, with other parameters.

    They keep their ids, and what is not given here. `nightmill show` tells what a row was before. Rows that
    succeeded, and bad rows of the file, are not changed; without new parameters, retry-failed does the same
    in less time.

    \b
      nightmill batch retry tonight --where state=failed,code=error --temperature 0.2 --new-seeds
    """
    with Client() as client:
        found = client.get_batch(name)
        options = given({"deadline": deadline} | changes)
        done = found.retry(where=where, new_seeds=new_seeds, **options)
        _say(done, name, as_json, "no such row has ended without an answer")


def _say(done: QueuedAgain, name: str, as_json: bool, none: str) -> None:
    """Print how many rows were queued again, or why `none` was."""
    if as_json:
        echo_json({"queued": done.rows, "refused": done.refused, "reason": done.reason})
        return
    why = "" if done.rows or done.refused else f": {none}"
    echo(f"{printable(name)}: {counted(done.rows, 'row')} queued again{why}")
    if done.refused:
        echo_err(
            f"{counted(done.refused, 'row')} cannot have these parameters, and stay as they are: "
            f"{printable(str(done.reason))}"
        )
