"""Two batches of the same rows, compared: how many answers differ, in which part, and where first."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nightmill.jobs.base.contract import FINAL_STATES, JobState
from nightmill.jobs.reply.job import Job
from nightmill.jobs.sql.batches import BatchStore

TEXT = "text"
_MOST_COLUMNS = 1_000  # properties of answers that are counted
_AROUND = 40  # characters shown before and behind the first that differs


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first row of which something differs."""

    row: int
    custom_id: str | None
    column: str
    place: int | None
    """The first character that differs, from 0; None of what is no text."""
    values: tuple[Any, Any]
    """The values; of texts what is around that character."""


@dataclass(slots=True)
class Difference:
    """The differences between two batches, and the rows that they have in common."""

    names: tuple[str, str]
    same_source: bool
    """True if both were submitted from the same bytes."""
    rows: int = 0
    """Rows that have ended in both."""
    alone: tuple[int, int] = (0, 0)
    """Rows that have ended in one of them only."""
    differing: int = 0
    """Rows of which anything below differs."""
    columns: Counter[str] = field(default_factory=Counter)
    """Rows that differ, by what does: state, stop_reason, text, properties of answers that are objects."""
    first: dict[str, FirstDifference] = field(default_factory=dict)
    """By column: the first row in which it differs."""

    @property
    def texts(self) -> int:
        """Rows whose texts differ."""
        return self.columns[TEXT]


def compare(one: str, other: str, store: BatchStore) -> Difference:
    """Compare two batches, row by row, in memory that does not grow with them.

    Rows are matched by their place in the file. Raises BatchNotFoundError.
    """
    records = store.get(one), store.get(other)
    found = Difference(
        (one, other),
        records[0].fingerprint is not None and records[0].fingerprint == records[1].fingerprint,
    )
    alone = [0, 0]
    states = [state for state in JobState if state in FINAL_STATES]
    for first, second in _matched(store.in_order(one, states), store.in_order(other, states)):
        if first is not None and second is not None:
            _compare(first, second, found)
        else:
            alone[first is None] += 1
    found.alone = alone[0], alone[1]
    return found


def _matched(ones: Iterator[Job], others: Iterator[Job]) -> Iterator[tuple[Job | None, Job | None]]:
    """Jobs of the same row, and those that have none beside them."""
    one, other = next(ones, None), next(others, None)
    while one is not None or other is not None:
        if other is None or (one is not None and _row(one) < _row(other)):
            yield one, None
            one = next(ones, None)
        elif one is None or _row(other) < _row(one):
            yield None, other
            other = next(others, None)
        else:
            yield one, other
            one, other = next(ones, None), next(others, None)


def _row(job: Job) -> int:
    return job.row or 0


def _compare(one: Job, other: Job, found: Difference) -> None:
    found.rows += 1
    before, after = _values(one), _values(other)
    columns = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    found.differing += bool(columns)
    for name in columns:
        if name not in found.columns and len(found.columns) >= _MOST_COLUMNS:
            continue
        found.columns[name] += 1
        if name not in found.first:
            found.first[name] = _first(one, name, before.get(name), after.get(name))


def _values(job: Job) -> dict[str, Any]:
    """The values of a job that are compared, by column."""
    made: dict[str, Any] = {
        TEXT: [answer.text for answer in job.several] if job.several else job.text,
        "state": str(job.state),
        "stop_reason": None if job.stop_reason is None else str(job.stop_reason),
    }
    parsed = job.parsed
    if isinstance(parsed, Mapping):
        made |= {f"{TEXT}.{name}": value for name, value in parsed.items()}
    return made


def _first(job: Job, column: str, before: Any, after: Any) -> FirstDifference:
    texts = [value if isinstance(value, str) else None for value in (before, after)]
    if texts[0] is None or texts[1] is None:
        values = tuple(_short(value) for value in (before, after))
        return FirstDifference(_row(job), job.custom_id, column, None, (values[0], values[1]))
    one, other = texts[0], texts[1]
    place = next(
        (at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right),
        min(len(one), len(other)),
    )
    start, end = max(0, place - _AROUND), place + _AROUND
    return FirstDifference(_row(job), job.custom_id, column, place, (one[start:end], other[start:end]))


def _short(value: Any) -> Any:
    """A value, or the beginning of a long one."""
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return value if len(shown) <= 2 * _AROUND else shown[: 2 * _AROUND]
