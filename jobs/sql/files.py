"""Statements about files uploaded or written over HTTP: names and sizes. Contents are stored elsewhere."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, cast

from sqlalchemy import Connection, Table, delete, func, insert, select

from nightmill.jobs.errors import InvalidTransitionError
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.http_tables import VALIDATING, FileRow, HttpBatchRow
from nightmill.jobs.sql.jobs import chunked
from nightmill.jobs.sql.retrying import retried

FILES = cast(Table, FileRow.__table__)
FILE_PREFIX = "file-"
"""Prefix of file ids for callers."""
UPLOADED = "batch"
"""Purpose of uploaded files."""
WRITTEN = "batch_output"
"""Purpose of files written by servers."""
_QUOTA_LOCK = 0x66696C6573  # PostgreSQL advisory lock: "files"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file's metadata."""

    id: str
    owner: str | None
    purpose: str
    filename: str  # as uploaded
    size: int  # bytes
    created_at: datetime


class FileStore:
    """The files in SQL."""

    def __init__(self, database: Database) -> None:
        self.database = database

    @retried
    def add(self, file: StoredFile, quota: int) -> bool:
        """Insert a file unless its owner would exceed `quota` bytes; returns True if inserted."""
        with self.database.write() as connection:
            if not self.database.is_sqlite:  # SQLite has one writer at a time
                connection.execute(select(func.pg_advisory_xact_lock(_QUOTA_LOCK)))
            if connection.execute(_used(file.owner)).scalar_one() + file.size > quota:
                return False
            insert_files(connection, [file])
        return True

    def get(self, file_id: str) -> StoredFile | None:
        """Return a file; None if there is none with this id."""
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
        """Return files in the order of their ids, which is that of creation. `owner` None: everybody's."""
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
        """Return ids of files created before this moment."""
        with self.database.read() as connection:
            query = select(FileRow.id).where(FileRow.created_at < moment).order_by(FileRow.id)
            return list(connection.execute(query).scalars())

    def used(self, owner: str | None) -> int:
        """Return the total size of an owner's files in bytes."""
        with self.database.read() as connection:
            return int(connection.execute(_used(owner)).scalar_one())

    def known(self, file_ids: Iterable[str]) -> set[str]:
        """Filter to ids of existing files."""
        found: set[str] = set()
        with self.database.read() as connection:
            for chunk in chunked(file_ids):
                found.update(connection.execute(select(FileRow.id).where(FileRow.id.in_(chunk))).scalars())
        return found

    def filenames(self, file_ids: Iterable[str]) -> dict[str, str]:
        """Return file names by id, without deleted files."""
        found: dict[str, str] = {}
        with self.database.read() as connection:
            for chunk in chunked(file_ids):
                rows = connection.execute(select(FileRow.id, FileRow.filename).where(FileRow.id.in_(chunk)))
                found.update((row.id, row.filename) for row in rows)
        return found

    @retried
    def delete(self, file_id: str, remove: Callable[[], None]) -> bool:
        """Delete a file; returns True if it existed.

        `remove` deletes its content before the row, so that an interrupted deletion can be repeated. Raises
        InvalidTransitionError while a batch is being made from it.
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
    """Insert files in the caller's transaction, regardless of quotas."""
    connection.execute(insert(FILES), [asdict(file) for file in files])


def _used(owner: str | None) -> Any:
    of_owner = FileRow.owner.is_(None) if owner is None else FileRow.owner == owner
    return select(func.coalesce(func.sum(FileRow.size), 0)).where(of_owner)
