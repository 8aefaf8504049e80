"""Batches on their way in, whichever endpoint they come by: the file, the limits, and keys of idempotency."""

from collections.abc import Callable
from dataclasses import replace

from starlette.requests import Request

from nightmill.jobs.printable import printable
from nightmill.jobs.server.desk import Desk, idempotency_key
from nightmill.jobs.server.errors import HttpError, invalid
from nightmill.jobs.server.files import PREFIX, Files
from nightmill.jobs.server.keys import Caller
from nightmill.jobs.server.listing import Page, bare_id
from nightmill.jobs.sql.files import UPLOADED
from nightmill.jobs.sql.http_batches import BATCH_PREFIX, HttpBatch, HttpBatchStore, HttpStatus

_CONTENT = ("input_file", "endpoint", "completion_window", "meta", "settings", "name")


class HandingIn:
    """Hands batches in, and finds and cancels them; `wake` tells this server's keeper that there is work."""

    def __init__(self, desk: Desk, store: HttpBatchStore, files: Files, wake: Callable[[], None]) -> None:
        self.desk = desk
        self.store = store
        self._files = files
        self._wake = wake

    async def submit(
        self, request: Request, caller: Caller, batch: HttpBatch, field: str, webhook: object = None
    ) -> HttpBatch:
        """Hand in a batch whose `input_file` is as the caller named it in `field`; raises HttpError.

        `webhook` is the URL that is called once it has ended, if there is one. The same again with the same
        Idempotency-Key is the batch that is there.
        """
        enter_webhook = self.desk.client.webhook_of(webhook)
        entered = await self._enter(request, caller, batch, field)
        # Nobody has been told of the batch yet: if this server dies here, the caller asks again.
        await self.desk.run(enter_webhook, entered.batch)
        self._wake()
        return entered

    async def _enter(self, request: Request, caller: Caller, batch: HttpBatch, field: str) -> HttpBatch:
        run = self.desk.run
        key = idempotency_key(request)
        named = batch.input_file
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
        if await self.desk.run(self.store.count_open, owner) >= self.desk.limits.batches:
            said = f"{self.desk.limits.batches:,} batches of this key have not ended; try again later"
            raise HttpError(429, said, code="too_many_batches")

    async def find(self, caller: Caller, name: str) -> HttpBatch:
        """A caller's batch; raises HttpError also for another's."""
        batch_id = bare_id(name, BATCH_PREFIX)
        batch = None if batch_id is None else await self.desk.run(self.store.get, batch_id)
        if batch is None or not caller.sees(batch.owner):
            raise HttpError(404, f"there is no batch {printable(name, 80)!r}", code="batch_not_found")
        return batch

    async def page(self, caller: Caller, page: Page) -> list[HttpBatch]:
        """The caller's batches, one more than a page has."""
        return await self.desk.run(
            self.store.page,
            owner=caller.only,
            after=page.after,
            oldest_first=page.oldest_first,
            limit=page.limit + 1,
        )

    async def cancel(self, caller: Caller, name: str) -> HttpBatch:
        """Cancel a caller's batch; again changes nothing. Raises HttpError for one that has ended."""
        batch = await self.find(caller, name)
        caller.need_to_change(batch.owner)
        if await self.desk.run(self.store.cancel, batch.id):
            self._wake()
        batch = await self.find(caller, name)
        if batch.cancelling_at is None:
            said = f"batch {name} is {batch.status}: there is nothing to cancel"
            raise HttpError(409, said, code="invalid_transition")
        return batch

    async def retry(self, caller: Caller, name: str) -> HttpBatch:
        """Queue those rows of a caller's batch again that ended without a result; raises HttpError.

        They have no deadline any more. Once they have ended, results and errors are other files.
        """
        batch = await self.find(caller, name)
        caller.need_to_change(batch.owner)
        nothing_ran = batch.status is HttpStatus.FAILED and not (batch.broken and batch.total)
        ends = batch.status is HttpStatus.CANCELLING or (
            batch.status is HttpStatus.FINALIZING and batch.broken  # rows that were queued are cancelled
        )
        if nothing_ran or ends or batch.status is HttpStatus.VALIDATING:
            said = f"batch {name} is {batch.status}: there is nothing to retry"
            raise HttpError(409, said, code="invalid_transition")
        if batch.status.final:
            await self._check_room(batch.owner)
        await self.desk.look(self._retry, batch)
        self._wake()
        return await self.find(caller, name)

    def _retry(self, batch: HttpBatch) -> None:
        """Rows first: what has none that are queued would end at once. Who dies between is called again."""
        rows = self.desk.client.get_batch(batch.batch)
        if rows.retry_failed() or rows.store.unfinished(batch.batch):
            self.store.reopen(batch.id)


def _same(wanted: HttpBatch, there: HttpBatch) -> HttpBatch:
    if any(getattr(wanted, name) != getattr(there, name) for name in _CONTENT):
        said = f"the idempotency key belongs to {there.batch}, which is of other content; use a new one"
        raise HttpError(409, said, param="Idempotency-Key", code="idempotency_conflict")
    return there
