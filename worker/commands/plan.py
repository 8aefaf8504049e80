"""The command `nightmill plan`: what a batch file holds and how long it takes, before the night."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING, Any

import click

from nightmill.jobs.base.hours import Hours
from nightmill.jobs.base.printable import printable
from nightmill.jobs.base.settings import Settings, parse_models
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.job_options import AT, PARAMETER_OPTIONS, given, job_options
from nightmill.jobs.commands.options import json_option
from nightmill.jobs.commands.query_options import check_named, query_options
from nightmill.jobs.commands.table_options import opened_with, table_options, taken
from nightmill.jobs.commands.terminal import LiveLine, ProgressLine, echo, echo_json
from nightmill.jobs.errors import DatabaseError, RunnerError, SettingsError
from nightmill.jobs.formats import InputFile
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.request.structured import CONSTRAINT_FIELDS
from nightmill.jobs.tables.queries import queried
from nightmill.worker.assembly.fetching import with_model_file, with_models
from nightmill.worker.assembly.options import merge_options, require_worker_extra, worker_options

if TYPE_CHECKING:
    from nightmill.worker.assembly.forecast import Forecast
    from nightmill.worker.assembly.model import OpenModel
    from nightmill.worker.assembly.together import Fit
    from nightmill.worker.commands.planning.plan import Plan
    from nightmill.worker.engine.engine import Engine

EXIT_NO_PLAN = 1
EXIT_BAD_ROWS = 3
EXIT_TOO_LATE = 4
_ROWS_PER_UPDATE = 64  # of the progress bar
_NO_GPU = "no GPU here, on which models could be loaded at once"
_FORMS = tuple(CONSTRAINT_FIELDS)
_NOT_OF_A_PLAN = ("drain_seconds", "metrics_port", "metrics_host")
_MODELS_OPTION = click.Option(
    ["--models"],
    metavar="MODEL,...",
    help="Models that a worker loads in turn: count their rows and loads, and check the rows "
    "[NIGHTMILL_MODELS].",
)
_TOGETHER_OPTION = click.Option(
    ["--together"],
    is_flag=True,
    default=None,
    help="With --models: say whether all fit the GPU at once, and what each gets [NIGHTMILL_TOGETHER].",
)


def _plan(
    file: str | None,
    query: str | None,
    from_url: str | None,
    as_json: bool,
    measure: bool,
    measure_seconds: float,
    **options: Any,
) -> None:
    """Say what FILE (or the rows of a --query) asks for, which rows are bad, and when it will be done.

    Reads and tokenises every row as a worker with the same options would, runs a random sample of the rows
    on this machine's runner for a few seconds, and plays the night through at that speed, for as many
    workers as serve the model now (at least one). Nothing is enqueued. Without a model
    it checks the rows only, which needs no extra: keys, types, custom_ids that come twice.

    \b
      nightmill plan prompts.jsonl
      nightmill plan prompts.jsonl --model model.gguf
      nightmill plan prompts.jsonl --model model.gguf --at 01:00 --deadline 06:00
      nightmill plan prompts.jsonl --model model.gguf --no-measure --json
      nightmill plan prompts.jsonl --models small.gguf,big.gguf --together

    \b
    Exit codes: 0  all rows can be run, and they fit before the deadline (if one is given)
                1  the plan could not be made, or models do not fit the GPU together
                2  the command line is wrong
                3  some rows cannot be run; they are listed
                4  the rows do not fit before the deadline (whether or not some are bad)
    """
    settings = merge_options(Settings.from_env(), options)
    table = taken(options)
    said = given({name: options.pop(name) for name in (*PARAMETER_OPTIONS, *_FORMS, AT, "deadline")})
    starts_at, deadline_at = said.pop(AT, None), said.pop("deadline", None)
    if deadline_at is not None and not measure:
        raise SettingsError(
            "--deadline: whether it is met is only known by measuring; leave out --no-measure"
        )
    if settings.model is None or settings.models is not None:
        if deadline_at is not None:
            raise SettingsError(
                "--deadline: whether it is met is only known by measuring: give --model FILE or "
                "set NIGHTMILL_MODEL"
            )
        models: tuple[str, ...] = ()
        fits: list[Fit] | None = None
        if settings.models is not None:
            require_worker_extra("plan --models")
            settings = with_models(settings, show=not as_json)
            models = tuple(str(name) for name, _ in parse_models(str(settings.models)))
            fits = _fits(settings) if settings.together else None
        elif settings.together:
            raise SettingsError("--together: name the models, --models a.gguf,b.gguf")
        with _input(file, query, from_url, settings, said | table) as source:
            _check_rows(source, JobSpec.defaults(said), as_json, models, fits)
        return
    require_worker_extra("plan")
    settings = with_model_file(settings, show=not as_json)
    with _input(file, query, from_url, settings, said | table) as source:
        plan = _make(
            source,
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

        echo("\n".join(describe_plan(plan, settings.price_per_kwh)))
    if plan.estimate is not None and plan.estimate.fits is False:
        raise SystemExit(EXIT_TOO_LATE)
    if plan.survey.bad:
        raise SystemExit(EXIT_BAD_ROWS)


plan = click.Command(
    "plan",
    callback=_plan,
    params=[
        click.Argument(["file"], metavar="[FILE]", required=False),
        *(option for option in worker_options() if option.name not in _NOT_OF_A_PLAN),
        _MODELS_OPTION,
        _TOGETHER_OPTION,
        click.Option(
            ["--pretend", "pretend_device"],
            metavar="CARD",
            help="Say what fits this card, such as rtx4090, with --no-measure also where there is no GPU "
            "[NIGHTMILL_PRETEND_DEVICE].",
        ),
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
query_options(plan)
table_options(plan)
job_options(AT, "deadline", *PARAMETER_OPTIONS, *_FORMS)(plan)
json_option(plan)


def _input(
    file: str | None, query: str | None, url: str | None, settings: Settings, said: Mapping[str, Any]
) -> AbstractContextManager[InputFile]:
    """Provide the file, or the rows of the query."""
    opened = opened_with(said)
    check_named(file, query, url)
    if query is None:
        return nullcontext(opened(str(file)))
    return queried(query, str(url), most=settings.spool_bytes, opened=opened)


def _fits(settings: Settings) -> "list[Fit]":
    """Find whether the models fit the GPU at once; none without a GPU."""
    from nightmill.worker.commands.together import cards_for, fit_together

    return [fit_together(settings, card) for card in cards_for(settings)]


def _check_rows(
    file: InputFile, defaults: JobSpec, as_json: bool, models: Sequence[str], fits: "list[Fit] | None"
) -> None:
    """Check all of a file that needs no model; exits with EXIT_BAD_ROWS if there are bad rows, and with
    EXIT_NO_PLAN if models that are to be loaded at once do not fit.

    models  those that a worker loads, whose loads are counted
    fits    whether they fit the GPU at once; None: they are loaded in turn
    """
    from nightmill.worker.commands.planning.rows import check_rows, describe_checked
    from nightmill.worker.commands.together import describe_fit, fit_as_json

    live = LiveLine(ProgressLine(name="reading", total=file.size), show=not as_json, estimate=True)
    with live:
        found = check_rows(file, defaults, _showing(live, file), models)
    if as_json:
        echo_json(
            found.as_json() | ({} if fits is None else {"together": [fit_as_json(fit) for fit in fits]})
        )
    else:
        echo("\n".join(describe_checked(found)))
        for said in () if fits is None else [describe_fit(fit) for fit in fits] or [_NO_GPU]:
            echo(f"together       {printable(said, 2000)}")
    if any(not fit.fits for fit in fits or ()):
        raise SystemExit(EXIT_NO_PLAN)
    if found.bad:
        raise SystemExit(EXIT_BAD_ROWS)


def _showing(live: LiveLine, file: InputFile) -> Callable[[], None]:
    """Make the function that moves a progress bar, to be called after each row."""
    rows = count(1)

    def on_row() -> None:
        if next(rows) % _ROWS_PER_UPDATE == 0:
            share = f"{file.position / max(file.size, 1):.0%}"
            live.update(replace(live.line, done=file.position, count=share))

    return on_row


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
    from nightmill.worker.assembly.engine import build_engine
    from nightmill.worker.assembly.model import load_model
    from nightmill.worker.assembly.sizes import PAGE_SIZE, context_length
    from nightmill.worker.commands.planning.plan import Measuring, PlannedModel, Schedule, make_plan
    from nightmill.worker.engine.limits import RequestLimits

    model = load_model(settings)
    card, memory = _memory(settings, model)
    engine = None
    if measure_seconds:
        try:
            engine = build_engine(settings, model)
        except RunnerError as error:
            raise RunnerError(
                f"the speed cannot be measured (--no-measure plans without): {error}"
            ) from error
    live = LiveLine(
        ProgressLine(name="reading and tokenising", total=file.size), show=not quiet, estimate=True
    )

    def on_measure() -> None:
        live.update(ProgressLine(name="measuring the speed"))

    with Client(settings) as client:
        workers = live_workers(client, model.name)
    try:
        with live:
            return make_plan(
                file,
                PlannedModel(
                    name=model.name,
                    reader=model,
                    limits=RequestLimits(
                        vocab=model.spec.vocab,
                        context=context_length(settings, model.spec),
                        page_size=PAGE_SIZE,
                        model_context=model.spec.context_length,
                        pages=None if engine is None else engine.stats.cache_tokens // PAGE_SIZE,
                    ),
                    slots=_slots(settings, model, memory, engine),
                    memory=memory,
                    card=card,
                ),
                Schedule(
                    now=lambda: datetime.now(UTC),
                    starts_at=starts_at,
                    deadline_at=deadline_at,
                    workers=workers,
                    hours=None if settings.hours is None else Hours.parse(settings.hours),
                ),
                measuring=None if engine is None else Measuring(engine, measure_seconds),
                defaults=defaults,
                on_row=_showing(live, file),
                on_measure=on_measure,
            )
    finally:
        model.close()
        if engine is not None:
            engine.close()


def _memory(settings: Settings, model: "OpenModel") -> "tuple[str | None, Forecast | None]":
    """The name of the GPU that would run the model, and how its memory is shared out.

    Both are None without one, the second also where the model does not fit. A pretended card need not be
    there.
    """
    from nightmill.worker.assembly.forecast import card_here, card_of, forecast
    from nightmill.worker.assembly.sizes import gpu_index, precision_of
    from nightmill.worker.runners.gpu.device.known_cards import known_card

    gpu, pretended = gpu_index(settings), known_card(settings.pretend_device)
    card = None if gpu is None else card_here(gpu, pretended)
    if card is None and pretended is not None and not settings.reference:
        card = card_of(pretended)
    if card is None:
        return None, None
    try:
        return card.name, forecast(model.spec, card, settings, precision_of(settings, model.file, model.spec))
    except RunnerError as error:
        if gpu is not None:  # whoever builds an engine hears why
            return card.name, None
        raise RunnerError(f"{card.name}: {error}") from error


def _slots(settings: Settings, model: "OpenModel", memory: "Forecast | None", engine: "Engine | None") -> int:
    """Rows that a worker runs at once: those of the engine, else those that are forecast."""
    from nightmill.worker.assembly.sizes import max_sequences
    from nightmill.worker.runners.reference import choose_slots

    if engine is not None:
        return engine.stats.sequences
    return choose_slots(model.spec, max_sequences(settings)) if memory is None else memory.slots


def live_workers(client: Client, model: str) -> int:
    """Workers that serve the model; 1 if there is none, or no database to ask."""
    try:
        return max(1, len(client.worker_store.serving(model)))
    except DatabaseError:
        return 1
