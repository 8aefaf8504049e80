"""All SQL about webhooks: entered with their batch, taken by whoever delivers them, tried again or over.

Who takes one moves the time of its next attempt before it sends anything. If it dies, another takes it at
that time: so a webhook is delivered at least once, always under the same id.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import cast

from sqlalchemy import Table, delete, exists, literal, or_, select, update

from nightmill.jobs.ids import IdSource
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.http_batches import BATCH_PREFIX
from nightmill.jobs.sql.jobs import UNFINISHED, dialect_insert
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.tables import BatchRow, HttpBatchRow, JobRow, WebhookRow

WEBHOOKS = cast(Table, WebhookRow.__table__)


@dataclass(frozen=True, slots=True)
class Webhook:
    """One that is to be delivered."""

    id: str
    batch: str
    url: str
    attempts: int  # before this one


class WebhookStore:
    """Webhooks in SQL."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._ids = IdSource()

    @retried
    def add(self, batch: str, url: str) -> None:
        """Have a URL called once this batch has ended; again changes nothing."""
        now = self.database.now()
        with self.database.write() as connection:
            statement = dialect_insert(connection, WEBHOOKS).on_conflict_do_nothing(
                index_elements=["batch", "url"]
            )
            row = {"id": self._ids.draw(), "batch": batch, "url": url, "created_at": now}
            connection.execute(statement, [row | {"attempts": 0, "next_at": now}])

    def due(self, limit: int, batch: str | None = None) -> list[Webhook]:
        """Those whose time has come and whose batch has ended, the longest waiting first."""
        over_http = literal(BATCH_PREFIX) + HttpBatchRow.id == WebhookRow.batch
        # A batch that was cancelled while it was submitted may have no end to its rows.
        entered = or_(BatchRow.row_count.is_not(None), BatchRow.cancel_requested_at.is_not(None))
        ended = (
            ~exists().where(over_http, HttpBatchRow.ended_at.is_(None)),
            or_(exists().where(over_http), exists().where(BatchRow.name == WebhookRow.batch, entered)),
            ~exists().where(JobRow.batch == WebhookRow.batch, JobRow.state.in_(UNFINISHED)),
        )
        query = (
            select(WebhookRow.id, WebhookRow.batch, WebhookRow.url, WebhookRow.attempts)
            .where(WebhookRow.next_at <= self.database.now(), *ended)
            .order_by(WebhookRow.next_at)
            .limit(limit)
        )
        if batch is not None:
            query = query.where(WebhookRow.batch == batch)
        with self.database.read() as connection:
            return [Webhook(*row) for row in connection.execute(query)]

    @retried
    def take(self, webhook: Webhook, pause: timedelta) -> bool:
        """Begin an attempt; False if another has. Others leave it alone for `pause`."""
        now = self.database.now()
        values = {"attempts": webhook.attempts + 1, "next_at": now + pause}
        with self.database.write() as connection:
            statement = update(WebhookRow).where(
                WebhookRow.id == webhook.id,
                WebhookRow.attempts == webhook.attempts,
                WebhookRow.next_at <= now,
            )
            return connection.execute(statement.values(**values)).rowcount == 1

    @retried
    def postpone(self, webhook: Webhook, pause: timedelta) -> None:
        """Leave one alone for `pause` that nobody has begun; that is no attempt."""
        values = {"next_at": self.database.now() + pause}
        with self.database.write() as connection:
            statement = update(WebhookRow).where(
                WebhookRow.id == webhook.id,
                WebhookRow.attempts == webhook.attempts,
                WebhookRow.next_at.is_not(None),
            )
            connection.execute(statement.values(**values))

    @retried
    def delivered(self, webhook: Webhook) -> None:
        """Its receiver has taken it."""
        with self.database.write() as connection:
            statement = update(WebhookRow).where(WebhookRow.id == webhook.id)
            now = self.database.now()
            connection.execute(statement.values(next_at=None, delivered_at=now, error=None))

    @retried
    def failed(self, webhook: Webhook, why: str, pause: timedelta | None) -> None:
        """The attempt that was begun has failed; the next one is after `pause`, None: it is given up."""
        next_at = None if pause is None else self.database.now() + pause
        with self.database.write() as connection:
            statement = update(WebhookRow).where(
                WebhookRow.id == webhook.id,
                WebhookRow.attempts == webhook.attempts + 1,
                WebhookRow.next_at.is_not(None),
            )
            connection.execute(statement.values(next_at=next_at, error=why))

    @retried
    def forget(self, before: datetime) -> None:
        """Delete those of batches that are gone, if they are older than that."""
        batch = exists().where(BatchRow.name == WebhookRow.batch)
        http = exists().where(literal(BATCH_PREFIX) + HttpBatchRow.id == WebhookRow.batch)
        with self.database.write() as connection:
            connection.execute(delete(WebhookRow).where(WebhookRow.created_at < before, ~batch, ~http))
