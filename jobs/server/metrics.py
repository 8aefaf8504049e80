"""GET /metrics: statistics of the database and of this server's requests in Prometheus's format.

Counts from SQL are the same at every server, so one of several is enough for them. They are counted on
request; ended jobs, of which there may be millions, use at most a fiftieth of the time.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.errors import DatabaseError
from nightmill.jobs.server.counted import Counted
from nightmill.jobs.server.errors import HttpError
from nightmill.jobs.server.job_service import JobService
from nightmill.jobs.server.keys import Right
from nightmill.jobs.sql.queue_stats import EndedJobs, Model, QueuedJobs, QueueStats

if TYPE_CHECKING:
    from prometheus_client.core import Metric

MOST_MODELS = 50  # models named in labels; others are summed up
OTHERS, ANY = "(other)", "(any)"  # not valid names of models
_METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"})
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)


class Traffic:
    """Counters of this server's requests by endpoint; empty without prometheus_client."""

    def __init__(self) -> None:
        self.registry: Any = None
        self._paths: dict[Any, str] = {}
        with suppress(ModuleNotFoundError):
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

            self.registry = CollectorRegistry()
            ProcessCollector(registry=self.registry)
            self._asked = Counter(
                "nightmill_http_requests",
                "Requests that were answered.",
                ["method", "path", "status"],
                registry=self.registry,
            )
            self._took = Histogram(
                "nightmill_http_request_seconds",
                "Time to the end of an answer, for a stream its length.",
                ["path"],
                buckets=_SECONDS,
                registry=self.registry,
            )
            self._open = Gauge(
                "nightmill_http_requests_open", "Requests that are being answered.", registry=self.registry
            )

    def know(self, routes: Iterable[BaseRoute]) -> None:
        """Set the paths by which requests are counted; all others count as one."""
        self._paths = {route.endpoint: route.path for route in routes if isinstance(route, Route)}

    def began(self) -> None:
        """Count a request that begins."""
        self._open.inc()

    def ended(self, scope: Scope, status: int, seconds: float) -> None:
        """Count an answered request; `status` is 0 if its sender disconnected first."""
        self._open.dec()
        path = self._paths.get(scope.get("endpoint"), OTHERS)
        method = scope["method"] if scope["method"] in _METHODS else OTHERS
        self._asked.labels(method, path, str(status)).inc()
        self._took.labels(path).observe(seconds)


