"""The application: which path leads where, and what every request passes on its way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from nightmill.jobs.client import Client
from nightmill.jobs.server import openapi, reference
from nightmill.jobs.server.batches import Batches
from nightmill.jobs.server.completions import Completions
from nightmill.jobs.server.desk import Desk, Limits
from nightmill.jobs.server.errors import handlers
from nightmill.jobs.server.files import Files
from nightmill.jobs.server.folder import Folder
from nightmill.jobs.server.guards import LocalOnly, OpenRequests, Unanswered
from nightmill.jobs.server.handing_in import HandingIn
from nightmill.jobs.server.health import Health
from nightmill.jobs.server.keeping import Keeper
from nightmill.jobs.server.keys import Keys
from nightmill.jobs.server.metrics import Measured, Metrics
from nightmill.jobs.server.models import Models
from nightmill.jobs.server.native import Native
from nightmill.jobs.server.night import Night
from nightmill.jobs.server.pages.checking import Checking
from nightmill.jobs.server.pages.routes import page_routes
from nightmill.jobs.sql.files import FileStore
from nightmill.jobs.sql.http_batches import HttpBatchStore


def make_app(client: Client, keys: Keys, limits: Limits | None = None) -> Starlette:
    """The ASGI application on a client, which stays the caller's to close."""
    limits = limits or Limits()
    desk = Desk(client, keys, limits)
    completions, models, health = Completions(desk), Models(desk), Health(desk)
    native = Native(desk)
    folder = Folder(client.settings.resolved_files_dir)
    files, keeper = Files(desk, FileStore(client.database), folder), Keeper(client, folder, limits.keep_files)
    handing_in = HandingIn(desk, HttpBatchStore(client.database), files, keeper.wake)
    batches, night = Batches(handing_in), Night(handing_in)
    metrics, checking = Metrics(desk), Checking()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        keeper.start()
        client.courier.start()
        yield
        client.courier.stop()
        await asyncio.to_thread(keeper.stop)
        checking.close()
        desk.close()
        health.close()

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", completions.chat, methods=["POST"]),
            Route("/v1/completions", completions.plain, methods=["POST"]),
            Route("/v1/embeddings", models.embeddings, methods=["POST"]),
            Route("/v1/models", models.all),
            Route("/v1/models/{name:path}", models.one),
            Route("/v1/files", files.upload, methods=["POST"]),
            Route("/v1/files", files.listed),
            Route("/v1/files/{file_id}", files.shown),
            Route("/v1/files/{file_id}", files.deleted, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", files.content),
            Route("/v1/batches", batches.create, methods=["POST"]),
            Route("/v1/batches", batches.listed),
            Route("/v1/batches/{batch_id}", batches.shown),
            Route("/v1/batches/{batch_id}/cancel", batches.cancelled, methods=["POST"]),
            Route("/v1/night", night.create, methods=["POST"]),
            Route("/v1/night", night.listed),
            Route("/v1/night/{batch_id}", night.shown),
            Route("/v1/night/{batch_id}", night.cancelled, methods=["DELETE"]),
            Route("/v1/night/{batch_id}/retry", night.retried, methods=["POST"]),
            Route("/execute", native.execute, methods=["POST"]),
            Route("/v1/generate", native.generate, methods=["POST"]),
            Route("/v1/jobs", native.submit, methods=["POST"]),
            Route("/v1/jobs", native.listed),
            Route("/v1/jobs/{job_id}", native.shown),
            Route("/v1/jobs/{job_id}", native.cancelled, methods=["DELETE"]),
            Route("/v1/jobs/{job_id}/events", native.events),
            Route("/openapi.json", openapi.answer),
            Route("/docs", reference.answer),
            Route("/health", health.health),
            Route("/ready", health.ready),
            Route("/metrics", metrics.answer),
            *page_routes(desk, handing_in, files, folder, checking),
        ],
        middleware=[
            Middleware(Measured, traffic=metrics.traffic),
            Middleware(Unanswered),
            *([] if keys else [Middleware(LocalOnly)]),
            Middleware(OpenRequests, most=limits.requests),
        ],
        exception_handlers=handlers(),
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # to where the Host header says
    metrics.traffic.know(app.routes)
    return app
