"""The commands worker, check and demo of `nightmill`.

What they need is imported when they run, so that the other commands stay quick.
"""

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from nightmill.jobs.client import Client
from nightmill.jobs.commands.options import json_option
from nightmill.jobs.commands.printing import follow, job_values, print_job
from nightmill.jobs.commands.terminal import echo, echo_json
from nightmill.jobs.contract import Worker
from nightmill.jobs.errors import NightmillError
from nightmill.jobs.messages.embedded import EmbeddedRedis
from nightmill.jobs.printable import printable
from nightmill.jobs.settings import Settings
from nightmill.worker.commands.process import END_WITH_STDIN, end_with_stdin, running_worker
from nightmill.worker.fetching import with_model_file
from nightmill.worker.options import (
    MODEL_HELP,
    as_arguments,
    merge_options,
    missing_worker_packages,
    require_worker_extra,
    worker_id_option,
    worker_options,
)

DEMO_PROMPTS = (
    "Write a haiku about {topic} that contains the word {word}",
    "Write a haiku about {topic} that contains the word {word}.",
)
DEMO_TOPICS = ("rain", "winter", "autumn", "moon", "river", "sea", "night", "forest", "spring", "snow")
DEMO_WORDS = (
    "lantern",
    "copper",
    "harbor",
    "whisper",
    "ember",
    "crow",
    "willow",
    "marble",
    "thunder",
    "bell",
)
_MARKS = {True: ("ok  ", "green"), False: ("FAIL", "red"), None: ("note", "yellow")}


def _worker(log_level: str, end_with_parent: bool, worker_id: str | None, **options: Any) -> None:
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
    settings = merge_options(Settings.from_env(), options)  # refuses bad settings before anything is loaded
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


@click.command()
@click.option("--model", metavar="MODEL", help=MODEL_HELP)
@json_option
def check(model: str | None, as_json: bool) -> None:
    """Test the database, the broker, the model file and the GPU, and say what to do about each."""
    settings = merge_options(Settings.from_env(), {"model": model})
    findings = list(_findings(settings, quiet=as_json))
    if as_json:
        echo_json([{"part": part, "ok": ok, "found": found} for part, ok, found in findings])
    else:
        for part, ok, found in findings:
            echo(f"{part:9} {printable(found)}", mark=_MARKS[ok])
    if any(ok is False for _, ok, _ in findings):
        raise SystemExit(1)


def _findings(settings: Settings, *, quiet: bool) -> Iterator[tuple[str, bool | None, str]]:
    """(part, True for fine, False for broken, None for a note; what was found and what to do)."""
    try:
        with Client(settings) as client:
            yield from _look_at_servers(client)
    except NightmillError as error:  # there is no place for them
        yield "database", False, str(error)
    if settings.model is None:
        yield "model", None, "none named: give --model FILE or set NIGHTMILL_MODEL"
    else:
        try:
            yield "model", True, _look_at_model(settings, quiet=quiet)
        except NightmillError as error:
            yield "model", False, str(error)
    yield "gpu", None, _look_at_gpu()


def _look_at_servers(client: Client) -> Iterator[tuple[str, bool | None, str]]:
    settings = client.settings
    try:
        client.database.ensure_schema()
        yield "database", True, f"{settings.safe_database_url}, schema {client.database.revision()}"
        serving = ", ".join(sorted({_serving(worker) for worker in client.serving()})) or "none is running"
        yield "workers", None, serving
    except NightmillError as error:
        yield "database", False, str(error)
    try:
        client.broker.ping()
        policy = client.broker.eviction_policy()
        loses = policy.startswith("allkeys")
        advice = f": maxmemory-policy {policy} loses messages when memory is full; set noeviction"
        yield "broker", not loses, settings.safe_broker_url + (advice if loses else "")
    except NightmillError as error:
        yield "broker", False, str(error)


def _serving(worker: Worker) -> str:
    return f"{worker.model} ({worker.detail})" if worker.detail else worker.model


