"""Jobs as Anthropic's messages: whole, or as the events of a stream."""

import json
from collections.abc import Iterator, Sequence

from nightmill.jobs.base.contract import JsonObject, StopReason
from nightmill.jobs.formats.responses.answer import grouped, kind_of, reading_of
from nightmill.jobs.reply.job import Job
from nightmill.jobs.reply.parsing import Reading, ReplyDelta, ToolCall
from nightmill.jobs.request.fields import INTERACTIVE
from nightmill.jobs.streams.pieces import Piece

PREFIX = "msg_"
"""Prefix before the job's id in a message's id."""
_STOP_REASONS = {
    StopReason.EOS: "end_turn",
    StopReason.STOP_SEQUENCE: "stop_sequence",
    StopReason.CONTEXT_FULL: "model_context_window_exceeded",
}


def message_body(job: Job, model: str) -> JsonObject:
    """Build the message object of an ended job."""
    reading = reading_of(job)
    parts = reading.push(job.text or "") + reading.end()
    content = [_block(kind, group) for kind, group in grouped(parts)]
    return _message(job, model) | {"content": content, "usage": _usage(job), "seed": job.seed} | _end(job)


class MessageEvents:
    """The events of one message, in order."""

    def __init__(self, job: Job, model: str) -> None:
        """Start from the queued `job`."""
        self._job, self._model = job, model
        self._reading: Reading | None = None
        self._kind = ""  # type of the open block
        self._blocks = 0  # number of ended blocks

    def first(self) -> Iterator[JsonObject]:
        """Yield the events before the text. The number of prompt tokens is known only at the end."""
        empty: JsonObject = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self._job),
        }
        yield {"type": "message_start", "message": _message(self._job, self._model) | empty}
        yield {"type": "ping"}

    def piece(self, piece: Piece) -> Iterator[JsonObject]:
        """Yield the events for a piece of the text."""
        if self._reading is None:
            rendering = self._job.rendering
            tools = None if rendering is None else rendering.tools
            self._reading = Reading(piece.markup, tools, self._job.id)
        yield from self._grow(self._reading.push(piece))

    def last(self, job: Job) -> Iterator[JsonObject]:
        """Yield the events after the text; `job` has ended with an answer."""
        if self._reading is not None:
            yield from self._grow(self._reading.end())
        yield from self._stop()
        yield {"type": "message_delta", "delta": _end(job), "usage": _usage(job)}
        yield {"type": "message_stop"}

    def _grow(self, parts: Sequence[ReplyDelta]) -> Iterator[JsonObject]:
        for part in parts:
            kind = kind_of(part)
            if kind != self._kind or part.call is not None:
                yield from self._stop()
                self._kind = kind
                empty = (
                    _call(part.call) | {"input": {}}
                    if part.call is not None
                    else _block(kind, [ReplyDelta()])
                )
                yield {"type": "content_block_start", "index": self._blocks, "content_block": empty}
            yield {"type": "content_block_delta", "index": self._blocks, "delta": _delta(part)}

    def _stop(self) -> Iterator[JsonObject]:
        if self._kind:
            yield {"type": "content_block_stop", "index": self._blocks}
            self._blocks += 1
            self._kind = ""


def _delta(part: ReplyDelta) -> JsonObject:
    if part.call is not None:
        return {"type": "input_json_delta", "partial_json": part.call.arguments}
    if part.reasoning:
        return {"type": "thinking_delta", "thinking": part.reasoning}
    return {"type": "text_delta", "text": part.content}


def _block(kind: str, parts: Sequence[ReplyDelta]) -> JsonObject:
    if (call := parts[0].call) is not None:
        return _call(call)
    if kind == "reasoning":
        thoughts = "".join(part.reasoning for part in parts)
        return {"type": "thinking", "thinking": thoughts, "signature": ""}
    return {"type": "text", "text": "".join(part.content for part in parts), "citations": None}


def _call(call: ToolCall) -> JsonObject:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}


def _message(job: Job, model: str) -> JsonObject:
    return {"id": PREFIX + job.id, "type": "message", "role": "assistant", "model": job.model or model}


def _end(job: Job) -> JsonObject:
    """Return the stop reason. The stop sequence is known only if the request had exactly one."""
    reason = _STOP_REASONS.get(job.stop_reason or StopReason.LENGTH, "max_tokens")
    if job.tool_calls and reason in ("end_turn", "stop_sequence"):
        reason = "tool_use"
    one = job.params.stop if reason == "stop_sequence" and not job.params.stop_token_ids else ()
    return {"stop_reason": reason, "stop_sequence": one[0] if len(one) == 1 else None}


def _usage(job: Job) -> JsonObject:
    cached = job.cached_tokens or 0
    return {
        "input_tokens": (job.prompt_tokens or 0) - cached,  # without cached tokens
        "output_tokens": job.completion_tokens or 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "service_tier": "standard" if job.priority == INTERACTIVE else "flex",
    }
