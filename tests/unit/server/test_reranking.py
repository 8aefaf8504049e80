"""Documents ranked over HTTP, here by how likely the model says yes to each."""

import math
from typing import Any

import pytest

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.request.fields import INTERACTIVE
from nightmill.jobs.sql.claims import Claim
from nightmill.worker.assembly.reranking import asked_in_chat
from tests.support.servers import wait_until
from tests.unit.engine.by_definition import found_for
from tests.unit.server.conftest import Server
from tests.unit.worker.bench import ScriptedPrompting

DOCUMENTS = ["a mill", "a river by night", "stone", "the wheel turns"]


def tokens_of(document: str) -> tuple[int, ...]:
    """The prompt of a document, in the tokens of the scripted runner."""
    return tuple(ord(letter) % 14 for letter in document)


def relevance(document: str) -> float:
    """By definition: of the scripted log-probabilities of yes and no after the prompt."""
    sums = []
    for word in ("yes", "no"):
        tokens, total = list(tokens_of(document)), 0.0
        for letter in word:
            total += float(found_for(tokens, ord(letter) % 14)["logprob"])
            tokens.append(ord(letter) % 14)
        sums.append(total)
    return 1 / (1 + math.exp(sums[1] - sums[0]))


@pytest.fixture(autouse=True)
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the worker was asked; each document is a prompt of its own."""
    asked: list[Any] = []

    def encode(claim: Claim) -> tuple[int, ...]:
        asked.append(asked_in_chat(claim))
        return tokens_of(claim.prompt or "")

    monkeypatch.setattr(ScriptedPrompting, "encode", staticmethod(encode))
    return asked


def test_documents_come_by_relevance(server: Server, prompts: list[Any]) -> None:
    with server.http() as http:
        asked = {"model": "model", "query": "What grinds grain?", "documents": DOCUMENTS}
        answer = http.post("/v1/rerank", json=asked).json()
    wanted = {number: relevance(document) for number, document in enumerate(DOCUMENTS)}
    order = sorted(wanted, key=lambda number: -wanted[number])
    assert order != [0, 1, 2, 3]
    assert [one["index"] for one in answer["results"]] == order
    for one in answer["results"]:
        assert one.keys() == {"index", "relevance_score"}
        assert one["relevance_score"] == pytest.approx(wanted[one["index"]], abs=1e-6)
    assert (answer["object"], answer["model"]) == ("list", "model")
    jobs = server.client.list_jobs()
    assert {(job.state, job.priority) for job in jobs} == {(JobState.SUCCEEDED, INTERACTIVE)}
    tokens = sum(len(tokens_of(document)) + 5 for document in DOCUMENTS)
    assert answer["usage"] == {"total_tokens": tokens, "prompt_tokens": tokens}
    asking = "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    asking += "<Query>: What grinds grain?\n<Document>: "
    assert {chat.messages[1]["content"] for chat in prompts} == {asking + one for one in DOCUMENTS}
    for chat in prompts:
        assert [message["role"] for message in chat.messages] == ["system", "user"]
        assert (chat.prompt, chat.rendering.variables) == (None, {"enable_thinking": False})
    assert {job.relevance for job in jobs} == {one["relevance_score"] for one in answer["results"]}
    assert not any(job.answers[0].logprobs or job.embedding for job in jobs)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_some_of_them_with_their_texts(server: Server, path: str, prompts: list[Any]) -> None:
    documents = [{"text": document} for document in DOCUMENTS]
    asked = {"query": "q", "documents": documents, "top_n": 2, "return_documents": True, "instruction": "Do"}
    with server.http() as http:
        results = http.post(path, json=asked).json()["results"]
    assert len(results) == 2
    assert all(one["document"] == {"text": DOCUMENTS[one["index"]]} for one in results)
    assert all(chat.messages[1]["content"].startswith("<Instruct>: Do\n") for chat in prompts)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"documents": ["a"]}, "query", "is missing"),
        ({"query": "", "documents": ["a"]}, "query", "must be a text, not an empty one"),
        ({"query": "a"}, "documents", "is missing"),
        ({"query": "a", "documents": []}, "documents", "must be a list of texts, not an empty one"),
        ({"query": "a", "documents": "b"}, "documents", "must be a list of texts, not a text"),
        ({"query": "a", "documents": ["b", {"image": "x"}]}, "documents[1]", "must be a text, not null"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "must be a whole number of at least 1"),
        ({"query": "a", "documents": ["b"], "return_documents": 1}, "return_documents", "must be true or"),
        ({"query": "a", "documents": ["b"], "max_tokens_per_doc": 5}, "max_tokens_per_doc", "is not supp"),
        ({"query": "a", "documents": ["b"] * 1001}, "documents", "has 1,001 documents, more than 1,000"),
    ],
)
def test_what_is_wrong_is_refused_by_its_key(
    server: Server, body: dict[str, Any], param: str, said: str
) -> None:
    with server.http() as http:
        answer = http.post("/v1/rerank", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert said in error["message"] and server.client.list_jobs() == []


def test_a_document_that_cannot_be_scored_is_named(server: Server) -> None:
    with server.http() as http:
        answer = http.post("/v1/rerank", json={"query": "a", "documents": ["fits", "x" * 500]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == "documents[1]"
    wait_until(lambda: all(job.state.final for job in server.client.list_jobs()))
