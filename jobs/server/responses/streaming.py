"""The typed events of a streamed response: each item begins, grows and ends before the next."""

from collections.abc import Iterator, Sequence
from typing import Any

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.formats.responses.answer import (
    kind_of,
    output_item,
    response_body,
    text_part,
    token_values,
)
from nightmill.jobs.reply.job import Job
from nightmill.jobs.reply.logprobs import TokenLogprob
from nightmill.jobs.reply.parsing import Reading, ReplyDelta
from nightmill.jobs.streams.pieces import Piece

_LAST = {"completed": "completed", "incomplete": "incomplete"}  # any other status has failed
_BARE_REASONING = {"type": "reasoning_text", "text": ""}


class ResponseEvents:
    """The events of one response, in order."""

    def __init__(self, job: Job, model: str) -> None:
        """Start from the queued `job`."""
        self._job, self._model = job, model
        self.with_logprobs = job.params.logprobs is not None
        self._number = 0  # number of the next event
        self._reading: Reading | None = None
        self._items = 0  # number of ended items
        self._kind = ""  # type of the open item
        self._parts: list[ReplyDelta] = []  # deltas of the open item
        self._tokens: list[TokenLogprob] = []  # since the last piece of text
        self._logprobs: list[TokenLogprob] = []  # logprobs of the open message
        self._messages = 0  # number of ended messages

    def first(self) -> Iterator[JsonObject]:
        """Yield the events before the text."""
        response = response_body(self._job, self._model) | {"output": [], "usage": None}
        if self._job.request and self._job.request.get("background"):
            yield self._event("response.created", response=response | {"status": "queued"})
            yield self._event("response.queued", response=response | {"status": "queued"})
        else:
            yield self._event("response.created", response=response | {"status": "in_progress"})
        yield self._event("response.in_progress", response=response | {"status": "in_progress"})

    def piece(self, piece: Piece) -> Iterator[JsonObject]:
        """Yield the events for a piece of the text."""
        self._tokens += piece.tokens
        if self._reading is None:
            rendering = self._job.rendering
            tools = None if rendering is None else rendering.tools
            self._reading = Reading(piece.markup, tools, self._job.id)
        yield from self._grow(self._reading.push(piece))

    def last(self, job: Job) -> Iterator[JsonObject]:
        """Yield the events after the text; `job` has ended."""
        if self._reading is not None:
            yield from self._grow(self._reading.end())
        response = response_body(job, self._model)
        if not self._items and not self._kind and response["output"]:
            yield from self._begin("message")
        if self._kind == "message" and not self._messages:
            # Including tokens without text, such as the end of the answer.
            self._logprobs = list(job.logprobs or ())
        if self._kind:
            yield from self._end(response["output"][-1]["status"] if response["output"] else "incomplete")
        yield self._event(f"response.{_LAST.get(response['status'], 'failed')}", response=response)

    def error(self, error: JsonObject) -> JsonObject:
        """Build the event of an error while the response's end is unknown; `error` is that of a body."""
        said = error["error"]
        return self._event("error", code=said["code"], message=said["message"], param=said["param"])

    def _grow(self, parts: Sequence[ReplyDelta]) -> Iterator[JsonObject]:
        for part in parts:
            kind = kind_of(part)
            if self._kind and (kind != self._kind or part.call is not None):
                yield from self._end("completed")
            if part.call is not None:
                yield from self._call(part)
                continue
            if not self._kind:
                yield from self._begin(kind)
            self._parts.append(part)
            yield from self._delta(part)

    def _begin(self, kind: str) -> Iterator[JsonObject]:
        self._kind, self._parts, self._logprobs = kind, [], []
        item = output_item(self._job.id, self._items, kind, [ReplyDelta()], "in_progress") | {"content": []}
        yield self._event("response.output_item.added", output_index=self._items, item=item)
        part = _BARE_REASONING if kind == "reasoning" else text_part("")
        yield self._of_item("response.content_part.added", content_index=0, part=part)

    def _delta(self, part: ReplyDelta) -> Iterator[JsonObject]:
        if part.reasoning:
            yield self._of_item("response.reasoning_text.delta", content_index=0, delta=part.reasoning)
            return
        tokens, self._tokens = self._tokens, []
        self._logprobs += tokens
        values = token_values(tokens)
        yield self._of_item(
            "response.output_text.delta", content_index=0, delta=part.content, logprobs=values
        )

    def _end(self, status: str) -> Iterator[JsonObject]:
        parts = self._parts or [ReplyDelta()]
        item = output_item(self._job.id, self._items, self._kind, parts, status)
        (content,) = item["content"]
        if self._kind == "reasoning":
            yield self._of_item("response.reasoning_text.done", content_index=0, text=content["text"])
        else:
            self._messages += 1
            values = content["logprobs"] = token_values(self._logprobs)
            text = content["text"]
            yield self._of_item("response.output_text.done", content_index=0, text=text, logprobs=values)
        yield self._of_item("response.content_part.done", content_index=0, part=content)
        yield self._event("response.output_item.done", output_index=self._items, item=item)
        self._items += 1
        self._kind = ""

    def _call(self, part: ReplyDelta) -> Iterator[JsonObject]:
        """Yield the events of a tool call, which comes as a whole."""
        self._kind = "function_call"
        item = output_item(self._job.id, self._items, self._kind, [part], "completed")
        begun = item | {"arguments": "", "status": "in_progress"}
        arguments = item["arguments"]
        yield self._event("response.output_item.added", output_index=self._items, item=begun)
        yield self._of_item("response.function_call_arguments.delta", delta=arguments)
        yield self._of_item("response.function_call_arguments.done", arguments=arguments, name=item["name"])
        yield self._event("response.output_item.done", output_index=self._items, item=item)
        self._items += 1
        self._kind = ""

    def _of_item(self, kind: str, **more: Any) -> JsonObject:
        prefix = {"reasoning": "rs", "message": "msg"}.get(self._kind, "fc")
        item_id = f"{prefix}_{self._job.id}_{self._items}"
        return self._event(kind, item_id=item_id, output_index=self._items, **more)

    def _event(self, kind: str, **more: Any) -> JsonObject:
        made = {"type": kind, "sequence_number": self._number} | more
        self._number += 1
        return made