class Measured:
    """ASGI middleware that counts requests and measures their duration."""

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self._app = app
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request."""
        if scope["type"] != "http" or self._traffic.registry is None:
            await self._app(scope, receive, send)
            return
        status = 0

        async def noticed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        began = time.perf_counter()
        self._traffic.began()
        try:
            await self._app(scope, receive, noticed)
        finally:
            self._traffic.ended(scope, status, time.perf_counter() - began)


class Metrics:
    """The endpoint."""

    def __init__(self, service: JobService) -> None:
        self._service = service
        self._queue_stats = QueueStats(service.client.database)
        self._asking = asyncio.Lock()
        self._queued: Counted[Mapping[Model, QueuedJobs]] = Counted(self._queue_stats.queued, {})
        self._running: Counted[Mapping[Model, int]] = Counted(self._queue_stats.running, {})
        self._ended: Counted[Mapping[tuple[Model, str], EndedJobs]] = Counted(self._queue_stats.ended, {})
        self._workers: Counted[Mapping[tuple[str, str], int]] = Counted(self._queue_stats.workers, {})
        self._database_up = False
        self.traffic = Traffic()
        if self.traffic.registry is not None:
            self.traffic.registry.register(self)

    async def answer(self, request: Request) -> Response:
        """GET /metrics; raises HttpError for a key that may not read everything."""
        if self._service.keys.caller(request).right is Right.SUBMIT:
            raise HttpError(
                403, "this key may not read what is others': NAME:read=KEY may", code="insufficient_rights"
            )
        if self.traffic.registry is None:
            raise HttpError(501, "metrics need the package prometheus-client here", code="not_installed")
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        async with self._asking:
            await self._service.look(self._count)
            return Response(generate_latest(self.traffic.registry), media_type=CONTENT_TYPE_LATEST)

    def _count(self) -> None:
        all_counted = (self._queued, self._running, self._ended, self._workers)
        try:
            for counted in all_counted:
                counted.look()
            self._database_up = True
        except DatabaseError:
            for counted in all_counted:
                counted.forget()
            self._database_up = False

    def describe(self) -> "Iterable[Metric]":
        """Return nothing: otherwise a registry would collect at once, before anything is counted."""
        return ()

    def collect(self) -> "Iterator[Metric]":
        """Return the last counts."""
        from prometheus_client.core import GaugeMetricFamily

        up = GaugeMetricFamily("nightmill_database_up", "1 if the database answers.")
        up.add_metric([], self._database_up)
        yield up
        queued, running, ended = self._queued.found, self._running.found, self._ended.found
        jobs = {key: one.jobs for key, one in ended.items()}
        jobs |= {(model, JobState.QUEUED): waiting.jobs for model, waiting in queued.items()}
        jobs |= {(model, JobState.RUNNING): number for model, number in running.items()}
        workers = self._workers.found
        names = names_of({model for model, _ in (*jobs, *workers)})
        yield _gauge("nightmill_jobs", "Jobs in SQL.", jobs, names)
        yield _gauge("nightmill_workers", "Workers that there are and were.", workers, names)
        yield _gauge(
            "nightmill_prompt_tokens",
            "Tokens of prompts that were read, of jobs in SQL that have ended.",
            {key: one.prompt_tokens for key, one in ended.items()},
            names,
        )
        yield _gauge(
            "nightmill_completion_tokens",
            "Tokens that were generated, of jobs in SQL that have ended.",
            {key: one.completion_tokens for key, one in ended.items()},
            names,
        )
        yield _gauge(
            "nightmill_cached_tokens",
            "Tokens of prompts that were found computed, of jobs in SQL that have ended.",
            {key: one.cached_tokens for key, one in ended.items()},
            names,
        )
        yield _gauge(
            "nightmill_reasoning_tokens",
            "Tokens of thoughts among those that were generated, of jobs in SQL that have ended.",
            {key: one.reasoning_tokens for key, one in ended.items()},
            names,
        )
        yield _gauge(
            "nightmill_gpu_seconds",
            "Time of GPUs, of jobs in SQL that have ended.",
            {key: one.gpu_seconds for key, one in ended.items()},
            names,
        )
        yield _gauge(
            "nightmill_energy_joules",
            "Energy of GPUs as far as they tell, of jobs in SQL that have ended.",
            {key: one.energy_joules for key, one in ended.items()},
            names,
        )
        suspects = {(model,): waiting.suspects for model, waiting in queued.items()}
        yield _gauge(
            "nightmill_suspect_jobs",
            "Queued jobs that were in flight when a worker died, and are tried apart from others.",
            suspects,
            names,
        )
        ages = {(model,): waiting.age for model, waiting in queued.items()}
        yield _gauge(
            "nightmill_queue_age_seconds",
            "How long the oldest queued job has waited whose time has come.",
            ages,
            names,
            together=max,
        )


def names_of(models: Iterable[Model]) -> dict[Model, str]:
    """Map models to a bounded set of labels."""
    named = sorted(model for model in models if model is not None)
    names: dict[Model, str] = {None: ANY}
    return names | {model: model if at < MOST_MODELS else OTHERS for at, model in enumerate(named)}


def _gauge(
    name: str,
    says: str,
    counted: Mapping[tuple[Any, ...], float],
    names: Mapping[Model, str],
    together: Callable[[list[float]], float] = sum,
) -> "Metric":
    """Build a gauge by (model, state) or (model,); `together` combines models with one label."""
    from prometheus_client.core import GaugeMetricFamily

    values: dict[tuple[str, ...], list[float]] = {}
    for (model, *state), number in counted.items():
        values.setdefault((names[model], *map(str, state)), []).append(number)
    stated = any(len(labels) > 1 for labels in values)
    family = GaugeMetricFamily(name, says, labels=["model", "state"] if stated else ["model"])
    for labels, numbers in values.items():
        family.add_metric(labels, together(numbers))
    return family
