"""Engines in this process: all of some requests at once, and no text."""

from collections.abc import Sequence

from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.request import Completion, Request

__all__ = ["NoText", "complete"]


class NoText:
    """A stream for who looks at tokens only."""

    def push(self, token_id: int) -> str:
        return ""

    @property
    def whole(self) -> bool:
        return True

    def flush(self) -> str:
        return ""


def complete(engine: Engine, requests: Sequence[Request], *, check: bool = True) -> dict[str, Completion]:
    """What becomes of all requests at once, by job id; `check`: audit the engine after each step."""
    for request in requests:
        engine.submit(request)
    done: dict[str, Completion] = {}
    while engine.has_work:
        done |= {completion.job_id: completion for completion in engine.step()}
        if check:
            engine.check_integrity()
    return done
