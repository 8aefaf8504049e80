"""Retries of transactions that lost to others, for example in a deadlock."""

import random
import time
from collections.abc import Callable
from functools import wraps
from itertools import count
from typing import ParamSpec, TypeVar

from nightmill.jobs.errors import DatabaseBusyError
from nightmill.jobs.sql.patience import seconds_for

RETRY_SECONDS = 10.0
_FIRST_PAUSE = 0.01
_LONGEST_PAUSE = 0.5

P = ParamSpec("P")
T = TypeVar("T")


def retried(function: Callable[P, T]) -> Callable[P, T]:
    """Call `function` again while it raises DatabaseBusyError, for RETRY_SECONDS at most.

    For functions that are one transaction (or several, if repeating the first ones is harmless): a
    transaction that lost was rolled back, so repeating it is safe. The pauses are random, so that two
    transactions do not collide again.
    """

    @wraps(function)
    def again(*args: P.args, **kwargs: P.kwargs) -> T:
        give_up_at = time.monotonic() + seconds_for(RETRY_SECONDS)
        for attempt in count():
            try:
                return function(*args, **kwargs)
            except DatabaseBusyError:
                if time.monotonic() >= give_up_at:
                    raise
                time.sleep(random.uniform(0.0, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt)))
        raise AssertionError("unreachable")

    return again
