"""Batches over HTTP in a test: a database, a folder of files, and servers that come, go and die."""

import json
from datetime import timedelta
from typing import Any

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.server.batch_processor import BatchProcessor
from nightmill.jobs.server.folder import Folder
from nightmill.jobs.sql.claims import Claims
from nightmill.jobs.sql.claims import Outcome as RowOutcome
from nightmill.jobs.sql.files import FileStore, StoredFile
from nightmill.jobs.sql.http_batches import HttpBatch, HttpBatchStore, HttpStatus
from tests.support.servers import Clock

COUNT = 40
SILENCE = Settings().stale_seconds + 1
IDS = IdSource()


class Death(BaseException):
    """A process ends like this: nothing that comes after is done."""


class World:
    """A database, a folder, and servers that come and go."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self.client = client
        self.clock = clock
        self.folder = Folder(client.settings.resolved_files_dir)
        self.files = FileStore(client.database)
        self.store = HttpBatchStore(client.database)
        self.claims = Claims(client.database, "a" * 32)
        self.claims.register("host", 1, "model", None)

    def keeper(self) -> BatchProcessor:
        return BatchProcessor(self.client, self.folder)

    def hand_in(self, count: int = COUNT, bad: int = 1, owner: str | None = None) -> HttpBatch:
        content = "".join(
            json.dumps(
                {
                    "custom_id": f"r{number}",
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": {"prompt": "x" if number >= bad else 5},
                }
            )
            + "\n"
            for number in range(count)
        )
        file_id, now = IDS.draw(), self.clock()
        self.folder.coming(file_id).write_text(content)
        assert self.files.add(StoredFile(file_id, owner, "batch", "x", len(content), now), 1 << 30)
        self.folder.settle(file_id)
        made = HttpBatch(
            IDS.draw(),
            owner,
            file_id,
            now,
            endpoint="/v1/completions",
            deadline_at=now + timedelta(days=1),
        )
        added = self.store.add(made)
        assert added == made
        return made

    def run_rows(self) -> None:
        """What a worker would do."""
        ids = [job.id for job in self.client.list_jobs(state="queued", limit=10 * COUNT)]
        claimed = self.claims.claim(ids)
        self.claims.finish(
            [RowOutcome(one.job_id, one.attempt, StopReason.EOS, "text", 1, 2) for one in claimed]
        )

    def status(self, batch: HttpBatch) -> HttpStatus:
        found = self.store.get(batch.id)
        assert found is not None
        return found.status

    def finish(self, batch: HttpBatch, keeper: BatchProcessor) -> None:
        """Work on as another server, once claims have run out, until the batch has ended; look at it all."""
        for _ in range(6):
            self.clock.advance(SILENCE)
            keeper.look()
            if self.status(batch).final:
                break
            self.run_rows()
        assert self.status(batch) is HttpStatus.COMPLETED
        self.check(batch)

    def check(self, batch: HttpBatch) -> None:
        """Every row is in one of the two files, once, and the folder holds nothing else."""
        found = self.store.get(batch.id)
        assert found is not None and found.output_file and found.error_file
        rows = [self.lines(file) for file in (found.output_file, found.error_file)]
        assert [row["custom_id"] for row in rows[0]] == [f"r{number}" for number in range(1, COUNT)]
        assert [row["custom_id"] for row in rows[1]] == ["r0"]
        assert (found.total, found.completed, found.failed) == (COUNT, COUNT - 1, 1)
        assert (found.prompt_tokens, found.completion_tokens) == (COUNT - 1, 2 * (COUNT - 1))
        assert [(one["line"], one["param"]) for one in found.errors] == [(1, "body.prompt")]
        assert len(self.client.list_jobs(batch=batch.batch, limit=10 * COUNT)) == COUNT
        whole = {path.name for path in self.folder.path.iterdir() if path.suffix != ".coming"}
        assert whole == self.files.known(whole)  # what nobody knows of is never under such a name

    def lines(self, file_id: str) -> list[dict[str, Any]]:
        with self.folder.open(file_id) as content:
            return [json.loads(line) for line in content]
