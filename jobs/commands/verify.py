"""`nightmill verify`: compute rows of a batch again, compare them, and report the result."""

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import click

from nightmill.jobs.base.printable import printable
from nightmill.jobs.base.times import parse_span
from nightmill.jobs.batches.verifying import Verdict, Verification, VerifiedRow
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.options import INTERRUPTED, json_option
from nightmill.jobs.commands.printing import counted
from nightmill.jobs.commands.terminal import LiveLine, ProgressLine, echo, echo_json
from nightmill.jobs.request.fields import HIGHEST_PRIORITY

# The first of these that applies to a row.
_EXIT_CODES = {
    Verdict.DEFECT: 1,
    Verdict.NOT_COMPARED: 4,
    Verdict.EXPLAINED: 3,
    Verdict.UNRECORDED: 3,
    Verdict.EQUAL: 0,
}
_MOST_SHOWN = 10


@click.command()
@click.argument("batch")
@click.option(
    "--sample", type=click.IntRange(1), default=20, show_default=True, help="Rows to compute again."
)
@click.option("--seed-of-sample", type=int, help="Choose the rows of an earlier run; by default drawn.")
@click.option(
    "--priority",
    type=click.IntRange(0, HIGHEST_PRIORITY),
    default=0,
    show_default=True,
    help="0 comes after all other jobs, 9 is soonest.",
)
@click.option("--timeout", help="Give up after so long: 90s, 30m, 8h; by default never.")
@click.option("--keep", is_flag=True, help="Do not delete the copies that were computed.")
@json_option
def verify(
    batch: str,
    sample: int,
    seed_of_sample: int | None,
    priority: int,
    timeout: str | None,
    keep: bool,
    as_json: bool,
) -> None:
    """Compute rows of a batch again from their seeds, and compare the texts, bit by bit.

    \b
      nightmill verify tonight --sample 100

    Rows are chosen at random among those that have succeeded. Copies of them run on the live workers, as a
    batch of their own that is deleted afterwards; BATCH is only read. Each row keeps the name of the
    arithmetic that computed it: if a text differs, the parts of that name which differ are shown.

    \b
    Exit codes:
      0    every row is equal to the bit
      1    a text differs although the arithmetic is the same: a defect. Also an error of the command
      2    wrong usage
      3    texts differ, all by another arithmetic, or by one that was not recorded
      4    rows could not be computed again
      130  interrupted; the copies are deleted, unless --keep
    """
    seconds = None if timeout is None else parse_span("--timeout", timeout).total_seconds()
    line = ProgressLine(name="computing again", total=sample)
    try:
        with Client() as client, LiveLine(line, show=not as_json, estimate=True) as live:
            found = client.verify(
                batch,
                sample=sample,
                seed_of_sample=seed_of_sample,
                priority=priority,
                timeout=seconds,
                keep=keep,
                on_rows=lambda done: live.update(replace(line, done=done)),
            )
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    echo_json(_values(found)) if as_json else _say(found)
    raise SystemExit(next(code for verdict, code in _EXIT_CODES.items() if found.count(verdict)))


def _values(found: Verification) -> dict[str, Any]:
    counts = {str(verdict): found.count(verdict) for verdict in Verdict}
    return {"batch": found.batch, "equal": found.equal, "counts": counts} | asdict(found)


def _say(found: Verification) -> None:
    equal, rows = found.count(Verdict.EQUAL), len(found.rows)
    echo(f"{printable(found.batch)}: {equal:,} of {counted(rows, 'row')} equal to the bit")
    others = [row for row in found.rows if row.verdict is not Verdict.EQUAL]
    for row in others[:_MOST_SHOWN]:
        echo(f"\n{_name_of(row)}: {_finding(row)}")
        if row.parting is not None:
            echo(f"  then  {_quoted(row.parting.then)}")
            echo(f"  now   {_quoted(row.parting.now)}")
        if row.verdict is not Verdict.NOT_COMPARED and row.stop_reason_then != row.stop_reason_now:
            echo(f"  stopped by {row.stop_reason_then}, now by {row.stop_reason_now}")
    if len(others) > _MOST_SHOWN:
        echo(f"\n{len(others) - _MOST_SHOWN:,} more are not shown; --json has them all")
    for note in _notes(found):
        echo(note)


def _finding(row: VerifiedRow) -> str:
    if row.verdict is Verdict.NOT_COMPARED:
        return f"not computed again: {printable(row.error)}"
    why = {
        Verdict.EXPLAINED: f"by another {_what_differs(row)} ({printable('; '.join(row.differences))})",
        Verdict.UNRECORDED: "by an arithmetic that was not recorded, then or now",
        Verdict.DEFECT: "by the same arithmetic, which is a defect: please report it",
    }[row.verdict]
    if row.parting is None:
        return f"the same text, but another stop reason, {why}"
    return f"another text after {counted(row.parting.at, 'equal character')}, {why}"


def _what_differs(row: VerifiedRow) -> str:
    prompts = sum(part.startswith("prompt: ") for part in row.differences)
    words = ["prompt"] * bool(prompts) + ["arithmetic"] * (len(row.differences) > prompts)
    return " and ".join(words)


def _notes(found: Verification) -> Iterable[str]:
    """Yield remarks about all rows, and the command to repeat the verification."""
    moved = sorted({part for row in found.rows if row.verdict is Verdict.EQUAL for part in row.differences})
    if moved:
        yield f"Equal rows too were computed by another arithmetic: {printable('; '.join(moved))}"
    if old := sum(
        row.arithmetic_then is None for row in found.rows if row.verdict is not Verdict.NOT_COMPARED
    ):
        yield f"{counted(old, 'row')} of an earlier version, which did not record its arithmetic"
    if names := sorted({row.arithmetic_now for row in found.rows if row.arithmetic_now}):
        yield f"Computed now by {printable(' and by '.join(names))}"
    if found.copies is not None:
        yield f"The copies are in batch {printable(found.copies)}"
    yield f"The same rows again: --sample {len(found.rows)} --seed-of-sample {found.seed_of_sample}"


def _name_of(row: VerifiedRow) -> str:
    named = [f"row {row.row}"] if row.row is not None else []
    named += [printable(row.custom_id)] if row.custom_id else []
    return ", ".join([*named, f"job {row.job_id}"])


def _quoted(text: str) -> str:
    return f"“{printable(text)}”"
