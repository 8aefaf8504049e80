"""`nightmill batch ...` and `nightmill prune`: submit, follow, read, cancel and delete batches of files."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.base.printable import printable
from nightmill.jobs.base.times import describe_moment, parse_span
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.comparing import diff
from nightmill.jobs.commands.job_options import AT, BATCH_OPTIONS, given, job_options
from nightmill.jobs.commands.limit_options import budget, limit_options, limits_taken
from nightmill.jobs.commands.on_end import on_end_options, run_on_end, words_of
from nightmill.jobs.commands.options import CommandGroup, json_option
from nightmill.jobs.commands.over_http import describe_http, http_batch, http_values
from nightmill.jobs.commands.printing import as_argument, counted, describe_status, say_if_nobody_serves
from nightmill.jobs.commands.progress import EXIT_FAILED, BatchProgress, logged_errors
from nightmill.jobs.commands.query_options import AFTER_OPTION, check_alone, input_named, query_options
from nightmill.jobs.commands.requeueing import extend, retry
from nightmill.jobs.commands.table_options import opened_with, table_options, taken
from nightmill.jobs.commands.terminal import confirm, echo, echo_err, echo_json, table
from nightmill.jobs.commands.writing import errors, progress_of, results
from nightmill.jobs.errors import BatchNotFoundError
from nightmill.jobs.formats import FileFormat, InputFile
from nightmill.jobs.reply.batch_status import BatchState, BatchStatus, status_values
from nightmill.jobs.sql.prune import Pruned
from nightmill.jobs.tables.following import FollowingRows

EXIT_CODES = {
    BatchState.COMPLETED: 0,
    BatchState.COMPLETED_WITH_ERRORS: 3,
    BatchState.FAILED: EXIT_FAILED,
    BatchState.EXPIRED: 5,
    BatchState.CANCELLED: 6,
}
"""Exit codes of commands that follow a batch to its end; 1 is an error of the command, 2 wrong usage."""

FORMAT_OPTION = click.option(
    "--format",
    type=click.Choice([str(one) for one in FileFormat]),
    help="The format of FILE; by default found from its name and first rows. CSV on standard input needs it.",
)


@click.group(cls=CommandGroup)
def batch() -> None:
    """Batches of prompts: submit, follow, read, cancel, retry.

    \b
      nightmill batch submit prompts.jsonl --name tonight --at 01:00 --deadline 06:00
      nightmill batch status tonight
      nightmill batch results tonight -o results.jsonl
      nightmill batch errors tonight -o errors.jsonl
      nightmill batch retry-failed tonight
      nightmill batch extend tonight --max-tokens 4096
      nightmill batch diff tonight yesterday

    A batch is submitting, scheduled, queued or running; in the end it is completed (every row succeeded),
    completed_with_errors, failed (no row succeeded), cancelled, or expired (the deadline or a budget ended
    rows). A worker must serve it: nightmill worker --model FILE. For both in one command, see nightmill run.
    """


@batch.command()
@click.argument("file", required=False)
@query_options
@FORMAT_OPTION
@click.option("--name", help="Name of the batch; by default made of the file, the model and the parameters.")
@click.option("--model", help="Name of the model that must serve every row, whatever the rows say.")
@AFTER_OPTION
@table_options
@on_end_options
@limit_options
@job_options(*BATCH_OPTIONS)
@json_option
def submit(
    file: str | None,
    query: str | None,
    from_url: str | None,
    format: str | None,
    name: str | None,
    webhook: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Queue every row of FILE as a batch, or a row after each of another batch.

    FILE contains OpenAI batch rows, plain JSONL rows, CSV or Parquet; docs/file-formats.md describes rows.
    With --template it is any table, and each of its rows a prompt (docs/tables.md). Parameters given here are
    defaults of the rows. A bad row becomes a failed row and stops nothing.
    Repeating an interrupted command resumes it, with the times of the first one. FILE must not change
    meanwhile. Use - for FILE to read standard input. It may also be a folder of files, a pattern such as
    'rows/*.parquet', or at s3://, gs://, hf:// or https://; --query takes the rows of a database.

    With --after each row follows one of that batch: its template takes the answer, and the columns before it.

    
      nightmill batch submit --after drafts --name judged --choice 1 --choice 5 \\
          --template "Rate 1 or 5: {{ prior.content }}"

    With --on-end the command waits until the batch has ended, like watch, and then runs COMMAND, which reads
    the status as JSON. Repeated after an interruption, it follows the same batch.

    \b
      nightmill batch submit prompts.jsonl --name tonight --on-end "mail -s done me@example.org"

    \b
    Exits with 0 while there are rows to run. If the batch has ended already (or all rows are bad), and with
    --on-end, it exits like watch: with 0 if every row succeeded, 3 to 6 otherwise.
    """
    on_end, on_end_seconds = options.pop("on_end"), options.pop("on_end_seconds")
    at_end = None if on_end is None else words_of(on_end)
    table, limits = taken(options), limits_taken(options)
    settings = given(options) | table
    with Client() as client:
        made = _submitted(
            client, (file, query, from_url, format), settings, name=name, webhook=webhook, **limits
        )
        status = made.status()
        say_times(status, settings)
        idle = status.state.final or status.state is BatchState.SCHEDULED  # no worker is needed, or not yet
        if not as_json and not idle:
            say_if_nobody_serves(client, made.record.model)
        if at_end is not None and not status.state.final:
            with BatchProgress(made.name) as line:
                status = made.wait(on_status=line.show)
    summary = status_values(status)
    if at_end is not None:
        summary["on_end"] = {"exit_code": run_on_end(at_end, status, on_end_seconds, echo_err)}
    if as_json:
        echo_json(summary)
    else:
        echo(describe_status(status))
        if not status.state.final:
            echo(f"Next: nightmill batch status {as_argument(made.name)}")
        elif status.unsuccessful:
            echo(f"Next: nightmill batch errors {as_argument(made.name)} -o FILE")
    if status.state.final:
        raise SystemExit(EXIT_CODES[status.state])


