"""OpenAI's embeddings, asked for with OpenAI's own client."""

import base64
import json
from typing import Any

import numpy as np
import openai
import pytest

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.request.fields import INTERACTIVE
from tests.support.servers import wait_until
from tests.unit.engine.by_definition import expected_embedding
from tests.unit.engine.scripted import make_request
from tests.unit.server.browser import Browser
from tests.unit.server.conftest import ALICE, BOB, Server
from tests.unit.worker.bench import PROMPT


def wanted(pooling: str = "last", **params: Any) -> bytes:
    places = range(0 if pooling == "mean" else len(PROMPT) - 1, len(PROMPT))
    return expected_embedding(make_request("j", PROMPT, embeds=places, embed=True, **params))


def bits(numbers: Any) -> bytes:
    return np.array(numbers, dtype="<f4").tobytes()


@pytest.fixture(autouse=True)
def made_for_embeddings(server: Server) -> None:
    server.bench.prompting.pooling = "last"


def test_texts_and_token_ids_become_embeddings_in_their_order(server: Server) -> None:
    client = server.openai()
    texts: Any = ["one", "two", [7, 8]]
    answer = client.embeddings.create(model="model", input=texts)  # which asks for base64 by itself
    assert [one.index for one in answer.data] == [0, 1, 2]
    assert [bits(one.embedding) for one in answer.data] == [wanted()] * 3
    assert (answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == ("model", 9, 9)
    jobs = server.client.list_jobs()[::-1]
    assert [job.prompt or job.prompt_ids for job in jobs] == ["one", "two", [7, 8]]
    assert {(job.owner, job.priority, job.params.embed) for job in jobs} == {("alice", INTERACTIVE, True)}
    assert len({job.request_id for job in jobs}) == 1
    plain = client.embeddings.create(
        model="model", input="one", encoding_format="float", dimensions=2, extra_body={"pooling": "mean"}
    )
    assert bits(plain.data[0].embedding) == wanted("mean", dimensions=2)
    ids = client.embeddings.create(model="model", input=[1, 2, 3], user="u")
    assert len(ids.data) == 1 and server.client.list_jobs()[0].prompt_ids == [1, 2, 3]


def test_the_body_is_openais(server: Server) -> None:
    with server.http() as http:
        answer = http.post("/v1/embeddings", json={"input": ["a"], "model": "model"})
        body = answer.json()
        assert body.keys() == {"object", "data", "model", "system_fingerprint", "usage"}
        assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]
        (one,) = body["data"]
        assert (one["object"], one["index"], bits(one["embedding"])) == ("embedding", 0, wanted())
        packed = http.post("/v1/embeddings", json={"input": "a", "encoding_format": "base64"}).json()
        assert base64.b64decode(packed["data"][0]["embedding"]) == wanted()
        shown = http.get(f"/v1/jobs/{server.client.list_jobs()[0].id}").json()
        assert bits(shown["embedding"]) == wanted() and shown["text"] == ""


def test_the_page_of_a_job_says_that_it_has_one(server: Server) -> None:
    server.openai().embeddings.create(model="model", input="a")
    page = Browser(server, ALICE).get("/job", id=server.client.list_jobs()[0].id)
    assert "An embedding of 3 numbers." in page.text and 'class="answer"' not in page.text


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"model": "model"}, "input", "is missing"),
        ({"input": []}, "input", "is empty"),
        ({"input": ["a", 5]}, "input[1]", "must be a text or a list of token ids"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "must be float or base64"),
        ({"input": "a", "dimensions": -1}, "dimensions", "must be at least 1"),
        ({"input": "a", "stream": True}, "stream", "is not supported"),
        ({"input": ["a"] * 2049}, "input", "has 2,049 texts, more than 2,048"),
    ],
)
def test_what_is_wrong_is_refused_in_openais_shape(
    server: Server, body: dict[str, Any], param: str, said: str
) -> None:
    with server.http() as http:
        answer = http.post("/v1/embeddings", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert said in error["message"] and server.client.list_jobs() == []


def test_a_model_that_was_made_for_none_is_the_requests_error(server: Server) -> None:
    server.bench.prompting.pooling = None
    with pytest.raises(openai.BadRequestError, match="pooling: no file says any") as caught:
        server.openai().embeddings.create(model="model", input=["a", "b"])
    assert str(caught.value.param).startswith("input[")
    with pytest.raises(openai.NotFoundError, match="no worker has ever served 'other'"):
        server.openai().embeddings.create(model="other", input="a")


def test_a_request_with_a_key_is_entered_once(server: Server) -> None:
    with server.http() as http:
        headers, asked = {"Idempotency-Key": "k"}, {"input": ["a", "b"], "model": "model"}
        first, again = (http.post("/v1/embeddings", json=asked, headers=headers) for _ in range(2))
        assert first.json() == again.json() and len(server.client.list_jobs()) == 2
        other = http.post("/v1/embeddings", json=asked | {"dimensions": 2}, headers=headers)
        assert other.status_code == 409


def test_a_batch_of_rows_in_openais_format(server: Server) -> None:
    rows = [
        {
            "custom_id": str(n),
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"input": "a", "model": "model"},
        }
        for n in range(3)
    ]
    client = server.openai(BOB)
    content = "\n".join(map(json.dumps, rows)).encode()
    file = client.files.create(file=("rows.jsonl", content), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    done = wait_until(
        lambda: (batch := client.batches.retrieve(made.id)).status in ("completed", "failed") and batch, 60.0
    )
    assert done.output_file_id is not None, done
    lines = client.files.content(done.output_file_id).text.splitlines()
    bodies = [json.loads(line)["response"]["body"] for line in lines]
    assert [bits(body["data"][0]["embedding"]) for body in bodies] == [wanted()] * 3
    assert {job.state for job in server.client.list_jobs()} == {JobState.SUCCEEDED}
