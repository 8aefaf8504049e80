"""An upload meets a folder that is away, as a network share is at times."""

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from nightmill.jobs.server.errors import HttpError
from nightmill.jobs.server.folder import Folder
from nightmill.jobs.server.job_service import ServerLimits
from nightmill.jobs.server.uploads import Uploads


class StaleFolder(Folder):
    """Neither writes nor removes."""

    def coming(self, file_id: str) -> Path:
        raise OSError(errno.ESTALE, "Stale file handle")

    def remove(self, file_id: str) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")


def test_an_upload_to_a_stale_folder_is_asked_to_come_again(tmp_path: Path) -> None:
    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    headers = [(b"content-type", b"multipart/form-data; boundary=b")]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    uploads = Uploads(StaleFolder(tmp_path), ServerLimits())
    with pytest.raises(HttpError) as raised:
        asyncio.run(uploads.receive(request, "a" * 32, None, 0))
    assert raised.value.status == 503
    assert raised.value.headers["Retry-After"]
