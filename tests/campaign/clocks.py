"""Clocks that can be set wrong: PostgreSQL's by functions in their place, a host's in our processes."""

import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, text
from sqlalchemy.engine import make_url

import nightmill.jobs.sql.database

HOUR = 3600.0


class PostgresClock:
    """A database's `clock_timestamp()` and `now()`, found before PostgreSQL's own by the search path.

    What names the schema, as the history's triggers do, has the right time.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        name = make_url(str(engine.url)).database
        path = "campaign_clock, pg_catalog, public"
        right = "pg_catalog.clock_timestamp()"
        wrong = f"{right} + (SELECT seconds * interval '1 second' FROM campaign_clock.wrong_by)"
        statements = [
            "CREATE SCHEMA campaign_clock",
            "CREATE TABLE campaign_clock.wrong_by AS SELECT 0.0::float8 AS seconds",
            *(
                f"CREATE FUNCTION campaign_clock.{function}() RETURNS timestamptz LANGUAGE sql VOLATILE "
                f"AS $$ SELECT {wrong} $$"
                for function in ("clock_timestamp", "now")
            ),
            f'ALTER DATABASE "{name}" SET search_path = {path}',
        ]
        with engine.begin() as connection:
            for statement in statements:
                connection.execute(text(statement))

    def step(self, seconds: float) -> None:
        """Set it wrong by so much; 0 sets it right."""
        with self._engine.begin() as connection:
            connection.execute(text("UPDATE campaign_clock.wrong_by SET seconds = :by"), {"by": seconds})


def wrong_by() -> float:
    """Seconds by which this process' host has its clock wrong, as two files say: the host's, and its own."""
    return sum(_read(os.environ.get(name)) for name in ("CAMPAIGN_HOST_CLOCK", "CAMPAIGN_CLOCK"))


def _read(path: str | None) -> float:
    try:
        return float(Path(path).read_text()) if path else 0.0
    except (FileNotFoundError, ValueError):  # the clock is right, or is being set
        return 0.0


class SteppedDatetime(datetime):
    """`datetime` on a host whose clock is wrong."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime.fromtimestamp(time.time() + wrong_by(), tz)


def install() -> None:
    """From now on Nightmill reads this host's clock as it is set."""
    nightmill.jobs.sql.database.datetime = SteppedDatetime  # type: ignore[attr-defined,misc]
