"""Submission of batches over HTTP, for all endpoints: the input file, limits, idempotency keys."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from nightmill.jobs.base.printable import printable
from nightmill.jobs.server.errors import HttpError, invalid
from nightmill.jobs.server.files import PREFIX, Files
from nightmill.jobs.server.job_service import JobService, idempotency_key
from nightmill.jobs.server.keys import Caller
from nightmill.jobs.server.listing import Page, bare_id
from nightmill.jobs.server.reusing import reuse_asked
from nightmill.jobs.sql.files import UPLOADED
from nightmill.jobs.sql.http_batches import BATCH_PREFIX, HttpBatch, HttpBatchStore, HttpStatus

_CONTENT = ("input_file", "endpoint", "completion_window", "meta", "settings", "name")


class UploadedBatchSubmission:
    """Submits, finds, cancels, retries and limits HTTP batches; `wake` starts the batch processor."""

    def __init__(
        self, service: JobService, store: HttpBatchStore, files: Files, wake: Callable[[], None]
    ) -> None:
        self.service = service
        self.store = store
        self._files = files
        self._wake = wake

    async def submit(
        self, request: Request, caller: Caller, batch: HttpBatch, field: str, webhook: object = None
    ) -> HttpBatch:
        """Submit a batch whose `input_file` was named by the caller in `field`; raises HttpError.

        `webhook` is a URL to be called once it has ended, if any. Repeating the request with the same
        Idempotency-Key returns the existing batch.
        """
        enter_webhook = self.service.client.courier.webhook_of(webhook)
        entered = await self._enter(request, caller, batch, field)
        # The response is not sent yet: if this server dies here, the caller repeats the request.
        await self.service.run(enter_webhook, entered.batch)
        self._wake()
        return entered

    async def _enter(self, request: Request, caller: Caller, batch: HttpBatch, field: str) -> HttpBatch:
        run = self.service.run
        key = idempotency_key(request)
        named, reuse = batch.input_file, reuse_asked(request)
        if reuse is not None:
            batch = replace(batch, settings=batch.settings | {"reuse": reuse})
        batch = replace(batch, input_file=bare_id(named, PREFIX) or "", owner=caller.name)
        if key is not None:
            batch = replace(batch, idempotency_key=f"{caller.name or ''}/{key}")
            there = await run(self.store.with_key, str(batch.idempotency_key))
            if there is not None:
                return _same(batch, there)
        file = await self._files.find(caller, named)
        if file.purpose != UPLOADED:
            raise invalid(field, "names a file of results; name one that was uploaded")
        await self._check_room(caller.name)
        entered = await run(self.store.add, batch)
        if entered is None:
            raise HttpError(404, "the file was deleted just now", param=field, code="file_not_found")
        return _same(batch, entered)

    async def _check_room(self, owner: str | None) -> None:
        if await self.service.run(self.store.count_open, owner) >= self.service.limits.batches:
            said = f"{self.service.limits.batches:,} batches of this key have not ended; try again later"
            raise HttpError(429, said, code="too_many_batches")

    async def find(self, caller: Caller, name: str) -> HttpBatch:
        """Return a caller's batch; raises HttpError, also for another caller's."""
        batch_id = bare_id(name, BATCH_PREFIX)
        batch = None if batch_id is None else await self.service.run(self.store.get, batch_id)
        if batch is None or not caller.sees(batch.owner):
            raise HttpError(404, f"there is no batch {printable(name, 80)!r}", code="batch_not_found")
        return batch

    async def page(self, caller: Caller, page: Page) -> list[HttpBatch]:
        """Return the caller's batches, one more than the page shows."""
        return await self.service.run(
            self.store.page,
            owner=caller.only,
            after=page.after,
            oldest_first=page.oldest_first,
            limit=page.limit + 1,
        )

    async def cancel(self, caller: Caller, name: str) -> HttpBatch:
        """Cancel a caller's batch; repeating it changes nothing. Raises HttpError for an ended one."""
        batch = await self.find(caller, name)
        caller.need_to_change(batch.owner)
        if await self.service.run(self.store.cancel, batch.id):
            self._wake()
        batch = await self.find(caller, name)
        if batch.cancelling_at is None:
            said = f"batch {name} is {batch.status}: there is nothing to cancel"
            raise HttpError(409, said, code="invalid_transition")
        return batch

    async def retry(self, caller: Caller, name: str) -> HttpBatch:
        """Queue the rows of a caller's batch again that ended without a result; raises HttpError.

        They have no deadline any more. Once they have ended, there are new files of results and errors.
        """
        batch = await self.find(caller, name)
        caller.need_to_change(batch.owner)
        nothing_ran = batch.status is HttpStatus.FAILED and not (batch.broken and batch.total)
        ends = batch.status is HttpStatus.CANCELLING or (
            batch.status is HttpStatus.FINALIZING and batch.broken  # queued rows will be cancelled
        )
        if nothing_ran or ends or batch.status is HttpStatus.VALIDATING:
            said = f"batch {name} is {batch.status}: there is nothing to retry"
            raise HttpError(409, said, code="invalid_transition")
        if batch.status.final:
            await self._check_room(batch.owner)
        await self.service.look(self._retry, batch)
        self._wake()
        return await self.find(caller, name)

    async def set_limits(self, caller: Caller, name: str, limits: Mapping[str, Any]) -> HttpBatch:
        """Change the budget or the limit of failures of a caller's batch; raises HttpError.

        Rows that a limit had ended are queued again if they may run now, and the batch goes on as after
        `retry`.
        """
        batch = await self.find(caller, name)
        caller.need_to_change(batch.owner)
        if batch.status in (HttpStatus.VALIDATING, HttpStatus.CANCELLING) or batch.broken:
            said = f"batch {name} is {batch.status}: change its limits once its rows are entered"
            raise HttpError(409, said, code="invalid_transition")
        if batch.status.final:
            await self._check_room(batch.owner)
        await self.service.look(self._set_limits, batch, limits)
        self._wake()
        return await self.find(caller, name)

    def _set_limits(self, batch: HttpBatch, limits: Mapping[str, Any]) -> None:
        rows = self.service.client.get_batch(batch.batch)
        if rows.set_limits(**limits).queued or rows.store.unfinished(batch.batch):
            self.store.reopen(batch.id)

    def _retry(self, batch: HttpBatch) -> None:
        """Retry the rows before reopening the batch, which would otherwise end at once. May be repeated."""
        rows = self.service.client.get_batch(batch.batch)
        if rows.retry_failed() or rows.store.unfinished(batch.batch):
            self.store.reopen(batch.id)


def _same(wanted: HttpBatch, there: HttpBatch) -> HttpBatch:
    if any(getattr(wanted, name) != getattr(there, name) for name in _CONTENT):
        said = f"the idempotency key belongs to {there.batch}, which is of other content; use a new one"
        raise HttpError(409, said, param="Idempotency-Key", code="idempotency_conflict")
    return there
