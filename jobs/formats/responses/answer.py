"""Jobs as OpenAI's responses: the whole object, and its output items."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from nightmill.jobs.base.contract import JobState, JsonObject, StopReason
from nightmill.jobs.formats.responses.items import call_item, reasoning_item
from nightmill.jobs.reply.job import Job
from nightmill.jobs.reply.logprobs import LikelyToken, TokenLogprob
from nightmill.jobs.reply.parsing import Reading, ReplyDelta
from nightmill.jobs.request.parameters import REPEATED

PREFIX = "resp_"
"""Prefix before the job's id in a response's id."""
_STATUS = {JobState.QUEUED: "queued", JobState.RUNNING: "in_progress", JobState.CANCELLED: "cancelled"}
_CUT = (StopReason.LENGTH, StopReason.CONTEXT_FULL)
_LATE = "the answer was not complete in time"


def response_body(job: Job, model: str) -> JsonObject:
    """Build the response object of a job in any state. `model`: the name shown if the job names none."""
    said = job.request or {}
    status = status_of(job)
    usage = None if job.prompt_tokens is None else _usage(job)
    return {
        "id": PREFIX + job.id,
        "object": "response",
        "created_at": int(job.created_at.timestamp()),
        "completed_at": _seconds(job.finished_at) if status == "completed" else None,
        "status": status,
        "background": bool(said.get("background")),
        "error": _error(job),
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": _instructions(job),
        "max_output_tokens": said.get("max_output_tokens"),
        "max_tool_calls": None,
        "model": job.model or model,
        "output": output_of(job),
        "parallel_tool_calls": said.get("parallel_tool_calls", True),
        "previous_response_id": said.get("previous_response_id"),
        "reasoning": said.get("reasoning", {"effort": None, "summary": None}),
        "service_tier": said.get("service_tier", "default"),
        "store": bool(said.get("store")),
        **{name: getattr(job.params, name) for name in REPEATED},
        "text": said.get("text", {"format": {"type": "text"}}),
        "tool_choice": said.get("tool_choice", "auto"),
        "tools": said.get("tools", []),
        "top_logprobs": said.get("top_logprobs", 0),
        "truncation": "disabled",
        "usage": usage,
        "metadata": job.metadata,
        "stop_reason": None if job.stop_reason is None else str(job.stop_reason),
        "seed": job.seed,
    }


def status_of(job: Job) -> str:
    """Return the status of a response in OpenAI's words."""
    if (status := _STATUS.get(job.state)) is not None:
        return status
    if job.state is not JobState.SUCCEEDED:
        return "failed"
    return "incomplete" if job.stop_reason in _CUT else "completed"


def output_of(job: Job) -> list[JsonObject]:
    """Build the output items of a job."""
    if not job.answers:
        return []
    reading = reading_of(job)
    groups = list(grouped(reading.push(job.answers[0].text) + reading.end())) or [("message", [ReplyDelta()])]
    items = [
        output_item(job.id, number, kind, parts, "completed") for number, (kind, parts) in enumerate(groups)
    ]
    items[-1]["status"] = item_status(job)
    if job.logprobs is not None and (texts := [one for one in items if one["type"] == "message"]):
        texts[0]["content"][0]["logprobs"] = token_values(job.logprobs)
    return items


def reading_of(job: Job) -> Reading:
    """Make a parser for the text of a job's answer."""
    tools = None if job.rendering is None else job.rendering.tools
    return Reading(job.markup, tools, job.id)


def kind_of(part: ReplyDelta) -> str:
    """Return the type of the item that a delta belongs to."""
    if part.call is not None:
        return "function_call"
    return "reasoning" if part.reasoning else "message"


def grouped(parts: Iterable[ReplyDelta]) -> Iterator[tuple[str, list[ReplyDelta]]]:
    """Group deltas by item, with its type: each call is an item, and so are consecutive texts."""
    kind, group = "", list[ReplyDelta]()
    for part in parts:
        if kind_of(part) != kind or part.call is not None:
            if group:
                yield kind, group
            kind, group = kind_of(part), []
        group.append(part)
    if group:
        yield kind, group


def output_item(job_id: str, number: int, kind: str, parts: Sequence[ReplyDelta], status: str) -> JsonObject:
    """Build item `number` of the output from these deltas."""
    if (call := parts[0].call) is not None:
        made = call_item(call.id, call.name, call.arguments)
        prefix = "fc"
    elif kind == "reasoning":
        made, prefix = reasoning_item("".join(part.reasoning for part in parts)), "rs"
    else:
        text = text_part("".join(part.content for part in parts))
        made, prefix = {"type": "message", "role": "assistant", "content": [text]}, "msg"
    return {"id": f"{prefix}_{job_id}_{number}", "status": status} | made


def text_part(text: str, logprobs: Sequence[JsonObject] = ()) -> JsonObject:
    """Build a text part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def item_status(job: Job) -> str:
    """Return whether the last item of a job is complete, in OpenAI's words."""
    whole = job.state is JobState.SUCCEEDED and job.stop_reason not in _CUT
    return "completed" if whole else "incomplete"


def token_values(tokens: Iterable[TokenLogprob]) -> list[JsonObject]:
    """Format log-probabilities for texts of the output."""
    return [_token(one) | {"top_logprobs": list(map(_token, one.top))} for one in tokens]


def _token(one: TokenLogprob | LikelyToken) -> JsonObject:
    return {"token": one.token, "logprob": one.logprob, "bytes": list(one.bytes)}


def _instructions(job: Job) -> str | None:
    if job.messages and (job.request or {}).get("instructions"):
        content: Any = job.messages[0].get("content")
        return content if isinstance(content, str) else None
    return None


def _error(job: Job) -> JsonObject | None:
    """Build the error: an invalid request, unless the job broke workers or met its deadline."""
    if job.state is not JobState.FAILED:
        return None
    late = job.stop_reason is StopReason.DEADLINE
    code = "server_error" if job.failures or late else "invalid_prompt"
    return {"code": code, "message": _LATE if late else job.error or "the job failed"}


def _usage(job: Job) -> JsonObject:
    read, wrote = job.prompt_tokens or 0, job.completion_tokens or 0
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": job.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": wrote,
        "output_tokens_details": {"reasoning_tokens": job.reasoning_tokens or 0},
        "total_tokens": read + wrote,
    }


def _seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())
