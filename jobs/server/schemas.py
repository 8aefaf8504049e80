"""JSON schemas of requests and responses for /openapi.json.

Schemas of bodies are generated from the parser's tables, with the bounds of GenerationParams.
"""

from nightmill.jobs.base.contract import JobState, JsonObject, StopReason
from nightmill.jobs.formats.openai import CHAT, COMPLETIONS, MAX_PROMPTS, URLS, body_keys
from nightmill.jobs.formats.refusals import REFUSED
from nightmill.jobs.formats.results import READ
from nightmill.jobs.reply.batch_status import BatchState
from nightmill.jobs.request.fields import FIELDS, OF_A_BATCH
from nightmill.jobs.request.limits import HELP, LIMIT_KEYS
from nightmill.jobs.server.anthropic.schemas import ANTHROPIC_SCHEMAS
from nightmill.jobs.server.completions import STREAM_OPTIONS
from nightmill.jobs.server.embedding_schemas import EMBEDDING_SCHEMAS
from nightmill.jobs.server.native import DELIVERY, JOB_FIELDS
from nightmill.jobs.server.responses.schemas import RESPONSES_SCHEMAS
from nightmill.jobs.server.schema_words import FLAG as _FLAG
from nightmill.jobs.server.schema_words import MAYBE_FLAG as _MAYBE_FLAG
from nightmill.jobs.server.schema_words import MAYBE_NUMBER as _MAYBE_NUMBER
from nightmill.jobs.server.schema_words import MAYBE_TEXT as _MAYBE_TEXT
from nightmill.jobs.server.schema_words import NUMBER as _NUMBER
from nightmill.jobs.server.schema_words import TEXT, TIER, list_of, named, several
from nightmill.jobs.server.schema_words import TIME as _TIME
from nightmill.jobs.server.schema_words import field_of as _field
from nightmill.jobs.server.schema_words import object_of as _object
from nightmill.jobs.server.tiers import FIELD, Tier
from nightmill.jobs.server.token_endpoints import TOKENIZE
from nightmill.jobs.sql.files import UPLOADED, WRITTEN
from nightmill.jobs.sql.http_batches import HttpStatus


def _page_of(name: str) -> JsonObject:
    return list_of(named(name), first_id=_MAYBE_TEXT, last_id=_MAYBE_TEXT, has_more=_FLAG)


# -- what is taken -------------------------------------------------------------------------------

_MESSAGES: JsonObject = {"type": "array", "minItems": 1, "items": {"type": "object"}}
_PROMPTS: JsonObject = {"prompt": {"type": ["string", "array"]}, "messages": _MESSAGES}


_STREAM_OPTIONS = _object(
    dict.fromkeys(STREAM_OPTIONS, _FLAG),
    optional=STREAM_OPTIONS,
)


def _openai_body(url: str) -> JsonObject:
    """Build the schema of a body for one of OpenAI's endpoints; keys without a schema are accepted and have
    no effect."""
    known = _PROMPTS | {"max_completion_tokens": _field("max_tokens"), "stream": _FLAG}
    known |= {"stream_options": _STREAM_OPTIONS, "best_of": _field("n"), FIELD: TIER}
    known |= {name: {"enum": [None, *refusal.neutral]} for name, refusal in REFUSED.items()}
    known |= {"prompt": several(MAX_PROMPTS)}
    ours = FIELDS.keys() - {"metadata"}  # OpenAI's own has no effect
    if url == CHAT:
        ours -= {"logprobs"}
        known |= {"logprobs": _FLAG, "top_logprobs": _field("logprobs")}
    properties = {
        name: _field(name) if name in ours else known.get(name, {}) for name in sorted(body_keys(url))
    }
    made: JsonObject = {
        "type": "object",
        "properties": properties,
        "required": ["messages" if url == CHAT else "prompt"],
        "additionalProperties": False,
    }
    return made if url == CHAT else made | _nothing_or_echo(properties)


