"""All SQL about the files of those who come over HTTP: names and sizes. Contents are elsewhere."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, cast

from sqlalchemy import Connection, Table, delete, func, insert, select

from nightmill.jobs.errors import InvalidTransitionError
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.jobs import chunked
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.tables import VALIDATING, FileRow, HttpBatchRow

FILES = cast(Table, FileRow.__table__)
FILE_PREFIX = "file-"
"""What callers see before the id of a file."""
UPLOADED = "batch"
"""The purpose of files that somebody uploads."""
WRITTEN = "batch_output"
"""The purpose of files that servers write."""
_QUOTA_LOCK = 0x66696C6573  # PostgreSQL advisory lock: "files"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What is known of a file besides its content."""

    id: str
    owner: str | None
    purpose: str
    filename: str  # as its owner calls it
    size: int  # bytes
    created_at: datetime


class FileStore:
    """Files in SQL."""

    def __init__(self, database: Database) -> None:
        self.database = database

    @retried
    def add(self, file: StoredFile, quota: int) -> bool:
        """Enter a file unless its owner would then have more than `quota` bytes; returns whether it is in."""
        with self.database.write() as connection:
            if not self.database.is_sqlite:  # which has one writer at a time
                connection.execute(select(func.pg_advisory_xact_lock(_QUOTA_LOCK)))
            if connection.execute(_used(file.owner)).scalar_one() + file.size > quota:
                return False
            insert_files(connection, [file])
        return True

    def get(self, file_id: str) -> StoredFile | None:
        """One file, if there is one of this id."""
        with self.database.read() as connection:
            row = connection.execute(select(FILES).where(FileRow.id == file_id)).mappings().one_or_none()
        return None if row is None else StoredFile(**row)

    def page(
        self,
        *,
        owner: str | None,
        purpose: str | None,
        after: str | None,
        oldest_first: bool,
        limit: int,
    ) -> list[StoredFile]:
        """Files in the order of their ids, which is that of their making. `owner`: None for everybody's."""
        query = select(FILES)
        if owner is not None:
            query = query.where(FileRow.owner == owner)
        if purpose is not None:
            query = query.where(FileRow.purpose == purpose)
        if after is not None:
            query = query.where(FileRow.id > after if oldest_first else FileRow.id < after)
        query = query.order_by(FileRow.id if oldest_first else FileRow.id.desc()).limit(limit)
        with self.database.read() as connection:
            return [StoredFile(**row) for row in connection.execute(query).mappings()]

    def made_before(self, moment: datetime) -> list[str]:
        """Ids of files that were made before."""
        with self.database.read() as connection:
            query = select(FileRow.id).where(FileRow.created_at < moment).order_by(FileRow.id)
            return list(connection.execute(query).scalars())

    def used(self, owner: str | None) -> int:
        """Bytes of all files of an owner."""
        with self.database.read() as connection:
            return int(connection.execute(_used(owner)).scalar_one())

    def known(self, file_ids: Iterable[str]) -> set[str]:
        """Those of these ids that files have."""
        found: set[str] = set()
        with self.database.read() as connection:
            for chunk in chunked(file_ids):
                found.update(connection.execute(select(FileRow.id).where(FileRow.id.in_(chunk))).scalars())
        return found

    @retried
    def delete(self, file_id: str, remove: Callable[[], None]) -> bool:
        """Delete a file; returns whether it was there.

        `remove` takes its content away before the row is: what is broken off in between can be done again.
        Raises InvalidTransitionError while a batch is being made of it.
        """
        with self.database.write() as connection:
            row = select(FileRow.id).where(FileRow.id == file_id).with_for_update()
            if connection.execute(row).one_or_none() is None:
                return False
            read = select(HttpBatchRow.id).where(HttpBatchRow.input_file == file_id, VALIDATING).limit(1)
            if (reader := connection.execute(read).scalar_one_or_none()) is not None:
                raise InvalidTransitionError(
                    f"the file is being read for batch_{reader}: wait until that is in progress, or cancel it"
                )
            remove()
            connection.execute(delete(FileRow).where(FileRow.id == file_id))
        return True


def insert_files(connection: Connection, files: Iterable[StoredFile]) -> None:
    """Enter files inside the caller's transaction, whatever their owner has already."""
    connection.execute(insert(FILES), [asdict(file) for file in files])


def _used(owner: str | None) -> Any:
    of_owner = FileRow.owner.is_(None) if owner is None else FileRow.owner == owner
    return select(func.coalesce(func.sum(FileRow.size), 0)).where(of_owner)
