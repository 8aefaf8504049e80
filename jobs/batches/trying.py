"""Some rows of a file or a table, at random, before all of them: run as interactive jobs, and taken away."""

import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.batches.waiting import JobWaiter
from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.formats import InputFile, InputRow, RowError, rows_from
from nightmill.jobs.formats.frames import items_of
from nightmill.jobs.formats.plain import ROW_KEYS
from nightmill.jobs.reply.job import Job
from nightmill.jobs.request.fields import OF_A_BATCH
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.deletion import Deletion
from nightmill.jobs.sql.jobs import Selection, Store
from nightmill.jobs.tables.memory import TableItems
from nightmill.jobs.tables.options import TableOptions, without_table
from nightmill.jobs.tables.together import table_source

MOST_ROWS = 100
_MANY = 0.2  # of the answers: so many that are cut are no accident
_STOPPING_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Trial:
    """Some rows, tried, and what the file holds.

    seed    chooses the same rows again
    jobs    in the order of the file; each has the number of its row
    good    rows of the file that can be run; of `bad` ones, `first_error` is the first's
    seconds from the first row's start to the last one's end
    """

    seed: int
    jobs: tuple[Job, ...]
    good: int
    bad: int
    first_error: tuple[int, RowError] | None
    seconds: float

    @property
    def cut(self) -> int:
        """The number of answers that were cut by max_tokens."""
        return sum(job.stop_reason is StopReason.LENGTH for job in self.jobs)

    @property
    def many_cut(self) -> bool:
        """True if more than a few answers were cut by max_tokens."""
        return self.cut > max(1.0, _MANY * len(self.jobs))

    def tokens_of_all(self) -> tuple[int, int]:
        """(read, written) tokens to expect of all good rows, if they are as these."""
        share = self.good / max(1, len(self.jobs))
        prompts = sum(job.prompt_tokens or 0 for job in self.jobs)
        answers = sum(job.completion_tokens or 0 for job in self.jobs)
        return round(share * prompts), round(share * answers)


@dataclass(frozen=True, slots=True)
class _Chosen:
    rows: list[InputRow]
    good: int
    bad: int
    first_error: tuple[int, RowError] | None


class Trying:
    """Tries rows of sources on the workers of one database.

    enqueue  queues jobs for which somebody waits, and returns their ids
    """

    def __init__(self, database: Database, enqueue: Callable[[list[JobSpec]], list[str]]) -> None:
        self._database = database
        self._jobs = Store(database)
        self._enqueue = enqueue

    def run(
        self,
        source: Any,
        settings: Mapping[str, Any],
        *,
        rows: int,
        seed: int | None,
        timeout: float | None,
        on_wait: Callable[[int], object] = lambda done: None,
    ) -> Trial:
        """See Client.try_rows. `on_wait` is called again and again with how many rows have ended."""
        if type(rows) is not int or not 1 <= rows <= MOST_ROWS:
            raise InvalidParameterError(f"rows: must be 1 to {MOST_ROWS} (got {rows!r})", field="rows")
        seed = secrets.randbelow(2**31) if seed is None else seed
        name = f"try:{secrets.token_hex(8)}"
        chosen = _choose(_rows(source, settings), rows, seed)
        specs = [row.spec.updated({"batch": name}) for row in chosen.rows if row.spec is not None]
        jobs: dict[str, Job] = {}
        if specs:
            try:
                ids = self._enqueue([spec.as_interactive() for spec in specs])
                for pause in JobWaiter(self._jobs).steps_to_end(ids, None, timeout):
                    on_wait(len(ids) - self._unfinished(name))
                    time.sleep(pause)
                jobs = {job.id: job for job in self._jobs.find(Selection(ids=ids))}
            finally:
                self._remove(name)
        numbered = zip((row.number for row in chosen.rows), jobs.values(), strict=False)
        made = tuple(_numbered(job, number) for number, job in numbered)
        return Trial(seed, made, chosen.good, chosen.bad, chosen.first_error, _seconds(made))

    def _remove(self, name: str) -> None:
        """Delete the rows. Raises InvalidTransitionError if one goes on running."""
        if self._unfinished(name):
            for job in self._jobs.find(Selection(batch=name)):
                if not job.state.final:
                    self._jobs.cancel(job.id)
            give_up_at = time.monotonic() + _STOPPING_SECONDS
            while self._unfinished(name) and time.monotonic() < give_up_at:
                time.sleep(0.1)
        if self._jobs.count(Selection(batch=name)):
            for _ in Deletion(self._database).run(name):
                pass

    def _unfinished(self, name: str) -> int:
        return self._jobs.count_unfinished(Selection(batch=name))


def _rows(source: Any, settings: Mapping[str, Any]) -> Iterator[InputRow]:
    """The rows of whatever a batch is submitted from."""
    settings = {**settings, "scheduled_at": None}  # somebody waits
    options = TableOptions.of(settings)
    defaults = JobSpec.defaults(without_table(settings), OF_A_BATCH)
    if options is not None:
        return table_source(source, options).rows(defaults)
    if isinstance(source, str | Path):
        source = InputFile(source)
    if isinstance(source, InputFile | TableItems):
        return source.rows(defaults)
    return rows_from(items_of(source, ROW_KEYS), defaults)


def _choose(rows: Iterable[InputRow], count: int, seed: int) -> _Chosen:
    """`count` good rows at random, each with equal probability, in their order; and what the others are."""
    draw = random.Random(seed)
    kept: list[InputRow] = []
    good = bad = waiting = 0
    first_error: tuple[int, RowError] | None = None
    for row in rows:
        if row.spec is not None and row.spec.held is not None:  # it has no prompt before another has ended
            good, waiting = good + 1, waiting + 1
            continue
        if row.error is not None:
            bad += 1
            first_error = first_error or (row.number, row.error)
            continue
        good += 1
        place = len(kept) if len(kept) < count else draw.randrange(good - waiting)
        if place < count:
            kept[place : place + 1] = [row]
    return _Chosen(sorted(kept, key=lambda row: row.number), good, bad, first_error)


def _numbered(job: Job, number: int) -> Job:
    return replace(job, row=number)


def _seconds(jobs: tuple[Job, ...]) -> float:
    begun = [job.started_at for job in jobs if job.started_at is not None]
    ended = [job.finished_at for job in jobs if job.finished_at is not None]
    return (max(ended) - min(begun)).total_seconds() if begun and ended else 0.0