def _nothing_or_echo(properties: JsonObject) -> JsonObject:
    """Allow max_tokens 0 together with echo; changes `properties`."""
    limits = [name for name in ("max_tokens", "max_completion_tokens") if name in properties]
    for name in limits:
        properties[name] = properties[name] | {"minimum": 0}
    none = [{"properties": {name: {"const": 0}}, "required": [name]} for name in limits]
    return {"if": {"anyOf": none}, "then": {"properties": {"echo": {"const": True}}, "required": ["echo"]}}


def _tokenize_body() -> JsonObject:
    """Build the schema of a body of /tokenize: a text or a chat."""
    flags = dict.fromkeys(("add_special_tokens", "return_token_strs"), _MAYBE_FLAG)
    fields = {name: _field(name) for name in TOKENIZE & FIELDS.keys()}
    properties = flags | fields | {"prompt": TEXT, "messages": _PROMPTS["messages"]}
    return {
        "type": "object",
        "properties": properties,
        "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
        "additionalProperties": False,
    }


def _job_body() -> JsonObject:
    properties = {name: _field(name) for name in sorted(JOB_FIELDS & FIELDS.keys())} | _PROMPTS
    properties |= {"job_id": {"type": "string", "minLength": 1, "maxLength": 128}}
    properties["embed"] = properties["embed"] | {"type": ["boolean", "string", "array", "null"]}
    properties |= dict.fromkeys(sorted(DELIVERY - {"job_id", FIELD}), _FLAG) | {FIELD: TIER}
    made: JsonObject = {"type": "object", "properties": properties, "additionalProperties": False}
    return made | _nothing_or_echo(properties)


_LIMITS: JsonObject = {name: {"type": ["string", "null"], "description": HELP[name]} for name in LIMIT_KEYS}
_WEBHOOK: JsonObject = {"type": ["string", "null"], "format": "uri"}


def _night_body() -> JsonObject:
    properties = {name: _field(name) for name in sorted(OF_A_BATCH)}
    properties |= {"file": TEXT, "name": {"type": ["string", "null"], "minLength": 1, "maxLength": 200}}
    properties |= {"webhook": _WEBHOOK}
    properties |= _LIMITS
    return _object(properties, optional=tuple(name for name in properties if name != "file"))


_BATCH_BODY = _object(
    {
        "input_file_id": TEXT,
        "endpoint": {"enum": [*URLS]},
        "completion_window": {"type": "string", "examples": ["24h", "90m"]},
        "metadata": {"type": ["object", "null"], "additionalProperties": TEXT},
        "webhook": _WEBHOOK,
    },
    optional=("metadata", "webhook"),
)

# -- what is answered ----------------------------------------------------------------------------

