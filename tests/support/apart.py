"""An object in a process of its own: a GPU's error, a crash or a hang there is an answer here."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

__all__ = ["Apart", "ApartError"]

START_S = 60  # for the process to start, or to end


class ApartError(Exception):
    """A call failed there, and the process is gone."""


class Apart:
    """Calls methods of what `make(*arguments)` gives, one by one; both must be importable.

    Tracebacks go to standard error there. A context manager, which ends the process: the object's `close` is
    called there if nothing failed.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._mine, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, make, arguments), daemon=True)
        self._process.start()
        other.close()

    def call(self, method: str, *arguments: Any, limit_s: float) -> Any:
        """What the method returns. Raises ApartError where it raises, the process dies, or time is up."""
        try:
            self._mine.send((method, arguments))
            if not self._mine.poll(limit_s + START_S):
                raise ApartError(f"{method} did not return within {limit_s + START_S:.0f} s")
            answer, failure = self._mine.recv()
        except (EOFError, OSError) as error:
            self._process.join(START_S)
            raise ApartError(f"the process ended by itself, with code {self._process.exitcode}") from error
        if failure:
            raise ApartError(failure)
        return answer

    def close(self) -> None:
        """End the process."""
        self._mine.close()
        self._process.join(START_S)
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        self.close()


def _serve(connection: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Answers calls until nobody is there to make them."""
    subject = None
    while True:
        try:
            method, given = connection.recv()
        except EOFError:
            break
        try:
            subject = subject or make(*arguments)
            answer = getattr(subject, method)(*given)
        except BaseException as error:
            connection.send((None, f"{type(error).__name__}: {error}"))
            raise
        connection.send((answer, ""))
    if subject is not None:
        subject.close()
