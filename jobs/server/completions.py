"""POST /v1/chat/completions and /v1/completions as in OpenAI's API.

Bodies are parsed like rows of batch files, with `stream` and `stream_options` in addition.
"""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nightmill.jobs.base.arithmetic import system_fingerprint
from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import NightmillError
from nightmill.jobs.formats.likelihoods import openai_tokens
from nightmill.jobs.formats.openai import CHAT, COMPLETIONS, body_jobs
from nightmill.jobs.formats.results import (
    call_value,
    completion_id,
    finish_reason,
    ids_of,
    prompt_details,
    request_body,
    unfinished,
    usage,
)
from nightmill.jobs.reply.job import Job
from nightmill.jobs.reply.logprobs import TokenLogprob
from nightmill.jobs.reply.parsing import Reading, ReplyDelta
from nightmill.jobs.request.prompts import json_type
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.server.errors import HttpError, invalid
from nightmill.jobs.server.events import (
    COMMENT,
    DONE,
    EventStream,
    begun,
    event,
    merged,
    together,
    with_pauses,
)
from nightmill.jobs.server.job_service import JobService, attended, idempotency_key
from nightmill.jobs.server.model_names import model_of
from nightmill.jobs.server.reusing import origin, with_reuse
from nightmill.jobs.server.several import check_end, ends_of
from nightmill.jobs.server.tiers import Tier, asked_tier, tier_of
from nightmill.jobs.streams.pieces import Piece

