"""A key that may only read changes nothing, on any path, not even what a key of the same name owns."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import select
from starlette.routing import Route

from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.formats.responses.request import read_response
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.server.app import make_app
from nightmill.jobs.server.files import PREFIX
from nightmill.jobs.server.keys import ApiKeys
from nightmill.jobs.sql.http_tables import FileRow, HttpBatchRow
from nightmill.jobs.sql.tables import JobRow
from tests.support.servers import wait_until
from tests.unit.server.browser import Browser
from tests.unit.server.conftest import Server
from tests.unit.server.openai_batches import submit

OWNS, READS = "bob-has-a-long-key", "bob-only-reads-here"
KEYS = f"bob={OWNS}, bob:read={READS}"
HARMLESS = {
    "/sign-in", "/sign-out", "/tokenize", "/detokenize", "/v1/messages/count_tokens",
}  # fmt: skip
"""They are posted to and change no row."""
PROMPT = {"prompt": "Once", "model": "model"}


@pytest.fixture
def server(start: Callable[..., Any]) -> Iterator[Server]:
    with start(keys=KEYS, worker=False) as server:
        yield server


def rows(server: Server) -> list[list[str]]:
    """Jobs, files, and which batches there are. (The keeper writes down which server has a batch.)"""
    with server.client.database.read() as connection:
        return [
            sorted(map(str, connection.execute(query).all()))
            for query in (select(JobRow.__table__), select(FileRow.__table__), select(HttpBatchRow.id))
        ]


def test_a_key_that_may_only_read_is_refused_on_all_paths_that_change_something(server: Server) -> None:
    client = server.client
    job = client.enqueueing.enqueue_spec(JobSpec.parse("of bob"), owner="bob")
    ended = client.enqueueing.enqueue_spec(JobSpec.parse("of bob"), owner="bob")
    client.cancel(ended)
    response = client.enqueueing.enqueue_spec(read_response({"input": "of bob"}, JobSpec()).spec, owner="bob")
    owner = server.openai(OWNS)
    batch = submit(owner, {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": PROMPT})
    wait_until(lambda: owner.batches.retrieve(batch.id).status == "in_progress")
    named = {
        "job_id": job,
        "file_id": batch.input_file_id,
        "batch_id": batch.id,
        "response_id": f"resp_{response}",
    }
    form = {"id": ended, "name": batch.id, "file": batch.input_file_id, "kind": "plain", "prompt": "x"}
    body = {
        "/v1/batches": {
            "input_file_id": batch.input_file_id, "endpoint": "/v1/completions", "completion_window": "24h",
        },
        "/v1/night": {"file": batch.input_file_id},
        "/v1/night/{batch_id}/limits": {"budget": {"tokens": 1000}},
        "/v1/responses": {"model": "model", "input": "x"},
        "/v1/embeddings": {"model": "model", "input": "x"},
        "/v1/rerank": {"query": "x", "documents": ["x"]},
        "/v2/rerank": {"query": "x", "documents": ["x"]},
        "/v1/messages": {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]},
        "/v1/chat/completions": {"model": "model", "messages": [{"role": "user", "content": "x"}]},
    }  # fmt: skip
    app = make_app(client, ApiKeys.parse(KEYS))
    routes = [
        (method, route.path)
        for route in app.routes
        if isinstance(route, Route)
        for method in sorted((route.methods or set()) - {"GET", "HEAD"})
        if route.path not in HARMLESS
    ]
    assert len(routes) >= 20
    browser, before = Browser(server, READS), rows(server)
    refused = {}
    with server.http(READS) as http:
        for method, path in routes:
            where = path.format(**named)
            if path.startswith(("/v1", "/v2")) or path == "/execute":
                if path == "/v1/files":
                    files = {"file": ("a.jsonl", b"{}")}
                    answer = http.post(where, data={"purpose": "batch"}, files=files)
                elif method == "POST":
                    answer = http.post(where, json=body.get(path, PROMPT))
                else:
                    answer = http.request(method, where)
            elif path == "/hand-in":
                data = {"form_token": browser.token("/try"), "purpose": "batch"}
                answer = browser.http.post(path, data=data, files={"file": ("a.jsonl", b"{}")})
            else:
                data = form | {"id": job if path == "/job/cancel" else ended}
                answer = browser.send("/try", path, **data)
            refused[method, path] = answer.status_code
    assert refused == dict.fromkeys(routes, 403)
    assert rows(server) == before
    assert owner.batches.retrieve(batch.id).status == "in_progress"


def test_the_other_key_of_the_name_may_change_what_is_the_names(server: Server) -> None:
    job = server.client.enqueueing.enqueue_spec(JobSpec.parse("of bob"), owner="bob")
    with server.http(READS) as http:
        assert http.get(f"/v1/jobs/{job}").status_code == 200
    with server.http(OWNS) as http:
        assert http.delete(f"/v1/jobs/{job}").status_code == 200
        assert http.delete(f"/v1/files/{PREFIX}{IdSource().draw()}").status_code == 404
