"""Timeouts of statements: a connection that stays silent for too long is closed.

A hanging database, or a connection frozen by a firewall, neither answers nor closes. The kernel's limits
(keepalives, TCP_USER_TIMEOUT) help only without acknowledgements, and a `statement_timeout` only if the
server can still reply. So waits for PostgreSQL end here, by this process's clock: the connection is closed,
and the statement fails as if the server had gone away.

The limit applies to silence: a statement whose rows keep coming may take longer. So may a statement on a
whole batch or table (`long_lasting`), as long as the server reports, over another connection, that it is
working on it. The limit is shorter for callers with a deadline (`until`).
"""

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial, wraps
from typing import Any, Final, ParamSpec, TypeVar

from nightmill.jobs.sql.sessions import Session

PING_SECONDS: Final = 5.0
"""Limit for the check of a pooled connection."""
STATEMENT_SECONDS: Final = 20.0
"""Limit for a statement; less than the silence after which a worker counts as dead."""
CONNECT_SECONDS: Final = 10.0
"""Limit for connecting, for each address of the host."""
LEAST_SECONDS: Final = 0.5
"""Least limit of a statement, even if its caller's time is over: a working database answers sooner."""
_LOOK_SECONDS = 1.0  # psycopg looks ten times a second; longer means that this process was suspended

KEEPALIVE: Final[Mapping[str, int]] = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,  # milliseconds
}
"""Connection options for the kernel: a peer that acknowledges nothing is given up within half a minute."""
SERVER_KEEPALIVE: Final = {
    f"tcp_{name}": KEEPALIVE[name] for name in ("keepalives_idle", "keepalives_interval", "keepalives_count")
}
"""The same options for the server's side."""

P = ParamSpec("P")
R = TypeVar("R")

_kind: ContextVar[float] = ContextVar("silence of a statement", default=STATEMENT_SECONDS)
_long: ContextVar[bool] = ContextVar("statements may last", default=False)
_end: ContextVar[float | None] = ContextVar("end of a caller's time", default=None)


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Set the limit of silence for statements in this block."""
    token = _kind.set(seconds)
    try:
        yield
    finally:
        _kind.reset(token)


@contextmanager
def until(moment: float | None) -> Iterator[None]:
    """Limit statements in this block to this moment of `time.monotonic`; None: the usual limits.

    In nested blocks the earliest moment applies.
    """
    outer = _end.get()
    moments = [limit for limit in (outer, moment) if limit is not None]
    token = _end.set(min(moments, default=None))
    try:
        yield
    finally:
        _end.reset(token)


def long_lasting(function: Callable[P, R]) -> Callable[P, R]:
    """Let statements of this function, not a generator, take as long as the server works on them."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _long.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _long.reset(token)

    return call


def seconds_for(usual: float | None = None) -> float:
    """Return the usual limit (by default a statement's), cut to the caller's remaining time."""
    seconds, end = _kind.get() if usual is None else usual, _end.get()
    return seconds if end is None else max(LEAST_SECONDS, min(seconds, end - time.monotonic()))


@cache
def bounded_connection() -> Any:
    """Return a subclass of psycopg's connection with bounded waits; made here as psycopg is optional."""
    import psycopg

    class BoundedConnection(psycopg.Connection[Any]):
        """A connection that is closed if its server has been silent for too long.

        pooled      whether it goes through a pooler in transaction mode
        server_pid  id of its server process; with a pooler, within this transaction
        """

        again: Callable[[], Any]
        pooled: bool
        server_pid: int

        @classmethod
        def connect_again(cls, args: Any, options: Mapping[str, Any], session: Session) -> Any:
            """Connect and set up the session; the connection can make another like it."""
            connection = cls.connect(*args, **options)
            connection.again = partial(cls.connect, *args, **options)
            try:
                with patience(PING_SECONDS):
                    connection._set_up(session)
            except BaseException:  # including Ctrl-C: no connection is leaked
                connection.close()
                raise
            return connection

        def _set_up(self, session: Session) -> None:
            said = self.server_pid = self.pgconn.backend_pid
            self.pooled = session.pooler == "transaction"
            if not self.pooled:
                self.autocommit = True
                row: Any = self.execute(session.opening(said), prepare=False).fetchone()
                self.autocommit = False
                self.pooled = session.pooler == "auto" and row[0] != said
            if self.pooled:
                self.prepare_threshold = None

        def wait(self, gen: Generator[Any, Any, R], *args: Any, **kwargs: Any) -> R:
            return super().wait(self._bounded(gen), *args, **kwargs)

        def _bounded(self, steps: Generator[Any, Any, R]) -> Generator[Any, Any, R]:
            """Run the same steps; fails if none completes for too long."""
            lasts, ends = _long.get(), _end.get() is not None
            limit, may_last = seconds_for(math.inf if lasts and ends else None), lasts and not ends
            silent, looked_at = 0.0, time.monotonic()
            try:
                wanted = next(steps)
                while True:
                    ready = yield wanted
                    now = time.monotonic()
                    silent += min(now - looked_at, _LOOK_SECONDS)
                    looked_at = now
                    if ready:
                        silent = 0.0
                    elif silent >= limit and may_last and self._is_worked_for():
                        silent, looked_at = 0.0, time.monotonic()
                    elif silent >= limit:
                        self.pgconn.finish()
                        raise psycopg.OperationalError(f"no answer for {limit:.0f} s")
                    wanted = steps.send(ready)
            except StopIteration as end:
                result: R = end.value
                return result

        def _is_worked_for(self) -> bool:
            """Ask over another connection whether the server is executing this connection's statement."""
            query = "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND state = 'active'"
            token = _long.set(False)
            try:
                with patience(PING_SECONDS), self.again() as other:
                    found = other.execute(query, (self.server_pid,), prepare=False)
                    return found.fetchone() is not None
            except psycopg.Error:
                return False
            finally:
                _long.reset(token)

    return BoundedConnection
