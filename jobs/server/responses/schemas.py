"""Schemas of requests and responses of /v1/responses for /openapi.json."""

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.formats.responses.items import ROLES
from nightmill.jobs.formats.responses.request import INCLUDED, KEYS
from nightmill.jobs.request.effort import EFFORTS
from nightmill.jobs.request.fields import FIELDS
from nightmill.jobs.request.parameters import REPEATED
from nightmill.jobs.server.schema_words import (
    FLAG,
    MAYBE_FLAG,
    MAYBE_NUMBER,
    MAYBE_TEXT,
    NUMBER,
    TEXT,
    TIER,
    field_of,
    named,
    object_of,
)

_ANYTHING: JsonObject = {"type": "object"}
_DECIMAL: JsonObject = {"type": "number"}
_ITEMS: JsonObject = {"type": "array", "minItems": 1, "items": {"type": "object"}}
_TOOL = object_of(
    {
        "type": {"const": "function"},
        "name": TEXT,
        "description": MAYBE_TEXT,
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
    optional=("description", "parameters", "strict"),
)
_CHOICE: JsonObject = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        object_of({"type": {"const": "function"}, "name": TEXT}),
    ]
}
_FORMAT: JsonObject = {
    "type": "object",
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "name": MAYBE_TEXT,
        "description": MAYBE_TEXT,
        "schema": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["type"],
    "additionalProperties": False,
}
_TEXT = object_of(
    {"format": {"anyOf": [_FORMAT, {"type": "null"}]}, "verbosity": {"enum": ["medium", None]}},
    optional=("format", "verbosity"),
)
_REASONING = object_of(
    {
        "effort": {"enum": [*EFFORTS, None]},
        "summary": {"enum": ["auto", None]},
        "generate_summary": {"enum": ["auto", None]},
    },
    optional=("effort", "summary", "generate_summary"),
)
_METADATA: JsonObject = {"type": ["object", "null"], "maxProperties": 16, "additionalProperties": TEXT}
_OWN: JsonObject = {
    "service_tier": TIER,
    "input": {"anyOf": [TEXT, _ITEMS], "description": "A text, or items: messages of text, calls, outputs."},
    "instructions": MAYBE_TEXT | {"description": "The system's message of this response alone."},
    "max_output_tokens": field_of("max_tokens"),
    "previous_response_id": MAYBE_TEXT | {"description": "The response that this one goes on from."},
    "tools": {"type": ["array", "null"], "items": _TOOL},
    "tool_choice": _CHOICE,
    "text": {"anyOf": [_TEXT, {"type": "null"}]},
    "reasoning": {"anyOf": [_REASONING, {"type": "null"}]},
    "include": {"type": ["array", "null"], "items": {"enum": [*INCLUDED]}},
    "top_logprobs": field_of("logprobs"),
    "metadata": _METADATA,
    "store": MAYBE_FLAG | {"description": "Whether it can be read later; true by default."},
    "background": MAYBE_FLAG | {"description": "Answer at once, and be asked later."},
    "stream": MAYBE_FLAG,
    "stream_options": {
        "anyOf": [
            object_of({"include_obfuscation": FLAG}, optional=("include_obfuscation",)),
            {"type": "null"},
        ]
    },
}
_BODY: JsonObject = {
    "type": "object",
    "properties": {
        name: _OWN[name] if name in _OWN else field_of(name) if name in FIELDS else {}
        for name in sorted(KEYS)
    },
    "required": ["input"],
    "additionalProperties": False,
}
_STATUS: JsonObject = {"enum": ["in_progress", "completed", "incomplete"]}
_TOKEN: JsonObject = {
    "token": TEXT, "logprob": {"type": ["number", "null"]}, "bytes": {"type": "array", "items": NUMBER},
}  # fmt: skip
_LOGPROB = object_of(_TOKEN | {"top_logprobs": {"type": "array", "items": object_of(_TOKEN)}})
_OUTPUT_TEXT = object_of(
    {
        "type": {"const": "output_text"},
        "text": TEXT,
        "annotations": {"type": "array", "maxItems": 0},
        "logprobs": {"type": "array", "items": _LOGPROB},
    }
)
_INPUT_TEXT = object_of({"type": {"const": "input_text"}, "text": TEXT})
_MESSAGE = object_of(
    {
        "id": TEXT,
        "type": {"const": "message"},
        "status": _STATUS,
        "role": {"enum": [*ROLES]},
        "content": {"type": "array", "items": {"anyOf": [_OUTPUT_TEXT, _INPUT_TEXT]}},
    }
)
_THOUGHTS = object_of(
    {
        "id": TEXT,
        "type": {"const": "reasoning"},
        "status": _STATUS,
        "summary": {"type": "array", "maxItems": 0},
        "content": {
            "type": "array",
            "items": object_of({"type": {"const": "reasoning_text"}, "text": TEXT}),
        },
        "encrypted_content": {"type": "null"},
    }
)
_CALL = object_of(
    dict.fromkeys(("id", "call_id", "name", "arguments"), TEXT)
    | {"type": {"const": "function_call"}, "status": _STATUS}
)
_OUTPUT = object_of(
    dict.fromkeys(("id", "call_id", "output"), TEXT)
    | {"type": {"const": "function_call_output"}, "status": _STATUS}
)
_USAGE = object_of(
    {
        "input_tokens": NUMBER,
        "input_tokens_details": object_of({"cached_tokens": NUMBER, "cache_write_tokens": NUMBER}),
        "output_tokens": NUMBER,
        "output_tokens_details": object_of({"reasoning_tokens": NUMBER}),
        "total_tokens": NUMBER,
    }
)
_ITEM: JsonObject = {"anyOf": [_MESSAGE, _THOUGHTS, _CALL, _OUTPUT]}
_RESPONSE = object_of(
    dict.fromkeys(("id", "model"), TEXT)
    | dict.fromkeys(("instructions", "previous_response_id", "stop_reason"), MAYBE_TEXT)
    | dict.fromkeys(("completed_at", "max_output_tokens", "seed"), MAYBE_NUMBER)
    | dict.fromkeys(("created_at", "top_logprobs"), NUMBER)
    | dict.fromkeys(("background", "parallel_tool_calls", "store"), FLAG)
    | {"service_tier": {"enum": ["default", "flex"]}}
    | dict.fromkeys(REPEATED, _DECIMAL)
    | dict.fromkeys(("metadata", "reasoning", "text"), _ANYTHING)
    | {
        "object": {"const": "response"},
        "status": {"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
        "error": {"anyOf": [{"type": "null"}, object_of({"code": TEXT, "message": TEXT})]},
        "incomplete_details": {"anyOf": [{"type": "null"}, object_of({"reason": TEXT})]},
        "max_tool_calls": {"type": "null"},
        "output": {"type": "array", "items": named("ResponseItem")},
        "tool_choice": _CHOICE,
        "tools": {"type": "array", "items": _TOOL},
        "truncation": {"const": "disabled"},
        "usage": {"anyOf": [{"type": "null"}, _USAGE]},
    }
)
RESPONSES_SCHEMAS: dict[str, JsonObject] = {
    "ResponseRequest": _BODY,
    "Response": _RESPONSE,
    "ResponseItem": _ITEM,
    "ResponseItems": object_of(
        {
            "object": {"const": "list"},
            "data": {"type": "array", "items": named("ResponseItem")},
            "first_id": MAYBE_TEXT,
            "last_id": MAYBE_TEXT,
            "has_more": FLAG,
        }
    ),
    "ResponseDeleted": object_of({"id": TEXT, "object": {"const": "response"}, "deleted": {"const": True}}),
}
"""Schemas by name."""