def _submitted(
    client: Client,
    named: tuple[str | None, str | None, str | None, str | None],
    settings: dict[str, Any],
    **more: Any,
) -> Batch:
    """Submit a file, a query or what follows a batch. `named`: file, query, URL, format."""
    if settings.get("after") is not None:
        check_alone(*named)
        with logged_errors(None):
            return client.submit_batch(**settings, **more)
    opened = opened_with(settings)
    with (
        logged_errors(None),
        input_named(*named, most=client.settings.spool_bytes, opened=opened) as source,
        submitting(source) as on_rows,
    ):
        return client.submit_batch(source, on_rows=on_rows, **settings, **more)


def say_times(
    status: BatchStatus, settings: Mapping[str, Any], say: Callable[[str], object] = echo_err
) -> None:
    """Report the batch's times if some were given: a batch keeps its first ones."""
    for label, asked, kept in (
        ("begins", settings.get(AT), status.scheduled_at),
        ("deadline", settings.get("deadline"), status.deadline_at),
    ):
        if asked is None:
            continue
        said = "none" if kept is None else describe_moment(kept)
        first = "" if kept == asked else ", as it was submitted at first"
        say(f"{label} {said}{first}")


@contextmanager
def submitting(source: InputFile | FollowingRows, *, show: bool = True) -> Iterator[Callable[[int], None]]:
    """Show a progress bar for a file, if `show`; yields the `on_rows` callback for submit_batch."""
    if isinstance(source, FollowingRows):
        yield lambda _: None
        return
    with progress_of("submitting", source.size, megabytes=True, show=show) as update:
        yield lambda _: update(source.position)


@batch.command("list")
@click.option("-n", "--limit", type=click.IntRange(1), default=20, show_default=True, help="At most so many.")
@json_option
def list_command(limit: int, as_json: bool) -> None:
    """List the newest batches."""
    with Client() as client:
        statuses = [found.status(errors=False) for found in client.list_batches(limit=limit)]
    if as_json:
        for status in statuses:
            echo_json(status_values(status))
        return
    rows = (
        (
            status.name,
            status.state,
            f"{status.expected_rows:,}",
            f"{status.done:,}",
            f"{status.unsuccessful:,}",
            "" if status.tokens_per_second is None else f"{status.tokens_per_second:,.0f}",
            describe_moment(status.created_at),
            "" if status.deadline_at is None else describe_moment(status.deadline_at),
        )
        for status in statuses
    )
    table(("name", "state", "rows", "done", "failed", "tokens/s", "created", "deadline"), rows, cut="name")


