"""The benchmark of one format of weights: texts that must agree, and speeds."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import NightmillError
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.assembly.engine import build_engine
from nightmill.worker.assembly.model import LoadedModel
from nightmill.worker.assembly.sizes import gpu_index
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.request import Request

__all__ = ["LOADS", "Check", "FormatReport", "EqualTexts", "LoadSpeed", "benchmark_format"]

_CHECKED, _CHECKED_TOKENS = 8, 24  # prompts, and tokens of each answer
_BESIDE = 56  # other sequences, so that steps are of a size that takes other kernels
_MOST_WITH_NUMPY = 200_000_000  # parameters that are also computed with NumPy: seconds
_LEAST_ALIKE = 0.75  # of first tokens: kernels that are wrong agree in next to none
CONTEXT = 1024


class EqualTexts(NamedTuple):
    """Equal sequences that run at once, by tokens of prompt and answer."""

    sequences: int
    prompt: int
    answer: int


LOADS = tuple(
    EqualTexts(*sizes)
    for sizes in ((1, 128, 128), (8, 128, 128), (64, 256, 128), (256, 512, 128), (256, 512, 1))
)
"""From a single text to the night, and prompts alone."""


@dataclass(frozen=True, slots=True)
class Check:
    """Something that has to hold, and what was found."""

    what: str
    ok: bool
    found: str


@dataclass(frozen=True, slots=True)
class LoadSpeed:
    """A load's tokens per second, drawn and of prompts, over so many seconds."""

    load: EqualTexts
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    seconds: float


@dataclass(slots=True)
class FormatReport:
    """The findings for a format of weights. `refused`: why this machine does not compute it."""

    weights: str
    refused: str | None = None
    arithmetic: str | None = None
    started_in: float = 0.0
    checks: list[Check] = field(default_factory=list)
    speeds: list[LoadSpeed] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """False if a check failed."""
        return all(check.ok for check in self.checks)

    def values(self) -> dict[str, Any]:
        """The report as an object of JSON."""
        speeds = [asdict(one) | {"load": one.load._asdict()} for one in self.speeds]
        return asdict(self) | {"speeds": speeds, "ok": self.ok}


def benchmark_format(
    settings: Settings, model: LoadedModel, *, loads: Sequence[EqualTexts], seconds: float,
    said: Callable[[str], None],
) -> FormatReport:  # fmt: skip
    """Check and measure a model with the weights that the settings name, each load for so long at most.

    said  is told what is being done
    """
    report = FormatReport(settings.weights)
    most = max((load.sequences for load in loads), default=1)
    context = min(CONTEXT, model.spec.context_length)
    sized = settings.model_copy(
        update={"max_sequences": max(most, _BESIDE + 1), "context": context, "prefix_sharing": False}
    )
    began = time.monotonic()
    said("compiling kernels, loading weights, testing products")
    try:
        engine = build_engine(sized, model)
    except NightmillError as error:
        if _is_a_fault(error):
            report.checks.append(Check("starts, and products are right", False, str(error)))
        else:
            report.refused = str(error)
        return report
    report.started_in = round(time.monotonic() - began, 1)
    try:
        report.arithmetic = str(engine.arithmetic)
        said("comparing texts")
        alone = _greedy(engine, model, beside=0)
        report.checks.append(
            _compared("alone and among others", alone, _greedy(engine, model, beside=_BESIDE))
        )
        report.checks.append(_compared("twice", alone, _greedy(engine, model, beside=0)))
        for load in loads:
            fitting = load._replace(prompt=min(load.prompt, context - load.answer - 1))
            said(f"measuring {load.sequences} sequences")
            report.speeds.append(_measured(engine, model, fitting, seconds))
    except NightmillError as error:
        report.checks.append(Check("runs to the end", False, str(error)))
    finally:
        engine.close()
    if gpu_index(settings) is not None and model.spec.parameters <= _MOST_WITH_NUMPY:
        said("comparing with NumPy")
        report.checks.append(_compared_with_numpy(sized, model, alone))
    return report


