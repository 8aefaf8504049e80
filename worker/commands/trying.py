"""`nightmill try`: some rows of a file at random, before all of them."""

import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import click

from nightmill.jobs.base.printable import printable
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.batches.trying import MOST_ROWS, Trial, Trying
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.batches import FORMAT_OPTION
from nightmill.jobs.commands.job_options import AT, BATCH_OPTIONS, given, job_options
from nightmill.jobs.commands.options import json_option
from nightmill.jobs.commands.printing import counted, job_values
from nightmill.jobs.commands.progress import duration
from nightmill.jobs.commands.query_options import input_named, query_options
from nightmill.jobs.commands.table_options import opened_with, table_options, taken
from nightmill.jobs.commands.terminal import LiveLine, ProgressLine, echo, echo_json, to_json
from nightmill.jobs.reply.job import Job
from nightmill.worker.assembly.fetching import with_model_file
from nightmill.worker.assembly.options import WORKER_SETTINGS, merge_options, worker_options
from nightmill.worker.commands.keeper import WorkerKeeper
from nightmill.worker.commands.served_file import ServedFile, another_file

_END_OF_PROMPT = 200  # characters that are shown
_LONGEST_ANSWER = 2_000
_CHECK_SECONDS = 1.0  # between two looks at the worker


@click.command("try")
@click.argument("file", required=False)
@query_options
@click.option(
    "--rows", type=click.IntRange(1, MOST_ROWS), default=10, show_default=True, help="So many at most."
)
@click.option("--seed-of-sample", type=click.IntRange(0), help="Which rows; by default others each time.")
@FORMAT_OPTION
@table_options
@job_options(*(name for name in BATCH_OPTIONS if name not in (AT, "deadline", "priority")))
@json_option
def try_command(
    file: str | None,
    query: str | None,
    from_url: str | None,
    rows: int,
    seed_of_sample: int | None,
    format: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run some rows of FILE at random, and show their answers, before all of them.

    \b
      nightmill try reviews.csv --template "Is this good or bad? {{ review }}" --model model.gguf

    The options are those of `nightmill run`; --query takes the rows of a database. Each row is shown with the
    end of its prompt, its answer, and why that ends; then what to expect of the whole file. The rows go past
    all batches, to the worker that serves the model, or to one that is started for them; afterwards they are
    deleted. Without --model any worker that runs will do.
    """
    from nightmill.worker.assembly.options import require_worker_extra

    worker_settings = {key: options.pop(key, None) for key in WORKER_SETTINGS}
    settings = merge_options(Settings.from_env(), worker_settings)
    said = given(options) | taken(options)
    opened = opened_with(said)
    with ExitStack() as stack:
        source = stack.enter_context(
            input_named(file, query, from_url, format, most=settings.spool_bytes, opened=opened)
        )
        keeper: WorkerKeeper | None = None
        if settings.model is not None:
            require_worker_extra("try")
            from nightmill.worker.assembly.model import model_path, served_name
            from nightmill.worker.model.gguf.file import GgufFile

            settings = with_model_file(settings, show=not as_json)
            model_file = GgufFile.open(model_path(settings))  # refuses a bad one before anything is queued
            said["model"] = served_name(settings)
        client = stack.enter_context(Client(settings))
        if settings.model is not None:
            served = ServedFile(client, model_file.digest(), said["model"])
            if (other := served.other_under(said["model"])) is not None:
                raise another_file(said["model"], other, "NIGHTMILL_MODEL_NAME")
            keeper = WorkerKeeper(client, said["model"])
            stack.callback(keeper.close)
        line = stack.enter_context(LiveLine(ProgressLine(name=f"trying {rows} rows"), show=not as_json))
        trial = Trying(client.database, client.enqueueing.enqueue_specs).run(
            source,
            said,
            rows=rows,
            seed=seed_of_sample,
            timeout=None,
            on_wait=_Keeping(keeper, line, rows),
        )
    if as_json:
        echo_json(_values(trial))
        return
    for job in trial.jobs:
        _show(job)
    for text in _summary(trial):
        echo(text)


try_command.params += [option for option in worker_options() if option.name != "model_name"]


class _Keeping:
    """Keeps a worker while rows are waited for, and says what goes on."""

    def __init__(self, keeper: WorkerKeeper | None, line: LiveLine, rows: int) -> None:
        self._keeper = keeper
        self._line = line
        self._rows = rows
        self._next = 0.0

    def __call__(self, done: int) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _CHECK_SECONDS
        note = "" if self._keeper is None else self._keeper.check(done)
        self._line.update(ProgressLine(name="trying", done=done, total=self._rows, note=note))


def _show(job: Job) -> None:
    tokens = f"{job.prompt_tokens or 0} + {job.completion_tokens or 0} tokens"
    echo(f"row {job.row:,}  {job.stop_reason}, {tokens}")
    echo(f"  prompt  ...{printable(_end_of_prompt(job), _END_OF_PROMPT)}")
    if job.error:
        echo(f"  error   {printable(job.error)}")
    if job.reasoning:
        echo(f"  thought {printable(job.reasoning, _END_OF_PROMPT)}")
    for answer in job.replies if job.answers else ():
        echo(f"  answer  {printable(answer.content, _LONGEST_ANSWER)}")
    if job.parsed is not None:
        echo(f"  parsed  {printable(to_json(job.parsed), _LONGEST_ANSWER)}")


def _end_of_prompt(job: Job) -> str:
    if job.messages is not None:
        return str(job.messages[-1]["content"])[-_END_OF_PROMPT:]
    return job.prompt[-_END_OF_PROMPT:] if job.prompt is not None else f"token ids {job.prompt_ids}"


def _summary(trial: Trial) -> list[str]:
    lines = [f"{counted(len(trial.jobs), 'row')}, chosen by --seed-of-sample {trial.seed}"]
    if trial.many_cut:
        lines.append(
            f"warning: {trial.cut} of {len(trial.jobs)} answers were cut: give more tokens (--max-tokens)"
        )
    read, written = trial.tokens_of_all()
    lines.append(
        f"the whole file: {counted(trial.good, 'row')} that can be run, about {read:,} tokens to read and "
        f"{written:,} to write"
    )
    if trial.jobs and trial.seconds:
        seconds = trial.seconds * trial.good / len(trial.jobs)
        lines.append(
            f"at the speed of these {len(trial.jobs)} at most {duration(seconds)}; many at once are faster: "
            "nightmill plan measures how much"
        )
    if trial.first_error is not None:
        number, error = trial.first_error
        lines.append(f"{counted(trial.bad, 'row')} cannot be run; first row {number:,}: {error.message}")
    return lines


def _values(trial: Trial) -> dict[str, Any]:
    read, written = trial.tokens_of_all()
    error = trial.first_error
    return {
        "seed": trial.seed,
        "rows": [job_values(job) | {"parsed": job.parsed} for job in trial.jobs],
        "cut": trial.cut,
        "seconds": trial.seconds,
        "good": trial.good,
        "bad": trial.bad,
        "first_error": None if error is None else {"row": error[0], **asdict(error[1])},
        "expected_tokens": {"prompt": read, "completion": written},
    }
