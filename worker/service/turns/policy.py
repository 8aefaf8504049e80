"""The policy of models in turn: which to load next, and when the loaded one gives way. Pure, without I/O.

A queue is drained before a swap, so that each model loads about once a night. Three things end a turn before
its rows do: rows of a higher priority, a deadline that would be missed, and rows that only came after the
model was loaded, while others wait for theirs. They leave a model loaded for `stay` first; a deadline, and a
job that somebody waits for, leave it for as long as a load takes.

Of several models that rows wait for, the next is found by, in this order: whether its last load failed, rows
that somebody waits for (if these may swap), the priority of the most urgent row, whether another worker has
it, the deadline that must be begun first, the most rows for each second of loading, the oldest row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from nightmill.jobs.sql.loads import Queue

_FILLINGS = 4
"""A model that other workers have is loaded once more only for rows beyond so many times what they compute at
once: fewer would be done before it is loaded, or soon after."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules that the settings give.

    stay                  how long a model that has rows is kept before more urgent ones unload it
    swap_for_interactive  whether an interactive job swaps
    """

    stay: timedelta = timedelta(minutes=10)
    swap_for_interactive: bool = False


@dataclass(frozen=True, slots=True)
class Loadable:
    """A model that could be loaded: what a load costs, and until when a failed one is left alone."""

    model: str
    load_seconds: float
    retry_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class View:
    """The facts that a decision is made by.

    queues  of all models that have rows; under None those that any model may answer
    held    by model, the rows that other workers which have it loaded compute at once
    """

    now: datetime
    candidates: Sequence[Loadable]
    queues: Mapping[str | None, Queue]
    held: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model that is loaded: since when, and whether the worker holds no job."""

    model: str
    since: datetime
    idle: bool


@dataclass(frozen=True, slots=True)
class NextModel:
    """A model to load, and why, for people."""

    model: str
    reason: str


def choose(view: View, rules: Rules) -> NextModel | None:
    """Return the model to load if none is loaded; None: nothing waits that is worth a load."""
    for candidate in ranked(view, rules):
        return NextModel(candidate.model, _said(view.queues[candidate.model]))
    if (any_model := view.queues.get(None)) is not None and not view.held:
        for candidate in view.candidates:
            if _may_try(candidate, view.now):
                return NextModel(candidate.model, f"{_said(any_model)} for any model")
    return None


def give_way(view: View, loaded: Loaded, rules: Rules) -> NextModel | None:
    """Return the model to swap to; None: the loaded one goes on."""
    own = _own(view, loaded.model)
    for candidate in ranked(view, rules):
        queue = view.queues[candidate.model]
        if candidate.model == loaded.model:
            continue
        if own is None and loaded.idle:
            # A load for a row that has just come may be followed at once by one back: so it waits for as
            # long as a load takes, unless somebody waits for it.
            if queue.interactive or view.now - queue.since >= timedelta(seconds=candidate.load_seconds):
                return NextModel(candidate.model, _said(queue))
        elif (
            candidate.retry_at is None
            and (reason := _urgent(view, loaded, own, candidate, rules)) is not None
        ):
            return NextModel(candidate.model, reason)
    return None


def ranked(view: View, rules: Rules) -> list[Loadable]:
    """Return the models that a load is worthwhile for, the first to load first."""

    def rank(candidate: Loadable) -> tuple[float, ...]:
        queue = view.queues[candidate.model]
        begin_by = _begin_by(view.now, candidate, queue)
        return (
            0.0 if candidate.retry_at is None else 1.0,  # one that failed waits for all that work
            0.0 if rules.swap_for_interactive and queue.interactive else 1.0,
            -queue.priority,
            1.0 if candidate.model in view.held else 0.0,
            float("inf") if begin_by is None else begin_by.timestamp(),
            -queue.rows / max(candidate.load_seconds, 0.001),
            queue.since.timestamp(),
        )

    return sorted((one for one in view.candidates if _is_worthwhile(view, one)), key=rank)


def _is_worthwhile(view: View, candidate: Loadable) -> bool:
    queue = view.queues.get(candidate.model)
    if queue is None or not _may_try(candidate, view.now):
        return False
    return queue.rows > _FILLINGS * view.held.get(candidate.model, 0)


def _may_try(candidate: Loadable, now: datetime) -> bool:
    return candidate.retry_at is None or candidate.retry_at <= now


def _own(view: View, model: str) -> Queue | None:
    """Return the rows that wait for the loaded model, those for any model among them."""
    found = [queue for name in (model, None) if (queue := view.queues.get(name)) is not None]
    if not found:
        return None
    deadlines = [queue.deadline for queue in found if queue.deadline is not None]
    return Queue(
        model,
        sum(queue.rows for queue in found),
        max(queue.priority for queue in found),
        min(queue.since for queue in found),
        min(deadlines, default=None),
        sum(queue.interactive for queue in found),
    )


def _urgent(view: View, loaded: Loaded, own: Queue | None, candidate: Loadable, rules: Rules) -> str | None:
    """Return why a model unloads one that is at work; None if it waits for its turn."""
    queue, load = view.queues[candidate.model], timedelta(seconds=candidate.load_seconds)
    here = view.now - loaded.since
    # A worker without a queue still has the rows in its hands, whose priority nobody knows here.
    priority = queue.priority if own is None else own.priority
    awaited = rules.swap_for_interactive and queue.interactive and not (own is not None and own.interactive)
    if awaited and here >= load:
        return f"an interactive job asks for {candidate.model}"
    if own is not None and queue.priority > own.priority and here >= rules.stay:
        return f"rows of priority {queue.priority} wait for {candidate.model}"
    if queue.priority < priority:
        return None
    begin_by = _begin_by(view.now, candidate, queue)
    ours = None if own is None else own.deadline
    first = begin_by is not None and (ours is None or queue.deadline is None or queue.deadline < ours)
    if begin_by is not None and first and begin_by - view.now <= max(rules.stay, load) and here >= load:
        return f"rows of {candidate.model} have a deadline that would be missed"
    came_later = own is not None and own.since > loaded.since and queue.since < own.since
    if came_later and here >= rules.stay:
        return f"rows of {candidate.model} have waited for longer than all that is left"
    return None


def _begin_by(now: datetime, candidate: Loadable, queue: Queue) -> datetime | None:
    """Return when a load must begin to meet the first deadline; None if there is none that can be met."""
    if queue.deadline is None:
        return None
    begin_by = queue.deadline - timedelta(seconds=candidate.load_seconds)
    return begin_by if begin_by >= now else None


def _said(queue: Queue) -> str:
    rows = "1 row waits" if queue.rows == 1 else f"{queue.rows:,} rows wait"
    return f"{rows} since {queue.since:%H:%M:%S} UTC"
