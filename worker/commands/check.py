"""The command check of `nightmill`."""

import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import click

from nightmill.jobs.base.extras import pip_install
from nightmill.jobs.base.printable import printable
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.options import json_option
from nightmill.jobs.commands.terminal import echo, echo_json
from nightmill.jobs.errors import NightmillError, RunnerError, SettingsError
from nightmill.jobs.messages.embedded import only_for_now
from nightmill.jobs.messages.tls import describe_sslmode, describe_tls
from nightmill.jobs.reply.job import Worker
from nightmill.jobs.sql.probing import try_writing
from nightmill.worker.assembly.fetching import with_model_file, with_models
from nightmill.worker.assembly.options import (
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
    from nightmill.worker.assembly.forecast import Card
    from nightmill.worker.assembly.model import OpenModel

_MARKS = {True: ("ok  ", "green"), False: ("FAIL", "red"), None: ("note", "yellow")}

_LARGE_SHARE = 0.95  # of the free memory: what CUDA graphs and libraries take has the rest, 1.1 GiB of 24

_POOLED = "through a pooler in transaction mode, so without prepared statements"


@click.command()
@click.argument("file", metavar="[FILE]", required=False)
@click.option("--model", metavar="MODEL", help=MODEL_HELP)
@click.option(
    "--models", metavar="MODEL,...", help="Models to load at once, with --together [NIGHTMILL_MODELS]."
)
@click.option(
    "--together",
    is_flag=True,
    default=None,
    help="Say whether all of --models fit the GPU at once, and what each gets [NIGHTMILL_TOGETHER].",
)
@click.option("--dtype", type=DTYPES, help=DTYPE_HELP)
@click.option("--weights", type=WEIGHTS, help=WEIGHTS_HELP)
@click.option("--kv", type=KV, help=KV_HELP)
@click.option(
    "--generate/--no-generate", default=True, help="Without: the model file is not tried with a sentence."
)
@click.option("--cards", is_flag=True, help="Say what fits cards of 8, 24 and 80 GB, where there is no GPU.")
@click.option(
    "--pretend", "pretend_device", metavar="CARD",
    help="Say what fits this card, such as rtx4090, and take the GPU, if there is one, for it "
    "[NIGHTMILL_PRETEND_DEVICE].",
)  # fmt: skip
@json_option
def check(file: str | None, generate: bool, cards: bool, as_json: bool, **options: Any) -> None:
    """Test the database, the broker, the model file and the GPU, and say what to do about each.

    FILE is a model, as for --model: what it is, what it sees of a conversation, which of its template's
    tokens are out of reach, how it thinks and calls tools, and a sentence that it writes.
    """
    if file is not None and options["model"] is not None:
        raise click.UsageError("FILE and --model name a model each; give one of them")
    settings = merge_options(Settings.from_env(), options | {"model": file or options["model"]})
    if bool(options["models"]) != bool(options["together"]) and not (settings.models and settings.together):
        raise SettingsError("--models and --together: give both, or one model to look at it closely")
    findings = list(_findings(settings, _Wanted(generate=generate, cards=cards, quiet=as_json)))
    if as_json:
        echo_json([finding.values() for finding in findings])
    else:
        for finding in findings:
            echo(f"{finding.part:9} {printable(finding.found)}", mark=_MARKS[finding.ok])
    if any(finding.ok is False for finding in findings):
        raise SystemExit(1)


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding about a part, and what to do; `ok` is None for a note. `more` is for programs."""

    part: str
    ok: bool | None
    found: str
    more: dict[str, Any] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """The finding as an object of JSON."""
        return {"part": self.part, "ok": self.ok, "found": self.found} | self.more


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The options of a check: a sentence of the model, other cards than this machine's, no progress shown."""

    generate: bool
    cards: bool
    quiet: bool


def _findings(settings: Settings, wanted: _Wanted) -> Iterator[Finding]:
    try:
        with only_for_now(settings), Client(settings) as client:
            try:
                yield from list(_look_at_servers(client))
            finally:
                client.broker.disconnect()
    except NightmillError as error:  # there is no place for them
        yield Finding("database", False, str(error))
    if settings.models is not None and settings.together:
        try:
            yield from _look_at_models(settings, wanted)
        except NightmillError as error:
            yield Finding("together", False, str(error))
    elif settings.model is None:
        yield Finding("model", None, "none named: give --model FILE or set NIGHTMILL_MODEL")
    else:
        try:
            yield from _look_at_model(settings, wanted)
        except NightmillError as error:
            yield Finding("model", False, str(error))
    yield Finding("gpu", None, _look_at_gpu(settings))


def _look_at_servers(client: Client) -> Iterator[Finding]:
    settings = client.settings
    try:
        try_writing(client.database, tables=True)
        verified = describe_sslmode(settings.resolved_database_url)
        pooled = _POOLED if client.database.pooled else ""
        said = f"{settings.safe_database_url}, schema {client.database.revision()}"
        yield Finding("database", True, "; ".join(filter(None, (said, verified, pooled))))
        serving = sorted({_serving(worker) for worker in client.worker_store.serving()})
        yield Finding("workers", None, ", ".join(serving) or "none is running")
    except NightmillError as error:
        yield Finding("database", False, str(error))
    try:
        client.broker.try_writing(worker=settings.model is not None)
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


def _look_at_model(settings: Settings, wanted: _Wanted) -> Iterator[Finding]:
    require_worker_extra("check --model")
    from nightmill.worker.assembly.model import load_model
    from nightmill.worker.commands.inspection import inspect, is_note
    from nightmill.worker.commands.sentence import write_sentence

    settings = with_model_file(settings, show=not wanted.quiet)
    with closing(load_model(settings)) as model:
        found = inspect(model)
        lines = found.lines()
        yield Finding(
            "model", True, f"{model.name}: {lines.pop('model')}", {"name": model.name} | asdict(found)
        )
        for part, line in lines.items():
            yield Finding(part, None if is_note(part, found) else True, line)
        if wanted.generate:
            wrote = write_sentence(_on_this_machine(settings), model)
            yield Finding("sentence", wrote.ok, wrote.found, {"text": wrote.text})
    yield from _look_at_memory(settings, model, cards=wanted.cards)


def _look_at_models(settings: Settings, wanted: _Wanted) -> Iterator[Finding]:
    """Yield whether all models fit this machine's GPU at once, or without one, with --cards, usual cards."""
    require_worker_extra("check --models")
    from nightmill.worker.assembly.forecast import CARDS
    from nightmill.worker.commands.together import cards_for, describe_fit, fit_as_json, fit_together

    settings = with_models(settings, show=not wanted.quiet)
    found = cards_for(settings)
    if not found and not wanted.cards:
        yield Finding("together", None, "no GPU here, on which models could be loaded at once: give --cards")
    for card in found or (CARDS if wanted.cards else ()):
        fit = fit_together(settings, card)
        yield Finding(
            "together", fit.fits or (None if wanted.cards else False), describe_fit(fit), fit_as_json(fit)
        )


def _on_this_machine(settings: Settings) -> Settings:
    """The settings without a pretended card if there is no GPU that could be taken for it."""
    from nightmill.worker.assembly.sizes import gpu_index

    return (
        settings if gpu_index(settings) is not None else settings.model_copy(update={"pretend_device": None})
    )


def _look_at_memory(settings: Settings, model: "OpenModel", *, cards: bool) -> Iterator[Finding]:
    """Yield how much of the model fits this machine's GPU or, without one and if `cards`, usual cards.

    Then the same for each other choice of formats; without a GPU, on the largest card.
    """
    from nightmill.worker.assembly.forecast import CARDS, card_here, card_of
    from nightmill.worker.assembly.model import element_of
    from nightmill.worker.assembly.sizes import precision_of
    from nightmill.worker.runners.gpu.device.known_cards import known_card

    pretended = known_card(settings.pretend_device)
    here = card_here(settings.gpu, pretended)
    if here is None and pretended is None and not cards:
        return
    kept = precision_of(settings, model.file, model.spec).words
    computed = f"in {element_of(settings, model)}{kept and f', {kept}'}"
    others = CARDS if pretended is None else (card_of(pretended),)
    for card in others if here is None else (here,):
        said = f"{computed}, on {card}"
        if here is None:
            said = f"no GPU here; computed for {card.name}, {computed}"
        memory = _fitting("memory", said, card, settings, model, computed=here is None)
        yield memory
        yield from _with_more_memory(memory, card, settings, model, computed=here is None)
        if pretended is not None and "weights_in" in memory.more and "rate" in memory.more:
            yield from _outlook(card, memory, settings, model)
    for option, choice in (("weights", WEIGHTS), ("kv", KV)):
        for value in choice.choices:
            if value != getattr(settings, option):
                other = settings.model_copy(update={option: value})
                said = f"with --{option} {value}, on {card.name}"
                yield _fitting("formats", said, card, other, model, computed=here is None)


def _with_more_memory(
    memory: Finding, card: "Card", settings: Settings, model: "OpenModel", *, computed: bool
) -> Iterator[Finding]:
    """Yield the same with a larger share of the memory, if all whole contexts have room only so."""

    def lacks_room(found: Finding) -> bool:
        return "sequences" not in found.more or min(found.more["sequences"].values()) < found.more["slots"]

    share = settings.gpu_memory
    if isinstance(share, float) and share < _LARGE_SHARE and lacks_room(memory):
        more = settings.model_copy(update={"gpu_memory": _LARGE_SHARE})
        said = f"with --gpu-memory {_LARGE_SHARE}, on {card.name}"
        other = _fitting("formats", said, card, more, model, computed=computed)
        if not lacks_room(other):
            yield other


def _outlook(card: "Card", memory: Finding, settings: Settings, model: "OpenModel") -> Iterator[Finding]:
    """Yield what would be computed by which kernels on a card, and what the forecast for it rests on."""
    from nightmill.worker.assembly.forecast import counted_steps
    from nightmill.worker.assembly.sizes import precision_of
    from nightmill.worker.runners.gpu.outlook import kernel_outlook
    from nightmill.worker.runners.gpu.precision import WeightsFormat

    precision = replace(
        precision_of(settings, model.file, model.spec), weights=WeightsFormat(memory.more["weights_in"])
    )
    kernels = kernel_outlook(model.spec, precision, hopper=card.hopper)
    said = "; ".join(f"{what}: {how}" for what, how in kernels.items())
    yield Finding("kernels", None, f"on {card.name}: {said}", {"card": card.name, "kernels": kernels})
    if not memory.more["rate"]:
        return
    bytes_, flops = card.peaks.bytes, card.peaks.flops
    slow = [what for what, how in kernels.items() if "slow" in how]
    uncounted = f"; how slow kernels of {' and '.join(slow)} are is not in it" if slow else ""
    yield Finding(
        "basis",
        None,
        f"the speed is a forecast: {bytes_ / 1e9:,.0f} GB/s and {flops / 1e12:,.0f} TFLOP/s of {card.name}, "
        f"at the shares that an H200 reaches{uncounted}; measure with `nightmill plan` on that card",
        {"card": card.name, "bytes_a_second": bytes_, "flops_a_second": flops},
    )
    fitting = max(memory.more["sequences"].values(), default=0)
    for step in counted_steps(model.spec, card, precision, memory.more["weights"], fitting):
        yield Finding("step", None, f"a step of {step}", asdict(step) | {"card": card.name})


def _fitting(
    part: str, said: str, card: "Card", settings: Settings, model: "OpenModel", *, computed: bool
) -> Finding:
    """Find how much of the model fits a card, or why it does not fit."""
    from nightmill.worker.assembly.forecast import forecast
    from nightmill.worker.assembly.sizes import precision_of

    precision = precision_of(settings, model.file, model.spec)
    about = {
        "card": card.name, "free": card.free, "computed": computed, "dtype": precision.element.value,
        "weights_in": precision.weights.value, "kv_in": precision.kv.value,
    }  # fmt: skip
    try:
        found = forecast(model.spec, card, settings, precision)
    except (RunnerError, SettingsError) as error:
        return Finding(part, None, f"{said}: {error}", about)
    return Finding(part, None, f"{said}: {found}", about | asdict(found))


def _look_at_gpu(settings: Settings) -> str:
    """Describe what this machine can generate with, and what is missing."""
    if missing_worker_packages():
        return f"this installation is the client only; to generate, {pip_install('worker')}"
    from nightmill.worker.runners.gpu.device.chosen import describe_device
    from nightmill.worker.runners.gpu.device.compiler import CompilerMissingError, compiler_version, find_nvcc
    from nightmill.worker.runners.gpu.device.device import NoDeviceError
    from nightmill.worker.runners.gpu.device.known_cards import known_card

    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "no NVIDIA GPU or driver found; the reference runner (NumPy) needs none"
    names = "; ".join(line.strip() for line in done.stdout.splitlines())
    try:
        nvcc = find_nvcc()
        release = compiler_version(nvcc).strip().splitlines()[-1]
        pretended = known_card(settings.pretend_device)
        as_another = "" if pretended is None else f"; taken for {pretended.name}"
        return f"{names}{as_another}; {describe_device(settings.gpu or 0)}; {nvcc} ({release})"
    except (CompilerMissingError, NoDeviceError) as error:
        return f"{names}; not used: {error}"
