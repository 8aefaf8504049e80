"""The command `nightmill benchmark`: whether a card computes right, and how fast, in one report."""

import json
from contextlib import closing
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.commands.terminal import echo, table
from nightmill.jobs.errors import NightmillError
from nightmill.worker.assembly.fetching import with_model_file
from nightmill.worker.assembly.options import merge_options, require_worker_extra

if TYPE_CHECKING:
    from nightmill.worker.assembly.model import LoadedModel
    from nightmill.worker.commands.benchmarking import FormatReport

_FORMAT = 1  # of the report
_WEIGHTS = ("16bit", "file", "fp8")


@click.command()
@click.argument("file", metavar="[FILE]", required=False)
@click.option("--gpu", type=click.IntRange(0), help="Index of the GPU; the first by default.")
@click.option(
    "--weights",
    type=click.Choice(_WEIGHTS),
    multiple=True,
    help="Only these formats of weights; all by default.",
)
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=8.0, show_default=True,
    help="Measure each load for so long at most.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path),
    help="Write the report there; by default nightmill-benchmark.json.",
)  # fmt: skip
@click.option("--reference", is_flag=True, default=None, help="Compute with NumPy even if there is a GPU.")
def benchmark(
    file: str | None, weights: tuple[str, ...], seconds: float, output: Path | None, **options: Any
) -> None:
    """Check that this machine's GPU computes right, and measure how fast, in about five minutes.

    FILE is a model, as for `nightmill worker --model`; by default the small bundled one, whose speed says
    little of a GPU. For each format of weights: products are compared with the file, texts alone with the
    same texts among others, small models with NumPy; then loads of 1 to 256 sequences are timed. The report
    is JSON, without names of yours, to be attached where something is wrong, or to tell how fast a card is.

    \b
    Exit codes: 0  all checks passed
                1  a check failed, or nothing could be run
    """
    require_worker_extra("benchmark")
    from nightmill.worker.assembly.model import demo_model, load_model

    settings = merge_options(Settings.from_env(), options | {"model": file})
    if settings.model is None:
        settings = settings.model_copy(update={"model": demo_model()})
    settings = with_model_file(settings, show=True)
    target = output or Path("nightmill-benchmark.json")
    with closing(load_model(settings)) as model:
        reports = list(_reports(settings, model, weights or _chosen(settings, model), seconds))
        found = _about(settings, model) | {"formats": [one.values() for one in reports]}
    target.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    _show(reports)
    echo(f"The report is in {target}.")
    if not any(one.checks for one in reports) or not all(one.ok for one in reports):
        raise SystemExit(1)


def _chosen(settings: Settings, model: "LoadedModel") -> tuple[str, ...]:
    """All formats; with NumPy, to which file and 16 bits are one, two."""
    from nightmill.worker.assembly.sizes import gpu_index

    return _WEIGHTS if gpu_index(settings) is not None else ("16bit", "fp8")


def _reports(
    settings: Settings, model: "LoadedModel", weights: tuple[str, ...], seconds: float
) -> "list[FormatReport]":
    from nightmill.worker.assembly.sizes import gpu_index
    from nightmill.worker.commands.benchmarking import LOADS, benchmark_format

    # NumPy takes minutes for what a GPU does in a second.
    loads = LOADS if gpu_index(settings) is not None else LOADS[:1]
    found = []
    for one in weights:
        own = settings.model_copy(update={"weights": one})
        found.append(
            benchmark_format(
                own, model, loads=loads, seconds=seconds,
                said=lambda news, name=one: echo(f"weights {name}: {news} ...", err=True),  # type: ignore[misc]
            )
        )  # fmt: skip
    return found


def _about(settings: Settings, model: "LoadedModel") -> dict[str, Any]:
    """Describe what the figures depend on, without paths or names of hosts."""
    from nightmill.worker.assembly.forecast import card_here
    from nightmill.worker.assembly.sizes import gpu_index
    from nightmill.worker.runners.gpu.device.chosen import describe_device
    from nightmill.worker.runners.gpu.device.known_cards import known_card

    gpu, device = gpu_index(settings), None
    if gpu is not None and (card := card_here(gpu, known_card(settings.pretend_device))) is not None:
        try:
            described = describe_device(gpu)
        except NightmillError as error:
            described = str(error)
        device = {
            "name": card.name, "described": described, "multiprocessors": card.multiprocessors,
            "free_bytes": card.free, "bytes_a_second": card.peaks.bytes, "flops_a_second": card.peaks.flops,
        }  # fmt: skip
    return {
        "format": _FORMAT,
        "nightmill": version("nightmill"),
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "model": {
            "family": model.spec.family, "layers": len(model.spec.layers), "width": model.spec.width,
            "parameters": model.spec.parameters, "digest": model.file.digest(),
        },
    }  # fmt: skip


def _show(reports: "list[FormatReport]") -> None:
    for report in reports:
        if report.refused is not None:
            echo(f"weights {report.weights}: not computed: {report.refused}")
            continue
        for check in report.checks:
            echo(
                f"weights {report.weights}: {check.what}: {check.found}",
                mark=("ok  " if check.ok else "FAIL", "green" if check.ok else "red"),
            )
    rows = [
        (
            report.weights, f"{speed.load.sequences:,}", f"{speed.load.prompt:,} + {speed.load.answer:,}",
            f"{speed.output_tokens_per_s:,.0f}", f"{speed.prompt_tokens_per_s:,.0f}",
        )
        for report in reports
        for speed in report.speeds
    ]  # fmt: skip
    if rows:
        table(("weights", "sequences", "tokens", "output tokens/s", "prompt tokens/s"), rows)
