"""GET /openapi.json: what the endpoints take and answer, in the words of OpenAPI 3.1.

What a body may say is written from the tables that its parser reads, with the bounds of GenerationParams.
"""

import re
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nightmill.jobs.constrained import FORMS as ANSWER_FORMS
from nightmill.jobs.contract import GenerationParams, JobState, JsonObject, StopReason
from nightmill.jobs.formats.openai import CHAT, COMPLETIONS, body_keys
from nightmill.jobs.server.files import UPLOADED, WRITTEN
from nightmill.jobs.server.native import DELIVERY, JOB_FIELDS
from nightmill.jobs.spec import FIELDS, Kind

_TEXT: JsonObject = {"type": "string"}
_NUMBER: JsonObject = {"type": "integer"}
_FLAG: JsonObject = {"type": "boolean"}
_TIME: JsonObject = {"type": ["string", "null"], "format": "date-time"}
_MAYBE_TEXT: JsonObject = {"type": ["string", "null"]}
_MAYBE_NUMBER: JsonObject = {"type": ["integer", "null"]}
_KINDS: dict[Kind, JsonObject] = {
    Kind.INTEGER: {"type": ["integer", "null"]},
    Kind.NUMBER: {"type": ["number", "null"]},
    Kind.FLAG: {"type": ["boolean", "null"]},
    Kind.TEXT: {"type": ["string", "null"]},
    Kind.TEXTS: {"type": ["string", "array", "null"], "items": _TEXT},
    Kind.INTEGERS: {"type": ["integer", "array", "null"], "items": _NUMBER},
    Kind.MOMENT: {"type": ["string", "null"], "examples": ["8h", "2026-11-22T06:00+01:00"]},
    Kind.OBJECT: {"type": ["object", "null"]},
}
"""In bodies: null counts as not given."""


def _object(properties: JsonObject, *, optional: tuple[str, ...] = (), **more: Any) -> JsonObject:
    """An object with these properties and no others, all of them there but the optional ones."""
    required = [name for name in properties if name not in optional]
    made = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return made | more


def _list_of(item: JsonObject, **more: JsonObject) -> JsonObject:
    return _object({"object": {"const": "list"}, "data": {"type": "array", "items": item}} | more)


def _page_of(name: str) -> JsonObject:
    return _list_of(_named(name), first_id=_MAYBE_TEXT, last_id=_MAYBE_TEXT, has_more=_FLAG)


def _named(name: str) -> JsonObject:
    return {"$ref": f"#/components/schemas/{name}"}


# -- what is taken -------------------------------------------------------------------------------

_MESSAGES: JsonObject = {"type": "array", "minItems": 1, "items": {"type": "object"}}
_PROMPTS: JsonObject = {"prompt": {"type": ["string", "array"]}, "messages": _MESSAGES}
_STREAM_OPTIONS = _object(
    {"include_usage": _FLAG, "include_obfuscation": _FLAG}, optional=("include_usage", "include_obfuscation")
)
_BOUNDS = GenerationParams.model_json_schema()["properties"]
_BOUND_KEYS = ("minimum", "maximum", "exclusiveMinimum", "default")


def _field(name: str) -> JsonObject:
    """What a field of a job takes."""
    field = FIELDS[name]
    said = _BOUNDS.get(name, {})
    bounds = {key: value for key, value in said.get("anyOf", [said])[0].items() if key in _BOUND_KEYS}
    return ({} if name in ANSWER_FORMS else _KINDS[field.kind]) | bounds | {"description": field.says}


def _openai_body(url: str) -> JsonObject:
    """A body that is for one of OpenAI's endpoints; keys without a schema are taken and have no effect."""
    known = _PROMPTS | {"max_completion_tokens": _field("max_tokens"), "stream": _FLAG}
    known |= {"stream_options": _STREAM_OPTIONS}
    ours = FIELDS.keys() - {"metadata"}  # OpenAI's own has no effect
    properties = {
        name: _field(name) if name in ours else known.get(name, {}) for name in sorted(body_keys(url))
    }
    return {
        "type": "object",
        "properties": properties,
        "required": ["messages" if url == CHAT else "prompt"],
        "additionalProperties": False,
    }


