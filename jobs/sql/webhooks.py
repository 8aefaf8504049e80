"""Statements about webhooks: entered with their batch, leased for delivery, retried or ended.

A process that takes a webhook moves the time of its next attempt before it sends anything. If it dies,
another takes over at that time: so a webhook is delivered at least once, always under the same id.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import cast

from sqlalchemy import Table, delete, exists, literal, or_, select, update

from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.http_batches import BATCH_PREFIX
from nightmill.jobs.sql.http_tables import HttpBatchRow, WebhookRow
from nightmill.jobs.sql.jobs import UNFINISHED, dialect_insert
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.tables import BatchRow, JobRow

WEBHOOKS = cast(Table, WebhookRow.__table__)


@dataclass(frozen=True, slots=True)
class Webhook:
    """A webhook to be delivered."""

    id: str
    batch: str
    url: str
    attempts: int  # earlier ones


class WebhookStore:
    """The webhooks in SQL."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._ids = IdSource()

    @retried
    def add(self, batch: str, url: str) -> None:
        """Register a URL to be called once this batch has ended; repeating it changes nothing."""
        now = self.database.now()
        with self.database.write() as connection:
            statement = dialect_insert(connection, WEBHOOKS).on_conflict_do_nothing(
                index_elements=["batch", "url"]
            )
            row = {"id": self._ids.draw(), "batch": batch, "url": url, "created_at": now}
            connection.execute(statement, [row | {"attempts": 0, "next_at": now}])

    def due(self, limit: int, batch: str | None = None) -> list[Webhook]:
        """Return due webhooks of ended batches, the longest waiting first."""
        over_http = literal(BATCH_PREFIX) + HttpBatchRow.id == WebhookRow.batch
        # A batch that was cancelled while being submitted may never have a row count.
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
        """Begin an attempt; returns False if another process has. Others wait for `pause`."""
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
        """Delay a webhook that nobody has begun by `pause`, without counting an attempt."""
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
        """Record the delivery."""
        with self.database.write() as connection:
            statement = update(WebhookRow).where(WebhookRow.id == webhook.id)
            now = self.database.now()
            connection.execute(statement.values(next_at=None, delivered_at=now, error=None))

    @retried
    def failed(self, webhook: Webhook, why: str, pause: timedelta | None) -> None:
        """Record a failed attempt; the next one is after `pause`, None: never."""
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
        """Delete webhooks of deleted batches that are older than this moment."""
        batch = exists().where(BatchRow.name == WebhookRow.batch)
        http = exists().where(literal(BATCH_PREFIX) + HttpBatchRow.id == WebhookRow.batch)
        with self.database.write() as connection:
            connection.execute(delete(WebhookRow).where(WebhookRow.created_at < before, ~batch, ~http))
