"""/v1/files, as OpenAI's API reference has it: uploads, their contents, and what servers wrote as results."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import PurePosixPath
from typing import BinaryIO

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from nightmill.jobs.contract import JsonObject
from nightmill.jobs.errors import NightmillError
from nightmill.jobs.fields import unknown_field
from nightmill.jobs.ids import IdSource
from nightmill.jobs.printable import printable
from nightmill.jobs.server.desk import Desk
from nightmill.jobs.server.errors import HttpError, invalid
from nightmill.jobs.server.folder import Folder
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
    """The endpoints."""

    def __init__(self, desk: Desk, store: FileStore, folder: Folder) -> None:
        self._desk = desk
        self._store = store
        self._folder = folder
        self._uploads = Uploads(folder, desk.limits)
        self._ids = IdSource()
        self._in_doubt: set[str] = set()  # uploads of which nobody knows whether they have been entered

    async def upload(self, request: Request) -> Response:
        """POST /v1/files."""
        return JSONResponse(self._object(await self.take(request, self._desk.keys.caller(request))))

    async def take(
        self, request: Request, caller: Caller, check: Callable[[dict[str, str]], None] = lambda texts: None
    ) -> StoredFile:
        """Keep the file of a form for its caller; raises HttpError.

        check  looks at the form's other fields, takes away what is its own, and may raise
        """
        desk = self._desk
        caller.need_to_submit()
        used = await desk.run(self._used, caller.name)
        file_id = self._ids.draw()
        form, size = await self._uploads.receive(request, file_id, caller.name, used)
        try:
            check(form.texts)
            filename = _checked(form.texts, form.filename, size)
        except BaseException:  # whatever it is goes on up; no content stays without a row
            self._folder.remove(file_id)
            raise
        # A caller who goes away does not end this: else a content could be left behind without its row.
        file = await asyncio.shield(desk.run(self._enter, file_id, caller.name, filename, size))
        if file is None:
            raise over_quota(desk.limits)
        return file

    def _used(self, owner: str | None) -> int:
        """Bytes that an owner's files have, once it is known which of the uploads in doubt are there."""
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
        """Enter an upload; None if its owner has no room for it. What is not entered is removed."""
        try:
            now = self._desk.client.database.now()
            file = StoredFile(file_id, owner, UPLOADED, filename, size, now)
            entered = self._store.add(file, self._desk.limits.stored_bytes)
        except BaseException:  # whatever it is goes on up
            self._in_doubt.add(file_id)  # it may be there all the same: the answer of the database is lost
            with suppress(NightmillError):  # the database is away: the next upload looks again
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
        """GET /v1/files: the caller's own, newest first."""
        caller = self._desk.keys.caller(request)
        query = request.query_params
        page = Page.read(query, PREFIX, limit=MOST_LISTED, most=MOST_LISTED, more="purpose")
        found = await self._desk.run(
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
        caller = self._desk.keys.caller(request)
        return JSONResponse(self._object(await self.find(caller, request.path_params["file_id"])))

    async def content(self, request: Request) -> Response:
        """GET /v1/files/ID/content."""
        caller = self._desk.keys.caller(request)
        file = await self.find(caller, request.path_params["file_id"])
        try:
            content = await asyncio.to_thread(self._folder.open, file.id)
        except FileNotFoundError:
            said = "the content of this file is not in the folder of this server, which servers must share"
            raise HttpError(500, said, code="content_missing") from None
        except OSError as error:
            log.error("the content of file %s cannot be read: %s", file.id, error)
            said = "the content of this file cannot be read just now; try again later"
            raise HttpError(503, said, code="unavailable") from None
        return StreamingResponse(
            _pieces(content),
            media_type="application/octet-stream",
            headers={
                "Content-Length": str(file.size),
                "Content-Disposition": "attachment",
                "X-Content-Type-Options": "nosniff",  # a stranger wrote it
            },
        )

    async def deleted(self, request: Request) -> Response:
        """DELETE /v1/files/ID."""
        caller = self._desk.keys.caller(request)
        file = await self.find(caller, request.path_params["file_id"])
        caller.need_to_change(file.owner)
        if not await self._desk.run(self._store.delete, file.id, lambda: self._folder.remove(file.id)):
            raise _no_file(PREFIX + file.id)  # somebody else was faster
        return JSONResponse({"id": PREFIX + file.id, "object": "file", "deleted": True})

    def _object(self, file: StoredFile) -> JsonObject:
        return file_object(file, self._desk.limits.keep_files)

    async def find(self, caller: Caller, name: str) -> StoredFile:
        """A caller's file; raises HttpError also for another's."""
        file_id = bare_id(name, PREFIX)
        file = None if file_id is None else await self._desk.run(self._store.get, file_id)
        if file is None or not caller.sees(file.owner):
            raise _no_file(name)
        return file


def file_object(file: StoredFile, keep: timedelta | None) -> JsonObject:
    """OpenAI's object for a file that is deleted after `keep`."""
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
    """The name of a file whose form is as it should be; raises HttpError."""
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
    # Whatever it says of folders is left out; what is left is shown and leads nowhere.
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
