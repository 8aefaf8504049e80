"""An outbox for a caller's transaction: messages are sent once it commits, dropped if it is rolled back."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sqlalchemy import event

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

_OUTBOX = "nightmill.outbox"  # key in Session.info


def after_commit(session: "Session", send: Callable[[], None]) -> None:
    """Call `send` once, when the session's outermost transaction commits.

    The call is dropped if that transaction, or the savepoint in which this was called, is rolled back.
    """
    if _OUTBOX not in session.info:  # the listeners stay: SQLAlchemy cannot remove one while it runs
        session.info[_OUTBOX] = []
        event.listen(session, "after_commit", _send_waiting)
        event.listen(session, "after_soft_rollback", _forget_rolled_back)
        event.listen(session, "after_transaction_end", _forget_ended)
    inside: list[Any] = []
    transaction = session.get_nested_transaction() or session.get_transaction()
    while transaction is not None:
        inside.append(transaction)
        transaction = transaction.parent
    session.info[_OUTBOX].append((inside, send))


def _send_waiting(session: "Session") -> None:
    if session.in_nested_transaction():
        return  # only a savepoint was released
    waiting, session.info[_OUTBOX] = session.info[_OUTBOX], []
    for _, send in waiting:
        send()


def _forget_rolled_back(session: "Session", rolled_back: Any) -> None:
    session.info[_OUTBOX] = [
        (inside, send) for inside, send in session.info[_OUTBOX] if rolled_back not in inside
    ]


def _forget_ended(session: "Session", ended: Any) -> None:
    if ended.parent is None:
        session.info[_OUTBOX] = []
