"""The worker's options, once for `nightmill worker` and once for `celery worker`, and what they need."""

from importlib.util import find_spec
from typing import Any, get_args

import click
from pydantic import ValidationError

from nightmill.jobs.base.extras import pip_install
from nightmill.jobs.base.sentences import sentence
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import MissingExtraError, SettingsError

MODEL_HELP = (
    "GGUF file to serve, or what is fetched once: hf:OWNER/REPO[:QUANT], hf:OWNER/REPO/FILE.gguf or a URL "
    "[NIGHTMILL_MODEL]."
)


DTYPES = click.Choice(get_args(Settings.model_fields["dtype"].annotation))
DTYPE_HELP = (
    "What a GPU computes in; auto, the default: BF16 if the model's family or file asks for it, else F16 "
    "[NIGHTMILL_DTYPE]."
)
WEIGHTS = click.Choice(get_args(Settings.model_fields["weights"].annotation))
WEIGHTS_HELP = (
    "How weights are kept; auto, the default: 16bit, in the type of --dtype, or file, as they are there, if "
    "that would take more than half of the memory; fp8: rounded to 8 bits, as is what they are multiplied "
    "with, from compute capability 8.9 on [NIGHTMILL_WEIGHTS]."
)
KV = click.Choice(get_args(Settings.model_fields["kv"].annotation))
KV_HELP = (
    "How keys and values are kept; 16bit, the default: in the type of --dtype; fp8: nearly twice as many in "
    "the same memory [NIGHTMILL_KV]."
)


DRAFTS = click.Choice(get_args(Settings.model_fields["drafts"].annotation))
TOOL_FORMATS = click.Choice(get_args(Settings.model_fields["tool_format"].annotation))
TOOL_FORMAT_HELP = (
    "How the model writes calls of tools; auto, the default: as its chat template shows; json: as JSON, "
    "of which a system message tells it, for templates that know no tools [NIGHTMILL_TOOL_FORMAT]."
)


def worker_options() -> list[click.Option]:
    """Fresh options; each overrides the setting that its help names."""
    return [
        click.Option(["--model"], metavar="MODEL", help=MODEL_HELP),
        click.Option(
            ["--name", "model_name"],
            help="What jobs call the model; by default the file's name without .gguf [NIGHTMILL_MODEL_NAME].",
        ),
        click.Option(["--gpu"], type=click.IntRange(0), help="Index of the GPU to own [NIGHTMILL_GPU]."),
        click.Option(
            ["--gpu-memory"],
            metavar="SHARE|SIZE",
            help="What to take of the GPU's free memory: a share, 0.9 by default, or a size such as 8GiB "
            "[NIGHTMILL_GPU_MEMORY].",
        ),
        click.Option(["--dtype"], type=DTYPES, help=DTYPE_HELP),
        click.Option(["--weights"], type=WEIGHTS, help=WEIGHTS_HELP),
        click.Option(["--kv"], type=KV, help=KV_HELP),
        click.Option(["--tool-format"], type=TOOL_FORMATS, help=TOOL_FORMAT_HELP),
        click.Option(
            ["--reference"],
            is_flag=True,
            default=None,
            help="Generate with NumPy, without a GPU [NIGHTMILL_REFERENCE].",
        ),
        click.Option(
            ["--max-sequences"],
            type=click.IntRange(1),
            help="Sequences to generate at once [NIGHTMILL_MAX_SEQUENCES].",
        ),
        click.Option(
            ["--context"],
            type=click.IntRange(2),
            help="Tokens that prompt and answer may have together [NIGHTMILL_CONTEXT].",
        ),
        click.Option(
            ["--prefix-sharing/--no-prefix-sharing"],
            default=None,
            help="Compute equal beginnings of prompts once; on by default [NIGHTMILL_PREFIX_SHARING].",
        ),
        click.Option(
            ["--drafts"],
            type=DRAFTS,
            help="ngram: while few texts are computed, guess each one's next tokens from its own words and "
            "its schema, so that it takes fewer steps; auto: while that is found to be faster. No text "
            "changes. Off by default [NIGHTMILL_DRAFTS].",
        ),
        click.Option(
            ["--draft"],
            metavar="FILE",
            help="With --drafts, a GGUF file of a small model with the same vocabulary, which guesses where "
            "a text's own words say nothing [NIGHTMILL_DRAFT].",
        ),
        click.Option(
            ["--hours"],
            metavar="WINDOWS",
            help="Serve at these times of day only, such as 22:00-06:00 or 22:00-06:00/Europe/Berlin; sleep "
            "outside them, without GPU memory [NIGHTMILL_HOURS].",
        ),
        click.Option(
            ["--idle-seconds"],
            type=click.FloatRange(1),
            help="After so long without jobs free the GPU, and sleep until there are some "
            "[NIGHTMILL_IDLE_SECONDS].",
        ),
        click.Option(
            ["--drain-seconds"],
            type=click.FloatRange(0),
            help="On SIGTERM, go on this long with the jobs in hand, then hand them back "
            "[NIGHTMILL_DRAIN_SECONDS].",
        ),
        click.Option(
            ["--metrics-port"],
            type=click.IntRange(1, 65535),
            help="Answer Prometheus at this port, at /metrics; by default nowhere [NIGHTMILL_METRICS_PORT].",
        ),
        click.Option(
            ["--metrics-host"],
            help="Where to listen for that, 127.0.0.1 by default [NIGHTMILL_METRICS_HOST].",
        ),
    ]


