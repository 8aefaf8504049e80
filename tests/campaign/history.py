"""Every change of every job, when batches began to be deleted and workers fell asleep: by triggers in SQL."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Engine, text

TRACKED = ("state", "attempt", "failures", "worker", "stop_reason", "finished_at", "text")
_SQLITE_NOW = "(julianday('now') - 2440587.5) * 86400.0"
_MARKED = "OLD.deleting_at IS NULL AND NEW.deleting_at IS NOT NULL"
_COLUMNS = ("id", "batch", "prior", "deadline_at", "created_at", "error", *TRACKED)
_KEPT = (*_COLUMNS, "worker_state")
_ASLEEP = "OLD.state <> 'sleeping' AND NEW.state = 'sleeping'"
_HELD = "(SELECT count(*) FROM jobs WHERE worker = NEW.id AND state = 'running')"


def _values(row: str) -> str:
    """The columns of a changed job, in SQL."""
    state = f"(SELECT state FROM workers WHERE workers.id = {row}.worker)"
    return ", ".join([*(f"{row}.{name}" for name in _COLUMNS), state])


@dataclass(frozen=True)
class Change:
    """One INSERT, UPDATE or DELETE of a job, with the row as it was afterwards (for DELETE: before)."""

    n: int
    at: float
    op: str  # I, U or D
    id: str
    state: str
    attempt: int = 0
    failures: int = 0
    worker: str | None = None
    stop_reason: str | None = None
    finished_at: float | None = None
    text: str | None = None
    batch: str | None = None
    prior: str | None = None
    deadline_at: float | None = None
    created_at: float | None = None
    error: str | None = None
    worker_state: str | None = None  # of its worker's row at that time

    @property
    def final(self) -> bool:
        return self.state in ("succeeded", "failed", "cancelled")


def install(engine: Engine) -> None:
    """Create the history table and its triggers."""
    statements = _sqlite() if engine.dialect.name == "sqlite" else _postgresql()
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def read(engine: Engine) -> Iterator[Change]:
    """All changes, in their order."""
    names = ", ".join(("n", "at", "op", *_KEPT))
    with engine.connect() as connection:
        for row in connection.execute(text(f"SELECT {names} FROM campaign_history ORDER BY n")).mappings():
            times = {name: _seconds(row[name]) for name in ("deadline_at", "created_at", "finished_at")}
            yield Change(**(dict(row) | times))


def deletions(engine: Engine) -> dict[str, list[float]]:
    """When batches of each name were marked as being deleted: after that nothing is queued in them again."""
    found: dict[str, list[float]] = defaultdict(list)
    with engine.connect() as connection:
        for name, at in connection.execute(text("SELECT name, at FROM campaign_deletions")):
            found[name].append(at)
    return found


def sleepers(engine: Engine) -> list[tuple[str, float, int]]:
    """Each worker that fell asleep, when, and how many jobs it had then."""
    with engine.connect() as connection:
        found = connection.execute(text("SELECT id, at, held FROM campaign_sleepers"))
        return [(worker, at, held) for worker, at, held in found]


def rows(engine: Engine) -> dict[str, dict[str, Any]]:
    """The jobs as they stand."""
    query = "SELECT id, state, attempt, error, errors, prompt, messages FROM jobs"
    with engine.connect() as connection:
        return {row["id"]: dict(row) for row in connection.execute(text(query)).mappings()}


def _seconds(value: Any) -> float | None:
    """A stored time as seconds since the epoch."""
    if value is None:
        return None
    moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    return (moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment).timestamp()


def _sqlite() -> Iterator[str]:
    yield (
        "CREATE TABLE campaign_history (n INTEGER PRIMARY KEY AUTOINCREMENT, at REAL, op TEXT, "
        + ", ".join(_KEPT)
        + ")"
    )
    changed = " OR ".join(f"OLD.{name} IS NOT NEW.{name}" for name in TRACKED)
    for op, event, row, when in (
        ("I", "INSERT", "NEW", ""),
        ("U", "UPDATE", "NEW", f"WHEN {changed}"),
        ("D", "DELETE", "OLD", ""),
    ):
        yield (
            f"CREATE TRIGGER campaign_{event.lower()} AFTER {event} ON jobs {when} BEGIN "
            f"INSERT INTO campaign_history (at, op, {', '.join(_KEPT)}) "
            f"VALUES ({_SQLITE_NOW}, '{op}', {_values(row)}); END"
        )
    yield "CREATE TABLE campaign_sleepers (id TEXT, at REAL, held INTEGER)"
    yield (
        f"CREATE TRIGGER campaign_asleep AFTER UPDATE ON workers WHEN {_ASLEEP} BEGIN "
        f"INSERT INTO campaign_sleepers VALUES (NEW.id, {_SQLITE_NOW}, {_HELD}); END"
    )
    yield "CREATE TABLE campaign_deletions (name TEXT, at REAL)"
    yield (
        f"CREATE TRIGGER campaign_deleting AFTER UPDATE ON batches WHEN {_MARKED} BEGIN "
        f"INSERT INTO campaign_deletions VALUES (NEW.name, {_SQLITE_NOW}); END"
    )


def _postgresql() -> Iterator[str]:
    kinds = {"attempt": "integer", "failures": "integer"}
    kinds |= dict.fromkeys(("deadline_at", "created_at", "finished_at"), "timestamptz")
    columns = ", ".join(f"{name} {kinds.get(name, 'text')}" for name in _KEPT)
    yield f"CREATE TABLE campaign_history (n bigserial PRIMARY KEY, at float8, op text, {columns})"
    inserting = f"INSERT INTO campaign_history (at, op, {', '.join(_KEPT)}) VALUES "
    now = "extract(epoch FROM pg_catalog.clock_timestamp())"
    values = {row: _values(row) for row in ("OLD", "NEW")}
    yield (
        "CREATE FUNCTION campaign_note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF TG_OP = 'DELETE' THEN {inserting} ({now}, 'D', {values['OLD']}); "
        f"ELSE {inserting} ({now}, left(TG_OP, 1), {values['NEW']}); END IF; "
        "RETURN NULL; END $$"
    )
    changed = " OR ".join(f"OLD.{name} IS DISTINCT FROM NEW.{name}" for name in TRACKED)
    for event, when in (("INSERT", ""), ("UPDATE", f"WHEN ({changed})"), ("DELETE", "")):
        yield (
            f"CREATE TRIGGER campaign_{event.lower()} AFTER {event} ON jobs "
            f"FOR EACH ROW {when} EXECUTE FUNCTION campaign_note()"
        )
    yield "CREATE TABLE campaign_sleepers (id text, at float8, held integer)"
    yield (
        "CREATE FUNCTION campaign_note_sleeper() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"INSERT INTO campaign_sleepers VALUES (NEW.id, {now}, {_HELD}); RETURN NULL; END $$"
    )
    yield (
        "CREATE TRIGGER campaign_asleep AFTER UPDATE ON workers "
        f"FOR EACH ROW WHEN ({_ASLEEP}) EXECUTE FUNCTION campaign_note_sleeper()"
    )
    yield "CREATE TABLE campaign_deletions (name text, at float8)"
    yield (
        "CREATE FUNCTION campaign_note_deletion() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"INSERT INTO campaign_deletions VALUES (NEW.name, {now}); RETURN NULL; END $$"
    )
    yield (
        "CREATE TRIGGER campaign_deleting AFTER UPDATE ON batches "
        f"FOR EACH ROW WHEN ({_MARKED}) EXECUTE FUNCTION campaign_note_deletion()"
    )