_EACH = "continuous_usage_stats"
STREAM_OPTIONS = ("include_usage", "include_obfuscation", _EACH)
HOLD_SECONDS = 1.0
"""Longest delay of pieces of several prompts while one of them may still be refused."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """The delivery of an answer: streamed or whole."""

    stream: bool = False
    include_usage: bool = False
    each_usage: bool = False

    @classmethod
    def take(cls, body: JsonObject) -> Self:
        """Parse the keys about delivery, and remove them from the body; raises HttpError."""
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
            if name not in STREAM_OPTIONS:
                known = ", ".join(STREAM_OPTIONS)
                raise invalid(f"stream_options.{name}", f"is not supported: remove it; known are {known}")
            if not isinstance(value, bool | None):
                raise invalid(f"stream_options.{name}", f"must be true or false, not {json_type(value)}")
        return cls(True, bool(options.get("include_usage")), bool(options.get(_EACH)))


class Completions:
    """The two endpoints."""

    def __init__(self, service: JobService) -> None:
        self._service = service

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, CHAT)

    async def plain(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, COMPLETIONS)

    async def _answer(self, request: Request, url: str) -> Response:
        service = self._service
        caller = service.keys.caller(request)

        def asked(body: JsonObject) -> tuple[Delivery, Tier, list[JobSpec]]:
            tier = tier_of(body, caller.tier)
            delivery = Delivery.take(body)
            specs = body_jobs(body, url, service.defaults(tier))
            if delivery.stream and specs[0].params.prompt_logprobs is not None:
                said = "come with whole answers, as in vLLM; leave stream out, or give echo with logprobs"
                raise invalid("prompt_logprobs", said)
            return delivery, tier, specs

        delivery, tier, specs = await service.bodies.read(request, caller.name, asked)
        asked_tier.set(tier)
        key = idempotency_key(request)
        specs = [with_reuse(request, spec) for spec in specs]
        if key is not None:
            specs = [replace(spec, idempotency_key=key) for spec in specs]
        request_id, job_ids = await service.enqueue_request(caller, specs)

        def leave() -> None:
            if key is None:  # with a key, the caller may return for the answer
                service.cancel_later(*job_ids)

        if not delivery.stream:
            jobs = await attended(request, ends_of(service, job_ids, "prompt"), leave)
            model = await model_of(service, specs[0], jobs[0].worker)
            body = request_body(jobs, request_id, model) | {"service_tier": tier}
            return JSONResponse(body, headers={"X-Request-ID": request_id} | origin(*jobs))
        over: list[bool] = []
        try:
            model = await model_of(service, specs[0])
            chunks = _Chunks(request_id, url == CHAT, model, specs, delivery)
            chunks.mark(await service.fingerprint(specs[0].model))
            events = await attended(request, begun(self._events(job_ids, chunks, over)), leave)
        except (NightmillError, HttpError):
            leave()
            raise
        return EventStream(request_id, events, on_close=lambda: None if over else leave())

    async def _followed(
        self, job_ids: Sequence[str], number: int, chunks: "_Chunks"
    ) -> AsyncIterator[tuple[int, Piece] | Job]:
        """Yield the pieces of a job of a request, then the job; raises HttpError if it ends without an
        answer."""
        wanted = {"with_logprobs": chunks.with_logprobs, "with_counts": chunks.with_counts}
        async for found in self._service.followed(job_ids[number], chunks.answers, **wanted):
            if isinstance(found, Job):
                check_end(self._service, job_ids, number, found, "prompt")
            yield found

    async def _events(
        self, job_ids: Sequence[str], chunks: "_Chunks", over: list[bool]
    ) -> AsyncIterator[str]:
        """Yield the events of an answer; `over` has an item once nothing is left to cancel. Raises
        HttpError."""
        count = len(job_ids)
        texts = merged([self._followed(job_ids, number, chunks) for number in range(count)])
        first: list[JsonObject] | None = None
        jobs: dict[int, Job] = {}
        async for numbered in with_pauses(together(texts, count, HOLD_SECONDS)):
            if numbered is None:
                yield COMMENT
                continue
            number, found = numbered
            chunks.count(number, found)
            if first is None:
                first = chunks.first()
            while first:
                yield event(first.pop(0))
            if isinstance(found, Job):
                jobs[number] = found
            made = chunks.last(number, found) if isinstance(found, Job) else chunks.piece(number, *found)
            for chunk in made:
                yield event(chunk)
        over.append(True)
        for chunk in chunks.end(list(jobs.values())):
            yield event(chunk)
        yield DONE


class _Chunks:
    """A builder of the chunks of a streamed answer."""

    def __init__(
        self, request_id: str, chat: bool, model: str, specs: Sequence[JobSpec], delivery: Delivery
    ) -> None:
        spec = specs[0]
        self.answers = spec.params.answers  # answers of each prompt
        self.with_logprobs = spec.params.logprobs is not None
        self.with_counts = delivery.each_usage
        self._read: dict[int, int] = {}  # prompt tokens by prompt, once they are known
        self._all = self.answers * len(specs)
        self._drawn = [0] * self._all  # tokens
        self._chat = chat
        self._job_id, self._tools = request_id, spec.tools  # a chat is one job
        self._readings: dict[int, Reading] = {}
        self._calls = [0] * self._all
        self._tokens: list[list[TokenLogprob]] = [[] for _ in range(self._all)]  # not sent yet
        self._sent = [0] * self._all  # tokens
        self._last_usage = delivery.include_usage
        self._frame: JsonObject = {
            "id": completion_id(request_id, chat),
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
            "service_tier": asked_tier.get(),
        }

    def mark(self, fingerprint: str | None) -> None:
        """Set the fingerprint of all later chunks; None: not known yet."""
        self._frame["system_fingerprint"] = fingerprint

    def count(self, prompt: int, found: tuple[int, Piece] | Job) -> None:
        """Note the numbers of tokens known from a piece or job, before the chunks that are made of it."""
        first = prompt * self.answers
        if isinstance(found, Job):
            self._read[prompt] = found.prompt_tokens or 0
            for index, answer in enumerate(found.answers, first):
                self._drawn[index] = answer.completion_tokens
        elif (counts := found[1].counts) is not None:
            self._read[prompt], self._drawn[first + found[0]] = counts

    def first(self) -> list[JsonObject]:
        """Return the chunks before the texts."""
        if not self._chat:
            return []
        begin = {"role": "assistant", "content": ""}
        drawn, self._drawn = self._drawn, [0] * self._all  # which come behind
        chunks = [self._chunk(index, begin, None) for index in range(self._all)]
        self._drawn = drawn
        return chunks

    def piece(self, prompt: int, answer: int, piece: Piece) -> list[JsonObject]:
        """Return the chunks for a piece; the first one also has the tokens up to its end."""
        index = prompt * self.answers + answer
        self._tokens[index] += piece.tokens
        if not self._chat:
            return [self._chunk(index, piece, None)]
        if index not in self._readings:
            self._readings[index] = Reading(piece.markup, self._tools, self._job_id, index)
        return self._parts(index, self._readings[index].push(piece))

    def _parts(self, index: int, parts: list[ReplyDelta]) -> list[JsonObject]:
        return [self._chunk(index, self._delta(index, part), None) for part in parts]

    def _delta(self, index: int, part: ReplyDelta) -> JsonObject:
        if part.call is not None:
            number = self._calls[index]
            self._calls[index] += 1
            return {"tool_calls": [{"index": number} | call_value(part.call)]}
        return {"reasoning_content": part.reasoning} if part.reasoning else {"content": part.content}

    def last(self, prompt: int, job: Job) -> list[JsonObject]:
        """Return the chunks after the texts of a prompt."""
        self.mark(system_fingerprint(job.arithmetic))
        first = prompt * self.answers
        held = [
            chunk
            for index in range(first, first + self.answers)
            if index in self._readings
            for chunk in self._parts(index, self._readings[index].end())
        ]
        ends = [
            self._chunk(
                index,
                {} if self._chat else "",
                finish_reason(answer, reply),
                None if answer.logprobs is None else answer.logprobs[self._sent[index] :],
            )
            for index, (answer, reply) in enumerate(zip(job.answers, job.replies, strict=True), first)
        ]
        for chunk, answer, reply in zip(ends, job.answers, job.replies, strict=True):
            (chunk if self._chat else chunk["choices"][0]).update(prompt_details(job))
            chunk["choices"][0].update(ids_of(answer) | (unfinished(reply) if self._chat else {}))
        return held + ends

    def end(self, jobs: Sequence[Job]) -> list[JsonObject]:
        """Return the chunks after all texts."""
        return [self._frame | {"choices": [], "usage": usage(*jobs)}] if self._last_usage else []

    def _chunk(
        self, index: int, content: Any, reason: str | None, left: Sequence[TokenLogprob] | None = None
    ) -> JsonObject:
        """Build a chunk; `left` are remaining tokens that came with no piece."""
        tokens = self._tokens[index] if left is None else left
        empty = not tokens and (left is None or self._sent[index] > 0)
        logprobs = None if empty else openai_tokens(tokens, self._chat)
        self._tokens[index] = []
        self._sent[index] += len(tokens)
        holds = {"delta": content} if self._chat else {"text": content}
        choice = {"index": index} | holds | {"logprobs": logprobs, "finish_reason": reason}
        return self._frame | {"choices": [choice]} | self._usage_of(index)

    def _usage_of(self, index: int) -> JsonObject:
        """The usage of an answer so far, if each chunk is to say so; a null or no `usage` otherwise."""
        read = self._read.get(index // self.answers) if self.with_counts else None
        if read is None:
            return {"usage": None} if self._last_usage or self.with_counts else {}
        drawn = self._drawn[index]
        made = {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}
        return {"usage": made}
