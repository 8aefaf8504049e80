"""Verification of a batch: some rows are computed again from their seeds, and the texts compared.

The copies are jobs of a separate batch that is always deleted at the end. The verified batch is only read.
"""

import hashlib
import heapq
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from nightmill.jobs.base.arithmetic import difference, model_of
from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.batches.waiting import JobWaiter
from nightmill.jobs.errors import (
    InvalidParameterError,
    InvalidTransitionError,
    NotServedError,
    WaitTimeoutError,
)
from nightmill.jobs.messages.announcing import Announcer
from nightmill.jobs.reply.embeddings import written
from nightmill.jobs.reply.job import Job
from nightmill.jobs.request.fields import check_option
from nightmill.jobs.sql.batches import BatchStore
from nightmill.jobs.sql.copying import COPIED_FROM, copy_jobs, models_of
from nightmill.jobs.sql.deletion import Deletion
from nightmill.jobs.sql.jobs import Selection, Store, by_queue, chunked
from nightmill.jobs.sql.workers import WorkerStore

_ROWS_AT_ONCE = 50  # few, as whole rows may have long prompts and texts
_EXCERPT = 24  # characters before and after the first difference
_STOPPING_SECONDS = 10.0  # running jobs stop within one
_LONGEST_NAME = 150  # characters of the batch's name in the name of the batch of copies


class Verdict(StrEnum):
    """The result of comparing a row with its copy.

    equal           the same text and stop reason, to the bit
    explained       different text, and a different prompt or arithmetic, whose differing parts are named
    unrecorded      different text; the arithmetic of one of the two was not recorded
    defect          different text by the same arithmetic, which must not happen
    not_compared    the copy did not succeed, or the row is gone
    """

    EQUAL = "equal"
    EXPLAINED = "explained"
    UNRECORDED = "unrecorded"
    DEFECT = "defect"
    NOT_COMPARED = "not_compared"


@dataclass(frozen=True, slots=True)
class Parting:
    """The first difference of two texts, after `at` equal characters, with excerpts of both."""

    at: int
    then: str
    now: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedRow:
    """A row that was computed again: `then` is the batch's result, `now` the copy's."""

    job_id: str
    verdict: Verdict
    row: int | None = None
    custom_id: str | None = None
    arithmetic_then: str | None = None  # None: not recorded
    arithmetic_now: str | None = None
    differences: tuple[str, ...] = ()  # differences in prompt and arithmetic, in words
    parting: Parting | None = None  # if texts differ
    stop_reason_then: str | None = None
    stop_reason_now: str | None = None
    error: str | None = None  # why nothing was compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of a verification."""

    batch: str
    seed_of_sample: int  # the same seed selects the same rows
    rows: tuple[VerifiedRow, ...]
    copies: str | None  # the batch of copies, if it was kept

    def count(self, verdict: Verdict) -> int:
        """Return the number of rows with this verdict."""
        return sum(row.verdict is verdict for row in self.rows)

    @property
    def equal(self) -> bool:
        """True if every row was computed again and is equal to the bit."""
        return self.count(Verdict.EQUAL) == len(self.rows)


class Verifier:
    """Verifies batches of one database with the workers that serve it."""

    def __init__(self, store: BatchStore, announcer: Announcer) -> None:
        self._batches = store
        self._jobs = Store(store.database)
        self._workers = WorkerStore(store.database)
        self._announcer = announcer

    def run(
        self,
        batch: str,
        *,
        sample: int,
        seed_of_sample: int | None,
        priority: int,
        timeout: float | None,
        keep: bool,
        on_rows: Callable[[int], None] | None,
    ) -> Verification:
        """Verify a batch; see Client.verify."""
        if sample < 1:
            raise InvalidParameterError(f"sample: must be at least 1 row (got {sample})", field="sample")
        check_option("priority", priority)
        self._batches.get(batch)  # raises BatchNotFoundError
        seed = secrets.randbelow(2**31) if seed_of_sample is None else seed_of_sample
        chosen = choose(self._batches.ids(batch, JobState.SUCCEEDED), sample, seed)
        if not chosen:
            raise _nothing_in(batch)
        self._refuse_unserved(chosen)
        copies = f"verify:{batch[:_LONGEST_NAME]}:{secrets.token_hex(6)}"
        try:
            queued = self._queue(chosen, copies, priority)
            if not queued:  # the batch was deleted meanwhile
                raise _nothing_in(batch)
            self._wait(copies, queued, timeout, on_rows)
            rows = tuple(self._compared(copies))
        finally:
            if not keep:
                self._remove(copies)
        return Verification(batch=batch, seed_of_sample=seed, rows=rows, copies=copies if keep else None)

    def _refuse_unserved(self, job_ids: list[str]) -> None:
        for model in sorted(models_of(self._batches.database, job_ids), key=str):
            if not self._workers.serving(model):
                named = "a model" if model is None else f"{model!r}, which these rows are of"
                name = "" if model is None else f" --name {model}"
                raise NotServedError(
                    f"no live worker serves {named}: start one first, nightmill worker --model FILE{name}"
                )

    def _queue(self, job_ids: list[str], copies: str, priority: int) -> int:
        """Queue copies of these jobs; returns their number, as some jobs may be gone meanwhile."""
        ids, queued = IdSource(), 0
        for chunk in chunked(job_ids, _ROWS_AT_ONCE):
            rows = copy_jobs(self._batches.database, chunk, copies, priority, ids)
            queued += len(rows)
            self._announcer.announce(by_queue(rows))
        return queued

    def _wait(
        self, copies: str, queued: int, timeout: float | None, on_rows: Callable[[int], None] | None
    ) -> None:
        try:
            for pause in JobWaiter(self._jobs).steps_to_end(None, copies, timeout):
                if on_rows is not None:
                    on_rows(queued - self._unfinished(copies))
                time.sleep(pause)
        except WaitTimeoutError:
            left = self._unfinished(copies)
            raise WaitTimeoutError(
                f"{left:,} of {queued:,} rows were not computed again in the time given: do other jobs come "
                "first? A higher priority, or a smaller sample, may help"
            ) from None

    def _compared(self, copies: str) -> Iterator[VerifiedRow]:
        for page in chunked(self._batches.ids(copies, *JobState), _ROWS_AT_ONCE):
            copied = self._jobs.find(Selection(ids=page))
            ids = [str(copy.metadata[COPIED_FROM]) for copy in copied]
            there = {job.id: job for job in self._jobs.find(Selection(ids=ids, states=[JobState.SUCCEEDED]))}
            for job_id, copy in zip(ids, copied, strict=True):
                yield compare(job_id, there.get(job_id), copy)

    def _remove(self, copies: str) -> None:
        """Delete the copies. Raises InvalidTransitionError if one does not stop running."""
        if self._unfinished(copies):
            self._batches.cancel(copies)
            give_up_at = time.monotonic() + _STOPPING_SECONDS
            while self._unfinished(copies) and time.monotonic() < give_up_at:
                time.sleep(0.1)
        if self._jobs.count(Selection(batch=copies)):  # otherwise no row was entered
            for _ in Deletion(self._batches.database).run(copies):
                pass

    def _unfinished(self, copies: str) -> int:
        return self._jobs.count_unfinished(Selection(batch=copies))


