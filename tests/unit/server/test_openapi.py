"""/openapi.json says what the server does: its endpoints, what they take, what they answer."""

import base64
import hashlib
import html
import re
from collections.abc import Callable, Iterable
from typing import Any

import httpx2
import pytest
from jsonschema import Draft202012Validator
from starlette.routing import Route

from nightmill.jobs.server.app import make_app
from nightmill.jobs.server.keys import ApiKeys
from nightmill.jobs.server.openapi import ENDPOINTS, document
from nightmill.worker.assembly.model import demo_model
from tests.support.servers import wait_until
from tests.unit.server.conftest import Server

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
PLAIN: dict[str, Any] = {"prompt": "Once"}
INPUT: dict[str, Any] = {"input": "Hello", "max_output_tokens": 3}
BATCH: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "1h", "metadata": {"a": "b"}}
ROWS = b"""{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
{"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": 5}}
"""


def ended_batch(http: httpx2.Client, path: str) -> httpx2.Response | None:
    answer = http.get(path)
    return answer if answer.json()["status"] == "completed" else None


def validator(name: str) -> Draft202012Validator:
    """Of one schema of the document."""
    return Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": document()["components"]}
    )


def test_it_names_the_endpoints_that_there_are(server: Server) -> None:
    routes = make_app(server.client, ApiKeys.parse(None)).routes
    there = {
        (method, route.path.replace(":path", ""))
        for route in routes
        if isinstance(route, Route) and route.include_in_schema
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert set(ENDPOINTS) == there
    with server.http(None) as http:
        assert http.get("/openapi.json").json() == document()


def test_its_schemas_are_schemas_and_all_that_are_named_are_there() -> None:
    said = document()
    for name, schema in said["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema)
        assert validator(name).is_valid({}) in (True, False)  # every reference leads somewhere
    used = {name for _, *names in ENDPOINTS.values() for name in names if name}
    assert used <= said["components"]["schemas"].keys()


RERANK = {"query": "a", "documents": ["b"], "return_documents": True}


def test_answers_are_as_it_says(start: Callable[..., Any]) -> None:
    tokenizer_files = f"model={demo_model()}"
    with start(tokenizer_files=tokenizer_files) as server, server.http() as http:
        short, later = {"max_tokens": 3}, {"scheduled_at": "8h"}
        job = http.post("/v1/jobs", json=PLAIN | short).json()
        cancelled = http.post("/v1/jobs", json=PLAIN | later).json()["id"]
        server.client.wait(job["id"], timeout=240)
        several = http.post("/v1/completions", json=PLAIN | short | {"prompt": ["a", [1, 2]], "logprobs": 1})
        validator("Completion").validate(several.json())
        answers = {
            ("POST", "/v1/chat/completions"): http.post(
                "/v1/chat/completions", json=CHAT | {"max_tokens": 3}
            ),
            ("POST", "/v1/completions"): http.post("/v1/completions", json=PLAIN | {"max_tokens": 3}),
            ("POST", "/v1/responses"): (response := http.post("/v1/responses", json=INPUT)),
            ("GET", "/v1/responses/{response_id}"): http.get(f"/v1/responses/{response.json()['id']}"),
            ("GET", "/v1/responses/{response_id}/input_items"): http.get(
                f"/v1/responses/{response.json()['id']}/input_items"
            ),
            ("POST", "/v1/responses/{response_id}/cancel"): http.post(
                f"/v1/responses/{response.json()['id']}/cancel"
            ),
            ("DELETE", "/v1/responses/{response_id}"): http.delete(f"/v1/responses/{response.json()['id']}"),
            ("POST", "/v1/embeddings"): http.post(
                "/v1/embeddings", json={"model": "model", "input": ["a", [1, 2]], "pooling": "last"}
            ),
            ("POST", "/v1/rerank"): (
                ranked := http.post(
                    "/v1/rerank", json={"query": "a", "documents": ["b"], "return_documents": True}
                )
            ),
            ("POST", "/v2/rerank"): ranked,
            ("POST", "/v1/messages"): http.post("/v1/messages", json=CHAT | {"max_tokens": 3}),
            ("POST", "/v1/messages/count_tokens"): http.post("/v1/messages/count_tokens", json=CHAT),
            ("POST", "/tokenize"): http.post("/tokenize", json={"messages": CHAT["messages"]}),
            ("POST", "/detokenize"): http.post("/detokenize", json={"tokens": [1, 2]}),
            ("GET", "/tokenizer_info"): http.get("/tokenizer_info"),
            ("GET", "/v1/models"): http.get("/v1/models"),
            ("GET", "/v1/models/{name}"): http.get("/v1/models/model"),
            ("POST", "/v1/generate"): http.post("/v1/generate", json=PLAIN | short),
            ("GET", "/v1/jobs"): http.get("/v1/jobs"),
            ("GET", "/v1/jobs/{job_id}"): http.get(f"/v1/jobs/{job['id']}"),
            ("POST", "/v1/jobs"): http.post("/v1/jobs", json=PLAIN | later),
            ("DELETE", "/v1/jobs/{job_id}"): http.delete(f"/v1/jobs/{cancelled}"),
            ("DELETE", "/v1/jobs"): http.delete(f"/v1/jobs?request={several.headers['x-request-id']}"),
            ("POST", "/v1/files"): (
                uploaded := http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("x", ROWS)})
            ),
            ("GET", "/v1/files"): http.get("/v1/files"),
            ("GET", "/v1/files/{file_id}"): http.get(f"/v1/files/{uploaded.json()['id']}"),
            ("POST", "/v1/batches"): (
                batch := http.post("/v1/batches", json=BATCH | {"input_file_id": uploaded.json()["id"]})
            ),
            ("GET", "/v1/batches"): http.get("/v1/batches"),
            ("GET", "/v1/batches/{batch_id}"): (
                ended := wait_until(lambda: ended_batch(http, f"/v1/batches/{batch.json()['id']}"))
            ),
            ("POST", "/v1/night"): (
                night := http.post("/v1/night", json={"file": uploaded.json()["id"], "scheduled_at": "8h"})
            ),
            ("GET", "/v1/night"): http.get("/v1/night"),
            ("POST", "/v1/night/{batch_id}/retry"): http.post(f"/v1/night/{ended.json()['id']}/retry"),
            ("POST", "/v1/night/{batch_id}/limits"): http.post(
                f"/v1/night/{ended.json()['id']}/limits", json={"budget": "1G-tokens"}
            ),
            ("GET", "/v1/night/{batch_id}"): http.get(f"/v1/night/{ended.json()['id']}"),
            ("DELETE", "/v1/night/{batch_id}"): http.delete(f"/v1/night/{night.json()['id']}"),
            ("POST", "/v1/batches/{batch_id}/cancel"): http.post(f"/v1/batches/{night.json()['id']}/cancel"),
            ("DELETE", "/v1/files/{file_id}"): wait_until(
                lambda: (gone := http.delete(f"/v1/files/{uploaded.json()['id']}")).status_code < 300 and gone
            ),
            ("GET", "/health"): http.get("/health"),
            ("GET", "/ready"): http.get("/ready"),
        }
        assert set(answers) == {endpoint for endpoint, (_, _, schema) in ENDPOINTS.items() if schema}
        for endpoint, answer in answers.items():
            assert answer.status_code < 300, (endpoint, answer.text)
            validator(ENDPOINTS[endpoint][2] or "").validate(answer.json())
        for answer in (http.post("/v1/embeddings", json={}), http.get("/v1/jobs/x"), http.get("/nothing")):
            validator("Error").validate(answer.json())
        validator("MessageError").validate(http.post("/v1/messages", json={}).json())


