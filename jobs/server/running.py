"""Calls on threads that can be abandoned, so that a hanging file system blocks nobody for long."""

import contextvars
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

R = TypeVar("R")


class Running(Generic[R]):
    """A call on a daemon thread, in `context` if given."""

    def __init__(
        self, function: Callable[[], R], name: str, context: contextvars.Context | None = None
    ) -> None:
        self._function = function
        self._context = contextvars.copy_context() if context is None else context
        self._over = threading.Event()
        self._result: list[R] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def over(self) -> bool:
        """True if the call has returned."""
        return self._over.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for at most this long; returns True if the call has returned."""
        return self._over.wait(seconds)

    def outcome(self) -> R:
        """Return or raise the result of the ended call; call it once."""
        if (error := self._error) is not None:
            self._error = None  # its frames refer to this object: break the cycle
            try:
                raise error
            finally:
                del error
        return self._result[0]

    def _run(self) -> None:
        try:
            self._result.append(self._context.run(self._function))
        except BaseException as error:  # noqa: BLE001 - whatever it is, whoever asks for the outcome gets it
            self._error = error
        finally:
            self._over.set()
