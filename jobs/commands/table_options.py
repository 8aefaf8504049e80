"""Options for files that are tables: the template, and what comes back."""

import csv
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import click

from nightmill.jobs.commands.options import text_of
from nightmill.jobs.formats.places import Opened
from nightmill.jobs.formats.together import open_input
from nightmill.jobs.request.template import MAX_CHARACTERS, Empty
from nightmill.jobs.tables.options import ALL, NONE, TABLE_KEYS, TableOptions
from nightmill.jobs.tables.together import open_table

Command = TypeVar("Command", bound=Callable[..., Any])


def _text(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """A text, or with @ that of a file."""
    return None if value is None else text_of(value, MAX_CHARACTERS + 2)


def _names(_: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> str | list[str] | None:
    """`all`, `none`, or columns with commas between them."""
    if not value:
        return None
    if value in ((ALL,), (NONE,)):
        return value[0]
    try:
        return [name for line in value for name in next(csv.reader([line], strict=True), [])]
    except csv.Error as error:
        raise click.BadParameter(str(error), param=parameter) from None


_OPTIONS = (
    click.option(
        "--template",
        metavar="TEXT|@FILE",
        callback=_text,
        help="FILE is a table, and this, with {{ column }} in it, becomes the prompt of each row.",
    ),
    click.option(
        "--system",
        metavar="TEXT|@FILE",
        callback=_text,
        help="The system message before it; it may name columns, too.",
    ),
    click.option(
        "--plain", is_flag=True, default=None, help="The template is the whole prompt, and not of a chat."
    ),
    click.option(
        "--keep",
        metavar="COLUMNS",
        multiple=True,
        callback=_names,
        help="The columns that come back beside the answers: all, none, or a,b. [all]",
    ),
    click.option("--column", metavar="NAME", help="What the column of answers is called. [answer]"),
    click.option(
        "--spread",
        is_flag=True,
        default=None,
        help="JSON answers become a column for each property at the top of their schema.",
    ),
    click.option(
        "--empty",
        type=click.Choice([str(one) for one in Empty]),
        help="What becomes of a row without a value that the template names: it fails (error), is left out "
        "(skip), or is run with nothing in its place (keep). [error]",
    ),
)


def table_options(command: Command) -> Command:
    """Add the options of a table."""
    for option in _OPTIONS if isinstance(command, click.Command) else reversed(_OPTIONS):
        command = option(command)
    return command


def opened_with(settings: Mapping[str, Any]) -> Opened:
    """Choose the class that opens FILE: as a table if there is a template. Raises InvalidParameterError."""
    options = TableOptions.of(settings)
    return open_input if options is None else partial(open_table, options=options)


def taken(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a table that were given, taken out of all of them."""
    found = {name: options.pop(name, None) for name in TABLE_KEYS}
    return {name: value for name, value in found.items() if value is not None}
