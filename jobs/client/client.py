"""The client of programs: enqueue, read, wait, cancel, retry. A call is checks, one transaction, one message.

What commands, servers and workers need beyond that they find on its parts: `enqueueing`, `batches`,
`worker_store`, `courier`.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Self, Unpack

from nightmill.jobs.base.contract import JobState, Prompt
from nightmill.jobs.base.ids import JobIds
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.batches.batches import Batches, BatchSource
from nightmill.jobs.batches.limits import SubmitSettings
from nightmill.jobs.batches.submission import OnRows
from nightmill.jobs.batches.trying import Trial, Trying
from nightmill.jobs.batches.verifying import Verification, Verifier
from nightmill.jobs.batches.waiting import JobWaiter, Order
from nightmill.jobs.client.computing import Computations
from nightmill.jobs.client.enqueueing import Enqueueing
from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.formats.frames import Prompts, items_of
from nightmill.jobs.messages.announcing import Announcer
from nightmill.jobs.messages.broker import Broker
from nightmill.jobs.reply.job import Job, Worker
from nightmill.jobs.reply.night import NightReport
from nightmill.jobs.request.fields import FIELDS, JobSettings, deadline_moment
from nightmill.jobs.sql.batches import BatchStore
from nightmill.jobs.sql.database import Clock, Database
from nightmill.jobs.sql.jobs import Selection, Store
from nightmill.jobs.sql.nights import Nights
from nightmill.jobs.sql.prune import Prune, Pruned
from nightmill.jobs.sql.workers import WorkerStore
from nightmill.jobs.streams.pieces import START, Piece, TextPosition
from nightmill.jobs.streams.readers import StreamReaders
from nightmill.jobs.tables.options import TableSettings
from nightmill.jobs.webhooks.delivering import Courier

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

_COLUMNS = frozenset(FIELDS.keys() | {"prompt", "messages"})  # known columns of a table of prompts


class Client(Computations):
    """A connection to one database and one broker. Safe to share between threads."""

    def __init__(self, settings: Settings | None = None, *, clock: Clock | None = None) -> None:
        self.settings = settings or Settings.from_env()
        self.database = Database(self.settings, clock)
        self.store = Store(self.database)
        self.worker_store = WorkerStore(self.database)
        self.waiting = JobWaiter(self.store)
        self.broker = Broker(self.settings)
        self.following = StreamReaders(self.store, self.broker)
        self._announcer = Announcer(self.database, self.broker)
        self.enqueueing = Enqueueing(self.store, self.worker_store, self.broker, self._announcer)
        self.batches = Batches(BatchStore(self.database), self._announcer, self.settings)
        self.courier = Courier(self.batches, self.settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def announce_apart(self) -> None:
        """Send messages on background threads, so that a hanging broker blocks no caller that enqueues.

        For servers, which do not fork.
        """
        self._announcer.go_apart()

    def close(self) -> None:
        """Close connections. An embedded broker keeps running."""
        self.following.close()
        self._announcer.close()
        self.broker.close()
        self.database.close()

    def enqueue(
        self,
        prompt: Prompt,
        *,
        session: "Session | None" = None,
        interactive: bool = False,
        **settings: Unpack[JobSettings],
    ) -> str:
        """Queue one prompt; returns its job id.

        `prompt` is a text or a list of token ids, sent to the model as it is, or a list of chat messages
        (`{"role": ..., "content": ...}`), to which the model's template is applied. Keywords are the
        fields of GenerationParams, and the options: model, batch, custom_id, priority (0 to 9, higher is
        sooner), deadline, scheduled_at, idempotency_key, metadata, max_attempts. None counts as not given.

        `interactive`: somebody waits for the answer. Unless `priority` is given, the job is run before all
        others, in slots that workers reserve for such jobs.

        With `session` the row is added to the caller's SQLAlchemy transaction: it becomes visible, and
        its message is sent, when that commits.

        Raises InvalidRequestError (naming the field) and DatabaseError. If the broker does not answer, warns
        with DeliveryDelayedWarning: the job is stored, and a worker will find it.
        """
        return self.enqueueing.enqueue([prompt], settings, session, interactive=interactive)[0]

    def enqueue_many(
        self,
        prompts: Prompts,
        *,
        session: "Session | None" = None,
        interactive: bool = False,
        **settings: Unpack[JobSettings],
    ) -> JobIds:
        """Queue every prompt of an iterable, in constant memory except for 16 bytes a job id.

        An item is a prompt, or a mapping with `prompt` or `messages` and settings that override the keywords.
        A table (pandas, Polars, Arrow) counts as its rows. Jobs are committed and sent in groups as the
        iterable is read, so work begins at once. At a bad item, the jobs before it stay queued; the
        InvalidRequestError says how many, and has their ids as `.enqueued`. With `session`, everything is one
        transaction, the caller's.
        """
        items = items_of(prompts, _COLUMNS)
        return self.enqueueing.enqueue(items, settings, session, interactive=interactive)

    def submit_batch(
        self,
        source: BatchSource | None = None,
        *,
        name: str | None = None,
        on_rows: OnRows | None = None,
        webhook: str | None = None,
        **settings: Unpack[SubmitSettings],
    ) -> Batch:
        """Queue every row of a file (its path), a table (pandas, Polars, Arrow) or an iterable, as one batch.

        Unlike `enqueue_many`, it does not stop at a bad row, which becomes a failed job with the reason.
        Parameters, `priority` and `max_attempts` are defaults of the rows, `model` overrides them,
        `scheduled_at` and `deadline` apply to the batch. Submitting a file again under its name enters
        missing rows and nothing twice; without a name, one is derived from the file and the settings. The
        times of the first submission apply. `on_rows` is called after each group with the number of rows read
        so far. `webhook` is a URL that is called once the batch has ended; NIGHTMILL_WEBHOOK_URLS must allow
        it.

        With `template`, a text with `{{ column }}` in it, the source is any table: a path, an object that
        speaks Arrow (pandas, Polars, DuckDB, pyarrow), or an iterable of mappings. Each row is a chat of
        `system` and the filled template (with `plain` a plain prompt). The columns of `keep` ("all", "none",
        or names) come back beside the answers, which are in `column`, and with `spread` in a column for each
        top property of their schema. `empty` ("error", "skip", "keep") is for rows that lack a value.

        With `after`, the name of a batch, and no source, each row follows one of that batch: it waits until
        that row has ended, and its template takes the answer (`{{ prior.content }}`). docs/tables.md says
        which parts there are, and what becomes of rows whose priors fail or are cancelled.

        `budget`, such as "20M-tokens", and `max_failures`, such as "5%", stop the batch: running rows end as
        they would, queued rows with the stop reason `budget`. Given to a batch that exists they replace its
        limits, and with larger ones it goes on; see Batch.set_limits.

        Raises BatchFileError, BatchConflictError (the name belongs to other rows), InvalidParameterError,
        UnknownModelError and DatabaseError.
        """
        return self.batches.submit(
            source,
            settings,
            name=name,
            check_model=self.enqueueing.check_model,
            on_rows=on_rows,
            on_entered=self.courier.webhook_of(webhook),
        )

    def try_rows(
        self,
        source: BatchSource,
        *,
        rows: int = 10,
        seed_of_sample: int | None = None,
        timeout: float | None = None,
        **settings: Unpack[TableSettings],
    ) -> Trial:
        """Run some rows of a source at random, before all of them, and wait for their answers.

        Source and keywords are those of `submit_batch`. The rows go past all batches, and are deleted once
        they have ended; the Trial has them. `seed_of_sample` chooses the same rows of the same source again.

        Raises what `submit_batch` raises, and WaitTimeoutError after `timeout` seconds.
        """
        trying = Trying(self.database, self.enqueueing.enqueue_specs)
        return trying.run(source, settings, rows=rows, seed=seed_of_sample, timeout=timeout)

    def get_batch(self, name: str) -> Batch:
        """Return a batch; raises BatchNotFoundError."""
        return self.batches.get(name)

    def list_batches(self, *, limit: int = 50) -> list[Batch]:
        """Return the newest batches, newest first."""
        return self.batches.newest(limit)

    def get(self, job_id: str) -> Job:
        """Return a snapshot of one job; raises JobNotFoundError."""
        return self.store.get(job_id)

    def list_jobs(
        self,
        *,
        state: JobState | str | None = None,
        batch: str | None = None,
        model: str | None = None,
        limit: int = 50,
    ) -> list[Job]:
        """Return the newest jobs that match, newest first: none also if no batch has this name."""
        states = None if state is None else [_state(state)]
        return self.store.find(Selection(batch=batch, states=states, model=model), limit, newest_first=True)

    def wait(
        self,
        jobs: str | Iterable[str] | None = None,
        *,
        batch: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """Return when the jobs (an id, ids, or a batch) are all final.

        Raises WaitTimeoutError after `timeout` seconds, JobNotFoundError for an unknown id, and
        BatchNotFoundError for an unknown batch.
        """
        self.waiting.wait(jobs, batch, timeout)

    def results(
        self,
        jobs: Iterable[str] | None = None,
        *,
        batch: str | None = None,
        order: Order = "enqueued",
        wait: bool = True,
        timeout: float | None = None,
    ) -> Iterator[Job]:
        """Yield finished jobs in the order of enqueueing, or as they finish.

        A batch may grow while it is read. A job whose transaction (`session=`) commits after later jobs were
        read comes at the end.

        Waits for unfinished jobs, or skips them if `wait` is False. Raises WaitTimeoutError after `timeout`
        seconds in total, JobNotFoundError, and BatchNotFoundError: a batch is there once its first job is
        committed, until it is deleted.
        """
        return self.waiting.results(jobs, batch, order, wait, timeout)

    def stream(
        self,
        job_id: str,
        *,
        answer: int = 0,
        after: TextPosition | str | None = None,
        timeout: float | None = None,
    ) -> Iterator[Piece]:
        """Yield the text of a job in pieces while it is generated; joined, they are the text of its row.

        A piece is a str with `place`, the position of its end. With that as `after`, an interrupted reader
        resumes exactly there, in any process. The stream ends with the job, in whichever state, which `get`
        returns. If Redis does not answer, the text comes as a whole at the end. `answer` selects one of
        several answers by its number, from 0.

        Raises JobNotFoundError, InvalidParameterError (`after` is invalid, or the job has no such answer),
        WaitTimeoutError after `timeout` seconds, StreamChangedError if the job restarted and produced
        different text.
        """
        return self.following.pieces(job_id, _place(after), timeout, answer)

    def stream_async(
        self,
        job_id: str,
        *,
        answer: int = 0,
        after: TextPosition | str | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Piece]:
        """Do the same as `stream` for asyncio."""
        return self.following.pieces_async(job_id, _place(after), timeout, answer)

    def stats(self, batch: str | None = None) -> dict[str, Any]:
        """Count jobs by state and stop reason, and their tokens; raises BatchNotFoundError."""
        if batch is not None:
            self.batches.store.get(batch)
        tokens = zip(("prompt_tokens", "completion_tokens"), self.store.tokens(batch), strict=True)
        return self.store.counts(batch) | dict(tokens)

    def night(self, day: date | None = None) -> NightReport:
        """Return what a night was, from the noon of `day` to the next noon in this machine's zone.

        None: the present night, or in the afternoon the last one.
        """
        return Nights(self.database).report(day)

    def verify(
        self,
        batch: str,
        *,
        sample: int = 20,
        seed_of_sample: int | None = None,
        priority: int = 0,
        timeout: float | None = None,
        keep: bool = False,
        on_rows: Callable[[int], None] | None = None,
    ) -> Verification:
        """Compute some rows of a batch again from their seeds, and compare texts and stop reasons.

        `sample` succeeded rows are chosen at random, the same ones for the same `seed_of_sample`. Copies of
        them run as jobs of a separate batch, by default after all other jobs, and are deleted at the end
        unless `keep`; the batch itself is only read. `on_rows` is called with the number of finished copies.
        Texts of one arithmetic are equal to the bit; if two differ, the result names the differing parts of
        the arithmetic.

        Raises BatchNotFoundError, InvalidTransitionError (no row has succeeded), NotServedError (no live
        worker serves the model), InvalidParameterError, and WaitTimeoutError after `timeout` seconds.
        """
        return Verifier(self.batches.store, self._announcer).run(
            batch,
            sample=sample, seed_of_sample=seed_of_sample, priority=priority, timeout=timeout, keep=keep,
            on_rows=on_rows,
        )  # fmt: skip

    def workers(self) -> list[Worker]:
        """Return all workers, past and present, newest first."""
        return self.worker_store.all()

    def cancel(self, job_id: str) -> JobState:
        """Cancel a job: a queued one at once, a running one at its next step. Returns its state now.

        Cancelling twice does nothing; a job that has already ended is an InvalidTransitionError.
        """
        return self.store.cancel(job_id)

    def cancel_batch(self, batch: str) -> tuple[int, int]:
        """Cancel all unfinished jobs of a batch: (cancelled at once, running and asked to stop).

        A batch that is not there has none.
        """
        return self.batches.store.cancel(batch)

    def prune(
        self,
        older_than: timedelta,
        *,
        dry_run: bool = False,
        on_jobs: Callable[[int], None] = lambda jobs: None,
    ) -> Pruned:
        """Delete jobs and batches that ended longer ago than this, and empty batches; returns their numbers.

        Unfinished jobs are never deleted, and a submitted batch only as a whole. `dry_run` only counts.
        `on_jobs` is called after each group with the number of jobs deleted so far.
        """
        return Prune(self.batches.store, self.database.now() - older_than).carry_out(
            dry_run=dry_run, on_jobs=on_jobs
        )

    def retry(self, job_id: str, *, deadline: datetime | timedelta | None = None) -> Job:
        """Queue a failed or cancelled job again, under its id and seed.

        Raises JobNotFoundError, InvalidTransitionError, and BatchConflictError (its batch is being deleted).
        """
        job = self.store.retry(job_id, deadline_moment(deadline, self.database.now()))
        self._announcer.announce({(job.model, job.priority): [job.id]})
        return job


def _place(after: TextPosition | str | None) -> TextPosition:
    return after if isinstance(after, TextPosition) else START if after is None else TextPosition.parse(after)


def _state(state: JobState | str) -> JobState:
    try:
        return JobState(state)
    except ValueError:
        known = ", ".join(JobState)
        raise InvalidParameterError(f"state: {state!r} is not one of {known}", field="state") from None