BODIES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"max_tokens": 1, "temperature": 0, "top_p": 1, "seed": 0, "stop": "x"}, True),
    ({"stop": ["x", "y"], "ignore_eos": False, "top_k": None}, True),
    ({"stop_token_ids": 3, "min_tokens": 0}, True),
    ({"stop_token_ids": [3, 4]}, True),
    ({"stop_token_ids": ["x"]}, False),
    ({"seed": -1, "top_k": -1, "include_stop_str_in_output": True}, True),
    ({"seed": -2}, False),
    ({"top_k": -2}, False),
    ({"max_tokens": 0}, False),
    ({"max_tokens": -1}, False),
    ({"max_tokens": 1.5}, False),
    ({"max_tokens": 1_000_001}, False),
    ({"temperature": -0.1}, False),
    ({"temperature": "warm"}, False),
    ({"top_p": 0}, False),
    ({"min_p": 1.1}, False),
    ({"ignore_eos": 1}, False),
    ({"stop": [1]}, False),
    ({"stream": "yes"}, False),
    ({"unknown": 1}, False),
]


def check(server: Server, path: str, cases: Iterable[tuple[dict[str, Any], bool]]) -> None:
    """What the schema says of each body, and the server's answer to it, are what is expected."""
    schema = validator(ENDPOINTS["POST", path][1] or "")
    wrong = []
    with server.http() as http:
        for body, good in cases:
            answer = http.post(path, json=body)
            if (schema.is_valid(body), answer.status_code == 200) != (good, good):
                wrong.append((path, body, answer.text))
    assert wrong == []


@pytest.mark.parametrize(
    ("path", "asked"),
    [("/v1/chat/completions", CHAT), ("/v1/completions", PLAIN), ("/v1/generate", PLAIN),
     ("/v1/generate", CHAT)],
)  # fmt: skip
def test_bodies_that_it_allows_are_taken_and_others_refused(
    server: Server, path: str, asked: dict[str, Any]
) -> None:
    check(server, path, [(asked | {"max_tokens": 2} | more, good) for more, good in BODIES])


