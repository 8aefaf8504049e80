"""POST /v1/chat/completions and /v1/completions, as OpenAI's API reference has them.

What a body may say is what a row of a batch file may say, read by the same parser, and `stream` with
`stream_options` besides.
"""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nightmill.jobs.contract import JsonObject
from nightmill.jobs.errors import NightmillError
from nightmill.jobs.formats.likelihoods import openai_tokens
from nightmill.jobs.formats.openai import CHAT, COMPLETIONS, body_job
from nightmill.jobs.formats.results import call_value, completion_body, completion_id, finish_reason, usage
from nightmill.jobs.job import Job
from nightmill.jobs.logprobs import TokenLogprob
from nightmill.jobs.pieces import Piece
from nightmill.jobs.prompts import json_type
from nightmill.jobs.reading import Part, Reading
from nightmill.jobs.server.desk import Desk, idempotency_key
from nightmill.jobs.server.errors import HttpError, http_error_of, http_error_of_job, invalid
from nightmill.jobs.server.events import COMMENT, DONE, EventStream, event, merged, with_pauses
from nightmill.jobs.spec import JobSpec


@dataclass(frozen=True, slots=True)
class Delivery:
    """How an answer is to come."""

    stream: bool = False
    include_usage: bool = False

    @classmethod
    def take(cls, body: JsonObject) -> Self:
        """What a body says about it, which is taken out of the body; raises HttpError."""
        stream, options = body.pop("stream", None), body.pop("stream_options", None)
        if stream is not None and not isinstance(stream, bool):
            raise invalid("stream", f"must be true or false, not {json_type(stream)}")
        if options is None:
            return cls(bool(stream))
        if not stream:
            raise invalid("stream_options", "is for answers with stream: true; remove it")
        if not isinstance(options, Mapping):
            raise invalid("stream_options", f"must be an object, not {json_type(options)}")
        for name, value in options.items():
            if name not in ("include_usage", "include_obfuscation"):
                raise invalid(f"stream_options.{name}", "is not supported; remove it")
            if not isinstance(value, bool):
                raise invalid(f"stream_options.{name}", f"must be true or false, not {json_type(value)}")
        return cls(True, bool(options.get("include_usage")))


