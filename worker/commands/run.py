"""`nightmill run`: a file of prompts into a file of results, whatever happens in between."""

import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any, Self

import click

from nightmill.jobs.base.last_resort import LastResort
from nightmill.jobs.base.logs import LogFormat
from nightmill.jobs.base.printable import printable
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.batches.result_files import destinations
from nightmill.jobs.batches.streaming import ResultStream
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.batches import EXIT_CODES, FORMAT_OPTION, say_times, submitting
from nightmill.jobs.commands.job_options import AT, BATCH_OPTIONS, given, job_options
from nightmill.jobs.commands.limit_options import limit_options, limits_taken
from nightmill.jobs.commands.on_end import on_end_options, run_on_end, words_of
from nightmill.jobs.commands.options import INTERRUPTED, LOG_FORMAT, json_option
from nightmill.jobs.commands.printing import as_argument, counted, describe_status
from nightmill.jobs.commands.progress import BatchProgress, log_of_command, logged_errors
from nightmill.jobs.commands.query_options import (
    AFTER_OPTION,
    check_alone,
    check_named,
    input_named,
    query_options,
)
from nightmill.jobs.commands.table_options import opened_with, table_options, taken
from nightmill.jobs.commands.terminal import echo, echo_err, echo_json
from nightmill.jobs.commands.writing import INTO_OPTION
from nightmill.jobs.errors import (
    BatchFileUnavailableError,
    DatabaseError,
    DatabaseUnreachableError,
    SettingsError,
)
from nightmill.jobs.formats import InputFile
from nightmill.jobs.formats.places import STANDARD, brought_to, check_apart, errors_name
from nightmill.jobs.reply.batch_status import BatchStatus, status_values
from nightmill.jobs.request.limits import without_limits
from nightmill.jobs.tables.following import FollowingRows
from nightmill.jobs.tables.into import UsersTable
from nightmill.jobs.tables.layout import layout_in_database
from nightmill.jobs.tables.options import TableOptions
from nightmill.jobs.tables.reading import TableFile
from nightmill.worker.assembly.fetching import with_model_file
from nightmill.worker.assembly.options import WORKER_SETTINGS, as_arguments, merge_options, worker_options
from nightmill.worker.commands.keeper import WorkerKeeper
from nightmill.worker.commands.served_file import ServedFile

POLL_SECONDS = 0.5
_FINISH_SECONDS = 5.0  # between two tries to put results in order
_END_SECONDS = 15.0  # after the worker's own end
_MOST_SHOWN = 3  # of the models that rows name
_POLL_SHARE = 10  # look at a huge batch a tenth of the time at most
_HEARD = frozenset({"model", "model_name", "gpu", "reference"})
"""The options that choose a running worker; other options of a worker are for one that is started."""