def _look_at_model(settings: Settings, *, quiet: bool) -> str:
    require_worker_extra("check --model")
    from nightmill.worker.link.loading import load_model

    model = load_model(with_model_file(settings, show=not quiet))
    spec, layer = model.spec, model.spec.layers[0]
    attention = layer.attention
    model.close()
    chat = f"plain prompts only ({model.chat})" if isinstance(model.chat, str) else "with a chat template"
    return (
        f"{model.name}: {spec.family}, {len(spec.layers)} layers of width {spec.width}, FFN "
        f"{layer.feed_forward.width}, {attention.heads} heads on {attention.kv_heads} KV heads of "
        f"{attention.head_dim}, vocabulary {spec.vocab:,}, context {spec.context_length:,}, {chat}"
    )


def _look_at_gpu() -> str:
    """What there is to generate with, and what is missing for it."""
    if missing_worker_packages():
        return "this installation is the client only; to generate, pip install 'nightmill[worker]'"
    from nightmill.worker.runners.gpu.device.compiler import CompilerMissingError, compiler_version, find_nvcc
    from nightmill.worker.runners.gpu.device.device import NoDeviceError, describe_device

    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "no NVIDIA GPU or driver found; the reference runner (NumPy) needs none"
    names = "; ".join(line.strip() for line in done.stdout.splitlines())
    try:
        nvcc = find_nvcc()
        release = compiler_version(nvcc).strip().splitlines()[-1]
        return f"{names}; {describe_device()}; {nvcc} ({release})"
    except (CompilerMissingError, NoDeviceError) as error:
        return f"{names}; not used: {error}"


@click.command()
@click.option(
    "-n", "--count", type=click.IntRange(1, 1000), default=12, show_default=True, help="Haiku to write."
)
@click.option("--temperature", type=click.FloatRange(0), default=0.7, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, help="Repeat an earlier run; by default drawn.")
@json_option
def demo(count: int, temperature: float, seed: int | None, as_json: bool) -> None:
    """Write haiku with the bundled model, through the whole path, on this machine.

    Enqueues prompts, starts a worker (Celery, reference runner), waits, and reads the results from SQL.
    Redis and SQLite are Nightmill's own, in a directory of the demo's, apart from other jobs.
    """
    require_worker_extra("demo")
    from nightmill.worker.link.loading import demo_model

    home = Settings.from_env().data_dir / "demo"
    settings = Settings(data_dir=home, model=demo_model())
    draw = random.Random(seed)
    with Client(settings) as client:
        ids = list(client.enqueue_many(_demo_items(draw, count), temperature=temperature, max_tokens=64))
        if not as_json:
            echo(f"{count} prompts enqueued; starting a worker with {settings.model}")
        try:
            with running_worker(client, home / "worker.log", ["--max-sequences", "32"]):
                began = time.monotonic()
                found = {job.id: job for job in follow(client, ids, show=not as_json, total_label="haiku")}
                seconds = time.monotonic() - began
        finally:
            EmbeddedRedis(home).stop()
    if as_json:
        for job_id in ids:
            echo_json(job_values(found[job_id]))
        return
    echo()
    for job_id in ids:
        print_job(found[job_id])
    tokens = sum(job.completion_tokens or 0 for job in found.values())
    database = settings.resolved_database_url.database
    echo(f"{count} texts, {tokens} tokens in {seconds:.1f} s: {tokens / seconds:,.0f} tokens/s")
    query = "SELECT text, stop_reason FROM jobs"
    echo(f"The rows are in table `jobs` of {database}:\n  sqlite3 {database} '{query}'")
    command = _how_to_call()
    echo(f"Next: {command} worker --model YOUR.gguf, and {command} enqueue --help")


def _how_to_call() -> str:
    """`nightmill`, or the path of this installation's where the shell would not find that."""
    ours = Path(sys.executable).with_name("nightmill")
    found = shutil.which("nightmill")
    if found is not None and Path(found).resolve() == ours.resolve():
        return "nightmill"
    return str(ours.relative_to(Path.cwd())) if ours.is_relative_to(Path.cwd()) else str(ours)


def _demo_items(draw: random.Random, count: int) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        text = draw.choice(DEMO_PROMPTS).format(topic=draw.choice(DEMO_TOPICS), word=draw.choice(DEMO_WORDS))
        yield {"messages": [{"role": "user", "content": text}], "seed": draw.getrandbits(32), "batch": "demo"}