def choose(job_ids: Iterable[str], sample: int, seed: int) -> list[str]:
    """Choose `sample` of the ids at random, or all if there are fewer, in their order.

    The ids with the smallest hashes are chosen: the same seed gives the same sample, in one pass and little
    memory, and mostly the same sample after more rows were added.
    """

    def rank(job_id: str) -> bytes:
        return hashlib.sha256(f"{seed}:{job_id}".encode()).digest()

    return sorted(heapq.nsmallest(sample, job_ids, key=rank))


def compare(job_id: str, then: Job | None, now: Job) -> VerifiedRow:
    """Compare a row of the batch (None: it is gone) with its copy."""
    if then is None:
        gone = "the row has been deleted meanwhile"
        return VerifiedRow(job_id=job_id, verdict=Verdict.NOT_COMPARED, error=gone)
    done = now.state is JobState.SUCCEEDED
    recorded = then.arithmetic is not None and now.arithmetic is not None
    differences = _prompts(then, now)
    if recorded:
        differences += difference(str(then.arithmetic), str(now.arithmetic))
    if not done:
        verdict = Verdict.NOT_COMPARED
    elif _said(then) == _said(now):
        verdict = Verdict.EQUAL
    elif differences:
        verdict = Verdict.EXPLAINED
    else:
        verdict = Verdict.DEFECT if recorded else Verdict.UNRECORDED
    return VerifiedRow(
        job_id=job_id,
        verdict=verdict,
        row=then.row,
        custom_id=then.custom_id,
        arithmetic_then=then.arithmetic,
        arithmetic_now=now.arithmetic,
        differences=differences,
        parting=_parting(then, now) if done else None,
        stop_reason_then=then.stop_reason,
        stop_reason_now=now.stop_reason,
        error=None if done else now.error or f"its copy was {now.state}",
    )


def _prompts(then: Job, now: Job) -> tuple[str, ...]:
    """Describe a change of the prompt's tokens: by digests, or by count if an older row has no digest."""
    if then.prompt_digest is None or now.prompt_digest is None:
        if then.prompt_tokens == now.prompt_tokens:
            return ()
        return (f"prompt: {then.prompt_tokens} tokens, now {now.prompt_tokens}",)
    if then.prompt_digest == now.prompt_digest:
        return ()
    models = [model_of(job.arithmetic) for job in (then, now)]
    cause = "its chat template or the version of Jinja is another"
    if models[0] is not None and models[0] == models[1]:  # the file's digest covers its templates
        cause = (
            "the version of Jinja or of Nightmill is another; the model file and its chat template are not"
        )
    return (f"prompt: the tokens {then.prompt_digest}, now {now.prompt_digest}, since {cause}",)


def _said(job: Job) -> list[tuple[str, str]]:
    reasons = (answer.stop_reason for answer in job.answers)
    return list(zip(_texts(job), reasons, strict=True))


def _texts(job: Job) -> list[str]:
    """The texts of a job's answers, or its embedding in digits that tell all bits."""
    if job.packed_embedding is not None:
        return [str(written(job.packed_embedding))]
    return [answer.text for answer in job.answers]


def _parting(then: Job, now: Job) -> Parting | None:
    """Return the first difference of the first answer that differs; None if all texts are equal."""
    pairs = zip(_texts(then), _texts(now), strict=False)
    return next((part(one, other) for one, other in pairs if one != other), None)


def part(then: str, now: str) -> Parting:
    """Return the first difference of two different texts."""
    pairs = enumerate(zip(then, now, strict=False))
    at = next((index for index, (one, other) in pairs if one != other), min(len(then), len(now)))
    around = slice(max(0, at - _EXCERPT), at + _EXCERPT)
    return Parting(at, then[around], now[around])


def _nothing_in(batch: str) -> InvalidTransitionError:
    return InvalidTransitionError(f"batch {batch!r} has no row that has succeeded: nothing to verify")
