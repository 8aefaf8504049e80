"""Rows of result files and error files, built from jobs.

Results have the format of the input: OpenAI rows for OpenAI rows (the objects `chat.completion`,
`text_completion` and `response` of its API reference), plain rows for all others, flat rows in tables.
Several answers are choices in OpenAI's objects, a list in plain rows, and JSON text in a column of tables,
which is always there.
"""

import json
from collections.abc import Sequence
from datetime import datetime

from nightmill.jobs.base.arithmetic import system_fingerprint
from nightmill.jobs.base.contract import JobState, JsonObject, StopReason
from nightmill.jobs.errors import RowCode
from nightmill.jobs.formats.likelihoods import openai_logprobs, token_values, vllm_prompt_logprobs
from nightmill.jobs.formats.responses.answer import response_body
from nightmill.jobs.formats.rows import FLOATS, FileFormat
from nightmill.jobs.reply.embeddings import encoded, written
from nightmill.jobs.reply.job import Answer, Job
from nightmill.jobs.reply.logprobs import total
from nightmill.jobs.reply.parsing import Reply, ToolCall

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
    "embedding": FLOATS,
    "cached_tokens": "int64",
    "reasoning_tokens": "int64",
    "gpu_seconds": "float64",
    "energy_joules": "float64",
    "relevance": "float64",
}
"""Columns of results in a table, with types."""
COSTS = ("gpu_seconds", "energy_joules")
"""Columns, and keys, of what a row cost."""
LATER = ("embedding", "cached_tokens", "reasoning_tokens", *COSTS, "relevance")
"""Columns, and keys, that results of earlier versions do not have, in the order in which they came."""
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
"""Columns of errors in a table, with types."""

ENCODING, BASE64 = "encoding_format", "base64"
"""A key of requests for embeddings, and its value for the bytes of float32 in base64."""

# OpenAI has only two reasons for a text: it ended by itself, or it was cut.
_FINISH_REASONS = {StopReason.EOS: "stop", StopReason.STOP_SEQUENCE: "stop"}
_STATUS_CODES = {StopReason.DEADLINE: 408, StopReason.BUDGET: 402, StopReason.CANCELLED: 499}
_MESSAGES = {
    StopReason.DEADLINE: "the deadline passed before the answer was complete; retry it with a later one",
    StopReason.BUDGET: "a limit of the batch was met before the answer began; raise it to have it",
    StopReason.CANCELLED: "the job was cancelled before the answer was complete; retry it to have it",
}


def result_row(job: Job, format: FileFormat, *, model: str = "") -> JsonObject:
    """Build the result row of a succeeded job. `model`: the name in OpenAI rows if the job names none."""
    if format is FileFormat.OPENAI:
        return {
            "id": job.id,
            "custom_id": job.custom_id,
            "response": _response(job, 200, model),
            "error": None,
        }
    return (
        {
            "custom_id": job.custom_id,
            "id": job.id,
            "text": job.text,
            "stop_reason": None if job.stop_reason is None else str(job.stop_reason),
            "prompt_tokens": job.prompt_tokens,
            "completion_tokens": job.completion_tokens,
            "seed": job.seed,
        }
        | _answers_of(job, format)
        | _embedding_of(job, format)
        | {"cached_tokens": job.cached_tokens, "reasoning_tokens": job.reasoning_tokens}
        | _costs_of(job, format)
        | _relevance_of(job, format)
    )


def _embedding_of(job: Job, format: FileFormat) -> JsonObject:
    """The embedding of a job: a list, and in CSV its JSON. In tables its column is always there."""
    if job.packed_embedding is None or job.embedding is None:
        return {} if format is FileFormat.JSONL else {"embedding": None}
    numbers = written(job.packed_embedding)
    return {"embedding": json.dumps(numbers) if format is FileFormat.CSV else numbers}


def _relevance_of(job: Job, format: FileFormat) -> JsonObject:
    """The relevance of a document for its query. In tables its column is always there."""
    found = job.relevance
    return {} if found is None and format is FileFormat.JSONL else {"relevance": found}


def _costs_of(job: Job, format: FileFormat) -> JsonObject:
    """Return what a job cost; in JSON lines nothing if nobody knows."""
    if job.gpu_seconds is None and format is FileFormat.JSONL:
        return {}
    return {
        name: None if cost is None else round(cost, 6)
        for name, cost in zip(COSTS, (job.gpu_seconds, job.energy_joules), strict=True)
    }