def _job_body() -> JsonObject:
    properties = {name: _field(name) for name in sorted(JOB_FIELDS & FIELDS.keys())} | _PROMPTS
    properties |= {"job_id": {"type": "string", "minLength": 1, "maxLength": 128}}
    properties |= dict.fromkeys(sorted(DELIVERY - {"job_id"}), _FLAG)
    return {"type": "object", "properties": properties, "additionalProperties": False}


# -- what is answered ----------------------------------------------------------------------------

_USAGE = _object({"prompt_tokens": _NUMBER, "completion_tokens": _NUMBER, "total_tokens": _NUMBER})
_REASON: JsonObject = {"enum": ["stop", "length"]}
_STOP_REASON: JsonObject = {"enum": [*map(str, StopReason), None]}
_MODEL = _object({"id": _TEXT, "object": {"const": "model"}, "created": _NUMBER, "owned_by": _TEXT})
_OUTCOME: JsonObject = {
    "state": {"enum": [*map(str, JobState)]},
    "stop_reason": _STOP_REASON,
    "error": _MAYBE_TEXT,
    "tokens_in": _MAYBE_NUMBER,
    "tokens_out": _MAYBE_NUMBER,
    "created_at": _TIME,
    "started_at": _TIME,
    "finished_at": _TIME,
}
_JOB = _object(
    {
        "id": _TEXT,
        "object": {"const": "job"},
        "owner": _MAYBE_TEXT,
        "model": _MAYBE_TEXT,
        "custom_id": _MAYBE_TEXT,
        "metadata": {"type": "object"},
        "params": {"type": "object"},
        "priority": _NUMBER,
        "scheduled_at": _TIME,
        "deadline_at": _TIME,
        "text": _MAYBE_TEXT,
    }
    | _OUTCOME
)

_FILE = _object(
    {
        "id": _TEXT,
        "object": {"const": "file"},
        "bytes": _NUMBER,
        "created_at": _NUMBER,
        "filename": _TEXT,
        "purpose": {"enum": [UPLOADED, WRITTEN]},
        "status": {"const": "processed"},
        "expires_at": _MAYBE_NUMBER,
    }
)


def _completion(kind: str, content: JsonObject) -> JsonObject:
    choice = _object({"index": _NUMBER} | content | {"logprobs": {"type": "null"}, "finish_reason": _REASON})
    return _object(
        {
            "id": _TEXT,
            "object": {"const": kind},
            "created": _NUMBER,
            "model": _TEXT,
            "choices": {"type": "array", "items": choice},
            "usage": _USAGE,
            "stop_reason": _STOP_REASON,
            "seed": _NUMBER,
        }
    )


_SCHEMAS: dict[str, JsonObject] = {
    "Error": _object(
        {"error": _object({"message": _TEXT, "type": _TEXT, "param": _MAYBE_TEXT, "code": _MAYBE_TEXT})}
    ),
    "ChatRequest": _openai_body(CHAT),
    "CompletionRequest": _openai_body(COMPLETIONS),
    "JobRequest": _job_body(),
    "ChatCompletion": _completion(
        "chat.completion",
        {"message": _object({"role": {"const": "assistant"}, "content": _TEXT, "refusal": {"type": "null"}})},
    ),
    "Completion": _completion("text_completion", {"text": _TEXT}),
    "Model": _MODEL,
    "Models": _list_of(_named("Model")),
    "Job": _JOB,
    "Jobs": _page_of("Job"),
    "FileForm": _object({"file": {"type": "string", "format": "binary"}, "purpose": {"const": UPLOADED}}),
    "File": _FILE,
    "Files": _page_of("File"),
    "FileDeleted": _object({"id": _TEXT, "object": {"const": "file"}, "deleted": {"const": True}}),
    "Piece": _object({"t": _TEXT, "i": _NUMBER}),
    "End": _object({"job_id": _TEXT} | _OUTCOME),
    "Health": _object({"status": {"const": "ok"}}),
    "Ready": _object(dict.fromkeys(("ready", "database", "broker", "worker"), _FLAG)),
}

