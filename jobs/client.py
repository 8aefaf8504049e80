"""What programs call: enqueue, look, wait, cancel, retry. Thin: checks, one transaction, one message."""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Self, Unpack

from nightmill.jobs.batches.batch import Batch, Batches, BatchSource
from nightmill.jobs.batches.submission import OnRows
from nightmill.jobs.batches.verifying import Verification, Verifier
from nightmill.jobs.contract import JobState, Prompt
from nightmill.jobs.enqueueing import Enqueueing
from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.fields import FIELDS, BatchSettings, JobSettings, deadline_moment
from nightmill.jobs.following import Following
from nightmill.jobs.formats.frames import Prompts, items_of
from nightmill.jobs.ids import JobIds
from nightmill.jobs.job import Job, Worker, scores_of
from nightmill.jobs.logprobs import Scores
from nightmill.jobs.messages.announcing import Announcer
from nightmill.jobs.messages.broker import Broker
from nightmill.jobs.pieces import START, Piece, Place
from nightmill.jobs.settings import Settings
from nightmill.jobs.spec import JobSpec
from nightmill.jobs.sql.batches import BatchStore
from nightmill.jobs.sql.database import Clock, Database
from nightmill.jobs.sql.jobs import Selection, Store
from nightmill.jobs.sql.prune import Prune, Pruned
from nightmill.jobs.sql.webhooks import WebhookStore
from nightmill.jobs.sql.workers import WorkerStore
from nightmill.jobs.waiting import Order, Waiting
from nightmill.jobs.webhooks.delivering import Courier, check_allowed

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

_COLUMNS = frozenset(FIELDS.keys() | {"prompt", "messages"})  # of a table of prompts


