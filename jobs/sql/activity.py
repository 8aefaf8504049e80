"""The time of workers by what they did: a row of `activity` for some minutes of a worker."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import delete, select, update

from nightmill.jobs.reply.night import Spell
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.jobs import dialect_insert
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.tables import ActivityRow, WorkerRow

ROW = timedelta(minutes=10)
"""The time that a row covers, at most."""


class ActivityStore:
    """The table `activity`."""

    def __init__(self, database: Database) -> None:
        self.database = database

    @retried
    def record(
        self,
        worker_id: str,
        model: str,
        began_at: datetime,
        ended_at: datetime,
        seconds: Mapping[str, float],
    ) -> None:
        """Write what a worker did from `began_at` on, in place of what was said about it before.

        seconds  by the name of a column, without `_seconds`
        """
        values: dict[str, Any] = {f"{name}_seconds": spent for name, spent in seconds.items()}
        values |= {"model": model, "ended_at": ended_at}
        with self.database.write() as connection:
            written = update(ActivityRow).where(
                ActivityRow.worker == worker_id, ActivityRow.began_at == began_at
            )
            if not connection.execute(written.values(values)).rowcount:
                entry = dialect_insert(connection, ActivityRow.__table__).on_conflict_do_nothing()
                connection.execute(entry.values(worker=worker_id, began_at=began_at, **values))

    def between(self, since: datetime, until: datetime) -> list[Spell]:
        """Return what workers did in a period, in the order in which it began; rows that only touch it count
        whole."""
        query = (
            select(ActivityRow, WorkerRow.host, WorkerRow.gpu)
            .outerjoin(WorkerRow, WorkerRow.id == ActivityRow.worker)
            .where(ActivityRow.began_at >= since - ROW, ActivityRow.began_at < until)
            .where(ActivityRow.ended_at > since)
            .order_by(ActivityRow.began_at, ActivityRow.worker)
        )
        with self.database.read() as connection:
            return [
                Spell(
                    worker=row.worker,
                    host=row.host,
                    gpu=row.gpu,
                    model=row.model,
                    began_at=row.began_at,
                    ended_at=row.ended_at,
                    computing=row.computing_seconds,
                    memory=row.memory_seconds,
                    tokenizer=row.tokenizer_seconds,
                    messages=row.messages_seconds,
                    loading=row.loading_seconds,
                )
                for row in connection.execute(query.with_only_columns(*_COLUMNS))
            ]

    @retried
    def prune(self, before: datetime) -> None:
        """Delete what ended before."""
        with self.database.write() as connection:
            connection.execute(delete(ActivityRow).where(ActivityRow.ended_at < before))


_COLUMNS = (*ActivityRow.__table__.columns, WorkerRow.host, WorkerRow.gpu)
