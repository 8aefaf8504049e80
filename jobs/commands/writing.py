"""`nightmill batch results` and `nightmill batch errors`: rows into a file, or into a table of a database."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from nightmill.jobs.base.printable import printable
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.options import json_option
from nightmill.jobs.commands.printing import counted
from nightmill.jobs.commands.terminal import LiveLine, ProgressLine, echo, echo_json
from nightmill.jobs.formats.places import STANDARD, STDOUT, brought_to
from nightmill.jobs.tables.into import UsersTable

INTO_OPTION = click.option(
    "--into",
    metavar="URL#TABLE",
    help="Table to write the results into, in PostgreSQL or SQLite; it is made if it is not there.",
)


@contextmanager
def progress_of(
    label: str, total: int, *, megabytes: bool = False, show: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr, if that is a terminal; yields a function that sets it to a number."""
    with LiveLine(ProgressLine(name=label, total=total), show=show, estimate=True) as live:

        def update(done: int) -> None:
            count = f"{done / 1e6:,.1f}/{total / 1e6:,.1f} MB" if megabytes else ""
            live.update(ProgressLine(name=label, done=done, total=total, count=count))

        yield update


def _write_command(kind: str, help_text: str) -> click.Command:
    of_errors = kind == "errors"

    @click.argument("name")
    @click.option("-o", "--output", metavar="FILE", help="File to write, or -.")
    @INTO_OPTION
    @click.option("--overwrite", is_flag=True, help="Replace FILE even if it holds something else.")
    @json_option
    def write(name: str, output: str | None, into: str | None, overwrite: bool, as_json: bool) -> None:
        if (output is None) is (into is None):
            raise click.UsageError("name a file (-o FILE), or a table (--into URL#TABLE)")
        with Client() as client:
            found = client.get_batch(name)
            now = found.status(errors=False)
            total = now.unsuccessful if of_errors else now.succeeded
            if into is not None:
                path = UsersTable(into).label
                with progress_of(f"writing {kind}", total) as update:
                    rows = found.write_into(into, errors=of_errors, on_rows=update)
            else:
                path = str(output)
                with brought_to(path, found.format, most=client.settings.spool_bytes) as place:
                    with progress_of(f"writing {kind}", total) as update:
                        rows = found.write_to(place, errors=of_errors, overwrite=overwrite, on_rows=update)
                    place.deliver()
        left = now.rows - now.done
        piped = output == STANDARD
        if as_json:
            echo_json({"path": path, "rows": rows, "unfinished": left}, err=piped)
            return
        more = f"; not done yet: {counted(left, 'row')}" if left else ""
        echo(f"{printable(STDOUT if piped else path)}: {counted(rows, 'row')}{more}", err=piped)

    return click.command(kind, help=help_text)(write)


_INTO = (
    "\n\nWith --into they go into a table, in groups of a transaction each; a row that is there already is "
    "replaced, so that an interrupted command may be repeated."
)
results = _write_command(
    "results",
    "Write the rows that succeeded, in the order of the input and in its format.\n\nThe file appears "
    "when it is complete. A batch that is not done gives what there is. A file that is there is "
    "replaced if it holds results of this batch and nothing else." + _INTO,
)
errors = _write_command(
    "errors",
    "Write the rows that failed, expired or were cancelled: why, and the text that they had.\n\nIn the "
    "order of the input; the file appears when it is complete. A file that is there is replaced if it "
    "holds errors of this batch and nothing else." + _INTO,
)
