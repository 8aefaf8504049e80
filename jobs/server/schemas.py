"""What bodies and answers look like, in the words of JSON Schema, for /openapi.json.

What a body may say is written from the tables that its parser reads, with the bounds of GenerationParams.
"""

from typing import Any

from nightmill.jobs.batch_status import BatchState
from nightmill.jobs.constrained import FORMS
from nightmill.jobs.contract import JobState, JsonObject, StopReason
from nightmill.jobs.fields import FIELDS, OF_A_BATCH, Kind
from nightmill.jobs.formats.openai import CHAT, COMPLETIONS, body_keys
from nightmill.jobs.formats.results import READ
from nightmill.jobs.parameters import GenerationParams
from nightmill.jobs.server.native import DELIVERY, JOB_FIELDS
from nightmill.jobs.sql.files import UPLOADED, WRITTEN
from nightmill.jobs.sql.http_batches import HttpStatus

TEXT: JsonObject = {"type": "string"}
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
    Kind.TEXTS: {"type": ["string", "array", "null"], "items": TEXT},
    Kind.INTEGERS: {"type": ["integer", "array", "null"], "items": _NUMBER},
    Kind.MOMENT: {"type": ["string", "null"], "examples": ["8h", "2026-11-22T06:00+01:00"]},
    Kind.OBJECT: {"type": ["object", "null"]},
    Kind.OBJECTS: {"type": ["array", "null"], "items": {"type": "object"}},
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
    return _list_of(named(name), first_id=_MAYBE_TEXT, last_id=_MAYBE_TEXT, has_more=_FLAG)


def named(name: str) -> JsonObject:
    """A reference to one of SCHEMAS."""
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
    if name == "tool_choice":  # a word, or OpenAI's object
        return {"type": ["string", "object", "null"], "description": field.says}
    said = _BOUNDS.get(name, {})
    bounds = {key: value for key, value in said.get("anyOf", [said])[0].items() if key in _BOUND_KEYS}
    return ({} if name in FORMS else _KINDS[field.kind]) | bounds | {"description": field.says}


def _openai_body(url: str) -> JsonObject:
    """A body that is for one of OpenAI's endpoints; keys without a schema are taken and have no effect."""
    known = _PROMPTS | {"max_completion_tokens": _field("max_tokens"), "stream": _FLAG}
    known |= {"stream_options": _STREAM_OPTIONS, "best_of": _field("n")}
    ours = FIELDS.keys() - {"metadata"}  # OpenAI's own has no effect
    if url == CHAT:
        ours -= {"logprobs"}
        known |= {"logprobs": _FLAG, "top_logprobs": _field("logprobs")}
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


_WEBHOOK: JsonObject = {"type": ["string", "null"], "format": "uri"}


def _night_body() -> JsonObject:
    properties = {name: _field(name) for name in sorted(OF_A_BATCH)}
    properties |= {"file": TEXT, "name": {"type": ["string", "null"], "minLength": 1, "maxLength": 200}}
    properties |= {"webhook": _WEBHOOK}
    return _object(properties, optional=tuple(name for name in properties if name != "file"))


_BATCH_BODY = _object(
    {
        "input_file_id": TEXT,
        "endpoint": {"enum": [CHAT, COMPLETIONS]},
        "completion_window": {"type": "string", "examples": ["24h", "90m"]},
        "metadata": {"type": ["object", "null"], "additionalProperties": TEXT},
        "webhook": _WEBHOOK,
    },
    optional=("metadata", "webhook"),
)

# -- what is answered ----------------------------------------------------------------------------

_USAGE = _object({"prompt_tokens": _NUMBER, "completion_tokens": _NUMBER, "total_tokens": _NUMBER})
_REASON: JsonObject = {"enum": ["stop", "length", "tool_calls"]}
_STOP_REASON: JsonObject = {"enum": [*map(str, StopReason), None]}
_MODEL = _object({"id": TEXT, "object": {"const": "model"}, "created": _NUMBER, "owned_by": TEXT})
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
_READ: JsonObject = {
    "content": TEXT,
    "reasoning": _MAYBE_TEXT,
    "tool_calls": {"type": "array", "items": _object({"id": TEXT, "name": TEXT, "arguments": TEXT})},
}
"""Only of texts that hold thoughts or calls of tools."""
_LIKELY: JsonObject = {
    "token": TEXT, "id": _NUMBER, "logprob": {"type": ["number", "null"]},
    "bytes": {"type": "array", "items": _NUMBER},
}  # fmt: skip
_TOKEN = _object(_LIKELY | {"top": {"type": "array", "items": _object(_LIKELY)}})
_TOLD: JsonObject = {"logprobs": {"type": "array", "items": _TOKEN}, "logprob": {"type": "number"}}
_ANSWER = _object(
    {"text": TEXT, "stop_reason": _STOP_REASON, "completion_tokens": _NUMBER, "seed": _NUMBER}
    | _TOLD
    | _READ,
    optional=(*READ, *_TOLD),
)
_JOB = _object(
    _READ
    | {
        "id": TEXT,
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
        "answers": {"type": "array", "items": _ANSWER},
    }
    | _OUTCOME,
    optional=READ,
)