def turn_options() -> list[click.Option]:
    """Fresh options of workers that load several models in turn."""
    return [
        click.Option(
            ["--models"],
            metavar="MODEL,...",
            help="Models to load in turn, one at a time, each as for --model or as NAME=MODEL: a queue is "
            "drained before the next is loaded [NIGHTMILL_MODELS].",
        ),
        click.Option(
            ["--stay"],
            metavar="DURATION",
            help="How long a model that has rows is kept before more urgent rows of another unload it; 10m "
            "by default [NIGHTMILL_STAY].",
        ),
        click.Option(
            ["--together"],
            is_flag=True,
            default=None,
            help="Load all of the models at once, each with a share of the GPU's memory; refused if they do "
            "not fit [NIGHTMILL_TOGETHER].",
        ),
        click.Option(
            ["--swap-for-interactive"],
            is_flag=True,
            default=None,
            help="Load another of the models when somebody waits for its answer; without it, such a call is "
            "refused while rows of others are computed [NIGHTMILL_SWAP_FOR_INTERACTIVE].",
        ),
    ]


def gpu_name(index: int) -> str:
    """The name of a GPU in a worker's row."""
    return f"GPU {index}"


def worker_id_option() -> click.Option:
    """For whoever starts a worker and wants to know its row in `workers` from the first moment."""
    return click.Option(["--id", "worker_id"], hidden=True, help="The id of its row in the table of workers.")


TURN = "--turn"
"""The option of a worker's process that says which of its models it serves."""


def turn_option() -> click.Option:
    """For the process of a worker with several models that serves one of them."""
    return click.Option([TURN], hidden=True, help="The name of the model of --models to serve.")


WOKEN = "--woken"
"""The option of a worker's process after one that slept, or served another model."""


def woken_option() -> click.Option:
    """For the process of a worker that has run before: it waits for servers that are away."""
    return click.Option([WOKEN], hidden=True, is_flag=True, help="Wait for servers that are away.")


GROUP, LEDGER = "--group", "--ledger"
"""Options of each of the workers that one command starts for several models at once: what names them all, and
the descriptor of the accounts of their engines."""


def group_options() -> list[click.Option]:
    """For the process of a worker that is one of several on one GPU."""
    return [
        click.Option([GROUP], hidden=True, help="The id of the workers that share a GPU."),
        click.Option([LEDGER], hidden=True, type=int, help="The descriptor of their engines' accounts."),
    ]


ENGINE = "--engine"
"""The option of a worker's process that names an engine's process which was started ahead."""


def engine_option() -> click.Option:
    """For the process of a worker whose engine was started before it knew what to serve."""
    return click.Option([ENGINE], hidden=True, help="The engine's process, as `EngineAhead.hand_on` says.")


def process_options() -> list[click.Option]:
    """Fresh options that processes give to each other, and people do not."""
    return [worker_id_option(), turn_option(), woken_option(), *group_options(), engine_option()]


WORKER_SETTINGS = frozenset(
    {
        "model",
        "model_name",
        "models",
        "together",
        "stay",
        "swap_for_interactive",
        "gpu",
        "pretend_device",
        "gpu_memory",
        "dtype",
        "weights",
        "kv",
        "tool_format",
        "reference",
        "max_sequences",
        "context",
        "prefix_sharing",
        "drafts",
        "draft",
        "hours",
        "idle_seconds",
        "drain_seconds",
        "metrics_port",
        "metrics_host",
    }
)


def merge_options(settings: Settings, options: dict[str, Any]) -> Settings:
    """Options of the command line over settings of the environment; raises SettingsError."""
    given = {name: value for name, value in options.items() if value is not None and name in WORKER_SETTINGS}
    if "model" in given and "models" in given:
        raise SettingsError("--model and --models: give one of them")
    if "model" in given:
        given = {"together": False} | given | {"models": None}
    if settings.stale_seconds < 2 * settings.heartbeat_seconds:
        raise SettingsError(
            f"NIGHTMILL_STALE_SECONDS: {settings.stale_seconds:g} must be twice NIGHTMILL_HEARTBEAT_SECONDS "
            f"({settings.heartbeat_seconds:g}) or more, or others take a worker's jobs while it lives"
        )
    try:
        return Settings.model_validate(settings.model_dump() | given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = "name" if first["loc"][0] == "model_name" else str(first["loc"][0]).replace("_", "-")
        raise SettingsError(f"--{name}: {sentence(first)}") from None


def as_arguments(options: dict[str, Any]) -> list[str]:
    """The options that were given, as arguments for the other command line."""
    arguments: list[str] = []
    for option in [*worker_options(), *turn_options()]:
        value = options.get(option.name or "")
        if value is None:
            continue
        if option.is_flag:
            arguments += [option.opts[0] if value else option.secondary_opts[0]]
        else:
            arguments += [option.opts[0], str(value)]
    return arguments


def missing_worker_packages() -> list[str]:
    """The packages that generating needs and a client-only installation lacks."""
    names = ("numpy", "gguf", "tokenizers", "jinja2", "threadpoolctl")
    return [name for name in names if find_spec(name) is None]


def require_worker_extra(command: str) -> None:
    """Raise MissingExtraError in a client-only installation."""
    if missing := missing_worker_packages():
        raise MissingExtraError(f"`nightmill {command}` needs {', '.join(missing)}: {pip_install('worker')}")
