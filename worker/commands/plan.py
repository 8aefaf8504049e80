"""The command `nightmill plan`: what a batch file holds and how long it takes, before the night."""

from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING, Any

import click

from nightmill.jobs.client import Client
from nightmill.jobs.commands.job_options import AT, PARAMETER_OPTIONS, given, job_options
from nightmill.jobs.commands.options import json_option
from nightmill.jobs.commands.terminal import Line, LiveLine, echo, echo_json
from nightmill.jobs.errors import DatabaseError, RunnerError, SettingsError
from nightmill.jobs.formats import InputFile
from nightmill.jobs.settings import Settings
from nightmill.jobs.spec import JobSpec
from nightmill.worker.fetching import with_model_file
from nightmill.worker.options import merge_options, require_worker_extra, worker_options

if TYPE_CHECKING:
    from nightmill.worker.commands.fitting import Fit
    from nightmill.worker.commands.planning.plan import Plan
    from nightmill.worker.link.loading import OpenModel

EXIT_BAD_ROWS = 3
EXIT_TOO_LATE = 4
_ROWS_PER_UPDATE = 64  # of the progress bar
_NOT_OF_A_PLAN = ("drain_seconds", "metrics_port", "metrics_host")


def _plan(
    file: str,
    as_json: bool,
    measure: bool,
    measure_seconds: float,
    **options: Any,
) -> None:
    """Say what FILE asks for, which of its rows are bad, and when it will be done.

    Reads and tokenises every row as a worker with the same options would, runs a random sample of the rows
    on this machine's runner for a few seconds, and plays the night through at that speed, for as many
    workers as serve the model now (at least one). Nothing is enqueued.

    \b
      nightmill plan prompts.jsonl --model model.gguf
      nightmill plan prompts.jsonl --model model.gguf --at 01:00 --deadline 06:00
      nightmill plan prompts.jsonl --model model.gguf --no-measure --json

    \b
    Exit codes: 0  all rows can be run, and they fit before the deadline (if one is given)
                1  the plan could not be made
                2  the command line is wrong
                3  some rows cannot be run; they are listed
                4  the rows do not fit before the deadline (whether or not some are bad)
    """
    require_worker_extra("plan")
    settings = with_model_file(merge_options(Settings.from_env(), options), show=not as_json)
    said = given({name: options.pop(name) for name in (*PARAMETER_OPTIONS, AT, "deadline")})
    starts_at, deadline_at = said.pop(AT, None), said.pop("deadline", None)
    if deadline_at is not None and not measure:
        raise SettingsError(
            "--deadline: whether it is met is only known by measuring; leave out --no-measure"
        )
    plan = _make(
        InputFile(file),
        settings,
        measure_seconds=measure_seconds if measure else 0.0,
        starts_at=starts_at,
        deadline_at=deadline_at,
        defaults=JobSpec.defaults(said),
        quiet=as_json,
    )
    if as_json:
        echo_json(plan.as_json())
    else:
        from nightmill.worker.commands.planning.report import describe_plan

        echo("\n".join(describe_plan(plan)))
    if plan.estimate is not None and plan.estimate.fits is False:
        raise SystemExit(EXIT_TOO_LATE)
    if plan.survey.bad:
        raise SystemExit(EXIT_BAD_ROWS)


plan = click.Command(
    "plan",
    callback=_plan,
    params=[
        click.Argument(["file"], metavar="FILE"),
        *(option for option in worker_options() if option.name not in _NOT_OF_A_PLAN),
        click.Option(["--measure/--no-measure"], default=True, help="Without: no estimate, and no GPU used."),
        click.Option(
            ["--measure-seconds"],
            type=click.FloatRange(0, min_open=True),
            default=10.0,
            show_default=True,
            help="Measure for so long at most.",
        ),
    ],
    help=_plan.__doc__,
    short_help="Say what a batch file asks for, which rows are bad, and when it will be done.",
)
job_options(AT, "deadline", *PARAMETER_OPTIONS)(plan)
json_option(plan)


def _make(
    file: InputFile,
    settings: Settings,
    *,
    measure_seconds: float,
    starts_at: datetime | None,
    deadline_at: datetime | None,
    defaults: JobSpec,
    quiet: bool,
) -> "Plan":
    """The plan, made under a progress bar. With `measure_seconds` of 0 no engine is built."""
    from nightmill.worker.commands.planning.plan import make_plan
    from nightmill.worker.engine.limits import Limits
    from nightmill.worker.link.loading import (
        BLOCK_SIZE,
        build_engine,
        context_length,
        load_model,
        max_sequences,
    )

    model = load_model(settings)
    memory = _memory(settings, model)
    engine = None
    if measure_seconds:
        try:
            engine = build_engine(settings, model)
        except RunnerError as error:
            raise RunnerError(
                f"the speed cannot be measured (--no-measure plans without): {error}"
            ) from error
    live = LiveLine(Line(name="reading and tokenising", total=file.size), show=not quiet, estimate=True)
    rows = count(1)

    def on_row() -> None:
        if next(rows) % _ROWS_PER_UPDATE == 0:
            share = f"{file.position / max(file.size, 1):.0%}"
            live.update(replace(live.line, done=file.position, count=share))

    def on_measure() -> None:
        live.update(Line(name="measuring the speed"))

    with Client(settings) as client:
        workers = live_workers(client, model.name)
    try:
        with live:
            return make_plan(
                file,
                model.encode,
                Limits(
                    vocab=model.spec.vocab,
                    context=context_length(settings, model.spec),
                    block_size=BLOCK_SIZE,
                    model_context=model.spec.context_length,
                    pages=None if engine is None else engine.stats.pages,
                ),
                model=model.name,
                slots=max_sequences(settings),
                engine=engine,
                memory=memory,
                measure_seconds=measure_seconds,
                workers=workers,
                now=lambda: datetime.now(UTC),
                starts_at=starts_at,
                deadline_at=deadline_at,
                defaults=defaults,
                on_row=on_row,
                on_measure=on_measure,
            )
    finally:
        model.close()
        if engine is not None:
            engine.close()


def _memory(settings: Settings, model: "OpenModel") -> "Fit | None":
    """What of the model fits the GPU that it would be run on; None where that is none, or it does not."""
    from nightmill.worker.commands.fitting import card_here, fit
    from nightmill.worker.link.loading import gpu_index, numbers_of

    gpu = gpu_index(settings)
    card = None if gpu is None else card_here(gpu)
    try:
        if card is not None:
            return fit(model.spec, card, settings, numbers_of(settings, model.file, model.spec))
    except RunnerError:  # whoever builds an engine hears why
        return None
    return None


def live_workers(client: Client, model: str) -> int:
    """Workers that serve the model; 1 if there is none, or no database to ask."""
    try:
        return max(1, len(client.serving(model)))
    except DatabaseError:
        return 1