_FILE = _object(
    {
        "id": TEXT,
        "object": {"const": "file"},
        "bytes": _NUMBER,
        "created_at": _NUMBER,
        "filename": TEXT,
        "purpose": {"enum": [UPLOADED, WRITTEN]},
        "status": {"const": "processed"},
        "expires_at": _MAYBE_NUMBER,
    }
)

_BAD_ROW = _object({"code": _MAYBE_TEXT, "line": _MAYBE_NUMBER, "message": _MAYBE_TEXT, "param": _MAYBE_TEXT})
_BAD_ROWS: JsonObject = {"type": "array", "items": _BAD_ROW}
_COUNTS = _object({"total": _NUMBER, "completed": _NUMBER, "failed": _NUMBER})
_BATCH = _object(
    dict.fromkeys(("id", "input_file_id", "endpoint", "completion_window"), TEXT)
    | dict.fromkeys(("model", "output_file_id", "error_file_id"), _MAYBE_TEXT)
    | dict.fromkeys(("in_progress_at", "expires_at", "finalizing_at", "completed_at"), _MAYBE_NUMBER)
    | dict.fromkeys(("failed_at", "expired_at", "cancelling_at", "cancelled_at"), _MAYBE_NUMBER)
    | {
        "object": {"const": "batch"},
        "status": {"enum": [*map(str, HttpStatus)]},
        "created_at": _NUMBER,
        "errors": {"anyOf": [{"type": "null"}, _object({"object": {"const": "list"}, "data": _BAD_ROWS})]},
        "request_counts": _COUNTS,
        "usage": _object(
            {
                "input_tokens": _NUMBER,
                "input_tokens_details": _object({"cached_tokens": _NUMBER}),
                "output_tokens": _NUMBER,
                "output_tokens_details": _object({"reasoning_tokens": _NUMBER}),
                "total_tokens": _NUMBER,
            }
        ),
        "metadata": {"type": ["object", "null"]},
    }
)
_NIGHT = _object(
    dict.fromkeys(("id", "file"), TEXT)
    | dict.fromkeys(("owner", "name", "note", "output_file", "error_file"), _MAYBE_TEXT)
    | dict.fromkeys(("rows", "succeeded", "unsuccessful", "tokens_in", "tokens_out"), _MAYBE_NUMBER)
    | dict.fromkeys(("created_at", "scheduled_at", "deadline_at", "ended_at", "estimated_end"), _TIME)
    | {
        "object": {"const": "night"},
        "settings": {"type": "object"},
        "status": {"enum": [*map(str, HttpStatus)]},
        "state": {"enum": [*map(str, BatchState), None]},
        "tokens_per_second": {"type": ["number", "null"]},
        "bad_rows": _BAD_ROWS,
        "errors": {"type": "array", "items": _object({"rows": _NUMBER, "message": TEXT})},
    }
)


_CALL = _object(
    {
        "id": TEXT,
        "type": {"const": "function"},
        "function": _object({"name": TEXT, "arguments": TEXT}),
    }
)
_MESSAGE = _object(
    {
        "role": {"const": "assistant"},
        "content": _MAYBE_TEXT,
        "refusal": {"type": "null"},
        "reasoning_content": TEXT,
        "tool_calls": {"type": "array", "items": _CALL},
    },
    optional=("reasoning_content", "tool_calls"),
)


def _completion(kind: str, content: JsonObject) -> JsonObject:
    choice = _object({"index": _NUMBER} | content | {"logprobs": {"type": "null"}, "finish_reason": _REASON})
    return _object(
        {
            "id": TEXT,
            "object": {"const": kind},
            "created": _NUMBER,
            "model": TEXT,
            "choices": {"type": "array", "items": choice},
            "usage": _USAGE,
            "stop_reason": _STOP_REASON,
            "seed": _NUMBER,
        }
    )


SCHEMAS: dict[str, JsonObject] = {
    "Error": _object(
        {"error": _object({"message": TEXT, "type": TEXT, "param": _MAYBE_TEXT, "code": _MAYBE_TEXT})}
    ),
    "ChatRequest": _openai_body(CHAT),
    "CompletionRequest": _openai_body(COMPLETIONS),
    "JobRequest": _job_body(),
    "ChatCompletion": _completion(
        "chat.completion",
        {"message": _MESSAGE},
    ),
    "Completion": _completion("text_completion", {"text": TEXT}),
    "Model": _MODEL,
    "Models": _list_of(named("Model")),
    "Job": _JOB,
    "Jobs": _page_of("Job"),
    "FileForm": _object({"file": {"type": "string", "format": "binary"}, "purpose": {"const": UPLOADED}}),
    "File": _FILE,
    "Files": _page_of("File"),
    "FileDeleted": _object({"id": TEXT, "object": {"const": "file"}, "deleted": {"const": True}}),
    "BatchRequest": _BATCH_BODY,
    "Batch": _BATCH,
    "Batches": _page_of("Batch"),
    "NightRequest": _night_body(),
    "Night": _NIGHT,
    "Nights": _page_of("Night"),
    "Piece": _object({"t": TEXT, "i": _NUMBER}),
    "End": _object({"job_id": TEXT} | _OUTCOME),
    "Health": _object({"status": {"const": "ok"}}),
    "Ready": _object(
        dict.fromkeys(("ready", "database", "broker", "worker"), _FLAG)
        | {"hangs": {"type": "array", "items": {"enum": ["database", "broker"]}}},
        optional=("hangs",),
    ),
}
"""By name."""
