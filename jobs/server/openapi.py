"""GET /openapi.json: the endpoints, what they take and what they answer, in the words of OpenAPI 3.1."""

import re
from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nightmill.jobs.contract import JobState, JsonObject
from nightmill.jobs.formats.openai import CHAT, COMPLETIONS
from nightmill.jobs.server.schemas import SCHEMAS, TEXT, named
from nightmill.jobs.sql.files import UPLOADED, WRITTEN

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
    ("POST", "/v1/batches"): ("Make a batch of a file.", "BatchRequest", "Batch"),
    ("GET", "/v1/batches"): ("The caller's batches, newest first.", None, "Batches"),
    ("GET", "/v1/batches/{batch_id}"): ("A batch.", None, "Batch"),
    ("POST", "/v1/batches/{batch_id}/cancel"): ("Cancel a batch.", None, "Batch"),
    ("POST", "/v1/night"): ("Make a batch of a file, with settings for its rows.", "NightRequest", "Night"),
    ("GET", "/v1/night"): ("The caller's batches in our words, newest first.", None, "Nights"),
    ("GET", "/v1/night/{batch_id}"): ("How a batch goes.", None, "Night"),
    ("DELETE", "/v1/night/{batch_id}"): ("Cancel a batch.", None, "Night"),
    ("POST", "/v1/night/{batch_id}/retry"): ("Queue rows without a result again.", None, "Night"),
    ("POST", "/execute"): ("Generate, as a stream of events.", "JobRequest", None),
    ("POST", "/v1/generate"): ("Generate, and answer at the end or as a stream.", "JobRequest", "Job"),
    ("POST", "/v1/jobs"): ("Queue a job.", "JobRequest", "Job"),
    ("GET", "/v1/jobs"): ("The caller's jobs, newest first.", None, "Jobs"),
    ("GET", "/v1/jobs/{job_id}"): ("A job.", None, "Job"),
    ("DELETE", "/v1/jobs/{job_id}"): ("Cancel a job.", None, "Job"),
    ("GET", "/v1/jobs/{job_id}/events"): ("A job's text, as a stream of events.", None, None),
    ("GET", "/health"): ("Whether the process answers.", None, "Health"),
    ("GET", "/ready"): ("Whether jobs can be run.", None, "Ready"),
    ("GET", "/metrics"): ("Numbers for Prometheus; needs a key that may read everything.", None, None),
    ("GET", "/openapi.json"): ("This document.", None, None),
    ("GET", "/docs"): ("This document, as a page to be read.", None, None),
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
    "/v1/batches": {},
    "/v1/night": {},
}
"""What is read by pages, and by what the items may be chosen."""
_PAGE: JsonObject = {
    "limit": {"type": "integer", "minimum": 1},
    "after": TEXT,
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
            "schemas": SCHEMAS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(method: str, path: str, says: str, body: str | None, answer: str | None) -> JsonObject:
    answers: JsonObject = {"default": {"description": "An error.", "content": _json(named("Error"))}}
    if answer is not None:
        answers["2XX"] = {"description": says, "content": _json(named(answer))}
    if path in STREAMING:
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
