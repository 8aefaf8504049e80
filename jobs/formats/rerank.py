"""Requests to rank documents, in Jina's and Cohere's shape, and the scoring jobs that they become.

A document is as relevant as `yes` is likely against `no`, when the model is asked whether it meets the query:
in the words that Qwen3-Reranker was trained with, which other chat models understand as well.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.formats.neutral import short
from nightmill.jobs.formats.rows import invalid, missing
from nightmill.jobs.reply.job import Job, scores_of
from nightmill.jobs.request.fields import unknown_field
from nightmill.jobs.request.prompts import json_type
from nightmill.jobs.request.spec import JobSpec

__all__ = ["INSTRUCTION", "MAX_DOCUMENTS", "RERANK_KEYS", "Ranking"]

MAX_DOCUMENTS: Final = 1_000
"""Most documents of one request, as Cohere's API advises."""
INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note "
    'that the answer can only be "yes" or "no".'
)
_YES, _NO = "yes", "no"
_IGNORED: Final = frozenset({"user", "truncation"})
RERANK_KEYS: Final = frozenset(
    {"model", "query", "documents", "top_n", "return_documents", "instruction", *_IGNORED}
)


class Ranking:
    """A checked request: `specs` are its jobs, one for each document, in their order."""

    def __init__(self, body: Mapping[str, Any], defaults: JobSpec) -> None:
        """Parse the body of a POST to /v1/rerank; raises InvalidRequestError, which names its key."""
        given = {name: value for name, value in body.items() if value is not None}
        for name in given:
            if name not in RERANK_KEYS:
                raise unknown_field(name, RERANK_KEYS)
        query, instruction = _text(given, "query"), given.get("instruction", INSTRUCTION)
        if not isinstance(instruction, str):
            raise invalid("instruction", f"must be a text, not {json_type(instruction)}")
        self.documents = _documents(given.get("documents"))
        self.top_n: int = given.get("top_n", len(self.documents))
        if type(self.top_n) is not int or self.top_n < 1:
            raise invalid("top_n", f"must be a whole number of at least 1 (got {short(self.top_n)})")
        self.returns_documents = given.get("return_documents", False)
        if not isinstance(self.returns_documents, bool):
            said = f"must be true or false, not {json_type(self.returns_documents)}"
            raise invalid("return_documents", said)
        asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: "
        fields = {
            "model": given.get("model"),
            "score": [_YES, _NO],
            "chat_template_kwargs": {"enable_thinking": False},
        }
        self.specs = [
            JobSpec.parse({"messages": _chat(asked + document), **fields}, defaults)
            for document in self.documents
        ]

    def body(self, jobs: Sequence[Job], request_id: str, model: str) -> JsonObject:
        """Build the response of ended jobs; raises ScoreError if one has no scores."""
        ranked = sorted(enumerate(map(relevance_of, jobs)), key=lambda one: -one[1])
        tokens = sum((job.prompt_tokens or 0) + (job.completion_tokens or 0) for job in jobs)
        return {
            "id": request_id,
            "object": "list",
            "model": model,
            "usage": {"total_tokens": tokens, "prompt_tokens": tokens},
            "results": [self._result(index, relevance) for index, relevance in ranked[: self.top_n]],
        }

    def _result(self, index: int, relevance: float) -> JsonObject:
        document = {"document": {"text": self.documents[index]}} if self.returns_documents else {}
        return {"index": index, "relevance_score": relevance} | document


def relevance_of(job: Job) -> float:
    """Return the likelihood of `yes` among `yes` and `no`, 0 to 1; raises ScoreError without scores."""
    yes, no = (score.logprob for score in scores_of(job))
    return 1 / (1 + math.exp(min(no - yes, 700.0)))


def _chat(question: str) -> list[JsonObject]:
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]


def _text(given: Mapping[str, Any], name: str) -> str:
    if name not in given:
        raise missing(name, "give a text")
    value = given[name]
    if not isinstance(value, str) or not value:
        got = "an empty one" if value == "" else json_type(value)
        raise invalid(name, f"must be a text, not {got}")
    return value


def _documents(value: Any) -> list[str]:
    if value is None:
        raise missing("documents", "give a list of texts")
    if not isinstance(value, list) or not value:
        got = "an empty one" if value == [] else json_type(value)
        raise invalid("documents", f"must be a list of texts, not {got}")
    if len(value) > MAX_DOCUMENTS:
        said = f"has {len(value):,} documents, more than {MAX_DOCUMENTS:,}; send several requests"
        raise invalid("documents", said)
    documents = []
    for number, one in enumerate(value):
        place = f"documents[{number}]"
        documents.append(_text({place: one.get("text") if isinstance(one, Mapping) else one}, place))
    return documents
