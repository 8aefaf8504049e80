"""What became of a job, as a row of a result file or of an error file.

Results have the format of the input: OpenAI rows for OpenAI rows (the objects `chat.completion` and
`text_completion` of its API reference), plain ones for all others; in tables, flat. Several answers are
choices there, a list in plain rows, and a text with JSON in tables, which have a column for it in any case.
"""

import json
from datetime import datetime

from nightmill.jobs.contract import JsonObject, StopReason
from nightmill.jobs.formats.likelihoods import openai_logprobs, token_values
from nightmill.jobs.formats.rows import FileFormat
from nightmill.jobs.job import Answer, Job
from nightmill.jobs.logprobs import total
from nightmill.jobs.reading import Reply, ToolCall

RESULT_COLUMNS = {
    "custom_id": "string",
    "id": "string",
    "text": "string",
    "stop_reason": "string",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
    "seed": "int64",
    "answers": "string",
    "content": "string",
    "reasoning": "string",
    "tool_calls": "string",
}
"""The columns of results in a table, and their types."""
ERROR_COLUMNS = {
    "custom_id": "string",
    "id": "string",
    "line": "int64",
    "code": "string",
    "field": "string",
    "message": "string",
    "text": "string",
    "answers": "string",
    "content": "string",
    "reasoning": "string",
    "tool_calls": "string",
}
"""The columns of errors in a table, and their types."""

# OpenAI knows no more words for a text: it ended by itself, or it was cut.
_FINISH_REASONS = {StopReason.EOS: "stop", StopReason.STOP_SEQUENCE: "stop"}
_STATUS_CODES = {StopReason.DEADLINE: 408, StopReason.CANCELLED: 499}
_MESSAGES = {
    StopReason.DEADLINE: "the deadline passed before the answer was complete; retry it with a later one",
    StopReason.CANCELLED: "the job was cancelled before the answer was complete; retry it to have it",
}


def result_row(job: Job, format: FileFormat, *, model: str = "") -> JsonObject:
    """The result of a succeeded job. `model`: what OpenAI rows name if the job asks for no model."""
    if format is FileFormat.OPENAI:
        return {
            "id": job.id,
            "custom_id": job.custom_id,
            "response": _response(job, 200, model),
            "error": None,
        }
    return {
        "custom_id": job.custom_id,
        "id": job.id,
        "text": job.text,
        "stop_reason": None if job.stop_reason is None else str(job.stop_reason),
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": job.completion_tokens,
        "seed": job.seed,
    } | _answers_of(job, format)


def error_row(job: Job, format: FileFormat, *, model: str = "") -> JsonObject:
    """The error of a failed, cancelled or expired job, with the text that it had.

    A duplicate's custom_id belongs to the row that had it first, so it is left to that one and only named
    in the message: results and errors together hold each custom_id once.
    """
    error = _error(job)
    custom_id = None if error["code"] == "duplicate_custom_id" else job.custom_id
    if format is FileFormat.OPENAI:
        status = _STATUS_CODES.get(job.stop_reason or StopReason.ERROR, 500)
        response = _response(job, status, model) if job.text else None
        return {"id": job.id, "custom_id": custom_id, "response": response, "error": error}
    if format is FileFormat.JSONL:
        line = {"line": error.pop("line")} if "line" in error else {}
        partial = {"text": job.text} if job.text else {}
        partial |= _answers_of(job, format)
        return {"custom_id": custom_id, "id": job.id} | line | {"error": error} | partial
    flat = {"custom_id": custom_id, "id": job.id} | error | {"text": job.text or None}
    flat |= _answers_of(job, format)
    return {name: flat.get(name) for name in ERROR_COLUMNS}


READ = ("content", "reasoning", "tool_calls")
"""What rows have besides where a text holds thoughts or calls."""


def reply_values(reply: Reply) -> JsonObject:
    """READ of a reply that is not all of its text; nothing of one that is."""
    if reply.reasoning is None and not reply.tool_calls:
        return {}
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in reply.tool_calls]
    return {"content": reply.content, "reasoning": reply.reasoning, "tool_calls": calls}


