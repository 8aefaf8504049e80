"""The benchmark of one format of weights: texts that must agree, and speeds; and what NumPy draws first."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import NightmillError
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.assembly.engine import build_engine
from nightmill.worker.assembly.model import OpenModel
from nightmill.worker.commands.benchmarking.report import Check, EqualTexts, LoadSpeed, PartReport, part_of
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.request import Request
from nightmill.worker.runners.starting import StartStep

__all__ = ["MOST_WITH_NUMPY", "Timing", "benchmark_format", "compared_with_numpy", "numpy_tokens"]

_CHECKED, _CHECKED_TOKENS = 8, 24  # prompts, and tokens of each answer
_BESIDE = 56  # other sequences, so that steps are of a size that takes other kernels
MOST_WITH_NUMPY = 200_000_000
"""Parameters of models that are also computed with NumPy: seconds."""
_LEAST_ALIKE = 0.75  # of first tokens: kernels that are wrong agree in next to none
CONTEXT = 1024
_LEAST_SECONDS = 0.5  # in which a load says anything
_WARM_UP_SHARE = 0.25  # of a load's time, at most, before it

Said = Callable[[str], None]
Texts = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Timing:
    """The loads to time, each for so many seconds at most, all of them for so many."""

    loads: Sequence[EqualTexts]
    seconds: float
    altogether: float = float("inf")


def benchmark_format(
    settings: Settings, model: OpenModel, timing: Timing, *, said: Said,
    found: Callable[[PartReport], None] = lambda report: None,
) -> PartReport:  # fmt: skip
    """Check and measure a model with the weights that the settings name.

    said   is told what is being done, at each step of the engine at the latest
    found  is told the report whenever it has grown
    """
    report = PartReport(part_of(settings.weights))
    most = max((load.sequences for load in timing.loads), default=1)
    context = min(CONTEXT, model.spec.context_length)
    sized = settings.model_copy(
        update={"max_sequences": max(most, _BESIDE + 1), "context": context, "prefix_sharing": False}
    )
    clock = _StepClock(report, said)
    try:
        engine = build_engine(sized, replace(model, progress=clock))
    except NightmillError as error:
        if _is_a_fault(error):
            report.failed("starts, and products are right", str(error))
        else:
            report.refused = str(error)
        return report
    finally:
        clock.over()
    try:
        report.arithmetic = str(engine.arithmetic)
        with _timed(report, "comparing texts"):
            _check_texts(engine, model, report, said)
        found(report)
        _measure_all(engine, model, timing, report, said, found)
    except NightmillError as error:
        report.failed("runs to the end", str(error))
    finally:
        engine.close()
    return report


def _check_texts(engine: Engine, model: OpenModel, report: PartReport, said: Said) -> None:
    """Generate texts alone, among others, and alone again."""

    def texts(words: str, beside: int) -> Texts:
        return _greedy(engine, model, beside=beside, said=lambda: said(f"comparing texts, {words}"))

    alone = texts("alone", 0)
    report.first_tokens["16bit" if report.part != part_of("fp8") else "fp8"] = [one[0] for one in alone]
    report.checks.append(_compared("alone and among others", alone, texts("among others", _BESIDE)))
    report.checks.append(_compared("twice", alone, texts("again", 0)))


def _measure_all(
    engine: Engine, model: OpenModel, timing: Timing, report: PartReport, said: Said,
    found: Callable[[PartReport], None],
) -> None:  # fmt: skip
    """Time the loads, the later ones more shortly where time runs out, or not at all."""
    ends, context = time.monotonic() + timing.altogether, min(CONTEXT, model.spec.context_length)
    for number, load in enumerate(timing.loads):
        left = (ends - time.monotonic()) / (len(timing.loads) - number)
        seconds = min(timing.seconds, left / (1 + _WARM_UP_SHARE))
        if seconds < min(_LEAST_SECONDS, timing.seconds):
            report.left_out.append(load)
            continue
        fitting = load._replace(prompt=min(load.prompt, context - load.answer - 1))
        words = f"measuring {load.sequences} sequences"
        with _timed(report, "measuring"):
            report.speeds.append(_measured(engine, model, fitting, seconds, partial(said, words)))
        found(report)


def numpy_tokens(settings: Settings, model: OpenModel, weights: Sequence[str], *, said: Said) -> PartReport:
    """The first tokens of the checked texts with NumPy, for what these formats are rounded to."""
    report = PartReport("numpy")
    for rounded in dict.fromkeys("fp8" if one == "fp8" else "16bit" for one in weights):
        changes = {
            "reference": True, "pretend_device": None, "weights": rounded, "max_sequences": _CHECKED,
            "context": min(CONTEXT, model.spec.context_length), "prefix_sharing": False,
        }  # fmt: skip
        with (
            _timed(report, f"texts in {rounded}"),
            _closing(build_engine(settings.model_copy(update=changes), model)) as engine,
        ):
            texts = _greedy(engine, model, beside=0, tokens=1, said=lambda: said("computing with NumPy"))
        report.first_tokens[rounded] = [one[0] for one in texts]
    return report


def compared_with_numpy(report: PartReport, numpy: PartReport) -> None:
    """Add to a format's report whether its first tokens are those of NumPy, where both are known."""
    for rounded, tokens in report.first_tokens.items():
        if (expected := numpy.first_tokens.get(rounded)) is not None:
            alike = sum(one == other for one, other in zip(tokens, expected, strict=True))
            ok = alike >= _LEAST_ALIKE * len(tokens)
            report.checks.append(Check("first tokens are NumPy's", ok, f"{alike} of {len(tokens)}"))


