"""The name under which a model file is served: of its own, or of a worker that has the same file loaded."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from nightmill.jobs.base.arithmetic import DIGITS, Arithmetic, model_of
from nightmill.jobs.base.printable import printable
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import BatchNotFoundError, SettingsError
from nightmill.jobs.formats import InputFile
from nightmill.jobs.reply.job import Worker
from nightmill.jobs.tables.following import FollowingRows
from nightmill.worker.commands.keeper import is_asked_for


class ServedFile:
    """A model file, and the workers that serve or served it, under whatever name.

    digest  `GgufFile.digest` of the file
    own     what jobs call it unless somebody else has named it
    """

    def __init__(self, client: Client, digest: str, own: str) -> None:
        self._client = client
        self._digest = digest[:DIGITS]
        self._own = own

    def name_for(
        self, source: InputFile | FollowingRows, rows: Mapping[str, Any], batch: str | None
    ) -> tuple[str, str | None]:
        """The model's name for the rows of `source`, and the batch's name: that of the first time, if given.

        A batch that is there keeps its model's name if that is of the same file. A new one gets the name of
        a live worker on the device that is asked for, unless one serves the file's own name.
        """
        names = {worker.model for worker in self._client.workers() if self._has_file(worker)} - {self._own}
        if not names:
            return self._own, batch
        batch = batch or self._client.batches.name_of(source, {**rows, "model": self._own})
        try:
            known = self._client.get_batch(batch).record.model
        except BatchNotFoundError:
            return self._live_name(names), batch
        return (known if known in names else self._own), batch

    def check_name(
        self, model: str, source: InputFile | FollowingRows, rows: Mapping[str, Any], batch: str | None
    ) -> None:
        """Check that no other file of this name answers the rows, or has answered some of them before.

        A live worker with another file does no harm if all rows have ended. Raises SettingsError.
        """
        name = batch or self._client.batches.name_of(source, {**rows, "model": model})
        answered_by = model_of(self._client.batches.store.arithmetic(name))
        if answered_by not in (None, self._digest):
            ways = ["the answers of this file a batch of their own (--name)"]
            if batch is None:
                ways.insert(0, "this file another name (--model-name)")
            raise SettingsError(
                f"batch {printable(name)!r} has answers of another model file that was called "
                f"{printable(model)!r}, too: give {', or '.join(ways)}"
            )
        if (other := self.other_under(model)) is None:
            return
        with suppress(BatchNotFoundError):
            if self._client.get_batch(name).status(errors=False).state.final:
                return
        raise another_file(model, other, "--model-name")

    def other_under(self, model: str) -> Worker | None:
        """Return a live worker that has another file under this name, and so would answer for this one."""
        live = self._client.worker_store.serving(model, sleeping=True)
        return next((worker for worker in live if self._file_of(worker) not in (None, self._digest)), None)

    def _live_name(self, names: set[str]) -> str:
        settings, serving = self._client.settings, self._client.worker_store.serving()
        live = [worker for worker in serving if is_asked_for(worker, settings)]
        if any(worker.model == self._own for worker in live):
            return self._own
        return next((one.model for one in live if one.model in names and self._has_file(one)), self._own)

    def _has_file(self, worker: Worker) -> bool:
        """True if a worker says that it serves this file; one that starts says nothing yet."""
        return self._file_of(worker) == self._digest

    @staticmethod
    def _file_of(worker: Worker) -> str | None:
        """Return the beginning of the digest of the file that a worker serves, if it says so."""
        try:
            return Arithmetic.parse(str((worker.stats or {}).get("arithmetic"))).model
        except ValueError:
            return None


def another_file(model: str, worker: Worker, option: str) -> SettingsError:
    """Return the refusal of a file whose name a worker has given to another one."""
    return SettingsError(
        f"worker {worker.id[:8]} on {printable(worker.host)} serves another file as {printable(model)!r}, "
        f"and would answer the rows: give this one another name ({option}), or end that worker first"
    )
