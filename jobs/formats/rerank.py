"""Requests to rank documents, in Jina's and Cohere's shape, and the jobs that they become, one a document.

What computes a relevance is the worker's matter: a cross-encoder's head, or how likely a model that chats
says that the document meets the query.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import InvalidRequestError
from nightmill.jobs.formats.neutral import short
from nightmill.jobs.formats.rows import invalid, missing
from nightmill.jobs.reply.job import Job, relevance_in
from nightmill.jobs.request.fields import unknown_field
from nightmill.jobs.request.prompts import json_type
from nightmill.jobs.request.spec import JobSpec

__all__ = ["MAX_DOCUMENTS", "RERANK_KEYS", "Ranking"]

MAX_DOCUMENTS: Final = 1_000
"""Most documents of one request, as Cohere's API advises."""
_FIELDS: Final[tuple[str, ...]] = ("model", "instruction", "truncate_prompt_tokens")
_IGNORED: Final = frozenset({"user", "truncation"})
RERANK_KEYS: Final = frozenset({"query", "documents", "top_n", "return_documents", *_FIELDS, *_IGNORED})


class Ranking:
    """A checked request: `specs` are its jobs, one for each document, in their order."""

    def __init__(self, body: Mapping[str, Any], defaults: JobSpec) -> None:
        """Parse the body of a POST to /v1/rerank; raises InvalidRequestError, which names its key."""
        given = {name: value for name, value in body.items() if value is not None}
        for name in given:
            if name not in RERANK_KEYS:
                raise unknown_field(name, RERANK_KEYS)
        query = _text(given, "query")
        self.documents = _documents(given.get("documents"))
        self.top_n: int = given.get("top_n", len(self.documents))
        if type(self.top_n) is not int or self.top_n < 1:
            raise invalid("top_n", f"must be a whole number of at least 1 (got {short(self.top_n)})")
        self.returns_documents = given.get("return_documents", False)
        if not isinstance(self.returns_documents, bool):
            said = f"must be true or false, not {json_type(self.returns_documents)}"
            raise invalid("return_documents", said)
        fields = {name: given[name] for name in _FIELDS if name in given}
        self.specs: list[JobSpec] = []
        for number, document in enumerate(self.documents):
            try:
                if self.specs:
                    self.specs.append(self.specs[0].prompted(document))
                else:
                    self.specs.append(
                        JobSpec.parse({"prompt": document, "rerank": query, **fields}, defaults)
                    )
            except InvalidRequestError as error:
                if error.field == "prompt":
                    raise error.renamed(f"documents[{number}]") from None
                raise error.renamed("query") if error.field == "rerank" else error from None

    def body(self, jobs: Sequence[Job], request_id: str, model: str) -> JsonObject:
        """Build the response of ended jobs; raises RerankError if one has no relevance."""
        ranked = sorted(enumerate(map(relevance_in, jobs)), key=lambda one: -one[1])
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
