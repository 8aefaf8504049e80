"""Schemas of requests and responses of /v1/messages for /openapi.json."""

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.request.effort import EFFORTS
from nightmill.jobs.request.fields import FIELDS
from nightmill.jobs.server.anthropic.request import KEYS, THINKING
from nightmill.jobs.server.anthropic.turns import ROLES
from nightmill.jobs.server.schema_words import (
    MAYBE_NUMBER,
    MAYBE_TEXT,
    NUMBER,
    TEXT,
    TIER,
    field_of,
    object_of,
)

_BLOCKS: JsonObject = {"type": "array", "items": {"type": "object", "required": ["type"]}}
_MESSAGE = object_of({"role": {"enum": [*ROLES]}, "content": {"anyOf": [TEXT, _BLOCKS]}})
_TOOL: JsonObject = {
    "type": "object",
    "properties": {
        "type": {"enum": ["custom", None]},
        "name": TEXT,
        "description": MAYBE_TEXT,
        "input_schema": {"type": "object"},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["name", "input_schema"],
}
_CHOICE = object_of(
    {
        "type": {"enum": ["auto", "any", "tool", "none"]},
        "name": MAYBE_TEXT,
        "disable_parallel_tool_use": {"type": ["boolean", "null"]},
    },
    optional=("name", "disable_parallel_tool_use"),
)
_THINKING = object_of(
    {
        "type": {"enum": [*THINKING]},
        "budget_tokens": MAYBE_NUMBER | {"minimum": 0},
        "display": {"enum": ["summarized", None]},
    },
    optional=("budget_tokens", "display"),
)
_FORMAT = object_of({"type": {"const": "json_schema"}, "schema": {"type": "object"}})
_OUTPUT = object_of(
    {"effort": {"enum": [*EFFORTS, None]}, "format": {"anyOf": [_FORMAT, {"type": "null"}]}},
    optional=("effort", "format"),
)
_OWN: JsonObject = {
    "service_tier": TIER,
    "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
    "system": {"anyOf": [TEXT, _BLOCKS, {"type": "null"}]},
    "max_tokens": field_of("max_tokens") | {"type": "integer"},
    "stop_sequences": {"type": ["array", "null"], "items": TEXT},
    "tools": {"type": ["array", "null"], "items": _TOOL},
    "tool_choice": {"anyOf": [_CHOICE, {"type": "null"}]},
    "thinking": {"anyOf": [_THINKING, {"type": "null"}]},
    "output_config": {"anyOf": [_OUTPUT, {"type": "null"}]},
    "output_format": {"anyOf": [_FORMAT, {"type": "null"}]},
    "stream": {"type": ["boolean", "null"]},
    "n": {"enum": [1, None]},
    "metadata": {},
}
_PROPERTIES: JsonObject = {
    name: _OWN[name] if name in _OWN else field_of(name) if name in FIELDS else {} for name in sorted(KEYS)
}
_BLOCK: JsonObject = {
    "anyOf": [
        object_of({"type": {"const": "text"}, "text": TEXT, "citations": {"type": "null"}}),
        object_of({"type": {"const": "thinking"}, "thinking": TEXT, "signature": TEXT}),
        object_of({"type": {"const": "tool_use"}, "id": TEXT, "name": TEXT, "input": {"type": "object"}}),
    ]
}
_USAGE = object_of(
    dict.fromkeys(
        ("input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"), NUMBER
    )
    | {"service_tier": {"enum": ["standard", "flex"]}}
)
_REASONS = ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
ANTHROPIC_SCHEMAS: dict[str, JsonObject] = {
    "MessageRequest": {
        "type": "object",
        "properties": _PROPERTIES,
        "required": ["max_tokens", "messages"],
        "additionalProperties": False,
    },
    "CountRequest": {
        "type": "object",
        "properties": _PROPERTIES,
        "required": ["messages"],
        "additionalProperties": False,
    },
    "TokenCount": object_of({"input_tokens": NUMBER}),
    "Message": object_of(
        {
            "id": TEXT,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": TEXT,
            "content": {"type": "array", "items": _BLOCK},
            "stop_reason": {"enum": _REASONS},
            "stop_sequence": MAYBE_TEXT,
            "usage": _USAGE,
            "seed": MAYBE_NUMBER,
        }
    ),
    "MessageError": object_of(
        {
            "type": {"const": "error"},
            "error": object_of({"message": TEXT, "type": TEXT, "param": MAYBE_TEXT, "code": MAYBE_TEXT}),
            "request_id": {"type": "null"},
        }
    ),
}
"""Schemas by name."""
