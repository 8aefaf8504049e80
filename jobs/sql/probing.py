"""A check that the database accepts writes, as a read-only one answers reads."""

from sqlalchemy import delete, false, insert, select, update

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.declared import METADATA
from nightmill.jobs.sql.jobs import JOBS
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.versions import check_encoding


@retried
def try_writing(database: Database, *, tables: bool = False) -> None:
    """Insert a job and delete it in one transaction, so that nobody sees it.

    tables  also check all needed privileges on all tables, and the encoding

    Raises DatabaseError.
    """
    job_id, now = IdSource().draw(), database.now()
    row = {
        "id": job_id, "state": JobState.CANCELLED, "params": {}, "seed": 0, "attempt": 0, "failures": 0,
        "max_attempts": 1, "priority": 0, "created_at": now, "finished_at": now,
    }  # fmt: skip
    with database.write() as connection:
        if tables:
            check_encoding(connection, database.settings.safe_database_url)
        connection.execute(insert(JOBS).values(row))
        connection.execute(update(JOBS).where(JOBS.c.id == job_id).values(priority=1))
        connection.execute(delete(JOBS).where(JOBS.c.id == job_id))
        for table in METADATA.sorted_tables if tables else ():
            columns = list(table.primary_key.columns)
            connection.execute(insert(table).from_select(columns, select(*columns).where(false())))
            connection.execute(update(table).where(false()).values({column: column for column in columns}))
            connection.execute(delete(table).where(false()))