class Client:
    """A connection to one database and one broker. Safe to share between threads."""

    def __init__(self, settings: Settings | None = None, *, clock: Clock | None = None) -> None:
        self.settings = settings or Settings.from_env()
        self.database = Database(self.settings, clock)
        self.store = Store(self.database)
        self._workers = WorkerStore(self.database)
        self.waiting = Waiting(self.store)
        self.broker = Broker(self.settings)
        self.following = Following(self.store, self.broker)
        self._announcer = Announcer(self.database, self.broker)
        self.enqueueing = Enqueueing(self.store, self._workers, self.broker, self._announcer)
        self.batches = Batches(BatchStore(self.database), self._announcer, self.settings)
        self.courier = Courier(self.batches, self.settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def announce_apart(self) -> None:
        """Send messages on threads of their own: a broker that hangs holds up nobody who hands in jobs.

        For servers, which do not fork.
        """
        self._announcer.go_apart()

    def close(self) -> None:
        """Close connections. An embedded broker goes on running."""
        self.following.close()
        self._announcer.close()
        self.broker.close()
        self.database.close()

    # -- in --------------------------------------------------------------------------------------

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

        `interactive`: somebody waits for the answer. Unless `priority` says otherwise the job goes before all
        others, into places that workers keep for such jobs.

        With `session` the row is added to the caller's SQLAlchemy transaction: it becomes visible, and
        its message is sent, when that commits.

        Raises InvalidRequestError (naming the field) and DatabaseError. A broker that does not answer is
        a DeliveryDelayedWarning: the job is kept, and a worker will find it.
        """
        return self.enqueueing.enqueue([prompt], settings, session, interactive=interactive)[0]

    def enqueue_spec(self, spec: JobSpec, *, owner: str | None) -> str:
        """Queue a job that was parsed elsewhere, for `owner`; returns its id. Raises as `enqueue` does.

        An idempotency key is the owner's own: another's job with the same key is another job.
        """
        return self.enqueueing.enqueue_spec(spec, owner)

    def enqueue_many(
        self,
        prompts: Prompts,
        *,
        session: "Session | None" = None,
        interactive: bool = False,
        **settings: Unpack[JobSettings],
    ) -> JobIds:
        """Queue every prompt of an iterable, in constant memory but for 16 bytes a job id.

        An item is a prompt, or a mapping with `prompt` or `messages` and settings of its own, which win
        over the keywords. A table (pandas, Polars, Arrow) is taken as its rows. Jobs are committed and sent
        in groups as the iterable is read, so work begins at once. At a bad item the jobs before it stay
        queued; the InvalidRequestError says how many, and has their ids as `.enqueued`. With `session` all is
        one transaction, the caller's.
        """
        return self.enqueueing.enqueue(
            items_of(prompts, _COLUMNS), settings, session, interactive=interactive
        )

    def submit_batch(
        self,
        source: BatchSource,
        *,
        name: str | None = None,
        on_rows: OnRows | None = None,
        webhook: str | None = None,
        **settings: Unpack[BatchSettings],
    ) -> Batch:
        """Queue every row of a file (its path), a table (pandas, Polars, Arrow) or an iterable, as one batch.

        Unlike `enqueue_many`, it stops at no row: one that cannot be run becomes a failed job that says why.
        Parameters, `priority` and `max_attempts` hold if a row says nothing, `model` whatever a row says;
        `scheduled_at` and `deadline` are those of the batch. Submitting a file again under its name enters
        what is missing and nothing twice; without a name, the file and the settings make one. The times of
        the first submission hold. `on_rows` is called after each group with the number of rows read so far.
        `webhook` is a URL that is told once the batch has ended; NIGHTMILL_WEBHOOK_URLS must allow it.

        Raises BatchFileError, BatchConflictError (the name belongs to other rows), InvalidParameterError,
        UnknownModelError and DatabaseError.
        """
        return self.batches.submit(
            source,
            settings,
            name=name,
            check_model=self.check_model,
            on_rows=on_rows,
            on_entered=self.webhook_of(webhook),
        )

    def webhook_of(self, url: object) -> Callable[[str], object]:
        """What enters a webhook for a batch, by the batch's name.

        Raises InvalidParameterError unless the URL is allowed.
        """
        if url is None:
            return lambda name: None
        allowed = check_allowed(self.settings, url)
        return lambda name: WebhookStore(self.database).add(name, allowed)

    # -- out -------------------------------------------------------------------------------------

    def get_batch(self, name: str) -> Batch:
        """A batch; raises BatchNotFoundError."""
        return self.batches.get(name)

    def list_batches(self, *, limit: int = 50) -> list[Batch]:
        """The newest batches, newest first."""
        return self.batches.newest(limit)

    def get(self, job_id: str) -> Job:
        """A snapshot of one job; raises JobNotFoundError."""
        return self.store.get(job_id)

    def list_jobs(
        self,
        *,
        state: JobState | str | None = None,
        batch: str | None = None,
        model: str | None = None,
        limit: int = 50,
    ) -> list[Job]:
        """The newest jobs that fit, newest first."""
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

        Raises WaitTimeoutError after `timeout` seconds, JobNotFoundError for an unknown id.
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
        """Finished jobs, one by one: in the order of enqueueing, or as they finish.

        A batch may grow while it is read. Jobs whose transaction (`session=`) commits after later ones were
        read come at the end.

        Waits for jobs that are not final yet, unless `wait` is False: then those are left out. Raises
        WaitTimeoutError once `timeout` seconds have passed in all.
        """
        return self.waiting.results(jobs, batch, order, wait, timeout)

    def stream(
        self,
        job_id: str,
        *,
        answer: int = 0,
        after: Place | str | None = None,
        timeout: float | None = None,
    ) -> Iterator[Piece]:
        """The text of a job while it is generated, piece by piece; joined, they are the text of its row.

        A piece is a str, with the `place` where it ends. With that as `after`, a reader that was interrupted
        goes on exactly there, in any process. Ends with the job, whatever became of it: `get` tells. If Redis
        does not answer, the text comes whole, when it is there. Of a job with several answers it is the
        first's text, or that of the one whose number is `answer`.

        Raises JobNotFoundError, InvalidParameterError (`after` is no place, or the job has no such answer),
        WaitTimeoutError after `timeout` seconds, StreamChangedError if the job began afresh and its text is
        another.
        """
        return self.following.pieces(job_id, _place(after), timeout, answer)

    def stream_async(
        self,
        job_id: str,
        *,
        answer: int = 0,
        after: Place | str | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Piece]:
        """As `stream`, for asyncio."""
        return self.following.pieces_async(job_id, _place(after), timeout, answer)

    def stats(self, batch: str | None = None) -> dict[str, Any]:
        """Numbers of jobs by state and stop reason, and the tokens read and written."""
        prompt_tokens, completion_tokens = self.store.tokens(batch)
        return self.store.counts(batch) | {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
        }

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

        `sample` rows are chosen at random among those that have succeeded, the same ones for the same
        `seed_of_sample`. Copies of them run as jobs of a batch of their own, by default after all other jobs,
        and are deleted in the end, unless `keep`; the batch itself is only read. `on_rows` is told how many
        are done. Texts of one arithmetic are equal to the bit; if two differ, the answer names the parts
        of the arithmetic that do.

        Raises BatchNotFoundError, InvalidTransitionError (no row has succeeded), NotServedError (no live
        worker serves the model), InvalidParameterError, and WaitTimeoutError after `timeout` seconds.
        """
        return Verifier(self.batches.store, self._announcer).run(
            batch,
            sample=sample,
            seed_of_sample=seed_of_sample,
            priority=priority,
            timeout=timeout,
            keep=keep,
            on_rows=on_rows,
        )

    def workers(self) -> list[Worker]:
        """Every worker that was ever there, newest first."""
        return self._workers.all()

    def score(
        self, prompt: Prompt, texts: Sequence[str], *, timeout: float | None = None,
        **settings: Unpack[JobSettings],
    ) -> Scores:  # fmt: skip
        """How likely each of these texts is after a prompt. Queues a job, and waits until it has ended.

        Keywords are those of `enqueue`; `logprobs=N` tells the likeliest tokens of each place, too. Raises
        InvalidRequestError, WaitTimeoutError, and ScoreError if the job ended in another way.
        """
        settings["score"] = texts
        job_id = self.enqueue(prompt, **settings)
        self.wait(job_id, timeout=timeout)
        return scores_of(self.get(job_id))

    def worker(self, worker_id: str) -> Worker | None:
        """One worker; None if it is not known, or never came to serve."""
        return self._workers.get(worker_id)

    def serving(self, model: str | None = None) -> list[Worker]:
        """The workers that take jobs for `model` (None: any model), or are about to."""
        return self._workers.serving(model)

    # -- change of mind --------------------------------------------------------------------------

    def cancel(self, job_id: str) -> JobState:
        """Cancel a job: a queued one at once, a running one at its next step. Returns its state now.

        Cancelling twice does nothing; a job that has already ended is an InvalidTransitionError.
        """
        return self.store.cancel(job_id)

    def cancel_batch(self, batch: str) -> tuple[int, int]:
        """Cancel all unfinished jobs of a batch: (cancelled at once, running and asked to stop)."""
        return self.batches.store.cancel(batch)

    def prune(
        self,
        older_than: timedelta,
        *,
        dry_run: bool = False,
        on_jobs: Callable[[int], None] = lambda jobs: None,
    ) -> Pruned:
        """Delete jobs and batches that ended so long ago, and batches that are empty; returns how many.

        What is not finished is never touched, and a submitted batch goes as a whole. `dry_run` only counts.
        `on_jobs` is called after each group with the number of jobs deleted so far.
        """
        work = Prune(self.batches.store, self.database.now() - older_than)
        if dry_run:
            return work.count()
        done = Pruned(0, 0)
        for done in work.run():
            on_jobs(done.jobs)
        return done

    def retry(self, job_id: str, *, deadline: datetime | timedelta | None = None) -> Job:
        """Queue a failed or cancelled job again, under its id and seed.

        Raises JobNotFoundError, InvalidTransitionError, and BatchConflictError (its batch is being deleted).
        """
        job = self.store.retry(job_id, deadline_moment(deadline, self.database.now()))
        self._announcer.announce({(job.model, job.priority): [job.id]})
        return job

    def check_model(self, model: str) -> None:
        """Raise UnknownModelError for a name that no worker ever had, unless there never was a worker."""
        self.enqueueing.check_model(model)


def _place(after: Place | str | None) -> Place:
    return after if isinstance(after, Place) else START if after is None else Place.parse(after)


def _state(state: JobState | str) -> JobState:
    try:
        return JobState(state)
    except ValueError:
        known = ", ".join(JobState)
        raise InvalidParameterError(f"state: {state!r} is not one of {known}", field="state") from None
