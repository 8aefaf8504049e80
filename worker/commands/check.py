"""The command check of `nightmill`."""

import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import click

from nightmill.jobs.client import Client
from nightmill.jobs.commands.options import json_option
from nightmill.jobs.commands.terminal import echo, echo_json
from nightmill.jobs.errors import NightmillError, RunnerError
from nightmill.jobs.job import Worker
from nightmill.jobs.messages.tls import describe_sslmode, describe_tls
from nightmill.jobs.printable import printable
from nightmill.jobs.settings import Settings
from nightmill.worker.fetching import with_model_file
from nightmill.worker.options import (
    DTYPE_HELP,
    DTYPES,
    KV,
    KV_HELP,
    MODEL_HELP,
    WEIGHTS,
    WEIGHTS_HELP,
    merge_options,
    missing_worker_packages,
    require_worker_extra,
)

if TYPE_CHECKING:
    from nightmill.worker.commands.fitting import Card
    from nightmill.worker.link.loading import OpenModel

_MARKS = {True: ("ok  ", "green"), False: ("FAIL", "red"), None: ("note", "yellow")}


@click.command()
@click.option("--model", metavar="MODEL", help=MODEL_HELP)
@click.option("--dtype", type=DTYPES, help=DTYPE_HELP)
@click.option("--weights", type=WEIGHTS, help=WEIGHTS_HELP)
@click.option("--kv", type=KV, help=KV_HELP)
@json_option
def check(as_json: bool, **options: str | None) -> None:
    """Test the database, the broker, the model file and the GPU, and say what to do about each."""
    settings = merge_options(Settings.from_env(), options)
    findings = list(_findings(settings, quiet=as_json))
    if as_json:
        echo_json([finding.values() for finding in findings])
    else:
        for finding in findings:
            echo(f"{finding.part:9} {printable(finding.found)}", mark=_MARKS[finding.ok])
    if any(finding.ok is False for finding in findings):
        raise SystemExit(1)


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of a part, and what to do; `ok` is None for a note. `more` is for programs."""

    part: str
    ok: bool | None
    found: str
    more: dict[str, Any] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"part": self.part, "ok": self.ok, "found": self.found} | self.more


def _findings(settings: Settings, *, quiet: bool) -> Iterator[Finding]:
    try:
        with Client(settings) as client:
            yield from _look_at_servers(client)
    except NightmillError as error:  # there is no place for them
        yield Finding("database", False, str(error))
    if settings.model is None:
        yield Finding("model", None, "none named: give --model FILE or set NIGHTMILL_MODEL")
    else:
        try:
            yield from _look_at_model(settings, quiet=quiet)
        except NightmillError as error:
            yield Finding("model", False, str(error))
    yield Finding("gpu", None, _look_at_gpu())


def _look_at_servers(client: Client) -> Iterator[Finding]:
    settings = client.settings
    try:
        client.database.ensure_schema()
        verified = describe_sslmode(settings.resolved_database_url)
        said = f"{settings.safe_database_url}, schema {client.database.revision()}"
        yield Finding("database", True, f"{said}; {verified}" if verified else said)
        serving = ", ".join(sorted({_serving(worker) for worker in client.serving()})) or "none is running"
        yield Finding("workers", None, serving)
    except NightmillError as error:
        yield Finding("database", False, str(error))
    try:
        client.broker.ping()
        policy = client.broker.eviction_policy()
        loses = policy.startswith("allkeys")
        advice = f": maxmemory-policy {policy} loses messages when memory is full; set noeviction"
        verified = describe_tls(settings.broker_url)
        said = f"{settings.safe_broker_url}; {verified}" if verified else settings.safe_broker_url
        yield Finding("broker", not loses, said + (advice if loses else ""))
    except NightmillError as error:
        yield Finding("broker", False, str(error))


def _serving(worker: Worker) -> str:
    return f"{worker.model} ({worker.note})" if worker.note else worker.model


def _look_at_model(settings: Settings, *, quiet: bool) -> Iterator[Finding]:
    require_worker_extra("check --model")
    from nightmill.worker.commands.inspection import inspect
    from nightmill.worker.link.loading import load_model

    with closing(load_model(with_model_file(settings, show=not quiet))) as model:
        found = inspect(model)
    lines = found.lines()
    yield Finding("model", True, f"{model.name}: {lines.pop('model')}", {"name": model.name} | asdict(found))
    for part, line in lines.items():
        yield Finding(part, None if part == "chat" and found.chat is None else True, line)
    yield from _look_at_memory(settings, model)


def _look_at_memory(settings: Settings, model: "OpenModel") -> Iterator[Finding]:
    """How much of the model fits this machine's GPU, or cards of usual sizes where there is none.

    And what each other choice of formats would make of that; without a GPU, for the largest card.
    """
    from nightmill.worker.commands.fitting import CARDS, card_here
    from nightmill.worker.link.loading import element_of, numbers_of

    here = card_here(settings.gpu)
    kept = numbers_of(settings, model.file, model.spec).words
    computed = f"in {element_of(settings, model)}{kept and f', {kept}'}"
    for card in CARDS if here is None else (here,):
        said = f"{computed}, on {card}"
        if here is None:
            said = f"no GPU here; computed for {card.name}, {computed}"
        yield _fitting("memory", said, card, settings, model, computed=here is None)
    for option, choice in (("weights", WEIGHTS), ("kv", KV)):
        for value in choice.choices:
            if value != getattr(settings, option):
                other = settings.model_copy(update={option: value})
                said = f"with --{option} {value}, on {card.name}"
                yield _fitting("formats", said, card, other, model, computed=here is None)


def _fitting(
    part: str, said: str, card: "Card", settings: Settings, model: "OpenModel", *, computed: bool
) -> Finding:
    """What of the model fits a card, or why it does not."""
    from nightmill.worker.commands.fitting import fit
    from nightmill.worker.link.loading import numbers_of

    numbers = numbers_of(settings, model.file, model.spec)
    about = {
        "card": card.name, "free": card.free, "computed": computed, "dtype": numbers.element.value,
        "weights_in": numbers.weights.value, "kv_in": numbers.kv.value,
    }  # fmt: skip
    try:
        fits = fit(model.spec, card, settings, numbers)
    except RunnerError as error:
        return Finding(part, None, f"{said}: {error}", about)
    return Finding(part, None, f"{said}: {fits}", about | asdict(fits))


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