def answer_values(job: Job) -> list[JsonObject]:
    """All answers in order, if the job was to have several or log-probabilities; none of any other job."""
    told = job.several or job.told is not None
    return [
        {
            "text": answer.text,
            "stop_reason": str(answer.stop_reason),
            "completion_tokens": answer.completion_tokens,
            "seed": answer.seed,
        }
        | _told(answer, scored=bool(job.params.score))
        | reply_values(reply)
        for answer, reply in (zip(job.answers, job.replies, strict=True) if told else ())
    ]


def _told(answer: Answer, *, scored: bool) -> JsonObject:
    """The log-probabilities of an answer, and of one that was scored their sum."""
    tokens = answer.logprobs
    if tokens is None:
        return {}
    return ({"logprob": total(tokens)} if scored else {}) | {"logprobs": token_values(tokens)}


def _answers_of(job: Job, format: FileFormat) -> JsonObject:
    answers = answer_values(job)
    read = reply_values(job.replies[0]) if job.markup is not None and job.answers else {}
    if format is FileFormat.JSONL:
        return ({"answers": answers} if answers else {}) | read
    calls = read.get("tool_calls")
    return {
        "answers": json.dumps(answers, ensure_ascii=False) if answers else None,
        "content": read.get("content"),
        "reasoning": read.get("reasoning"),
        "tool_calls": json.dumps(calls, ensure_ascii=False) if calls else None,
    }


def _error(job: Job) -> JsonObject:
    """{"code", "message"}, and "field" and "line" if they are known."""
    reason = job.stop_reason or StopReason.ERROR
    last: JsonObject = job.errors[-1] if job.errors else {}
    code = last.get("code") if reason is StopReason.ERROR else None
    made: JsonObject = {
        "code": code or str(reason),
        "message": job.error or _MESSAGES.get(reason, "the job failed; retry it"),
    }
    if code and last.get("field") is not None:
        made["field"] = last["field"]
    if job.row is not None:
        made["line"] = job.row
    return made


def _response(job: Job, status: int, model: str) -> JsonObject:
    return {"status_code": status, "request_id": job.id, "body": completion_body(job, job.model or model)}


def completion_body(job: Job, model: str) -> JsonObject:
    """The object that POST /v1/chat/completions or /v1/completions answers."""
    chat = job.messages is not None
    return {
        "id": completion_id(job.id, chat),
        "object": "chat.completion" if chat else "text_completion",
        "created": _seconds(job.finished_at or job.created_at),
        "model": model,
        "choices": [
            _choice(index, answer, reply, chat)
            for index, (answer, reply) in enumerate(zip(job.answers, job.replies, strict=True))
        ],
        "usage": usage(job),
        "stop_reason": None if job.stop_reason is None else str(job.stop_reason),
        "seed": job.seed,
    }


def _choice(index: int, answer: Answer, reply: Reply, chat: bool) -> JsonObject:
    said: JsonObject = {"message": _message(reply)} if chat else {"text": answer.text}
    ends = {"logprobs": openai_logprobs(answer, chat), "finish_reason": finish_reason(answer, reply)}
    return {"index": index} | said | ends


def _message(reply: Reply) -> JsonObject:
    made: JsonObject = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning is not None:
        made["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        made["content"] = reply.content or None
        made["tool_calls"] = list(map(call_value, reply.tool_calls))
    return made


def call_value(call: ToolCall) -> JsonObject:
    """A call as OpenAI's API has it."""
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def completion_id(job_id: str, chat: bool) -> str:
    """What OpenAI's objects call a job."""
    return f"{'chatcmpl' if chat else 'cmpl'}-{job_id}"


def finish_reason(answer: Answer, reply: Reply) -> str:
    """Why a text ends, in OpenAI's words."""
    reason = _FINISH_REASONS.get(answer.stop_reason, "length")
    return "tool_calls" if reply.tool_calls and reason == "stop" else reason


def usage(job: Job) -> JsonObject:
    """The tokens of a job that has ended."""
    prompt_tokens, completion_tokens = job.prompt_tokens or 0, job.completion_tokens or 0
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _seconds(moment: datetime) -> int:
    return int(moment.timestamp())