def _is_a_fault(error: NightmillError) -> bool:
    """Tell kernels that fail from what a machine has no memory for, or no kernels."""
    from nightmill.worker.runners.gpu.device.compiler import KernelCompileError
    from nightmill.worker.runners.gpu.device.device import CudaError, DeviceMemoryError, NoDeviceError
    from nightmill.worker.runners.starting import SelfTestError

    faults = (SelfTestError, CudaError, KernelCompileError)
    return isinstance(error, faults) and not isinstance(error, (DeviceMemoryError, NoDeviceError))


class _StepClock:
    """Notes what the steps of a start take, and passes on the news."""

    def __init__(self, report: PartReport, said: Said) -> None:
        self._report, self._said = report, said
        self._step: StartStep | None = None
        self._since = time.monotonic()

    def __call__(self, step: StartStep, news: str = "") -> None:
        if step is not self._step:
            self.over()
            self._step = step
        self._said(f"{step.words}: {news}" if news else step.words)

    def over(self) -> None:
        """Note what the last step took."""
        now = time.monotonic()
        if self._step is not None:
            self._report.took(self._step.words, now - self._since)
        self._step, self._since = None, now


@contextmanager
def _timed(report: PartReport, step: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        report.took(step, time.monotonic() - began)


def _greedy(
    engine: Engine, model: OpenModel, *, beside: int, tokens: int | None = None,
    said: Callable[[], None] = lambda: None,
) -> Texts:  # fmt: skip
    """Texts of the checked prompts, each alone, or all at once among so many others, or of few tokens."""
    prompts = _prompts(model, _CHECKED + beside, seed=0)
    requests = [
        _request(number, prompt, _CHECKED_TOKENS if tokens is None else tokens)
        for number, prompt in enumerate(prompts)
    ]
    groups = [[one] for one in requests[:_CHECKED]] if not beside and tokens is None else [requests[::-1]]
    found: dict[str, tuple[int, ...]] = {}
    for group in groups:
        for request in group:
            engine.submit(request)
        while engine.has_work:
            said()
            for done in engine.step():
                if done.error is not None:
                    raise NightmillError(f"a text failed: {done.error}")
                found[done.job_id] = done.token_ids
    return [found[str(number)] for number in range(_CHECKED)]


def _compared(what: str, first: Texts, second: Texts) -> Check:
    equal = sum(one == other for one, other in zip(first, second, strict=True))
    return Check(f"texts are equal: {what}", equal == len(first), f"{equal} of {len(first)}")


@contextmanager
def _closing(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        engine.close()


def _measured(
    engine: Engine, model: OpenModel, load: EqualTexts, seconds: float, said: Callable[[], None]
) -> LoadSpeed:
    """Run a load, after a short one like it, to its end or for so long."""
    for turn, answer in enumerate((min(load.answer, 4), load.answer)):
        prompts = _prompts(model, load.sequences, seed=1 + turn, length=load.prompt)
        for number, prompt in enumerate(prompts):
            engine.submit(_request(number, prompt, answer))
        before, began = engine.stats, time.perf_counter()
        most = seconds if turn else seconds * _WARM_UP_SHARE
        while engine.has_work and time.perf_counter() - began < most:
            said()
            engine.step()
        took, after, cut = time.perf_counter() - began, engine.stats, engine.has_work
        engine.abandon()
    drawn = after.generated_tokens - before.generated_tokens
    read = after.prompt_tokens - before.prompt_tokens
    return LoadSpeed(load, round(drawn / took, 1), round(read / took, 1), round(took, 3), cut)


def _prompts(model: OpenModel, count: int, *, seed: int, length: int | None = None) -> Texts:
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