_MORE: list[tuple[str, dict[str, Any], bool]] = [
    ("/v1/responses", {}, True),
    ("/v1/responses", {"input": [{"role": "user", "content": "Hello"}], "temperature": 0}, True),
    ("/v1/responses", {"text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}}, True),
    ("/v1/responses", {"store": False, "metadata": {"a": "b"}, "top_logprobs": 2, "include": []}, True),
    ("/v1/responses", {"tools": [{"type": "function", "name": "a"}], "tool_choice": "auto"}, True),
    ("/v1/responses", {"tools": [{"type": "web_search"}]}, False),
    ("/v1/responses", {"reasoning": {"effort": "extreme"}}, False),
    ("/v1/responses", {"input": []}, False),
    ("/v1/responses", {"top_logprobs": 99}, False),
    ("/v1/responses", {"include": ["x"]}, False),
    ("/v1/responses", {"unknown": 1}, False),
    ("/v1/messages", {}, True),
    ("/v1/messages", {"system": "Be short.", "stop_sequences": ["x"], "thinking": None}, True),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
    ("/v1/messages", {"tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": "auto"}}, True),
    ("/v1/messages", {"messages": [{"role": "king", "content": "a"}]}, False),
    ("/v1/messages", {"messages": []}, False),
    ("/v1/messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, False),
    ("/v1/messages", {"max_tokens": 0}, False),
    ("/v1/messages", {"stream": "yes"}, False),
    ("/v1/messages", {"unknown": 1}, False),
]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_bodies_of_other_apis_that_it_allows_are_taken_and_others_refused(server: Server, path: str) -> None:
    asked = INPUT if path == "/v1/responses" else CHAT | {"max_tokens": 2}
    check(server, path, [(asked | more, good) for of, more, good in _MORE if of == path])


PROMPTS: list[tuple[Any, bool]] = [
    ("a", True), ([1, 2], True), (["a", "b"], True), ([[1], [2, 3]], True),
    ([], False), (5, False), (["a", 5], False), ([[1], []], False), ([[["a"]]], False), ([None], False),
    (["a"] * 1_025, False),
]  # fmt: skip


@pytest.mark.parametrize("prompts", [PROMPTS, pytest.param([(["a"] * 1_024, True)], marks=pytest.mark.slow)],
                         ids=["some", "most"])  # fmt: skip
def test_prompts_that_it_allows_are_taken_and_others_refused(
    server: Server, prompts: list[tuple[Any, bool]]
) -> None:
    check(server, "/v1/completions", [({"prompt": one, "max_tokens": 1}, good) for one, good in prompts])


OF_COMPLETIONS: list[tuple[dict[str, Any], bool]] = [
    ({"echo": True, "max_tokens": 0}, True),
    ({"echo": True, "max_completion_tokens": 0}, True),
    ({"echo": False, "max_tokens": 0}, False),
    ({"echo": True, "max_tokens": -1}, False),
    ({"stream": True, "stream_options": {"continuous_usage_stats": False}}, True),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, True),
    ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, False),
    ({"prompt_logprobs": None, "length_penalty": 1, "truncate_prompt_tokens": None}, True),
    ({"prompt_logprobs": 1}, True),
    ({"truncate_prompt_tokens": 5}, True),
    ({"return_token_ids": True}, True),
    ({"prompt_logprobs": 21}, False),
    ({"truncate_prompt_tokens": 0}, False),
    ({"return_tokens_as_token_ids": True}, False),
]


def test_what_it_says_of_completions_is_what_they_take(server: Server) -> None:
    asked = PLAIN | {"max_completion_tokens": None}
    check(server, "/v1/completions", [(asked | more, good) for more, good in OF_COMPLETIONS])


def test_the_page_shows_all_of_it_and_takes_nothing_from_elsewhere(server: Server) -> None:
    with server.http(None) as http:
        answer = http.get("/docs")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy
    style = answer.text.partition("<style>")[2].partition("</style>")[0]
    assert base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() in policy
    links = re.findall(r'(?:href|src)="([^"]*)"', answer.text)
    assert set(links) - {"openapi.json"} == {link for link in links if link.startswith("#")}
    assert {link[1:] for link in links if link.startswith("#")} <= set(
        re.findall(r'id="([^"]*)"', answer.text)
    )
    for (method, path), (says, *schemas) in ENDPOINTS.items():
        assert f"<code>{method} {path}</code>" in answer.text and says in html.unescape(answer.text)
        assert all(f'id="{name}"' in answer.text for name in schemas if name)
    assert "<script" not in answer.text and "style=" not in answer.text


def test_a_method_that_a_path_lacks_is_told_all_that_it_has(server: Server) -> None:
    with server.http() as http:
        for method, path, allowed in (
            ("PATCH", "/v1/jobs", "DELETE, GET, HEAD, POST"),
            ("POST", "/v1/jobs/x", "DELETE, GET, HEAD"),
            ("GET", "/execute", "POST"),
            ("GET", "/v1/batches/x/cancel", "POST"),
        ):
            answer = http.request(method, path)
            assert (answer.status_code, answer.headers["allow"]) == (405, allowed), (method, path)


def test_a_list_refuses_a_query_that_it_does_not_know(server: Server) -> None:
    with server.http() as http:
        for path in ("/v1/jobs", "/v1/files", "/v1/batches", "/v1/night"):
            answer = http.get(path, params={"limt": "5"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limt"), path
            assert "did you mean limit?" in answer.json()["error"]["message"], path