ENDPOINTS: dict[tuple[str, str], tuple[str, str | None, str | None]] = {
    ("POST", "/v1/chat/completions"): ("Answer a chat.", "ChatRequest", "ChatCompletion"),
    ("POST", "/v1/completions"): ("Go on with a text.", "CompletionRequest", "Completion"),
    ("POST", "/v1/embeddings"): ("An error: no model here computes embeddings.", None, None),
    ("GET", "/v1/models"): ("The models that live workers serve.", None, "Models"),
    ("GET", "/v1/models/{name}"): ("One of these models.", None, "Model"),
    ("POST", "/v1/files"): ("Upload a file.", "FileForm", "File"),
    ("GET", "/v1/files"): ("The caller's files, newest first.", None, "Files"),
    ("GET", "/v1/files/{file_id}"): ("A file, without its content.", None, "File"),
    ("DELETE", "/v1/files/{file_id}"): ("Delete a file.", None, "FileDeleted"),
    ("GET", "/v1/files/{file_id}/content"): ("A file's content.", None, None),
    ("POST", "/execute"): ("Generate, as a stream of events.", "JobRequest", None),
    ("POST", "/v1/generate"): ("Generate, and answer at the end or as a stream.", "JobRequest", "Job"),
    ("POST", "/v1/jobs"): ("Queue a job.", "JobRequest", "Job"),
    ("GET", "/v1/jobs"): ("The caller's jobs, newest first.", None, "Jobs"),
    ("GET", "/v1/jobs/{job_id}"): ("A job.", None, "Job"),
    ("DELETE", "/v1/jobs/{job_id}"): ("Cancel a job.", None, "Job"),
    ("GET", "/v1/jobs/{job_id}/events"): ("A job's text, as a stream of events.", None, None),
    ("GET", "/health"): ("Whether the process answers.", None, "Health"),
    ("GET", "/ready"): ("Whether jobs can be run.", None, "Ready"),
    ("GET", "/openapi.json"): ("This document.", None, None),
}
"""(method, path) -> what it does, the schema of its body, the schema of its answer."""
STREAMING = frozenset({CHAT, COMPLETIONS, "/execute", "/v1/generate", "/v1/jobs/{job_id}/events"})
"""What may be answered by events."""
BYTES = frozenset({"/v1/files/{file_id}/content"})
"""What is answered by bytes as they are."""
FORMS = frozenset({"FileForm"})
"""Bodies that are forms with a file."""
LISTS: dict[str, JsonObject] = {
    "/v1/jobs": {"state": {"enum": [*map(str, JobState)]}},
    "/v1/files": {"purpose": {"enum": [UPLOADED, WRITTEN]}},
}
"""What is read by pages, and by what the items may be chosen."""
_PAGE: JsonObject = {
    "limit": {"type": "integer", "minimum": 1},
    "after": _TEXT,
    "order": {"enum": ["asc", "desc"]},
}


def document() -> JsonObject:
    """The whole document."""
    paths: JsonObject = {}
    for (method, path), endpoint in ENDPOINTS.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, *endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Nightmill", "version": version("nightmill")},
        "paths": paths,
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(method: str, path: str, says: str, body: str | None, answer: str | None) -> JsonObject:
    answers: JsonObject = {"default": {"description": "An error.", "content": _json(_named("Error"))}}
    if answer is not None:
        answers["2XX"] = {"description": says, "content": _json(_named(answer))}
    if path in STREAMING:
        content = answers.setdefault("2XX", {"description": says, "content": {}})["content"]
        content["text/event-stream"] = {"schema": _TEXT}
    if path in BYTES:
        content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        answers["2XX"] = {"description": says, "content": content}
    made: JsonObject = {"summary": says, "responses": answers}
    made["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": _TEXT}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    if method == "GET" and path in LISTS:
        asked = _PAGE | LISTS[path]
        made["parameters"] += [{"name": name, "in": "query", "schema": asked[name]} for name in asked]
    if body is not None:
        kind = "multipart/form-data" if body in FORMS else "application/json"
        made["requestBody"] = {"required": True, "content": {kind: {"schema": _named(body)}}}
    return made


def _json(schema: JsonObject) -> JsonObject:
    return {"application/json": {"schema": schema}}


async def answer(request: Request) -> Response:
    """GET /openapi.json."""
    return JSONResponse(document())
