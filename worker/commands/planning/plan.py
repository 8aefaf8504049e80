"""Puts survey, measurement and the time that was played through together into a plan."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import numpy as np

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.base.hours import Hours, begin_within, end_within
from nightmill.jobs.formats import InputFile
from nightmill.jobs.reply.batch_status import JOULES_PER_KWH
from nightmill.jobs.request.spec import JobSpec
from nightmill.worker.assembly.forecast import Forecast
from nightmill.worker.commands.planning.measure import WARM_UP, Measurement, measure
from nightmill.worker.commands.planning.playing import (
    Pages,
    Playthrough,
    expected_lengths,
    pages_needed,
    play_through,
    prompts_of_answers,
)
from nightmill.worker.commands.planning.rows import bad_by_code
from nightmill.worker.commands.planning.survey import PromptReader, Survey, survey
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.limits import RequestLimits

_SAMPLE_AT_LEAST = 256  # rows: the mean of answers that vary by half of it is then known to 3%
_SAMPLE_BATCHES = 4  # so that a full batch is seen at work, not only filling and draining


@dataclass(frozen=True, slots=True)
class Estimate:
    """When the file will be done, from the speed that was measured."""

    played: Playthrough
    workers: int
    starts_at: datetime
    deadline_at: datetime | None
    measured_rows: int
    measured_seconds: float
    hours: Hours | None = None
    """The times of day at which the workers serve."""
    watts: float | None = None
    """Power of a worker's GPU while it computed; None if it did not tell."""

    @property
    def gpu_seconds(self) -> float:
        """Time of all workers' GPUs."""
        return self.played.seconds * self.workers

    @property
    def energy_kwh(self) -> float | None:
        """Energy of all workers' GPUs, at the measured power; None if that is not known."""
        return None if self.watts is None else self.watts * self.gpu_seconds / JOULES_PER_KWH

    @property
    def done_at(self) -> datetime:
        """When the last row ends."""
        hours = [] if self.hours is None else [self.hours]
        return end_within(hours, self.starts_at, self.played.seconds)

    @property
    def fits(self) -> bool | None:
        """True if the last row ends by the deadline; None without a deadline."""
        return None if self.deadline_at is None else self.done_at <= self.deadline_at


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a file: what it asks for, which of its rows are bad, and when it will be done."""

    file: InputFile
    model: str
    survey: Survey
    output_tokens: int | None
    """Expected; None if nothing was measured."""
    pages: Pages
    """Pages that the answers need; if nothing was measured, with the longest answers that rows may have."""
    limits: RequestLimits
    estimate: Estimate | None
    memory: Forecast | None = None
    """The GPU's memory as a worker with these options would share it out."""
    card: str | None = None
    """The GPU of which that is said; None without one."""
    template_fault: str | None = None
    """Which special tokens the model's chat template writes that stay out of reach, and what to do."""

    @property
    def bad_by_code(self) -> dict[str, int]:
        """Numbers of bad rows, the most frequent first."""
        return bad_by_code(self.survey.bad)

    @property
    def other_models(self) -> dict[str, int]:
        """Rows that ask for a model of another name than the one that was planned with."""
        return {name: count for name, count in self.survey.models.most_common() if name != self.model}

    def as_json(self) -> JsonObject:
        """Everything, every bad row included; the keys are described in docs/file-formats.md."""
        found = self.survey
        prompts = found.prompt_tokens
        return {
            "file": str(self.file.path),
            "format": str(self.file.format),
            "model": self.model,
            "rows": found.rows,
            "good": found.good,
            "answers": sum(found.answers),
            "bad": [asdict(row) for row in found.bad],
            "bad_by_code": self.bad_by_code,
            "rows_for_other_models": self.other_models,
            "rows_that_may_be_cut": found.cut,
            "rows_with_structured_output": dict(+found.constrained),
            "rows_with_tools": found.tools,
            "rows_with_log_probabilities": found.told,
            "rows_with_special_tokens": found.marked,
            "chat_template_fault": self.template_fault,
            "special_tokens_in_prompts": dict(found.marks.most_common()),
            "prompt_tokens": sum(prompts),
            "longest_prompt": max(prompts, default=0),
            "output_tokens": self.output_tokens,
            "output_tokens_at_most": found.tokens_at_most,
            "context": self.limits.context,
            "kv_pages": asdict(self.pages)
            | {"tokens_per_page": self.limits.page_size, "available": self.limits.pages},
            "card": self.card,
            "memory": None if self.memory is None else asdict(self.memory),
            "estimate": None if self.estimate is None else _estimate_json(self.estimate),
        }


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """The model that is planned with.

    slots   rows that a worker runs at once
    memory  of the GPU, as a worker with these options would share it out
    card    the name of that GPU
    """

    name: str
    reader: PromptReader
    limits: RequestLimits
    slots: int
    memory: Forecast | None = None
    card: str | None = None


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The time that there is, and who works in it.

    now        the time; the night begins when the plan is made, unless `starts_at` names another
    """

    now: Callable[[], datetime]
    starts_at: datetime | None = None
    deadline_at: datetime | None = None
    workers: int = 1
    hours: Hours | None = None

    @property
    def begin(self) -> datetime:
        """When the first row begins."""
        hours = [] if self.hours is None else [self.hours]
        return begin_within(hours, self.starts_at or self.now())


@dataclass(frozen=True)
class Measuring:
    """The engine on which the speed is measured, for how long, and by which clock."""

    engine: Engine
    seconds: float = 0.0
    clock: Callable[[], float] | None = None


def make_plan(
    file: InputFile,
    model: PlannedModel,
    schedule: Schedule,
    *,
    measuring: Measuring | None = None,
    defaults: JobSpec | None = None,
    on_row: Callable[[], None] = lambda: None,
    on_measure: Callable[[], None] = lambda: None,
) -> Plan:
    """Plan a file. Without `measuring` there is no estimate.

    `on_measure` is called when all rows are read. Raises BatchFileError, RunnerError.
    """
    limits, slots = model.limits, model.slots
    size = max(_SAMPLE_AT_LEAST, _SAMPLE_BATCHES * slots) + WARM_UP if measuring is not None else 0
    found = survey(file, model.reader, limits, defaults=defaults, sample=size, on_row=on_row)
    measured: Measurement | None = None
    if measuring is not None and found.sample:
        on_measure()
        timing = {} if measuring.clock is None else {"clock": measuring.clock}
        measured = measure(measuring.engine, found.sample, seconds=measuring.seconds, **timing)
    lengths = expected_lengths(found, None if measured is None else measured.survival)
    estimate = None
    if measured is not None:
        rows_at_once = _fitting(found, lengths, limits, slots)
        estimate = Estimate(
            played=play_through(found, measured, slots=rows_at_once, workers=schedule.workers),
            workers=schedule.workers,
            starts_at=schedule.begin,
            deadline_at=schedule.deadline_at,
            measured_rows=measured.rows,
            measured_seconds=measured.seconds,
            hours=schedule.hours,
            watts=measured.watts,
        )
    return Plan(
        file=file,
        model=model.name,
        survey=found,
        output_tokens=None if measured is None else round(float(lengths.sum())),
        pages=pages_needed(found, lengths, slots, limits.page_size),
        limits=limits,
        estimate=estimate,
        memory=model.memory,
        card=model.card,
        template_fault=model.reader.template_fault(),
    )


def _fitting(found: Survey, lengths: Any, limits: RequestLimits, slots: int) -> int:
    """Answers of the usual size that the KV cache has pages for, at most `slots`."""
    if limits.pages is None:
        return slots
    usual = np.ceil((prompts_of_answers(found) + lengths) / limits.page_size).mean()
    return max(1, min(slots, int(limits.pages / usual)))


def _estimate_json(estimate: Estimate) -> JsonObject:
    played = estimate.played
    deadline_at = estimate.deadline_at
    return {
        "seconds": round(played.seconds, 3),
        "tail_seconds": round(played.tail_seconds, 3),
        "tokens_per_second": round(played.tokens_per_second, 1),
        "workers": estimate.workers,
        "rows_at_once": played.slots,
        "starts_at": estimate.starts_at.isoformat(),
        "done_at": estimate.done_at.isoformat(),
        "deadline_at": None if deadline_at is None else deadline_at.isoformat(),
        "fits": estimate.fits,
        "gpu_seconds": round(estimate.gpu_seconds, 3),
        "energy_kwh": None if estimate.energy_kwh is None else round(estimate.energy_kwh, 6),
        "measured_rows": estimate.measured_rows,
        "measured_seconds": round(estimate.measured_seconds, 3),
    }
