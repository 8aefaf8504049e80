"""Requests whose grammar is being compiled: they wait beside the engine, which goes on with the others."""

from concurrent.futures import Future
from dataclasses import replace

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.errors import RunnerError
from nightmill.worker.engine.constraints import MatcherFactory, reason_of
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.request import DrawnTokens, Request

_NEWER = "a newer attempt of this job was started"
_OLDER = "a newer attempt of this job is running"


class Preparing:
    """Passes requests to the engine once their grammar is compiled; used on the engine's thread alone."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: dict[str, tuple[Request, Future[MatcherFactory]]] = {}

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Give a request to the engine, at once or when its grammar is compiled."""
        if (known := self._waiting.get(request.job_id)) is not None:
            if request.attempt == known[0].attempt:
                return
            if request.attempt < known[0].attempt:
                self._engine.reject(request, StopReason.CANCELLED, _OLDER)
                return
            self._waiting.pop(request.job_id)
            self._engine.reject(known[0], StopReason.CANCELLED, _NEWER)
        if request.constrained is None:
            self._engine.submit(request)
            return
        compiled = self._engine.constraints.compile(request.constrained)
        if compiled.done():
            self._begin(request, compiled)
        else:
            self._waiting[request.job_id] = request, compiled

    def look(self) -> None:
        """Give those to the engine whose grammar is compiled. Raises RunnerError if none can be compiled."""
        for job_id, (request, compiled) in list(self._waiting.items()):
            if compiled.done():
                del self._waiting[job_id]
                self._begin(request, compiled)

    def cancel(self, job_id: str) -> None:
        """Stop a job, wherever it is."""
        if (known := self._waiting.pop(job_id, None)) is not None:
            self._engine.reject(known[0], StopReason.CANCELLED)
        self._engine.cancel(job_id)

    def abandon(self) -> list[DrawnTokens]:
        """Drop what waits; returns the tokens that each request had."""
        dropped = [request for request, _ in self._waiting.values()]
        self._waiting.clear()
        return [DrawnTokens(one.job_id, one.attempt, one.generated_ids) for one in dropped]

    def _begin(self, request: Request, compiled: Future[MatcherFactory]) -> None:
        try:
            constraint = compiled.result()()
        except RunnerError:
            raise  # what compiles cannot be had: no job's fault
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what this job asks for
            self._engine.reject(request, StopReason.ERROR, reason_of(error))
            return
        self._engine.submit(replace(request, constraint=constraint))
