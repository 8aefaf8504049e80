"""The command worker of `nightmill`.

What it needs is imported when it runs, so that the other commands stay quick.
"""

import os
import sys
from typing import Any

import click

from nightmill.jobs.base.settings import PREFIX, Settings
from nightmill.jobs.commands.options import LOG_FORMAT
from nightmill.worker.assembly.fetching import with_model_file
from nightmill.worker.assembly.options import (
    as_arguments,
    merge_options,
    require_worker_extra,
    worker_id_option,
    worker_options,
)
from nightmill.worker.commands.process import END_WITH_STDIN, end_with_stdin


def _worker(
    log_level: str, log_format: str | None, end_with_parent: bool, worker_id: str | None, **options: Any
) -> None:
    """Serve a model: take jobs from the queue, generate, write the results.

    Runs until SIGTERM or Ctrl-C; then it finishes what it can within --drain-seconds, and hands the rest
    back to the queue. A second Ctrl-C ends it at once; other workers then take over its jobs.

    \b
      nightmill worker --model qwen2.5-0.5b-instruct-q8_0.gguf
      nightmill worker --model hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0
      nightmill worker --model big.gguf --name big --max-sequences 64

    It is the same worker as `celery -A nightmill.worker.app worker --pool=threads --model FILE`.
    """
    require_worker_extra("worker")
    if log_format is not None:  # Celery's logs are set up by what the environment says
        os.environ[f"{PREFIX}LOG_FORMAT"] = log_format
    settings = merge_options(Settings.from_env(), options)  # refuses bad settings before anything is loaded
    if settings.log_format == "json":  # Celery greets and takes its leave on standard output, in plain words
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if end_with_parent:
        end_with_stdin()
    if isinstance(settings.model, str):  # a name: fetched here, where there is a terminal for the progress
        options["model"] = with_model_file(settings).model
    # The `celery` command would import the working folder's modules first, and a shell for its users, which
    # takes as long as the rest of Celery.
    from celery.bin.base import CLIContext
    from celery.bin.worker import worker as celery_worker

    from nightmill.worker.app import app

    celery_worker.params.extend(app.user_options["worker"])
    arguments = ["--pool=threads", f"--loglevel={log_level}", *as_arguments(options)]
    if worker_id is not None:
        arguments += ["--id", worker_id]
    context = CLIContext(app, no_color=bool(os.environ.get("NO_COLOR")), workdir=None, quiet=True)
    # `app.start` would forget the exit code.
    code = celery_worker.main(arguments, "celery worker", obj=context, standalone_mode=False)
    raise SystemExit(code)


worker = click.Command(
    "worker",
    callback=_worker,
    params=[
        *worker_options(),
        click.Option(
            ["--log-level"],
            type=click.Choice(["debug", "info", "warning", "error"]),
            default="info",
            show_default=True,
            help="How much to log.",
        ),
        click.Option(["--log-format"], **LOG_FORMAT),
        worker_id_option(),
        click.Option(
            [END_WITH_STDIN, "end_with_parent"],
            is_flag=True,
            help="Drain and end when standard input ends: with the process that holds its other end.",
        ),
    ],
    help=_worker.__doc__,
    short_help="Serve a model: take jobs from the queue, generate, write the results.",
)