def error_row(job: Job, format: FileFormat, *, model: str = "") -> JsonObject:
    """Build the error row of a failed, cancelled or expired job, with its partial text.

    A duplicate's custom_id belongs to the first row that had it, and is only named in the message: results
    and errors together contain each custom_id once.
    """
    error = error_of(job)
    custom_id = None if error["code"] == "duplicate_custom_id" else job.custom_id
    if format is FileFormat.OPENAI:
        status = _STATUS_CODES.get(job.stop_reason or StopReason.ERROR, 500)
        # The first answer may have no text where others have theirs.
        begun = any(answer.text for answer in job.answers)
        response = _response(job, status, model) if begun else None
        return {"id": job.id, "custom_id": custom_id, "response": response, "error": error}
    if format is FileFormat.JSONL:
        line = {"line": error.pop("line")} if "line" in error else {}
        partial = {"text": job.text} if job.text else {}
        partial |= _answers_of(job, format)
        return {"custom_id": custom_id, "id": job.id} | line | {"error": error} | partial
    flat = {"custom_id": custom_id, "id": job.id} | error | {"text": job.text or None}
    flat |= _answers_of(job, format)
    return {name: flat.get(name) for name in ERROR_COLUMNS}


READ = ("content", "reasoning", "tool_calls", "reasoning_unfinished")
"""Additional keys of rows whose text has reasoning or calls."""


def reply_values(reply: Reply) -> JsonObject:
    """Return the READ keys for a reply with reasoning or calls; empty if it is just the text.

    One that was cut inside its reasoning has `reasoning_unfinished`, too.
    """
    if reply.reasoning is None and not reply.tool_calls:
        return unfinished(reply)
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in reply.tool_calls]
    return {"content": reply.content, "reasoning": reply.reasoning, "tool_calls": calls} | unfinished(reply)


def unfinished(reply: Reply) -> JsonObject:
    """Return the key of a reply that was cut inside its reasoning, or nothing."""
    return {"reasoning_unfinished": True} if reply.unfinished else {}


def answer_values(job: Job) -> list[JsonObject]:
    """Return all answers in order if the job asked for several or for details of tokens, otherwise none."""
    details = (job.packed_logprobs, job.packed_prompt_logprobs, job.token_ids)
    listed = job.several or any(detail is not None for detail in details)
    answers = [
        {
            "text": answer.text,
            "stop_reason": str(answer.stop_reason),
            "completion_tokens": answer.completion_tokens,
            "seed": answer.seed,
        }
        | _logprobs_of(answer, scored=bool(job.params.score))
        | reply_values(reply)
        for answer, reply in (zip(job.answers, job.replies, strict=True) if listed else ())
    ]
    if answers and job.prompt_logprobs is not None:
        answers[0]["prompt_logprobs"] = token_values(job.prompt_logprobs)
    if answers and job.prompt_token_ids is not None:
        answers[0]["prompt_token_ids"] = list(job.prompt_token_ids)
    return answers


def _logprobs_of(answer: Answer, *, scored: bool) -> JsonObject:
    """Return the token ids of an answer and its log-probabilities, with the sum for a scored text."""
    ids = ids_of(answer)
    tokens = answer.logprobs
    if tokens is None:
        return ids
    return ids | ({"logprob": total(tokens)} if scored else {}) | {"logprobs": token_values(tokens)}


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


def error_of(job: Job) -> JsonObject:
    """Return {"code", "message"}, and "field" and "line" if known."""
    reason = job.stop_reason or StopReason.ERROR
    last: JsonObject = job.errors[-1] if job.errors else {}
    # A row that was cancelled with the one before it has a code of its own, too.
    with_prior = last.get("code") == RowCode.PRIOR_CANCELLED and job.error == last.get("error")
    code = last.get("code") if reason is StopReason.ERROR or with_prior else None
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
    model = job.model or model
    if job.params.embed:
        body = embeddings_body([job], model)
    elif job.params.rerank is not None:
        tokens = job.prompt_tokens or 0
        body = {
            "object": "list",
            "model": model,
            "results": [{"index": 0, "relevance_score": job.relevance}],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    else:
        body = (completion_body if job.request is None else response_body)(job, model)
    return {"status_code": status, "request_id": job.id, "body": body}


def embeddings_body(jobs: Sequence[Job], model: str) -> JsonObject:
    """Build the response body of POST /v1/embeddings for all jobs of a request, which succeeded."""
    tokens = sum(job.prompt_tokens or 0 for job in jobs)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _openai_embedding(job)}
            for index, job in enumerate(jobs)
        ],
        "model": model,
        "system_fingerprint": system_fingerprint(jobs[0].arithmetic),
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _openai_embedding(job: Job) -> str | list[float]:
    """The embedding in the encoding that the request asked for."""
    data = job.packed_embedding or b""
    return encoded(data) if (job.request or {}).get(ENCODING) == BASE64 else written(data)


