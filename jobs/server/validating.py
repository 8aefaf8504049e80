"""Entering the rows of HTTP batches: reads files in small steps, and reports errors."""

from pathlib import Path

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import BatchFileError, BatchFileUnavailableError, InvalidRequestError
from nightmill.jobs.server.folder import Folder
from nightmill.jobs.server.inputs import EndpointFile, file_error, row_error
from nightmill.jobs.server.working import OvertakenError, PostponedError, Steps
from nightmill.jobs.sql.files import FileStore
from nightmill.jobs.sql.http_batches import HttpBatch, HttpBatchStore, HttpStatus

_MOST_ERRORS = 100  # errors listed in a batch; the file of errors has all


class Validator:
    """Reads files for one server, whose leases are held by `keeper`."""

    def __init__(self, client: Client, folder: Folder, keeper: str) -> None:
        self._client = client
        self._folder = folder
        self._keeper = keeper
        self._files = FileStore(client.database)
        self._store = HttpBatchStore(client.database)
        self._rows = client.batches.store

    def steps(self, batch: HttpBatch) -> Steps:
        """Enter all rows of a leased batch, and release them to be run.

        A file that is temporarily unreadable raises PostponedError, until the batch's deadline. A broken file
        ends the batch with the rows entered so far. Raises OvertakenError.
        """
        path = self._folder.path / batch.input_file
        times = {"scheduled_at": batch.scheduled_at, "deadline": batch.deadline_at}
        try:
            path = self._folder.find(batch.input_file)
            self._check_whole(batch, path)
            there = self._rows.last_row(batch.batch)
            for committed in self._client.batches.submitting(
                EndpointFile(path, batch.endpoint, self._filename(batch)),
                batch.settings | times,
                name=batch.batch,
                check_model=self._client.enqueueing.check_model,
                asker=batch.owner,
            ):
                yield committed > there
        except (BatchFileUnavailableError, OSError) as error:
            reason = _reason(error, path)
            if not self.is_late(batch):
                raise PostponedError(f"the file cannot be read now: {reason}") from error
            said = f"the file could not be read before the deadline: {reason}"
            self._break_off(batch, _error("file_unavailable", said))
            return
        except (BatchFileError, InvalidRequestError) as error:
            self._break_off(batch, file_error(error, path))
            return
        invalid, rows = self._store.bad_rows(batch, _MOST_ERRORS)
        errors = [row_error(line, error) for line, error in rows]
        if not self._store.begin(batch, self._keeper, invalid, errors):
            raise OvertakenError

    def give_up(self, batch: HttpBatch, died: int) -> None:
        """End a leased batch whose file has killed too many servers."""
        row = self._rows.last_row(batch.batch)
        where = f"after row {row:,}" if row else "before its first rows were entered"
        said = (
            f"{died} servers ended while they read the file, {where}: a row there may need more memory than "
            "they have; look at it, divide the file, or ask the operator of the server for the log"
        )
        self._break_off(batch, _error("file_too_costly", said))

    def _filename(self, batch: HttpBatch) -> str:
        """Return the owner's name of the file, whose ending gives the format: contents are named by ids."""
        file = self._files.get(batch.input_file)
        return "" if file is None else file.filename

    def is_late(self, batch: HttpBatch) -> bool:
        """Return True if its deadline has passed."""
        return batch.deadline_at is not None and batch.deadline_at <= self._client.database.now()

    def _check_whole(self, batch: HttpBatch, path: Path) -> None:
        """Refuse content that is missing or incomplete in a shared folder."""
        if not path.exists():
            said = "it is not in the folder of this server, which all servers must share"
            raise BatchFileUnavailableError(f"{path}: {said}")
        file, found = self._files.get(batch.input_file), path.stat().st_size
        if file is not None and found < file.size:
            said = f"{found:,} of its {file.size:,} bytes are in the folder of this server"
            raise BatchFileUnavailableError(f"{path}: {said}")

    def _break_off(self, batch: HttpBatch, error: JsonObject) -> None:
        """Stop reading a file; its rows are cancelled, or their results written, if this server still has the
        lease."""
        if self._rows.last_row(batch.batch):
            invalid, bad = self._store.bad_rows(batch, _MOST_ERRORS)
            errors = [error, *(row_error(line, of_row) for line, of_row in bad)]
            if not self._store.break_off(batch, self._keeper, invalid, errors):
                raise OvertakenError
            return
        status = HttpStatus.EXPIRED if self.is_late(batch) else HttpStatus.FAILED
        if not self._store.fail(batch, self._keeper, status, [error]):
            raise OvertakenError
        self._rows.cancel(batch.batch)  # in case an overtaken server still enters rows
        self._rows.complete(batch.batch, 0)


def _error(code: str, said: str) -> JsonObject:
    """Build OpenAI's object for an error of the whole file, which has no line."""
    return {"code": code, "line": None, "message": said, "param": "input_file_id"}


def _reason(error: Exception, path: Path) -> str:
    """Describe why a file cannot be read now, without its path."""
    if isinstance(error, BatchFileError):
        return str(file_error(error, path)["message"]).removeprefix("cannot be read: ")
    return (isinstance(error, OSError) and error.strerror) or "input/output error"
