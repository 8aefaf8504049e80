"""The command worker of `nightmill`.

What it needs is imported when it runs, so that the other commands stay quick.
"""

import logging
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import click

from nightmill.jobs.base.hours import Hours
from nightmill.jobs.base.importing import imports
from nightmill.jobs.base.logs import fit
from nightmill.jobs.base.settings import PREFIX, Settings, parse_models
from nightmill.jobs.commands.options import LOG_FORMAT, CommandGroup
from nightmill.jobs.commands.terminal import echo
from nightmill.jobs.errors import SettingsError
from nightmill.worker.assembly.fetching import (
    check_files,
    settings_of_turn,
    with_model_file,
    with_models,
)
from nightmill.worker.assembly.options import (
    ENGINE,
    GROUP,
    LEDGER,
    TURN,
    WOKEN,
    as_arguments,
    merge_options,
    process_options,
    require_worker_extra,
    turn_options,
    worker_options,
)
from nightmill.worker.service.parent import END_WITH_STDIN, end_with_stdin

ALL_GPUS = "all"
"""The value of --gpu for a worker on each."""


def _worker(
    log_level: str,
    log_format: str | None,
    end_with_parent: bool,
    worker_id: str | None,
    **options: Any,
) -> None:
    """Serve a model: take jobs from the queue, generate, write the results.

    Runs until SIGTERM or Ctrl-C; then it finishes what it can within --drain-seconds, and hands the rest
    back to the queue. A second Ctrl-C ends it at once; other workers then take over its jobs.

    \b
      nightmill worker --model qwen2.5-0.5b-instruct-q8_0.gguf
      nightmill worker --model hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0
      nightmill worker --model big.gguf --name big --max-sequences 64
      nightmill worker --model big.gguf --hours 22:00-06:00 --idle-seconds 600
      nightmill worker --models small.gguf,big.gguf --stay 10m
      nightmill worker --models small.gguf,big.gguf --together
      nightmill worker --model big.gguf --gpu all
      nightmill worker pause all

    With --models it loads one after another, each when rows wait for it; with --together all at once, each
    in a worker of its own, if they fit the GPU's memory. Outside its --hours, and after
    --idle-seconds without jobs, it gives its GPU back and sleeps; so it does if it is paused, from any
    machine.

    It is the same worker as `celery -A nightmill.worker.app worker --pool=threads --model FILE`.
    """
    require_worker_extra("worker")
    one_of_several = options.get("group") is not None
    if options["gpu"] == ALL_GPUS:
        _supervise(log_format, worker_id, options)
    if log_format is not None:  # Celery's logs are set up by what the environment says
        os.environ[f"{PREFIX}LOG_FORMAT"] = log_format
    settings = merge_options(Settings.from_env(), options)  # refuses bad settings before anything is loaded
    if settings.log_format == "json":  # Celery greets and takes its leave on standard output, in plain words
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if end_with_parent:
        end_with_stdin()
    if settings.together and not one_of_several:
        from nightmill.worker.commands.together import serve_together

        serve_together(log_format, worker_id, options)
    if settings.models is not None:
        check_files(settings.models)
        options["models"] = with_models(settings).models
    elif isinstance(settings.model, str):  # a name: fetched here, where there is a terminal for the progress
        options["model"] = with_model_file(settings).model
    if options["engine"] is None:
        options["engine"] = _started_ahead(options, logging.getLevelName(log_level.upper()))
    # The `celery` command would import the working folder's modules first, and a shell for its users, which
    # takes as long as the rest of Celery.
    with imports():
        from celery.bin.base import CLIContext
        from celery.bin.worker import worker as celery_worker

        from nightmill.worker.app import app

    celery_worker.params.extend(app.user_options["worker"])
    arguments = ["--pool=threads", f"--loglevel={log_level}", *as_arguments(options)]
    if worker_id is not None:
        arguments += ["--id", worker_id]
    for name in (TURN, GROUP, LEDGER, ENGINE):
        if (value := options[name.removeprefix("--")]) is not None:
            arguments += [name, str(value)]
    if options["woken"]:
        arguments.append(WOKEN)
    context = CLIContext(app, no_color=bool(os.environ.get("NO_COLOR")), workdir=None, quiet=True)
    # `app.start` would forget the exit code.
    code = celery_worker.main(arguments, "celery worker", obj=context, standalone_mode=False)
    raise SystemExit(code)