class Completions:
    """The two endpoints."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, CHAT)

    async def plain(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, COMPLETIONS)

    async def _answer(self, request: Request, url: str) -> Response:
        desk = self._desk
        caller = desk.keys.caller(request)

        def asked(body: JsonObject) -> tuple[Delivery, JobSpec]:
            return Delivery.take(body), body_job(body, url, desk.waited_for)

        delivery, spec = await desk.bodies.read(request, caller.name, asked)
        key = idempotency_key(request)
        if key is not None:
            spec = replace(spec, idempotency_key=key)
        job_id = await desk.enqueue(caller, spec)
        if delivery.stream:
            chunks = _Chunks(job_id, url == CHAT, await self._model_of(spec), spec, delivery)
            return EventStream(
                job_id,
                self._events(job_id, chunks),
                # Whoever has given a key may come again for the same answer.
                on_close=lambda: None if chunks.over or key else desk.cancel_later(job_id),
            )
        job = await desk.finished(request, job_id, cancel=key is None)
        if (error := http_error_of_job(job)) is not None:
            raise error
        model = await self._model_of(spec, job.worker)
        return JSONResponse(completion_body(job, model), headers={"X-Request-ID": job_id})

    async def _model_of(self, spec: JobSpec, worker_id: str | None = None) -> str:
        """The model that was asked for, or that the worker which answered serves.

        While it is not known which worker will, that of all live ones; empty if they serve several.
        """
        desk = self._desk
        if spec.model is not None:
            return spec.model
        worker = None if worker_id is None else await desk.run(desk.client.worker, worker_id)
        workers = await desk.run(desk.client.serving) if worker is None else [worker]
        models = {worker.model for worker in workers}
        return models.pop() if len(models) == 1 else ""

    async def _events(self, job_id: str, chunks: "_Chunks") -> AsyncIterator[str]:
        try:
            for chunk in chunks.first():
                yield event(chunk)
            texts = [
                self._desk.pieces(job_id, answer=index, told=chunks.told) for index in range(chunks.answers)
            ]
            async for piece in with_pauses(merged(texts)):
                if piece is None:
                    yield COMMENT
                for chunk in () if piece is None else chunks.piece(*piece):
                    yield event(chunk)
            job = await self._desk.run(self._desk.client.get, job_id)
            chunks.over = True
            if (failure := http_error_of_job(job)) is not None:
                yield event(failure.body)
                return
            for chunk in chunks.last(job):
                yield event(chunk)
            yield DONE
        except (NightmillError, HttpError) as error:  # the status was sent long ago
            yield event(http_error_of(error).body)


class _Chunks:
    """The objects that a streamed answer consists of."""

    def __init__(self, job_id: str, chat: bool, model: str, spec: JobSpec, delivery: Delivery) -> None:
        self.over = False
        self.answers = spec.params.answers
        self.told = spec.params.logprobs is not None
        self._chat = chat
        self._job_id, self._tools = job_id, spec.tools
        self._readings: dict[int, Reading] = {}
        self._calls = [0] * self.answers
        self._tokens: list[list[TokenLogprob]] = [[] for _ in range(self.answers)]  # not sent yet
        self._sent = [0] * self.answers  # tokens
        self._usage: JsonObject = {"usage": None} if delivery.include_usage else {}
        self._frame: JsonObject = {
            "id": completion_id(job_id, chat),
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def first(self) -> list[JsonObject]:
        """Before the texts."""
        if not self._chat:
            return []
        begin = {"role": "assistant", "content": ""}
        return [self._chunk(index, begin, None) for index in range(self.answers)]

    def piece(self, index: int, piece: Piece) -> list[JsonObject]:
        """What a piece of an answer's text holds; its first object also has the tokens up to its end."""
        self._tokens[index] += piece.tokens
        if not self._chat:
            return [self._chunk(index, piece, None)]
        if index not in self._readings:
            self._readings[index] = Reading(piece.markup, self._tools, self._job_id, index)
        return self._parts(index, self._readings[index].push(piece))

    def _parts(self, index: int, parts: list[Part]) -> list[JsonObject]:
        return [self._chunk(index, self._delta(index, part), None) for part in parts]

    def _delta(self, index: int, part: Part) -> JsonObject:
        if part.call is not None:
            number = self._calls[index]
            self._calls[index] += 1
            return {"tool_calls": [{"index": number} | call_value(part.call)]}
        return {"reasoning_content": part.reasoning} if part.reasoning else {"content": part.content}

    def last(self, job: Job) -> list[JsonObject]:
        """After them."""
        held = [
            chunk
            for index in sorted(self._readings)
            for chunk in self._parts(index, self._readings[index].end())
        ]
        ends = held + [
            self._chunk(
                index,
                {} if self._chat else "",
                finish_reason(answer, reply),
                None if answer.logprobs is None else answer.logprobs[self._sent[index] :],
            )
            for index, (answer, reply) in enumerate(zip(job.answers, job.replies, strict=True))
        ]
        return [*ends, self._frame | {"choices": [], "usage": usage(job)}] if self._usage else ends

    def _chunk(
        self, index: int, content: Any, reason: str | None, left: Sequence[TokenLogprob] | None = None
    ) -> JsonObject:
        """`left`: tokens that no piece came with, behind which there are none."""
        tokens = self._tokens[index] if left is None else left
        empty = not tokens and (left is None or self._sent[index] > 0)
        logprobs = None if empty else openai_tokens(tokens, self._chat)
        self._tokens[index] = []
        self._sent[index] += len(tokens)
        holds = {"delta": content} if self._chat else {"text": content}
        choice = {"index": index} | holds | {"logprobs": logprobs, "finish_reason": reason}
        return self._frame | {"choices": [choice]} | self._usage