@click.command()
@click.argument("file", required=False)
@query_options
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="File for the results, or -. Its ending says the format; OpenAI's rows have theirs.",
)
@click.option(
    "--errors",
    metavar="FILE",
    help="File for the rows that failed; by default OUTPUT with .errors before its ending.",
)
@FORMAT_OPTION
@INTO_OPTION
@AFTER_OPTION
@click.option("--name", help="Name of the batch; by default made of the file, the model and the parameters.")
@click.option("--retry-failed", is_flag=True, help="Try rows again that failed in an earlier run.")
@click.option("--overwrite", is_flag=True, help="Replace OUTPUT even if it holds something else.")
@table_options
@on_end_options
@limit_options
@click.option("--log-format", **LOG_FORMAT)
@job_options(*(name for name in BATCH_OPTIONS if name != AT))
@json_option
def run(
    file: str | None,
    query: str | None,
    from_url: str | None,
    output: str | None,
    into: str | None,
    errors: str | None,
    format: str | None,
    name: str | None,
    retry_failed: bool,
    overwrite: bool,
    on_end: str | None,
    on_end_seconds: float,
    webhook: str | None,
    log_format: LogFormat | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Generate for every row of FILE, and write the results to OUTPUT.

    \b
      nightmill run prompts.jsonl -o results.jsonl --model model.gguf

    Rows are OpenAI batch rows, plain JSONL, CSV or Parquet; a bad one fails alone. The model given here
    answers every row, also one that names another. With --template FILE is any table (also TSV and Arrow),
    and OUTPUT a table of its columns and the answers, in the format that its name ends in (docs/tables.md):

    \b
      nightmill run reviews.csv -o labelled.csv --template "Is this good or bad? {{ review }}" \\
          --column label --choice good --choice bad --model model.gguf

    A worker is started unless one serves the model already,
    on the GPU that --gpu names, or with NumPy for --reference.
    Results are appended to OUTPUT as they finish, and put in the order of FILE at the end. Killed at any
    moment and run again, the same command goes on where it stood: rows that are done are not done again.

    \b
      cat prompts.jsonl | nightmill run - -o - --model model.gguf | jq -r .text
      nightmill run prompts.jsonl -o results.jsonl --on-end "mail -s done me@example.org"

    With - for FILE the rows are those of standard input. The same rows again go on as those of the same file
    would. With - for OUTPUT the results come at the end, in the order of FILE, and all else goes to standard
    error, with no file of errors unless --errors names one. FILE may also be a folder of files, a pattern
    such as 'rows/*.parquet', or at s3://, gs://, hf:// or https://, and OUTPUT at s3:// or gs://, where it
    appears at the end. --query takes the rows of a database, --after a row behind each of a batch, and --into
    writes results into a table. The command of --on-end reads the status as JSON; whatever becomes of it, the
    results and the exit code stay as they are.

    Ctrl-C once drains: running rows may finish, or go back to the queue. Twice hands them back at once.

    \b
    Exit codes:
      0    every row succeeded
      1    an error stopped the command; it says which
      2    wrong usage
      3    some rows failed (completed_with_errors); the error file has them
      4    no row succeeded
      5    the deadline or a budget ended rows (expired)
      6    the batch was cancelled
      130  interrupted; the same command goes on
    """
    from nightmill.worker.assembly.options import require_worker_extra

    require_worker_extra("run")
    from nightmill.worker.assembly.model import model_path, served_name
    from nightmill.worker.model.gguf.file import GgufFile

    if options["after"] is None:
        check_named(file, query, from_url)
    else:
        check_alone(file, query, from_url, format)
    if output is None and into is None:
        raise click.UsageError("name a file for the results (-o FILE), or a table (--into URL#TABLE)")
    table_of_results = None if into is None else UsersTable(into)
    at_end = None if on_end is None else words_of(on_end)
    renamed = options.pop("renamed", {})  # by `nightmill embed`, which has no template
    worker_settings = {key: options.pop(key, None) for key in WORKER_SETTINGS}
    settings = merge_options(Settings.from_env(), worker_settings)
    if log_format is not None:
        settings = settings.model_copy(update={"log_format": log_format})
    log = log_of_command(settings)
    with logged_errors(log, renamed):
        if settings.model is None:
            raise SettingsError("no model file is named: give --model FILE or set NIGHTMILL_MODEL")
        settings = with_model_file(settings, show=log is None)
        model_file = GgufFile.open(model_path(settings))  # refuses a bad one before anything is queued
        model = served_name(settings)
        table, limits = taken(options), limits_taken(options)
        rows = given(options) | table | {"model": model}
        opened = opened_with(rows)  # which checks the template
        rows |= limits
        errors = errors or (None if output is None else errors_name(output))
        if output is not None:
            check_apart(file or "", output, errors)
        say = echo_err if log is None else log.info
        with ExitStack() as stack:
            given_rows: AbstractContextManager[InputFile | FollowingRows] = (
                _following(settings, rows)
                if "after" in rows
                else input_named(file, query, from_url, format, most=settings.spool_bytes, opened=opened)
            )
            source = stack.enter_context(given_rows)
            with Client(settings) as client:
                served = ServedFile(client, model_file.digest(), model)
                if settings.model_name is None:
                    rows["model"], name = served.name_for(source, rows, name)
                served.check_name(rows["model"], source, rows, name)
            if rows["model"] != model:
                model = rows["model"]
                say(f"a worker serves this file as {printable(model)!r}: the rows are for that model")
                settings = settings.model_copy(update={"model_name": model})
            client = stack.enter_context(Client(settings))
            places = [
                stack.enter_context(brought_to(place, source.format, most=settings.spool_bytes))
                for place in (output, errors)
            ]
            if table_of_results is not None:
                shape = source.table.shape if isinstance(source, TableFile | FollowingRows) else None
                table_of_results.check(layout_in_database(shape))
            outputs = stack.enter_context(destinations(source, *places, overwrite=overwrite))
            with submitting(source, show=log is None) as on_rows:
                batch = client.batches.submit(
                    source,
                    rows,
                    name=name,
                    check_model=lambda _: None,  # a worker for it is about to be started
                    outputs=outputs,
                    on_rows=on_rows,
                    on_entered=client.courier.webhook_of(webhook),
                )
            if batch.renamed:
                say(_renamed_note(source.label, batch.renamed, model))
            if retry_failed:
                batch.retry_failed(deadline=rows.get("deadline"))
            say_times(batch.status(errors=False), rows, say)
            keeper = WorkerKeeper(client, model)
            stack.callback(keeper.close)
            unheard = as_arguments({name: worker_settings[name] for name in WORKER_SETTINGS - _HEARD})
            if unheard and keeper.served:
                say(
                    "a worker that is there already serves the model, as it was started; for one that this "
                    f"command starts are {' '.join(unheard)}"
                )
            stream = stack.enter_context(ResultStream(batch, *outputs))
            status = _follow(batch, stream, keeper, log)
            if status.state.final:
                _finish(stream, say)
                for place in places:
                    place.deliver()
                if into is not None:
                    batch.write_into(into)
                with suppress(DatabaseError):  # our worker ends with us, but others try again
                    client.courier.look(batch.name)
        summary = status_values(status)
        if status.state.final and at_end is not None:
            code = run_on_end(at_end, status, on_end_seconds, say, results=output, errors=errors)
            summary["on_end"] = {"exit_code": code}
    piped = output == STANDARD
    if as_json:
        echo_json(summary, err=piped)
    else:
        echo(describe_status(status, client.settings.price_per_kwh), err=piped)
        written, failed = (printable(place.label) for place in places)
        if errors is None:
            failed = f"nightmill batch errors {as_argument(batch.name)} -o FILE"
        if table_of_results is not None:
            written = ", ".join([*([] if output is None else [written]), printable(table_of_results.label)])
        echo(f"Results: {written}; errors: {failed}", err=piped)
    raise SystemExit(EXIT_CODES[status.state] if status.state.final else INTERRUPTED)


@contextmanager
def _following(settings: Settings, rows: Mapping[str, Any]) -> Iterator[FollowingRows]:
    """Provide the rows that follow those of the batch --after."""
    options = TableOptions.of(without_limits(rows))
    assert options is not None and options.after is not None
    with Client(settings) as client:
        yield FollowingRows(client.batches.store, options)


# `--name` names the batch here, so the model's name has another option than that of `nightmill worker`.
_MODEL_NAME = click.Option(
    ["--model-name"], help="What jobs call the model; by default the file's name without .gguf."
)
run.params += [_MODEL_NAME if option.name == "model_name" else option for option in worker_options()]


def _renamed_note(file: str, renamed: Mapping[str, int], model: str) -> str:
    """Say how many rows name other models, and that this model answers them."""
    names = sorted(renamed, key=lambda name: -renamed[name])
    shown = ", ".join(repr(printable(name, 80)) for name in names[:_MOST_SHOWN])
    more = ", ..." if len(names) > _MOST_SHOWN else ""
    return (
        f"{counted(sum(renamed.values()), 'row')} of {printable(file)} name another model ({shown}{more}); "
        f"{printable(model)!r} answers them all the same"
    )


def _follow(
    batch: Batch, stream: ResultStream, keeper: WorkerKeeper, log: logging.Logger | None
) -> BatchStatus:
    """Keep the model served and the results flowing until the batch has ended, or a person has enough."""
    note = complaint = ""
    asked = 0
    # First the worker ends, or is ended by force, then this process.
    seconds = keeper.end_seconds + _END_SECONDS
    with (
        _Interrupts() as interrupts,
        LastResort(lambda: interrupts.count > 0, seconds, what="run"),
        BatchProgress(batch.name, log=log) as bar,
    ):
        while True:
            began = time.monotonic()
            if interrupts.count > asked:
                asked = interrupts.count
                note = keeper.end(at_once=asked > 1)
                bar.say(f"{note}; the same command goes on later")
            try:
                status = batch.status(errors=False)
                full = _update(stream)
                bar.show(status, note)
                if (status.state.final and not full) or (asked and keeper.ended):
                    return batch.status()
                if not asked and not status.state.final:
                    note = keeper.check(status.done)
                if full and full != complaint:
                    bar.say(f"waiting: {full}")
                complaint = full
            except DatabaseUnreachableError as error:  # a night is long: go on when it is back
                if asked and keeper.ended:
                    raise
                if str(error) != complaint:
                    complaint = str(error)
                    bar.say(f"waiting: {error}")
            interrupts.pause(max(POLL_SECONDS, _POLL_SHARE * (time.monotonic() - began)))


def _update(stream: ResultStream) -> str:
    """Append what has finished; why it has to wait, as on a disk that is full, or nothing."""
    try:
        stream.update()
    except BatchFileUnavailableError as error:
        return str(error)
    return ""


def _finish(stream: ResultStream, say: Callable[[str], object]) -> None:
    """Put the results in order, once the database answers and there is room for what must be written."""
    complaint = ""
    while True:
        try:
            stream.finish()
        except (BatchFileUnavailableError, DatabaseUnreachableError) as error:
            if str(error) != complaint:
                complaint = str(error)
                say(f"waiting: {error}")
            time.sleep(_FINISH_SECONDS)
            continue
        if not stream.in_order:
            say(
                "the disk has no room to put the results in the order of the input: they are complete, in "
                "the order in which rows ended; the same command puts them in order once there is room"
            )
        return


class _Interrupts:
    """Counts Ctrl-C and SIGTERM in place of being ended by them."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[signal.Signals, Any] = {}

    def pause(self, seconds: float) -> None:
        """Sleep, but not on when there is an interrupt."""
        count, until = self.count, time.monotonic() + seconds
        while self.count == count and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