@batch.command()
@click.argument("name")
@click.option(
    "--price-per-kwh",
    type=click.FloatRange(0),
    help="Say what its energy costs at this price [NIGHTMILL_PRICE_PER_KWH].",
)
@json_option
def status(name: str, price_per_kwh: float | None, as_json: bool) -> None:
    """Show the status of a batch: rows by state and stop reason, errors, speed, cost, estimated end."""
    with Client() as client:
        price = client.settings.price_per_kwh if price_per_kwh is None else price_per_kwh
        http = http_batch(client, name)
        try:
            found = client.get_batch(name).status()
        except BatchNotFoundError:  # its rows may not be entered yet
            if http is None:
                raise
            found = None
    if as_json:
        values: JsonObject = {"name": name, "state": None} if found is None else status_values(found)
        if found is not None and found.energy_kwh is not None and price is not None:
            values |= {"energy_price": round(found.energy_kwh * price, 6)}
        echo_json(values if http is None else values | {"http": http_values(http)})
        return
    echo(f"{printable(name)}: no row is entered yet" if found is None else describe_status(found, price))
    if http is not None:
        echo(describe_http(http))


@batch.command()
@click.argument("name")
@json_option
def watch(name: str, as_json: bool) -> None:
    """Follow a batch to its end.

    \b
    Exits 0 if every row succeeded; 3: completed_with_errors; 4: failed, no row succeeded; 5: expired at the
    deadline or a budget; 6: cancelled. 1 is an error of this command, 2 wrong usage. Ctrl-C only stops
    watching; 130.
    """
    with Client() as client:
        followed = client.get_batch(name)
        if not as_json and not followed.status(errors=False).state.final:
            say_if_nobody_serves(client, followed.record.model)
        with BatchProgress(name) as line:
            found = followed.wait(on_status=line.show)
        price = client.settings.price_per_kwh
    echo_json(status_values(found)) if as_json else echo(describe_status(found, price))
    raise SystemExit(EXIT_CODES[found.state])


batch.add_command(results)
batch.add_command(errors)
batch.add_command(diff)


@batch.command()
@click.argument("name")
@json_option
def cancel(name: str, as_json: bool) -> None:
    """Cancel a batch: queued rows at once, running ones within a second, keeping the text so far."""
    with Client() as client:
        at_once, asked = client.get_batch(name).cancel()
    if as_json:
        echo_json({"cancelled": at_once, "asked": asked})
        return
    echo(f"{printable(name)}: {counted(at_once, 'row')} cancelled, {asked:,} running and asked to stop")


@batch.command("retry-failed")
@click.argument("name")
@click.option("--deadline", help="A new deadline: 06:00, 2026-11-22T06:00, 8h; by default none.")
@json_option
def retry_failed(name: str, deadline: str | None, as_json: bool) -> None:
    """Queue the rows again that failed, expired or were cancelled, under their ids and seeds.

    Rows with a result, and bad rows of the file, are not changed.
    """
    settings = given({"deadline": deadline})
    with Client() as client:
        found = client.get_batch(name)
        rows = found.retry_failed(**settings)
        say_times(found.status(errors=False), settings)
    echo_json({"queued": rows}) if as_json else echo(
        f"{printable(name)}: {counted(rows, 'row')} queued again"
    )


batch.add_command(extend)
batch.add_command(retry)
batch.add_command(budget)


@batch.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def delete(name: str, yes: bool, as_json: bool) -> None:
    """Delete a batch and all its rows, results included. Its rows must be done or cancelled."""
    with Client() as client:
        found = client.get_batch(name)
        rows = found.status(errors=False).rows
        if not yes:
            confirm(f"Delete {counted(rows, 'row')} of batch {name}, results included?")
        with progress_of("deleting", rows) as update:
            gone = found.delete(update)
    echo_json({"deleted": gone}) if as_json else echo(f"{printable(name)}: {counted(gone, 'row')} deleted")


@click.command()
@click.option("--older-than", required=True, help="Age since a job or batch ended: 30d, 12h, 8w.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@json_option
def prune(older_than: str, dry_run: bool, as_json: bool) -> None:
    """Delete jobs and batches that ended long ago, and empty batches. Unfinished ones are never deleted.

    A submitted file is deleted as a whole, by the time at which its last row ended; other jobs one by one.
    Rows are deleted in groups, so that workers continue meanwhile.

    \b
      nightmill prune --older-than 30d --dry-run
    """
    age = parse_span("--older-than", older_than)
    with Client() as client:
        done = client.prune(age, dry_run=True)
        if not dry_run:
            with progress_of("deleting", done.jobs) as update:
                done = client.prune(age, on_jobs=update)
    _say_pruned(done, dry_run, as_json)


def _say_pruned(done: Pruned, dry_run: bool, as_json: bool) -> None:
    if as_json:
        echo_json({"jobs": done.jobs, "batches": done.batches, "dry_run": dry_run})
        return
    verb = "would be deleted" if dry_run else "deleted"
    echo(f"{counted(done.jobs, 'job')} and {counted(done.batches, 'batch')} {verb}")