_USAGE = _object(
    dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _NUMBER)
    | {
        "prompt_tokens_details": _object({"cached_tokens": _NUMBER}),
        "completion_tokens_details": _object({"reasoning_tokens": _NUMBER}),
    }
)
_REASON: JsonObject = {"enum": ["stop", "length", "tool_calls"]}
_STOP_REASON: JsonObject = {"enum": [*map(str, StopReason), None]}
_MODEL = _object(
    {
        "id": TEXT,
        "object": {"const": "model"},
        "created": _NUMBER,
        "owned_by": TEXT,
        "max_model_len": _MAYBE_NUMBER,
        "loaded": {"type": "boolean"},
    }
)
_TOKEN_IDS: JsonObject = {"type": "array", "items": _NUMBER}
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
    "reasoning_unfinished": {"const": True},
}
"""Keys for texts with reasoning or tool calls."""
_LIKELY: JsonObject = {
    "token": TEXT, "id": _NUMBER, "logprob": {"type": ["number", "null"]},
    "bytes": {"type": "array", "items": _NUMBER},
}  # fmt: skip
_TOKEN = _object(_LIKELY | {"top": {"type": "array", "items": _object(_LIKELY)}})
_TOLD: JsonObject = {
    "logprobs": {"type": "array", "items": _TOKEN}, "logprob": {"type": "number"},
    "token_ids": _TOKEN_IDS, "prompt_token_ids": _TOKEN_IDS,
    "prompt_logprobs": {"type": "array", "items": _TOKEN},
}  # fmt: skip
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
        "request_id": _MAYBE_TEXT,
        "metadata": {"type": "object"},
        "params": {"type": "object"},
        "priority": _NUMBER,
        "scheduled_at": _TIME,
        "deadline_at": _TIME,
        "reused_from": _MAYBE_TEXT,
        "prior": _MAYBE_TEXT,
        "held": _FLAG,
        "text": _MAYBE_TEXT,
        "answers": {"type": "array", "items": _ANSWER},
        "embedding": {"type": "array", "items": {"type": "number"}},
        "relevance": {"type": "number"},
    }
    | _OUTCOME,
    optional=(*READ, "embedding", "relevance"),
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
    | {"rows_before": _MAYBE_NUMBER}
    | dict.fromkeys(("created_at", "scheduled_at", "deadline_at", "ended_at", "estimated_end"), _TIME)
    | {
        "object": {"const": "night"},
        "settings": {"type": "object"},
        "status": {"enum": [*map(str, HttpStatus)]},
        "state": {"enum": [*map(str, BatchState), None]},
        "tokens_per_second": {"type": ["number", "null"]},
        "budget": {"type": ["object", "null"], "additionalProperties": {"type": "number"}},
        "spent": {"type": "object", "additionalProperties": {"type": "number"}},
        "max_failures": {"type": ["number", "null"]},
        "stopped_because": _MAYBE_TEXT,
        "unlisted_errors": _NUMBER,
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
    ends: JsonObject = {"logprobs": {"type": ["object", "null"]}, "finish_reason": _REASON, "seed": _NUMBER}
    of_choice: JsonObject = {"token_ids": _TOKEN_IDS}
    of_prompt: JsonObject = {
        "prompt_token_ids": _TOKEN_IDS,
        "prompt_logprobs": {"type": "array", "items": {"type": ["object", "null"]}},
    }
    if kind == "text_completion":
        of_choice, of_prompt = of_choice | of_prompt, {}
    else:
        of_choice["reasoning_unfinished"] = {"const": True}
    choice = _object({"index": _NUMBER} | content | ends | of_choice, optional=("seed", *of_choice))
    return _object(
        of_prompt
        | {
            "id": TEXT,
            "object": {"const": kind},
            "created": _NUMBER,
            "model": TEXT,
            "service_tier": {"enum": [*map(str, Tier)]},
            "system_fingerprint": _MAYBE_TEXT,
            "choices": {"type": "array", "items": choice},
            "usage": _USAGE,
            "stop_reason": _STOP_REASON,
            "seed": _NUMBER,
        },
        optional=tuple(of_prompt),
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
    **EMBEDDING_SCHEMAS,
    **RESPONSES_SCHEMAS,
    **ANTHROPIC_SCHEMAS,
    "TokenizeRequest": _tokenize_body(),
    "Tokens": _object(
        {
            "count": _NUMBER,
            "max_model_len": _MAYBE_NUMBER,
            "tokens": _TOKEN_IDS,
            "token_strs": {"type": ["array", "null"], "items": TEXT},
        }
    ),
    "DetokenizeRequest": _object({"model": _MAYBE_TEXT, "tokens": _TOKEN_IDS}, optional=("model",)),
    "Detokenized": _object({"prompt": TEXT}),
    "TokenizerInfo": _object(
        dict.fromkeys(("bos_token", "eos_token", "pad_token", "chat_template"), _MAYBE_TEXT)
        | {
            "tokenizer_class": TEXT,
            "model_max_length": _MAYBE_NUMBER,
            "vocab_size": _NUMBER,
            "add_bos_token": _FLAG,
        }
    ),
    "Model": _MODEL,
    "Models": list_of(named("Model")),
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
    "LimitsRequest": _object(_LIMITS, optional=LIMIT_KEYS),
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
"""Schemas by name."""
