"""The ASGI application: routes and middleware."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from nightmill.jobs.client.client import Client
from nightmill.jobs.server import openapi, reference
from nightmill.jobs.server.anthropic.endpoints import Messages
from nightmill.jobs.server.batch_processor import BatchProcessor
from nightmill.jobs.server.batch_submission import UploadedBatchSubmission
from nightmill.jobs.server.batches import OpenAIBatchEndpoints
from nightmill.jobs.server.completions import Completions
from nightmill.jobs.server.embeddings import Embeddings
from nightmill.jobs.server.errors import handlers
from nightmill.jobs.server.files import Files
from nightmill.jobs.server.folder import Folder
from nightmill.jobs.server.guards import LocalOnly, OpenRequests, Unanswered, cross_origin
from nightmill.jobs.server.health import Health
from nightmill.jobs.server.job_service import JobService, ServerLimits
from nightmill.jobs.server.keys import ApiKeys
from nightmill.jobs.server.metrics import Measured, Metrics
from nightmill.jobs.server.models import Models
from nightmill.jobs.server.native import Native
from nightmill.jobs.server.night import NightEndpoints
from nightmill.jobs.server.pages.checking import Checking
from nightmill.jobs.server.pages.routes import page_routes
from nightmill.jobs.server.reranking import Reranking
from nightmill.jobs.server.responses.endpoints import Responses
from nightmill.jobs.server.token_endpoints import TokenEndpoints
from nightmill.jobs.server.tokenizing import Tokenizing
from nightmill.jobs.sql.files import FileStore
from nightmill.jobs.sql.http_batches import HttpBatchStore


def make_app(
    client: Client, keys: ApiKeys, limits: ServerLimits | None = None, origins: Sequence[str] = ()
) -> Starlette:
    """Make the ASGI application for a client, which the caller closes.

    origins  origins of other pages that may call it from a browser
    """
    limits = limits or ServerLimits()
    service = JobService(client, keys, limits)
    completions, models, health = Completions(service), Models(service), Health(service)
    embeddings, reranking = Embeddings(service), Reranking(service)
    native, responses = Native(service), Responses(service)
    folder = Folder(client.settings.resolved_files_dir)
    files, processor = (
        Files(service, FileStore(client.database), folder),
        BatchProcessor(client, folder, limits.keep_files),
    )
    submission = UploadedBatchSubmission(service, HttpBatchStore(client.database), files, processor.wake)
    batches, night = OpenAIBatchEndpoints(submission), NightEndpoints(submission)
    metrics, checking = Metrics(service), Checking()
    tokenizing = Tokenizing(service)
    tokens, messages = TokenEndpoints(service, tokenizing), Messages(service, tokenizing)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        processor.start()
        client.courier.start()
        yield
        client.courier.stop()
        await asyncio.to_thread(processor.stop)
        await tokenizing.close()
        checking.close()
        service.close()
        health.close()

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", completions.chat, methods=["POST"]),
            Route("/v1/completions", completions.plain, methods=["POST"]),
            Route("/v1/messages", messages.create, methods=["POST"]),
            Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
            Route("/v1/responses", responses.create, methods=["POST"]),
            Route("/v1/responses/{response_id}", responses.shown),
            Route("/v1/responses/{response_id}", responses.deleted, methods=["DELETE"]),
            Route("/v1/responses/{response_id}/cancel", responses.cancelled, methods=["POST"]),
            Route("/v1/responses/{response_id}/input_items", responses.input_items),
            Route("/v1/rerank", reranking.create, methods=["POST"]),
            Route("/v2/rerank", reranking.create, methods=["POST"]),
            Route("/v1/embeddings", embeddings.create, methods=["POST"]),
            Route("/tokenize", tokens.tokenize, methods=["POST"]),
            Route("/detokenize", tokens.detokenize, methods=["POST"]),
            Route("/tokenizer_info", tokens.info),
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
            Route("/v1/night/{batch_id}/limits", night.limited, methods=["POST"]),
            Route("/execute", native.execute, methods=["POST"]),
            Route("/v1/generate", native.generate, methods=["POST"]),
            Route("/v1/jobs", native.submit, methods=["POST"]),
            Route("/v1/jobs", native.listed),
            Route("/v1/jobs", native.request_cancelled, methods=["DELETE"]),
            Route("/v1/jobs/{job_id}", native.shown),
            Route("/v1/jobs/{job_id}", native.cancelled, methods=["DELETE"]),
            Route("/v1/jobs/{job_id}/events", native.events),
            Route("/openapi.json", openapi.answer),
            Route("/docs", reference.answer),
            Route("/health", health.health),
            Route("/ready", health.ready),
            Route("/metrics", metrics.answer),
            *page_routes(service, submission, files, folder, checking),
        ],
        middleware=[
            Middleware(Measured, traffic=metrics.traffic),
            *([cross_origin(origins)] if origins else []),
            Middleware(Unanswered),
            *([] if keys else [Middleware(LocalOnly, origins=origins)]),
            Middleware(OpenRequests, most=limits.requests),
        ],
        exception_handlers=handlers(),
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a redirect would go to the host in the Host header
    metrics.traffic.know(app.routes)
    return app
