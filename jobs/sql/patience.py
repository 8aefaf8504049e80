"""How long a statement may go without an answer, and what drops the connection past that.

A database that hangs, or a connection that a firewall has frozen, answers nothing and closes nothing. The
kernel's own limits (keepalives, TCP_USER_TIMEOUT) help only if nobody acknowledges either, and a
`statement_timeout` only if the server can still be heard. So a wait for PostgreSQL ends here, by the clock of
this process: the connection is closed, and the statement fails as it does if the server goes away.

The limit is one of silence: a statement whose rows keep coming may take longer. So may one on a whole batch
or table (`long_lasting`), for as long as the server says, over another connection, that it works on it. And
it is shorter for callers who have only so much time themselves (`until`).
"""

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial, wraps
from typing import Any, Final, ParamSpec, TypeVar

PING_SECONDS: Final = 5.0
"""For a connection of the pool to show that it is still good."""
STATEMENT_SECONDS: Final = 20.0
"""For a statement; less than the silence after which a worker counts as dead."""
CONNECT_SECONDS: Final = 10.0
"""For a connection to be made, for each address of the host."""
LEAST_SECONDS: Final = 0.5
"""What a statement is given though its caller's time is over: a database that answers does so sooner."""
_IDLE_SECONDS = (
    30  # in a transaction, after which the server ends it; nothing of ours is slow between statements
)
_LOOK_SECONDS = 1.0  # psycopg looks ten times a second; longer means that this process was suspended

KEEPALIVE: Final[Mapping[str, int]] = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,  # milliseconds
}
"""What libpq asks of the kernel: a peer that acknowledges nothing is given up within half a minute."""

_SESSION: Final = "; ".join(
    f"SET {name} = {value}"
    for name, value in {
        "idle_in_transaction_session_timeout": 1000 * _IDLE_SECONDS,
        "tcp_keepalives_idle": KEEPALIVE["keepalives_idle"],
        "tcp_keepalives_interval": KEEPALIVE["keepalives_interval"],
        "tcp_keepalives_count": KEEPALIVE["keepalives_count"],
    }.items()
)
"""What the server is to do about a client that it hears no more: until it gives up a transaction whose client
went on with another connection, that one waits for the rows which the first has locked."""

P = ParamSpec("P")
R = TypeVar("R")

_kind: ContextVar[float] = ContextVar("silence of a statement", default=STATEMENT_SECONDS)
_long: ContextVar[bool] = ContextVar("statements may last", default=False)
_end: ContextVar[float | None] = ContextVar("end of a caller's time", default=None)


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Give each statement in this block so many seconds without an answer."""
    token = _kind.set(seconds)
    try:
        yield
    finally:
        _kind.reset(token)


@contextmanager
def until(moment: float | None) -> Iterator[None]:
    """Give statements in this block no more time than to this moment of `time.monotonic`; None: as usual.

    Inside another such block the earlier moment counts.
    """
    outer = _end.get()
    moments = [one for one in (outer, moment) if one is not None]
    token = _end.set(min(moments, default=None))
    try:
        yield
    finally:
        _end.reset(token)


def long_lasting(function: Callable[P, R]) -> Callable[P, R]:
    """Let statements in this function, which is no generator, take as long as the server works on them."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _long.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _long.reset(token)

    return call


def seconds_for(usual: float | None = None) -> float:
    """What is left of the usual time (by default a statement's) for a caller who has only so much."""
    seconds, end = _kind.get() if usual is None else usual, _end.get()
    return seconds if end is None else max(LEAST_SECONDS, min(seconds, end - time.monotonic()))


@cache
def bounded_connection() -> Any:
    """psycopg's connection, whose waits for the server end; the class, made where psycopg is installed."""
    import psycopg

    class BoundedConnection(psycopg.Connection[Any]):
        """A connection that is closed once its server has been silent for too long."""

        again: Callable[[], Any]

        @classmethod
        def connect_again(cls, args: Any, options: Mapping[str, Any]) -> Any:
            """As `connect`; the connection can make another like it."""
            made = cls.connect(*args, **options)
            made.again = partial(cls.connect, *args, **options)
            try:
                with patience(PING_SECONDS):
                    made.autocommit = True
                    made.execute(_SESSION)
                    made.autocommit = False
            except BaseException:  # also Ctrl-C: no connection stays open unowned
                made.close()
                raise
            return made

        def wait(self, gen: Generator[Any, Any, R], *args: Any, **kwargs: Any) -> R:
            return super().wait(self._bounded(gen), *args, **kwargs)

        def _bounded(self, steps: Generator[Any, Any, R]) -> Generator[Any, Any, R]:
            """The same steps, which end with an error if none could be taken for too long."""
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
            """Whether the server is busy with this connection's statement; it is asked over another one."""
            query = "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND state = 'active'"
            token = _long.set(False)
            try:
                with patience(PING_SECONDS), self.again() as other:
                    return other.execute(query, (self.pgconn.backend_pid,)).fetchone() is not None
            except psycopg.Error:
                return False
            finally:
                _long.reset(token)

    return BoundedConnection
