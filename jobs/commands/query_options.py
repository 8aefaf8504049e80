"""Options for inputs that are not files: the rows of a query."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import click

from nightmill.jobs.formats.inputs import InputFile
from nightmill.jobs.formats.places import Opened, taken_from
from nightmill.jobs.formats.rows import FileFormat
from nightmill.jobs.tables.queries import queried

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--query",
        metavar="SQL",
        help="In place of FILE, the rows of a query, which may only read: 'SELECT id, review FROM ...'.",
    ),
    click.option(
        "--from", "from_url", metavar="URL", help="Database of --query: postgresql://... or sqlite:///FILE."
    ),
)


AFTER_OPTION = click.option(
    "--after",
    metavar="NAME",
    help="In place of FILE, a row for each of this batch, which waits for that row's answer.",
)


def check_alone(*others: str | None) -> None:
    """Refuse another input beside --after. Raises UsageError."""
    if any(one is not None for one in others):
        raise click.UsageError("--after stands in place of a FILE, a --query and a --format")


def query_options(command: Command) -> Command:
    """Add the options of a query."""
    for option in _OPTIONS if isinstance(command, click.Command) else reversed(_OPTIONS):
        command = option(command)
    return command


def check_named(file: str | None, query: str | None, url: str | None) -> None:
    """Refuse an input that is named twice, or not at all. Raises UsageError."""
    if (file is None) is (query is None):
        raise click.UsageError("name a FILE, or a --query, one of them")
    if (query is None) is not (url is None):
        raise click.UsageError("--query and --from go together: the query, and the URL of its database")


def input_named(
    file: str | None, query: str | None, url: str | None, format: str | None, *, most: int, opened: Opened
) -> AbstractContextManager[InputFile]:
    """Provide the input of a command; raises UsageError and BatchFileError."""
    check_named(file, query, url)
    if query is not None:
        return queried(query, str(url), most=most, opened=opened)
    return taken_from(str(file), None if format is None else FileFormat(format), most=most, opened=opened)
