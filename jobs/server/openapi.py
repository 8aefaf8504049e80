"""GET /openapi.json: the endpoints with their schemas, in OpenAPI 3.1."""

import re
from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nightmill.jobs.base.contract import JobState, JsonObject
from nightmill.jobs.formats.embedding_requests import EMBEDDINGS
from nightmill.jobs.formats.openai import CHAT, COMPLETIONS
from nightmill.jobs.formats.responses.request import RESPONSES
from nightmill.jobs.server.anthropic.request import COUNT_TOKENS, MESSAGES
from nightmill.jobs.server.schema_words import TEXT, named
from nightmill.jobs.server.schemas import SCHEMAS
from nightmill.jobs.sql.files import UPLOADED, WRITTEN

ENDPOINTS: dict[tuple[str, str], tuple[str, str | None, str | None]] = {
    ("POST", "/v1/chat/completions"): ("Answer a chat.", "ChatRequest", "ChatCompletion"),
    ("POST", "/v1/completions"): ("Go on with a text.", "CompletionRequest", "Completion"),
    ("POST", RESPONSES): ("Answer a text or items, and keep the answer.", "ResponseRequest", "Response"),
    ("GET", "/v1/responses/{response_id}"): ("A response that is kept.", None, "Response"),
    ("DELETE", "/v1/responses/{response_id}"): ("Delete a response.", None, "ResponseDeleted"),
    ("POST", "/v1/responses/{response_id}/cancel"): ("Cancel a response.", None, "Response"),
    ("GET", "/v1/responses/{response_id}/input_items"): ("All that it answers.", None, "ResponseItems"),
    ("POST", MESSAGES): ("Answer a chat, as Anthropic's API does.", "MessageRequest", "Message"),
    ("POST", COUNT_TOKENS): ("How many tokens a message's prompt has.", "CountRequest", "TokenCount"),
    ("POST", EMBEDDINGS): ("The embeddings of texts.", "EmbeddingRequest", "Embeddings"),
    ("POST", "/v1/rerank"): ("Documents by relevance.", "RerankRequest", "Ranking"),
    ("POST", "/v2/rerank"): ("The same, for clients of Cohere.", "RerankRequest", "Ranking"),
    ("POST", "/tokenize"): ("The tokens of a text or a chat.", "TokenizeRequest", "Tokens"),
    ("POST", "/detokenize"): ("The text of tokens.", "DetokenizeRequest", "Detokenized"),
    ("GET", "/tokenizer_info"): ("A model's special tokens and chat template.", None, "TokenizerInfo"),
    ("GET", "/v1/models"): ("The models that live workers serve.", None, "Models"),
    ("GET", "/v1/models/{name}"): ("One of these models.", None, "Model"),
    ("POST", "/v1/files"): ("Upload a file.", "FileForm", "File"),
    ("GET", "/v1/files"): ("The caller's files, newest first.", None, "Files"),
    ("GET", "/v1/files/{file_id}"): ("A file, without its content.", None, "File"),
    ("DELETE", "/v1/files/{file_id}"): ("Delete a file.", None, "FileDeleted"),
    ("GET", "/v1/files/{file_id}/content"): ("A file's content.", None, None),
    ("POST", "/v1/batches"): ("Make a batch of a file.", "BatchRequest", "Batch"),
    ("GET", "/v1/batches"): ("The caller's batches, newest first.", None, "Batches"),
    ("GET", "/v1/batches/{batch_id}"): ("A batch.", None, "Batch"),
    ("POST", "/v1/batches/{batch_id}/cancel"): ("Cancel a batch.", None, "Batch"),
    ("POST", "/v1/night"): ("Make a batch of a file, with settings for its rows.", "NightRequest", "Night"),
    ("GET", "/v1/night"): ("The caller's batches in our words, newest first.", None, "Nights"),
    ("GET", "/v1/night/{batch_id}"): ("How a batch goes.", None, "Night"),
    ("DELETE", "/v1/night/{batch_id}"): ("Cancel a batch.", None, "Night"),
    ("POST", "/v1/night/{batch_id}/retry"): ("Queue rows without a result again.", None, "Night"),
    ("POST", "/v1/night/{batch_id}/limits"): ("Change a batch's limits.", "LimitsRequest", "Night"),
    ("POST", "/execute"): ("Generate, as a stream of events.", "JobRequest", None),
    ("POST", "/v1/generate"): ("Generate, and answer at the end or as a stream.", "JobRequest", "Job"),
    ("POST", "/v1/jobs"): ("Queue a job.", "JobRequest", "Job"),
    ("GET", "/v1/jobs"): ("The caller's jobs, newest first.", None, "Jobs"),
    ("DELETE", "/v1/jobs"): ("Cancel the jobs of a request with several prompts.", None, "Jobs"),
    ("GET", "/v1/jobs/{job_id}"): ("A job.", None, "Job"),
    ("DELETE", "/v1/jobs/{job_id}"): ("Cancel a job.", None, "Job"),
    ("GET", "/v1/jobs/{job_id}/events"): ("A job's text, as a stream of events.", None, None),
    ("GET", "/health"): ("Whether the process answers.", None, "Health"),
    ("GET", "/ready"): ("Whether jobs can be run.", None, "Ready"),
    ("GET", "/metrics"): ("Numbers for Prometheus; needs a key that may read everything.", None, None),
    ("GET", "/openapi.json"): ("This document.", None, None),
    ("GET", "/docs"): ("This document, as a page to be read.", None, None),
}
"""(summary, schema of the body, schema of the answer) by (method, path)."""
STREAMING = frozenset(
    {CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/v1/responses/{response_id}"}
    | {"/execute", "/v1/generate", "/v1/jobs/{job_id}/events"}
)
"""Endpoints that may answer with events."""
BYTES = frozenset({"/v1/files/{file_id}/content"})
"""Endpoints that answer with raw bytes."""
FORMS = frozenset({"FileForm"})
"""Bodies that are forms with a file."""
LISTS: dict[str, JsonObject] = {
    "/v1/jobs": {"state": {"enum": [*map(str, JobState)]}, "request": TEXT},
    "/v1/files": {"purpose": {"enum": [UPLOADED, WRITTEN]}},
    "/v1/batches": {},
    "/v1/night": {},
    "/v1/responses/{response_id}/input_items": {},
}
"""Paged endpoints with their filters."""
_PAGE: JsonObject = {
    "limit": {"type": "integer", "minimum": 1},
    "after": TEXT,
    "order": {"enum": ["asc", "desc"]},
}


def document() -> JsonObject:
    """Return the whole document."""
    paths: JsonObject = {}
    for (method, path), endpoint in ENDPOINTS.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, *endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Nightmill", "version": version("nightmill")},
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
        "security": [{}, {"key": []}, {"header": []}],
    }