def _is_a_fault(error: NightmillError) -> bool:
    """Tell kernels that fail from what a machine has no memory for, or no kernels."""
    from nightmill.worker.runners.gpu.device.compiler import KernelCompileError
    from nightmill.worker.runners.gpu.device.device import CudaError, DeviceMemoryError, NoDeviceError
    from nightmill.worker.runners.starting import SelfTestError

    faults = (SelfTestError, CudaError, KernelCompileError)
    return isinstance(error, faults) and not isinstance(error, (DeviceMemoryError, NoDeviceError))


def _greedy(engine: Engine, model: LoadedModel, *, beside: int) -> list[tuple[int, ...]]:
    """Texts of the checked prompts, each alone, or all at once among so many others."""
    prompts = _prompts(model, _CHECKED + beside, seed=0)
    requests = [_request(number, prompt, _CHECKED_TOKENS) for number, prompt in enumerate(prompts)]
    groups = [[one] for one in requests[:_CHECKED]] if not beside else [requests[::-1]]
    found: dict[str, tuple[int, ...]] = {}
    for group in groups:
        for request in group:
            engine.submit(request)
        while engine.has_work:
            for done in engine.step():
                if done.error is not None:
                    raise NightmillError(f"a text failed: {done.error}")
                found[done.job_id] = done.token_ids
    return [found[str(number)] for number in range(_CHECKED)]


def _compared(what: str, first: list[tuple[int, ...]], second: list[tuple[int, ...]]) -> Check:
    equal = sum(one == other for one, other in zip(first, second, strict=True))
    return Check(f"texts are equal: {what}", equal == len(first), f"{equal} of {len(first)}")


def _compared_with_numpy(settings: Settings, model: LoadedModel, texts: list[tuple[int, ...]]) -> Check:
    weights = settings.weights if settings.weights == "fp8" else "16bit"
    changes = {"reference": True, "pretend_device": None, "weights": weights, "max_sequences": _CHECKED}
    with _closing(build_engine(settings.model_copy(update=changes), model)) as engine:
        expected = _greedy(engine, model, beside=0)
    alike = sum(one[:1] == other[:1] for one, other in zip(texts, expected, strict=True))
    ok = alike >= _LEAST_ALIKE * len(texts)
    return Check("first tokens are NumPy's", ok, f"{alike} of {len(texts)}")


@contextmanager
def _closing(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        engine.close()


def _measured(engine: Engine, model: LoadedModel, load: EqualTexts, seconds: float) -> LoadSpeed:
    """Run a load, after a short one like it, to its end or for so long."""
    for turn, answer in enumerate((min(load.answer, 4), load.answer)):
        prompts = _prompts(model, load.sequences, seed=1 + turn, length=load.prompt)
        for number, prompt in enumerate(prompts):
            engine.submit(_request(number, prompt, answer))
        before, began = engine.stats, time.perf_counter()
        while engine.has_work and time.perf_counter() - began < seconds:
            engine.step()
        took, after = time.perf_counter() - began, engine.stats
        engine.abandon()
    drawn = after.generated_tokens - before.generated_tokens
    read = after.prompt_tokens - before.prompt_tokens
    return LoadSpeed(load, round(drawn / took, 1), round(read / took, 1), round(took, 3))


def _prompts(
    model: LoadedModel, count: int, *, seed: int, length: int | None = None
) -> list[tuple[int, ...]]:
    """Random tokens; a prompt depends on its number alone, not on how many there are."""
    found = []
    for number in range(count):
        rng = np.random.default_rng((seed, number))
        size = int(rng.integers(5, 60)) if length is None else length
        found.append(tuple(rng.integers(0, model.spec.vocab, size).tolist()))
    return found


def _request(number: int, prompt: tuple[int, ...], answer: int) -> Request:
    params = GenerationParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    return Request(str(number), 1, prompt, params, seed=number)