def _started_ahead(options: dict[str, Any], log_level: int) -> str | None:
    """Have the engine begin to load its model while this process imports Celery, which takes as long.

    Returns the option that says which process that is; None if the worker begins with sleep, the choice of a
    model or its transfer.
    """
    from nightmill.worker.link.launching import EngineAhead  # which needs what the extra `worker` brings

    settings = merge_options(Settings.from_env(), options)
    if settings.models is not None:
        if options["turn"] not in dict(parse_models(settings.models)):
            return None
        settings = settings_of_turn(settings, options["turn"])
    closed = settings.hours is not None and not Hours.parse(settings.hours).open_at(datetime.now(UTC))
    if closed or not isinstance(settings.model, Path):
        return None
    ahead = EngineAhead.start(ledger=options["ledger"])
    ahead.begin(settings, log_level=log_level, ledger=options["ledger"])
    return ahead.hand_on()


def _supervise(log_format: str | None, worker_id: str | None, options: dict[str, Any]) -> NoReturn:
    """Run a worker on each GPU. Raises SettingsError."""
    from nightmill.worker.commands.process import end_seconds
    from nightmill.worker.commands.supervising import commands_of, supervise
    from nightmill.worker.runners.gpu.device.device import device_count

    settings = merge_options(Settings.from_env(), {**options, "gpu": None})
    if settings.together:
        raise SettingsError("--gpu all and --together: give one of them")
    if worker_id is not None:
        raise SettingsError("--id: names one worker, and --gpu all starts one for each GPU")
    if settings.reference:
        raise SettingsError("--gpu all and --reference: give one of them; the reference runner uses no GPU")
    if not (count := device_count()):
        raise SettingsError("--gpu all: no GPU can be used here; `nightmill check` says why")
    port = settings.metrics_port
    commands = commands_of([sys.executable, *sys.orig_argv[1:]], range(count), port)
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s: %(levelname)s] %(message)s")
    as_json = (log_format or settings.log_format) == "json"
    fit(logging.getLogger().handlers, "json" if as_json else "text", settings.scrubbed)
    address = None if port is None else (settings.metrics_host, port)
    raise SystemExit(supervise(commands, end_seconds(settings), as_json=as_json, address=address))


@click.pass_context
def _worker_or_more(context: click.Context, /, **options: Any) -> None:
    if context.invoked_subcommand is None:
        _worker(**options)


class _Gpu(click.ParamType[int | str]):
    """The index of a GPU, or `all`."""

    name = "INDEX|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Parse the option's value."""
        if value == ALL_GPUS:
            return ALL_GPUS
        return int(click.IntRange(0).convert(value, param, ctx))


_GPU_OPTION = click.Option(
    ["--gpu"],
    type=_Gpu(),
    metavar="INDEX|all",
    help="Index of the GPU to own [NIGHTMILL_GPU]; all: start a worker on each GPU of this machine, and "
    "again if it fails.",
)

worker = CommandGroup(
    "worker",
    callback=_worker_or_more,
    invoke_without_command=True,
    params=[
        *(_GPU_OPTION if option.name == "gpu" else option for option in worker_options()),
        *turn_options(),
        click.Option(
            ["--log-level"],
            type=click.Choice(["debug", "info", "warning", "error"]),
            default="info",
            show_default=True,
            help="How much to log.",
        ),
        click.Option(["--log-format"], **LOG_FORMAT),
        *process_options(),
        click.Option(
            [END_WITH_STDIN, "end_with_parent"],
            is_flag=True,
            help="Drain and end when standard input ends: with the process that holds its other end.",
        ),
    ],
    help=_worker.__doc__,
    short_help="Serve a model: take jobs from the queue, generate, write the results.",
)


_WORKERS = click.argument("workers", nargs=-1, required=True, metavar="ID...|all")


@worker.command()
@_WORKERS
def pause(workers: tuple[str, ...]) -> None:
    """Let workers finish what they have, free their GPUs and sleep until they are resumed.

    ID is what `nightmill stats` shows, or its beginning; of models that are loaded together, also what it
    shows for all of them. Rows that are not done within a worker's
    --drain-seconds go back to the queue, with their tokens.
    """
    _change(workers, paused=True)


@worker.command()
@_WORKERS
def resume(workers: tuple[str, ...]) -> None:
    """Let paused workers serve again, as soon as their hours allow it."""
    _change(workers, paused=False)


def _change(workers: Sequence[str], *, paused: bool) -> None:
    from nightmill.jobs.client.client import Client

    with Client() as client:
        changed = client.worker_store.pause(None if "all" in workers else workers, paused=paused)
    for one in changed:
        echo(f"{one.id[:8]}: {'paused' if paused else 'resumed'}, {one.model} on {one.host}")
    if not changed:
        echo(f"no live worker is {'to be paused' if paused else 'paused'}")
