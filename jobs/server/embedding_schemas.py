"""JSON schemas of requests and responses about embeddings and rankings, for /openapi.json."""

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.formats.embedding_requests import EMBEDDING_KEYS, ENCODINGS, MAX_INPUTS
from nightmill.jobs.formats.rerank import MAX_DOCUMENTS
from nightmill.jobs.request.fields import FIELDS
from nightmill.jobs.server.schema_words import (
    MAYBE_FLAG,
    MAYBE_TEXT,
    NUMBER,
    TEXT,
    TIER,
    field_of,
    list_of,
    object_of,
    several,
)
from nightmill.jobs.server.tiers import FIELD


def _body() -> JsonObject:
    known: JsonObject = {
        "input": several(MAX_INPUTS),
        "encoding_format": {"enum": [None, *ENCODINGS]},
        FIELD: TIER,
    }
    properties = {
        name: known[name] if name in known else field_of(name) if name in FIELDS else {}
        for name in sorted(EMBEDDING_KEYS)
    }
    return object_of(properties, optional=tuple(EMBEDDING_KEYS - {"input"}))


_DOCUMENT: JsonObject = {"anyOf": [TEXT, object_of({"text": TEXT})]}
_RERANK_BODY = object_of(
    {
        "model": MAYBE_TEXT,
        "query": TEXT,
        "documents": {"type": "array", "minItems": 1, "maxItems": MAX_DOCUMENTS, "items": _DOCUMENT},
        "top_n": {"type": ["integer", "null"], "minimum": 1},
        "return_documents": MAYBE_FLAG,
        "instruction": MAYBE_TEXT,
        "truncate_prompt_tokens": field_of("truncate_prompt_tokens"),
        "user": {},
        "truncation": {},
        FIELD: TIER,
    },
    optional=(
        "model",
        "top_n",
        "return_documents",
        "instruction",
        "truncate_prompt_tokens",
        "user",
        "truncation",
        FIELD,
    ),
)
_RANKED = object_of(
    {"index": NUMBER, "relevance_score": {"type": "number"}, "document": object_of({"text": TEXT})},
    optional=("document",),
)

EMBEDDING_SCHEMAS: dict[str, JsonObject] = {
    "EmbeddingRequest": _body(),
    "Embeddings": list_of(
        object_of(
            {
                "object": {"const": "embedding"},
                "index": NUMBER,
                "embedding": {"type": ["array", "string"], "items": {"type": "number"}},
            }
        ),
        model=TEXT,
        system_fingerprint=MAYBE_TEXT,
        usage=object_of(dict.fromkeys(("prompt_tokens", "total_tokens"), NUMBER)),
    ),
    "RerankRequest": _RERANK_BODY,
    "Ranking": object_of(
        {
            "id": TEXT,
            "object": {"const": "list"},
            "model": TEXT,
            "usage": object_of(dict.fromkeys(("prompt_tokens", "total_tokens"), NUMBER)),
            "results": {"type": "array", "items": _RANKED},
        }
    ),
}
"""Schemas by name."""
