"""`nightmill batch diff`: what two batches of the same rows answered otherwise."""

import json
from dataclasses import asdict

import click

from nightmill.jobs.base.printable import printable
from nightmill.jobs.batches.comparing import Difference
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.options import json_option
from nightmill.jobs.commands.printing import counted
from nightmill.jobs.commands.terminal import echo, echo_json

_MOST_SHOWN = 20  # columns


@click.command()
@click.argument("one", metavar="A")
@click.argument("other", metavar="B")
@json_option
def diff(one: str, other: str, as_json: bool) -> None:
    """Compare two batches of the same rows: how many texts differ, in which column, and where first.

    Rows are matched by their place in the file, so that prompts, models and parameters can be compared on
    the same rows. Properties of answers that are JSON objects count as columns: text.NAME.

    \b
      nightmill batch diff terse verbose

    Exits 0 whether or not they differ.
    """
    with Client() as client:
        found = client.get_batch(one).diff(client.get_batch(other))
    if as_json:
        values = asdict(found) | {"columns": dict(found.columns)}
        echo_json(values | {"first": [asdict(first) for first in found.first.values()]})
        return
    for line in _described(found):
        echo(line)


def _described(found: Difference) -> list[str]:
    one, other = map(printable, found.names)
    differ = "differs" if found.differing == 1 else "differ"
    rows, differing = counted(found.rows, "row"), counted(found.differing, "row")
    lines = [f"{one}, {other}: {rows} in both, {differing} {differ}"]
    if not found.same_source:
        lines.append("  they are of different files, or of no file: rows are matched by their number")
    for name, alone in zip((one, other), found.alone, strict=True):
        if alone:
            lines.append(f"  only in {name}: {counted(alone, 'row')}")
    for column, count in found.columns.most_common(_MOST_SHOWN):
        first = found.first[column]
        where = "" if first.place is None else f", character {first.place + 1:,}"
        lines.append(f"  {printable(column, 60)}: {counted(count, 'row')}, first in row {first.row:,}{where}")
        lines += [
            f"    {mark} {printable(value if isinstance(value, str) else json.dumps(value), 80)}"
            for mark, value in zip("-+", first.values, strict=True)
        ]
    return lines
