"""/v1/files as in OpenAI's API: uploads, their contents, and result files."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import PurePosixPath
from typing import BinaryIO

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.base.printable import printable
from nightmill.jobs.errors import NightmillError
from nightmill.jobs.request.fields import unknown_field
from nightmill.jobs.server.errors import HttpError, invalid
from nightmill.jobs.server.folder import Folder
from nightmill.jobs.server.job_service import JobService
from nightmill.jobs.server.keys import Caller
from nightmill.jobs.server.listing import Page, bare_id
from nightmill.jobs.server.uploads import Uploads, over_quota
from nightmill.jobs.sql.files import FILE_PREFIX, UPLOADED, FileStore, StoredFile

log = logging.getLogger("nightmill.server")

PREFIX = FILE_PREFIX
MOST_LISTED = 10_000
_LONGEST_NAME = 255
_READ_AT_ONCE = 1 << 18
_NOT_HERE = {"expires_after": "the server decides how long files stay"}


class Files:
    """Endpoints of /v1/files."""

    def __init__(self, service: JobService, store: FileStore, folder: Folder) -> None:
        self._service = service
        self._store = store
        self._folder = folder
        self._uploads = Uploads(folder, service.limits)
        self._ids = IdSource()
        self._in_doubt: set[str] = set()  # uploads whose INSERT may or may not have succeeded

    async def upload(self, request: Request) -> Response:
        """POST /v1/files."""
        return JSONResponse(self._object(await self.take(request, self._service.keys.caller(request))))

    async def take(
        self, request: Request, caller: Caller, check: Callable[[dict[str, str]], None] = lambda texts: None
    ) -> StoredFile:
        """Store the file of a form for its caller; raises HttpError.

        check  checks the form's other fields, removes its own, and may raise
        """
        service = self._service
        caller.need_to_submit()
        used = await service.run(self._used, caller.name)
        file_id = self._ids.draw()
        form, size = await self._uploads.receive(request, file_id, caller.name, used)
        try:
            check(form.texts)
            filename = _checked(form.texts, form.filename, size)
        except BaseException:  # whatever it is goes on up; no content stays without a row
            self._folder.remove(file_id)
            raise
        # A disconnect does not interrupt this: otherwise content could be left without a row.
        file = await asyncio.shield(service.run(self._enter, file_id, caller.name, filename, size))
        if file is None:
            raise over_quota(service.limits)
        return file

    def _used(self, owner: str | None) -> int:
        """Return the bytes of an owner's files, after resolving uploads in doubt."""
        while self._in_doubt:
            file_id = self._in_doubt.pop()
            try:
                if self._store.get(file_id) is None:
                    self._folder.remove(file_id)
            except BaseException:  # whatever it is goes on up; the upload stays in doubt
                self._in_doubt.add(file_id)
                raise
        return self._store.used(owner)

    def _enter(self, file_id: str, owner: str | None, filename: str, size: int) -> StoredFile | None:
        """Insert an upload; None if it exceeds the quota. Content that is not entered is removed."""
        try:
            now = self._service.client.database.now()
            file = StoredFile(file_id, owner, UPLOADED, filename, size, now)
            entered = self._store.add(file, self._service.limits.stored_bytes)
        except BaseException:  # whatever it is goes on up
            self._in_doubt.add(file_id)  # the INSERT may have succeeded: the database's reply is lost
            with suppress(NightmillError):  # the database is unreachable: the next upload checks again
                self._used(owner)
            raise
        if not entered:
            self._folder.remove(file_id)
            return None
        try:
            self._folder.settle(file_id)
        except OSError as error:  # it is found under the name that it has, too
            log.error("the content of file %s keeps the name of an upload: %s", file_id, error)
        return file

    async def listed(self, request: Request) -> Response:
        """GET /v1/files: list the caller's files, newest first."""
        caller = self._service.keys.caller(request)
        query = request.query_params
        page = Page.read(query, PREFIX, limit=MOST_LISTED, most=MOST_LISTED, more=("purpose",))
        found = await self._service.run(
            self._store.page,
            owner=caller.only,
            purpose=query.get("purpose"),
            after=page.after,
            oldest_first=page.oldest_first,
            limit=page.limit + 1,
        )
        return JSONResponse(page.answer([self._object(file) for file in found]))

    async def shown(self, request: Request) -> Response:
        """GET /v1/files/ID."""
        caller = self._service.keys.caller(request)
        return JSONResponse(self._object(await self.find(caller, request.path_params["file_id"])))

    async def content(self, request: Request) -> Response:
        """GET /v1/files/ID/content."""
        caller = self._service.keys.caller(request)
        file = await self.find(caller, request.path_params["file_id"])
        try:
            content = await asyncio.to_thread(self._folder.open, file.id)
        except FileNotFoundError:
            said = "the content of this file is not in the folder of this server, which servers must share"
            raise HttpError(500, said, code="content_missing") from None
        except OSError as error:
            log.error("the content of file %s cannot be read: %s", file.id, error)
            said = "the content of this file cannot be read now; try again later"
            raise HttpError(503, said, code="unavailable") from None
        return StreamingResponse(
            _pieces(content),
            media_type="application/octet-stream",
            headers={
                "Content-Length": str(file.size),
                "Content-Disposition": "attachment",
                "X-Content-Type-Options": "nosniff",  # untrusted content
            },
        )

    async def deleted(self, request: Request) -> Response:
        """DELETE /v1/files/ID."""
        caller = self._service.keys.caller(request)
        file = await self.find(caller, request.path_params["file_id"])
        caller.need_to_change(file.owner)
        if not await self._service.run(self._store.delete, file.id, lambda: self._folder.remove(file.id)):
            raise _no_file(PREFIX + file.id)  # another request was faster
        return JSONResponse({"id": PREFIX + file.id, "object": "file", "deleted": True})

    def _object(self, file: StoredFile) -> JsonObject:
        return file_object(file, self._service.limits.keep_files)

    async def find(self, caller: Caller, name: str) -> StoredFile:
        """Return a caller's file; raises HttpError, also for another caller's."""
        file_id = bare_id(name, PREFIX)
        file = None if file_id is None else await self._service.run(self._store.get, file_id)
        if file is None or not caller.sees(file.owner):
            raise _no_file(name)
        return file


