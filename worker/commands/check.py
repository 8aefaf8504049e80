"""The command check of `nightmill`."""

import subprocess
from collections.abc import Iterator

import click

from nightmill.jobs.client import Client
from nightmill.jobs.commands.options import json_option
from nightmill.jobs.commands.terminal import echo, echo_json
from nightmill.jobs.contract import Worker
from nightmill.jobs.errors import NightmillError
from nightmill.jobs.printable import printable
from nightmill.jobs.settings import Settings
from nightmill.worker.fetching import with_model_file
from nightmill.worker.options import (
    DTYPE_HELP,
    DTYPES,
    MODEL_HELP,
    merge_options,
    missing_worker_packages,
    require_worker_extra,
)

_MARKS = {True: ("ok  ", "green"), False: ("FAIL", "red"), None: ("note", "yellow")}


@click.command()
@click.option("--model", metavar="MODEL", help=MODEL_HELP)
@click.option("--dtype", type=DTYPES, help=DTYPE_HELP)
@json_option
def check(model: str | None, dtype: str | None, as_json: bool) -> None:
    """Test the database, the broker, the model file and the GPU, and say what to do about each."""
    settings = merge_options(Settings.from_env(), {"model": model, "dtype": dtype})
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
    from nightmill.worker.link.loading import element_of, load_model

    model = load_model(with_model_file(settings, show=not quiet))
    spec, layer = model.spec, model.spec.layers[0]
    attention = layer.attention
    model.close()
    element = element_of(settings, model)
    chat = f"plain prompts only ({model.chat})" if isinstance(model.chat, str) else "with a chat template"
    return (
        f"{model.name}: {spec.family}, {len(spec.layers)} layers of width {spec.width}, FFN "
        f"{layer.feed_forward.width}, {attention.heads} heads on {attention.kv_heads} KV heads of "
        f"{attention.head_dim}, vocabulary {spec.vocab:,}, context {spec.context_length:,}, {chat}; "
        f"on a GPU in {element}"
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