def completion_body(job: Job, model: str) -> JsonObject:
    """Build the response body of POST /v1/chat/completions or /v1/completions."""
    return request_body([job], job.id, model)


def request_body(jobs: Sequence[Job], request_id: str, model: str) -> JsonObject:
    """Build the response body for all jobs of a request; choices have seeds if there are several."""
    first = jobs[0]
    chat = first.messages is not None
    choices = [
        _choice(answer, reply, chat)
        | _of_several(job, answer, len(jobs) > 1)
        | ({} if chat else prompt_details(job))
        for job in jobs
        for answer, reply in zip(job.answers, job.replies, strict=True)
    ]
    return {
        "id": completion_id(request_id, chat),
        "object": "chat.completion" if chat else "text_completion",
        "created": _seconds(max(job.finished_at or job.created_at for job in jobs)),
        "model": model,
        "system_fingerprint": system_fingerprint(first.arithmetic),
        "choices": [{"index": index} | choice for index, choice in enumerate(choices)],
        "usage": usage(*jobs),
        "stop_reason": None if first.stop_reason is None else str(first.stop_reason),
        "seed": first.seed,
    } | (prompt_details(first) if chat else {})


def prompt_details(job: Job) -> JsonObject:
    """Details of a prompt as vLLM gives them: in each choice of a completion, or in a chat's answer."""
    made: JsonObject = {}
    if job.prompt_logprobs is not None:
        made["prompt_logprobs"] = vllm_prompt_logprobs(job.prompt_logprobs)
    if job.prompt_token_ids is not None:
        made["prompt_token_ids"] = list(job.prompt_token_ids)
    return made


def _of_several(job: Job, answer: Answer, prompts: bool) -> JsonObject:
    """Tell choices apart: by seeds if prompts are several, by stop reasons if one has failed."""
    made: JsonObject = {"seed": answer.seed} if prompts else {}
    if len(job.answers) > 1 and job.state is not JobState.SUCCEEDED:
        made["stop_reason"] = str(answer.stop_reason)
    return made


def _choice(answer: Answer, reply: Reply, chat: bool) -> JsonObject:
    said: JsonObject = {"message": _message(reply)} if chat else {"text": answer.text}
    ends = {"logprobs": openai_logprobs(answer, chat), "finish_reason": finish_reason(answer, reply)}
    return said | ends | ids_of(answer) | (unfinished(reply) if chat else {})


def ids_of(answer: Answer) -> JsonObject:
    """An answer's `token_ids`, if they were asked for."""
    return {} if answer.token_ids is None else {"token_ids": list(answer.token_ids)}


def _message(reply: Reply) -> JsonObject:
    made: JsonObject = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning is not None:
        made["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        made["content"] = reply.content or None
        made["tool_calls"] = list(map(call_value, reply.tool_calls))
    return made


def call_value(call: ToolCall) -> JsonObject:
    """Format a tool call as in OpenAI's API."""
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def completion_id(job_id: str, chat: bool) -> str:
    """Return the id of a job in OpenAI's objects."""
    return f"{'chatcmpl' if chat else 'cmpl'}-{job_id}"


def finish_reason(answer: Answer, reply: Reply) -> str:
    """Return the stop reason in OpenAI's words."""
    reason = _FINISH_REASONS.get(answer.stop_reason, "length")
    return "tool_calls" if reply.tool_calls and reason == "stop" else reason


def usage(*jobs: Job) -> JsonObject:
    """Sum up the tokens of ended jobs."""
    prompt_tokens = sum(job.prompt_tokens or 0 for job in jobs)
    completion_tokens = sum(job.completion_tokens or 0 for job in jobs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(job.cached_tokens or 0 for job in jobs)},
        "completion_tokens_details": {"reasoning_tokens": sum(job.reasoning_tokens or 0 for job in jobs)},
    }


def _seconds(moment: datetime) -> int:
    return int(moment.timestamp())