def file_object(file: StoredFile, keep: timedelta | None) -> JsonObject:
    """Build OpenAI's object for a file that is deleted after `keep`."""
    created = int(file.created_at.timestamp())
    return {
        "id": PREFIX + file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": created,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "expires_at": None if keep is None else created + int(keep.total_seconds()),
    }


def _checked(texts: dict[str, str], filename: str | None, size: int) -> str:
    """Return the name of a file after checking its form; raises HttpError."""
    for name in texts:
        if name != "purpose":
            raise unknown_field(name, {"file", "purpose"}, _NOT_HERE.get(name))
    if filename is None:
        raise invalid("file", "is missing; send the file as a part of this name, with a filename")
    if (purpose := texts.get("purpose")) != UPLOADED:
        fault = "is missing" if purpose is None else f"must be {UPLOADED}"
        raise invalid(
            "purpose", f"{fault}: files are for batches here; send {UPLOADED} as a part of this name"
        )
    if not size:
        raise invalid("file", "is empty; write one row on each line")
    # Folders are removed; the rest is only displayed, and never used as a path.
    return printable(PurePosixPath(filename.replace("\\", "/")).name or "file", _LONGEST_NAME)


async def _pieces(content: BinaryIO) -> AsyncIterator[bytes]:
    with content:
        while piece := await asyncio.to_thread(content.read, _READ_AT_ONCE):
            yield piece


def _no_file(name: str) -> HttpError:
    return HttpError(
        404,
        f"no file has the id {printable(name, 80)!r}: GET /v1/files lists your files",
        code="file_not_found",
    )
