"""The command `nightmill benchmark`: whether a card computes right, and how fast, in one report."""

import itertools
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nightmill.jobs.base.printable import printable
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.commands.terminal import LiveLine, ProgressLine, echo, table
from nightmill.worker.assembly.fetching import with_model_file
from nightmill.worker.assembly.options import merge_options, require_worker_extra

if TYPE_CHECKING:
    from nightmill.worker.assembly.model import OpenModel
    from nightmill.worker.commands.benchmarking.parts import News, PartTask
    from nightmill.worker.commands.benchmarking.report import PartReport

_FORMAT = 2  # of the report
_DEFAULT = Path("nightmill-benchmark.json")
_WEIGHTS = ("16bit", "file", "fp8")
_QUICK_SECONDS, _LEAST_OF_A_PART = 2.0, 1.0


@click.command()
@click.argument("file", metavar="[FILE]", required=False)
@click.option("--gpu", type=click.IntRange(0), help="Index of the GPU; the first by default.")
@click.option(
    "--weights",
    type=click.Choice(_WEIGHTS),
    multiple=True,
    help="Only these formats of weights; all by default.",
)
@click.option("--quick", is_flag=True, help="Time one and 64 sequences only, for two seconds each.")
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=5.0, show_default=True,
    help="Time each load for so long at most.",
)  # fmt: skip
@click.option(
    "--minutes", type=click.FloatRange(0, min_open=True), default=5.0, show_default=True,
    help="Time loads more shortly, or leave them out, once it has taken so long. Checks are all made.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path),
    help="Write the report there; by default nightmill-benchmark.json, or -2, -3, ... if that is there.",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace the file that --output names.")
@click.option("--reference", is_flag=True, default=None, help="Compute with NumPy even if there is a GPU.")
def benchmark(
    file: str | None, weights: tuple[str, ...], quick: bool, seconds: float, minutes: float,
    output: Path | None, overwrite: bool, **options: Any,
) -> None:  # fmt: skip
    """Check that this machine's GPU computes right, and measure how fast, in about five minutes.

    FILE is a model, as for `nightmill worker --model`; by default the small bundled one, whose speed says
    little of a GPU. First all kernels are compiled. Then, for each format of weights, products are compared
    with the file, texts alone with the same texts among others, small models with NumPy, and loads of 1 to
    256 sequences are timed. The report is JSON, without names of yours, to be attached where something is
    wrong, or to tell how fast a card is. It is written after each part; a part that hangs is cut, and the
    report says where. What was compiled, and what was fastest, is kept in ~/.cache/nightmill for later
    starts; to begin anew, delete that folder.

    \b
    Exit codes: 0  all checks passed
                1  a check failed, or nothing could be run
    """
    require_worker_extra("benchmark")
    from nightmill.worker.assembly.model import demo_model, open_model
    from nightmill.worker.assembly.sizes import gpu_index
    from nightmill.worker.commands.benchmarking.report import LOADS, QUICK_LOADS

    began = time.monotonic()
    target = report_path(output, overwrite=overwrite)
    settings = merge_options(Settings.from_env(), options | {"model": file})
    if settings.model is None:
        settings = settings.model_copy(update={"model": demo_model()})
    settings = with_model_file(settings, show=True)
    gpu = gpu_index(settings) is not None
    loads = QUICK_LOADS if quick else LOADS
    if not gpu:  # NumPy takes minutes for what a GPU does in a second
        loads = loads[:1]
    with ExitStack() as stack:
        model = open_model(settings)
        stack.callback(model.file.close)
        run = _Run(
            settings, model, weights or (_WEIGHTS if gpu else ("16bit", "fp8")), gpu=gpu,
            loads=loads, seconds=min(seconds, _QUICK_SECONDS) if quick else seconds,
            ends=began + 60 * minutes,
        )  # fmt: skip
        stack.callback(lambda: _write(target, run, time.monotonic() - began))  # on Ctrl-C, too
        for _ in run.parts():
            _write(target, run, time.monotonic() - began)
    _show(run.reports)
    echo(f"The report is in {target}, after {time.monotonic() - began:.0f} s.")
    if not run.computed or not all(one.ok for one in run.reports):
        raise SystemExit(1)


def report_path(output: Path | None, *, overwrite: bool) -> Path:
    """Return where the report goes; a ClickException before minutes have been spent, if it cannot."""
    if output is None:
        numbered = (_DEFAULT.with_stem(f"{_DEFAULT.stem}-{n}") for n in itertools.count(2))
        output = next(path for path in itertools.chain([_DEFAULT], numbered) if not path.exists())
    elif output.exists() and not overwrite:
        raise click.ClickException(
            f"{printable(output)} is there already: name another file, or add --overwrite to replace it"
        )
    if not os.access(output.parent, os.W_OK | os.X_OK):
        reason = "is not writable" if output.parent.is_dir() else "is no folder"
        raise click.ClickException(f"the report cannot be written: {printable(output.parent)} {reason}")
    return output


class _Run:
    """A benchmark: its parts, one after the other, and their reports."""

    def __init__(
        self, settings: Settings, model: "OpenModel", weights: tuple[str, ...], *, gpu: bool,
        loads: tuple[Any, ...], seconds: float, ends: float,
    ) -> None:  # fmt: skip
        self.settings, self.model, self.reports = settings, model, list["PartReport"]()
        self._weights, self._gpu = weights, gpu
        self._loads, self._seconds, self._ends = loads, seconds, ends
        self._number, self._count = 0, len(weights) + gpu

    @property
    def device(self) -> dict[str, Any] | None:
        """The GPU, once a part has looked at it."""
        return next((one.device for one in self.reports if one.device is not None), None)

    @property
    def computed(self) -> bool:
        """True if some format was computed and checked."""
        return any(one.checks for one in self.reports if one.part.startswith("weights"))

    def parts(self) -> Iterator["PartReport"]:
        """Run the parts; each report is added, and yielded."""
        from nightmill.worker.commands.benchmarking.parts import Part, PartProcess, PartTask
        from nightmill.worker.commands.benchmarking.report import part_of
        from nightmill.worker.commands.benchmarking.texts import MOST_WITH_NUMPY, compared_with_numpy

        everything = PartTask(Part.KERNELS, "kernels", self.settings, self._weights)
        with ExitStack() as stack:
            numpy = None
            if self._gpu:
                if self.model.spec.parameters <= MOST_WITH_NUMPY:  # beside the others, on a core of its own
                    numpy = PartProcess(replace(everything, part=Part.NUMPY, name="numpy"))
                    stack.callback(numpy.close)
                yield self._done(everything)
            for place, one in enumerate(self._weights):
                left = (self._ends - time.monotonic()) / (len(self._weights) - place)
                settings = self.settings.model_copy(update={"weights": one})
                yield self._done(
                    PartTask(
                        Part.FORMAT, part_of(one), settings, (one,), self._loads, self._seconds,
                        max(left, _LEAST_OF_A_PART) if self._gpu else float("inf"),
                    )
                )  # fmt: skip
            if numpy is not None:
                report = numpy.wait(lambda news: None, Part.NUMPY.most_seconds(gpu=True))
                for one_format in self.reports:
                    compared_with_numpy(one_format, report)
                self.reports.append(report)
                yield report

    def _done(self, task: "PartTask") -> "PartReport":
        """Run a part to its end, under a line that tells how far it is."""
        from nightmill.worker.commands.benchmarking.parts import PartProcess

        self._number += 1
        name = f"part {self._number} of {self._count}, {task.name}"
        with LiveLine(ProgressLine(name=name)) as line, closing(PartProcess(task)) as process:
            if not line.shown:
                echo(f"{name} ...", err=True)

            def said(news: "News") -> None:
                line.update(ProgressLine(name=name, done=news.done, total=news.total, note=news.words))

            report = process.wait(said, task.part.most_seconds(gpu=self._gpu))
        self.reports.append(report)
        return report


def _write(target: Path, run: _Run, seconds: float) -> None:
    """Write the report as far as it is."""
    spec = run.model.spec
    found = {
        "format": _FORMAT,
        "nightmill": version("nightmill"),
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "device": run.device,
        "model": {
            "family": spec.family, "layers": len(spec.layers), "width": spec.width,
            "parameters": spec.parameters, "digest": run.model.file.digest(),
        },
        "passed": [one.part for one in run.reports if one.refused is None and one.ok],
        "failed": [one.part for one in run.reports if not one.ok],
        "parts": [one.values() for one in run.reports],
    }  # fmt: skip
    part = target.with_name(target.name + ".part")
    part.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    part.replace(target)


def _show(reports: "list[PartReport]") -> None:
    for report in reports:
        if report.refused is not None:
            echo(f"{report.part}: not computed: {report.refused}")
        for check in report.checks:
            echo(
                f"{report.part}: {check.what}: {check.found}",
                mark=("ok  " if check.ok else "FAIL", "green" if check.ok else "red"),
            )
        for load in report.left_out:
            echo(f"{report.part}: {load.sequences:,} sequences were not timed: the time was up (--minutes)")
    rows = [
        (
            report.part, f"{speed.load.sequences:,}", f"{speed.load.prompt:,} + {speed.load.answer:,}",
            f"{speed.output_tokens_per_s:,.0f}", f"{speed.prompt_tokens_per_s:,.0f}",
            f"{speed.seconds:.1f}" + (", cut" if speed.cut else ""),
        )
        for report in reports
        for speed in report.speeds
    ]  # fmt: skip
    if rows:
        table(("part", "sequences", "tokens", "output tokens/s", "prompt tokens/s", "seconds"), rows)
