"""Types of columns that hold the same on every database: times in UTC, text that can be stored."""

from datetime import UTC, datetime

from sqlalchemy import (
    DateTime,
    Dialect,
    String,
    Text,
)
from sqlalchemy.types import TypeDecorator

from nightmill.jobs.base.contract import storable


class UtcDateTime(TypeDecorator[datetime]):
    """A point in time in UTC on every database: SQLite stores no zone, so it is added on reading."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a datetime without a time zone cannot be stored")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class StorableText(TypeDecorator[str]):
    """Text from a worker, which no user can correct: anything unstorable in it is replaced."""

    impl = Text
    cache_ok = True

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.limit = limit

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else storable(value, self.limit)


class StorableString(TypeDecorator[str]):
    """A StorableText of at most `length` characters."""

    impl = String
    cache_ok = True

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.length = length

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else storable(value, self.length)
