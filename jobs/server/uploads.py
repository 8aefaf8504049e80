"""Uploads: a form's file is written to disk as it arrives, within its owner's limits."""

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from typing import BinaryIO

from starlette.requests import ClientDisconnect, Request

from nightmill.jobs.formats.inputs import GZIP
from nightmill.jobs.server import bodies
from nightmill.jobs.server.errors import HttpError
from nightmill.jobs.server.folder import Folder, wait_for_disk
from nightmill.jobs.server.forms import OTHER_BYTES, MultipartForm
from nightmill.jobs.server.job_service import ServerLimits

log = logging.getLogger("nightmill.server")

_AT_ONCE = 64  # uploads of one server
_WRITTEN_AT_ONCE = 1 << 18  # bytes
_SLOWEST = 1 << 14  # required bytes per second after the first minute


class Uploads:
    """The uploads of one server."""

    def __init__(self, folder: Folder, limits: ServerLimits) -> None:
        self._folder = folder
        self._limits = limits
        self._open = 0
        self._coming: Counter[str | None] = Counter()  # bytes on disk without a row, by owner

    async def receive(
        self, request: Request, file_id: str, owner: str | None, used: int
    ) -> tuple[MultipartForm, int]:
        """Write a form's file to its temporary path; returns (the parsed form, bytes of the file).

        used  bytes of the owner's files

        Raises HttpError; then the file is removed, if the folder permits it.
        """
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > self._limits.file_bytes + OTHER_BYTES:
            raise _too_large(self._limits)
        form = MultipartForm(request.headers.get("content-type", ""))
        if self._open >= _AT_ONCE:
            raise HttpError(429, f"{_AT_ONCE} uploads are open already; try again later", code="busy")
        self._open += 1
        upload = _Upload(self._limits, self._coming, owner, used)
        try:
            with self._folder.coming(file_id).open("wb") as file:
                await upload.run(request, form, file)
            await asyncio.to_thread(wait_for_disk, self._folder.coming(file_id))
        except BaseException as error:  # including a disconnect
            with suppress(OSError):  # an unreachable folder: leftovers are swept after a day
                self._folder.remove(file_id)
            if isinstance(error, OSError):
                log.error("an upload cannot be written: %s", error)
                raise HttpError(
                    503, "the server has no room for files; try again later", code="no_room"
                ) from None
            raise
        finally:
            self._open -= 1
            self._coming[owner] -= upload.size
        return form, upload.size


class _Upload:
    """One upload."""

    def __init__(
        self, limits: ServerLimits, coming: Counter[str | None], owner: str | None, used: int
    ) -> None:
        self.size = 0
        self._limits = limits
        self._coming = coming
        self._owner = owner
        self._used = used

    async def run(self, request: Request, form: MultipartForm, file: BinaryIO) -> None:
        received = 0
        now = asyncio.get_running_loop().time
        begun = now()
        try:
            async with asyncio.timeout(bodies.BODY_SECONDS) as patience:
                async for chunk in request.stream():
                    received += len(chunk)
                    patience.reschedule(begun + bodies.BODY_SECONDS + received / _SLOWEST)
                    form.feed(chunk)
                    self._count(received, form)
                    if form.waiting >= _WRITTEN_AT_ONCE:
                        await self._write(form, file)
                await self._write(form, file)
        except TimeoutError:
            raise HttpError(408, "the file came too slowly", code="slow_body") from None
        except ClientDisconnect:
            raise _incomplete() from None
        if not form.over:
            raise _incomplete()

    def _count(self, received: int, form: MultipartForm) -> None:
        """Refuse too many bytes before they are written."""
        if (
            received > self._limits.file_bytes + OTHER_BYTES
            or self.size + form.waiting > self._limits.file_bytes
        ):
            raise _too_large(self._limits)
        if self._used + self._coming[self._owner] + form.waiting > self._limits.stored_bytes:
            raise over_quota(self._limits)

    async def _write(self, form: MultipartForm, file: BinaryIO) -> None:
        piece = form.take()
        if not self.size and piece.startswith(GZIP):
            raise HttpError(
                400,
                "file: is compressed with gzip, which is not supported here; send the uncompressed file",
                param="file",
                code="unsupported_format",
            )
        self.size += len(piece)
        self._coming[self._owner] += len(piece)
        await asyncio.to_thread(file.write, piece)


def _too_large(limits: ServerLimits) -> HttpError:
    return HttpError(413, f"a file may have {limits.file_bytes:,} bytes; divide it", code="too_large")


def over_quota(limits: ServerLimits) -> HttpError:
    """Make the error for a file that exceeds its owner's quota. Repeating the request at once is useless."""
    return HttpError(
        429,
        f"the files of this key may have {limits.stored_bytes:,} bytes together, results too; delete some",
        code="quota_exceeded",
        headers={"x-should-retry": "false"},
    )


def _incomplete() -> HttpError:
    return HttpError(400, "the form ended too early; send the whole file", code="incomplete_body")
