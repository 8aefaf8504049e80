"""GET /metrics: how the database stands, and what this server was asked, in the words of Prometheus.

What is counted in SQL is the same at every server: one of several is enough for it. It is counted when it is
asked for, and jobs that have ended, of which there may be millions, at most a fiftieth of the time.
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

from nightmill.jobs.contract import JobState
from nightmill.jobs.errors import DatabaseError
from nightmill.jobs.server.counted import Counted
from nightmill.jobs.server.desk import Desk
from nightmill.jobs.server.errors import HttpError
from nightmill.jobs.server.keys import Right
from nightmill.jobs.sql.standing import Ended, Model, Standing, Waiting

if TYPE_CHECKING:
    from prometheus_client.core import Metric

MOST_MODELS = 50  # named in labels; what there is of others is put together
OTHERS, ANY = "(other)", "(any)"  # no model is called so
_METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"})
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)


class Traffic:
    """Requests that this server was asked, by endpoint; keeps nothing without prometheus_client."""

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
        """The paths that there are, by which requests are counted; what is elsewhere is one path."""
        self._paths = {route.endpoint: route.path for route in routes if isinstance(route, Route)}

    def began(self) -> None:
        """A request is being answered."""
        self._open.inc()

    def ended(self, scope: Scope, status: int, seconds: float) -> None:
        """It was answered; `status` is 0 if its sender went away before."""
        self._open.dec()
        path = self._paths.get(scope.get("endpoint"), OTHERS)
        method = scope["method"] if scope["method"] in _METHODS else OTHERS
        self._asked.labels(method, path, str(status)).inc()
        self._took.labels(path).observe(seconds)


class Measured:
    """Counts requests and measures how long answers take. ASGI middleware."""

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self._app = app
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
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

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._standing = Standing(desk.client.database)
        self._asking = asyncio.Lock()
        self._queued: Counted[Mapping[Model, Waiting]] = Counted(self._standing.queued, {})
        self._running: Counted[Mapping[Model, int]] = Counted(self._standing.running, {})
        self._ended: Counted[Mapping[tuple[Model, str], Ended]] = Counted(self._standing.ended, {})
        self._workers: Counted[Mapping[tuple[str, str], int]] = Counted(self._standing.workers, {})
        self._database_up = False
        self.traffic = Traffic()
        if self.traffic.registry is not None:
            self.traffic.registry.register(self)

    async def answer(self, request: Request) -> Response:
        """GET /metrics; raises HttpError for a key that may not read everything."""
        if self._desk.keys.caller(request).right is Right.SUBMIT:
            raise HttpError(
                403, "this key may not read what is others': NAME:read=KEY may", code="insufficient_rights"
            )
        if self.traffic.registry is None:
            raise HttpError(501, "metrics need the package prometheus-client here", code="not_installed")
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        async with self._asking:
            await self._desk.look(self._count)
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
        """Nothing: a registry would else collect at once, before anything is counted."""
        return ()

    def collect(self) -> "Iterator[Metric]":
        """What was counted last."""
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
    """What models are called in labels, which are bounded."""
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
    """By (model, state) or by (model,); `together` is for models that share a name."""
    from prometheus_client.core import GaugeMetricFamily

    values: dict[tuple[str, ...], list[float]] = {}
    for (model, *state), number in counted.items():
        values.setdefault((names[model], *map(str, state)), []).append(number)
    stated = any(len(labels) > 1 for labels in values)
    family = GaugeMetricFamily(name, says, labels=["model", "state"] if stated else ["model"])
    for labels, numbers in values.items():
        family.add_metric(labels, together(numbers))
    return family
