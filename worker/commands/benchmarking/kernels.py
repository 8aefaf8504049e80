"""The first part of a benchmark: the kernels for all formats of a model's weights, compiled at once."""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import NightmillError, RunnerError
from nightmill.worker.assembly.model import OpenModel
from nightmill.worker.assembly.sizes import gpu_index, precision_of
from nightmill.worker.commands.benchmarking.report import Check, PartReport
from nightmill.worker.runners.gpu.catalogue import check_spec, sources_for
from nightmill.worker.runners.gpu.device.chosen import NamedGpu, describe_device
from nightmill.worker.runners.gpu.device.compiler import compile_kernels
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.known_cards import known_card
from nightmill.worker.runners.gpu.device.sources import Source

__all__ = ["compile_all_kernels", "compiled", "kernels_of"]

_SLOWEST = 5  # files that are named

Counted = Callable[[str, int, int], None]
"""Is told what is done, how much of it, and how much there is."""


def compile_all_kernels(
    settings: Settings, model: OpenModel, weights: Sequence[str], *, said: Counted
) -> PartReport:
    """Look at the GPU, and put the kernels of all these formats into the cache."""
    report = PartReport("kernels")
    gpu = gpu_index(settings)
    assert gpu is not None
    precision = precision_of(settings, model.file, model.spec)
    try:
        pretended = known_card(settings.pretend_device)
        with Device(gpu, precision.element, precision.kv, pretended=pretended) as device:
            report.device = _about(device)
            target, sources = device.architecture, kernels_of(settings, model, weights, device)
    except NightmillError as error:
        report.failed("the GPU is there", str(error))
        return report
    compiled(report, sources, target, said)
    return report


def kernels_of(settings: Settings, model: OpenModel, weights: Sequence[str], gpu: NamedGpu) -> list[Source]:
    """The sources of formats that the GPU computes, those first that are of one format: products."""
    found: Counter[Source] = Counter()
    for one in weights:
        precision = precision_of(settings.model_copy(update={"weights": one}), model.file, model.spec)
        try:
            check_spec(model.spec, precision, gpu)
        except RunnerError:
            continue  # the format's own part says why
        found.update(sources_for(model.spec, precision, hopper=gpu.hopper))
    return sorted(found, key=lambda source: found[source])


def compiled(report: PartReport, sources: Sequence[Source], target: str, said: Counted) -> None:
    """Compile as many at once as there are processors; what nvcc refuses is a check that failed."""
    began, done, made, counting = time.monotonic(), 0, 0, threading.Lock()
    took: list[tuple[float, str]] = []

    def compile_one(source: Source) -> str | None:
        nonlocal done, made
        news: list[str] = []
        started = time.monotonic()
        try:
            compile_kernels(*source, target, report=news.append)
            failure = None
        except RunnerError as error:
            failure = str(error)
        with counting:
            done, made = done + 1, made + len(news)
            if news:
                took.append((time.monotonic() - started, source[0].name))
            said("compiling kernels", done, len(sources))
        return failure

    said("compiling kernels", 0, len(sources))
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        failures = [failure for failure in pool.map(compile_one, sources) if failure is not None]
    report.took("compiling kernels", time.monotonic() - began)
    report.slowest = [f"{name} {seconds:.1f} s" for seconds, name in sorted(took, reverse=True)[:_SLOWEST]]
    for failure in dict.fromkeys(failures):
        report.failed("kernels compile", failure)
    found = f"{len(sources) - len(failures)} of {len(sources)} for {target}, {made} of them now"
    report.checks.append(Check("kernels compile", not failures, found))


def _about(device: Device) -> dict[str, Any]:
    """Describe the GPU, without names of hosts."""
    peaks = device.peaks()
    return {
        "name": device.name, "described": describe_device(device.index), "target": device.architecture,
        "multiprocessors": device.multiprocessors, "free_bytes": device.free_memory(),
        "bytes_a_second": peaks.bytes, "flops_a_second": peaks.flops,
    }  # fmt: skip
