"""Classification of errors from SQLAlchemy and drivers: an outage, a refusal of values, or neither."""

import sqlite3

from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    ProgrammingError,
    StatementError,
)

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import (
    DatabaseBusyError,
    DatabaseError,
    DatabaseRefusedError,
    DatabaseUnreachableError,
    SchemaError,
)

# PostgreSQL's error codes, and classes of them,
# https://www.postgresql.org/docs/current/errcodes-appendix.html
LOCK_NOT_AVAILABLE = "55P03"
# Deadlock, serialization failure, lock timeout: PostgreSQL has rolled back, and the next try may succeed.
_LOST_TO_OTHERS = ("40P01", "40001", LOCK_NOT_AVAILABLE)
# Data exception, integrity constraint, program limit (such as a too long index entry).
_REFUSING = ("22", "23", "54")
# Read-only, insufficient resources (disk full, too many connections), an operator's intervention.
_UNWILLING = ("25", "53", "57")
_LACKING = ("42P01", "42703", "3F000")  # a table, a column, a schema
_OTHER_SESSION = ("26000", "42P05")  # a prepared statement is missing, or exists already
_UNWILLING_SQLITE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL)


def mapped(error: StatementError, settings: Settings) -> DatabaseError:
    """Map a failed statement or connection to a DatabaseError."""
    where = settings.safe_database_url
    said = settings.scrubbed(first_line(error.orig or error))
    code = sqlstate(error)
    if _lost_to_others(error.orig):
        return DatabaseBusyError(
            f"the database at {where} is busy: {said}. Other programs hold the same rows, or its lock; "
            "several tries did not help"
        )
    if _is_refusal(error):
        return refused(error.orig or error, settings)
    if code in _LACKING or "no such table" in said or "no such column" in said:
        return SchemaError(f"the database at {where} lacks a table ({said}): run `nightmill migrate`")
    if "no such index" in said:
        return SchemaError(
            f"the database at {where} lacks an index that its revision has ({said}): another program "
            "changed it, or a version under development made it. Create the index again, or take another "
            "database"
        )
    if code in _OTHER_SESSION:
        return DatabaseError(
            f"the database at {where} is behind a pooler that changes sessions ({said}): set "
            "NIGHTMILL_DATABASE_POOLER=transaction"
        )
    if code[:2] in _UNWILLING or _sqlite_code(error.orig) in _UNWILLING_SQLITE:
        return DatabaseUnreachableError(f"the database at {where} accepts no writes now: {said}")
    if isinstance(error, OperationalError | InterfaceError):
        if "FATAL:" in said:  # the driver's error for a connection has no code
            return DatabaseUnreachableError(
                f"the database at {where} refuses the connection: {said}. Check NIGHTMILL_DATABASE_URL, and "
                "what the server lets in"
            )
        return DatabaseUnreachableError(
            f"the database at {where} does not answer: {said}. Check that it runs and that "
            "NIGHTMILL_DATABASE_URL is right"
        )
    if isinstance(error, ProgrammingError) and "invalid connection option" in said:
        return DatabaseError(
            f"the database at {where} cannot be connected to: NIGHTMILL_DATABASE_URL: {said}"
        )
    return DatabaseError(f"the database at {where} refused a statement: {said}")


def refused(error: BaseException, settings: Settings) -> DatabaseRefusedError:
    """Make the error for values that the database does not accept."""
    where, said = settings.safe_database_url, settings.scrubbed(first_line(error))
    return DatabaseRefusedError(f"the database at {where} refused a statement: {said}")


def sqlstate(error: StatementError) -> str:
    """Return PostgreSQL's error code; empty if there is none."""
    return getattr(error.orig, "sqlstate", None) or ""


def first_line(error: BaseException | None) -> str:
    """Return the first line of a foreign error's message without its full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__


def _is_refusal(error: StatementError) -> bool:
    """Return True if the same values would always be refused, so that retrying is useless."""
    if not isinstance(error, DBAPIError):
        return True  # SQLAlchemy could not convert the values to parameters
    if isinstance(error, DataError | IntegrityError):
        return True
    binding = isinstance(error, InterfaceError | ProgrammingError) and "binding parameter" in str(error.orig)
    return binding or sqlstate(error)[:2] in _REFUSING


def _lost_to_others(error: BaseException | None) -> bool:
    """Return True if the statement conflicted with other transactions, so that it may succeed next time."""
    if isinstance(error, sqlite3.Error):
        return _sqlite_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return getattr(error, "sqlstate", None) in _LOST_TO_OTHERS


def _sqlite_code(error: BaseException | None) -> int:
    """Return SQLite's primary error code; 0 for other databases."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF if isinstance(error, sqlite3.Error) else 0