def _operation(method: str, path: str, says: str, body: str | None, answer: str | None) -> JsonObject:
    error = "MessageError" if path.startswith(MESSAGES) else "Error"
    answers: JsonObject = {"default": {"description": "An error.", "content": _json(named(error))}}
    if answer is not None:
        answers["2XX"] = {"description": says, "content": _json(named(answer))}
    if path in STREAMING and (method == "GET") != (body is not None):
        content = answers.setdefault("2XX", {"description": says, "content": {}})["content"]
        content["text/event-stream"] = {"schema": TEXT}
    if path in BYTES:
        content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        answers["2XX"] = {"description": says, "content": content}
    made: JsonObject = {"summary": says, "responses": answers}
    made["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": TEXT}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    if (method, path) == ("DELETE", "/v1/jobs"):
        made["parameters"].append({"name": "request", "in": "query", "required": True, "schema": TEXT})
    if method == "GET" and path in LISTS:
        asked = _PAGE | LISTS[path]
        made["parameters"] += [{"name": name, "in": "query", "schema": asked[name]} for name in asked]
    if body is not None:
        kind = "multipart/form-data" if body in FORMS else "application/json"
        made["requestBody"] = {"required": True, "content": {kind: {"schema": named(body)}}}
    return made


def _json(schema: JsonObject) -> JsonObject:
    return {"application/json": {"schema": schema}}


async def answer(request: Request) -> Response:
    """GET /openapi.json."""
    return JSONResponse(document())
