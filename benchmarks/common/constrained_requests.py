"""Requests of a workload under JSON schemas that never end, so that answers are as long as without."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nightmill.jobs.base.contract import Constrained, ConstraintKind
from nightmill.worker.engine.request import Request
from nightmill.worker.grammar import Grammars
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer.vocabulary import Vocabulary

WHICH = ("none", "one", "same", "all")
"""Which answers are held: none, the first one, all to one schema, or each to a schema of its own."""


class ConstrainedRequests:
    """Holds the requests of one model's workloads."""

    def __init__(self, file: GgufFile, vocab: int) -> None:
        vocabulary = Vocabulary.from_gguf(file)
        vocabulary.spell_all()
        self.grammars = Grammars(vocabulary, vocab)

    def requests(self, requests: Sequence[Request], which: str) -> list[Request]:
        """The same, compiled before any clock runs."""
        if which == "none":
            return list(requests)
        count = 1 if which == "one" else len(requests)
        compiling = [self.grammars.compile(_schema(place if which == "all" else 0)) for place in range(count)]
        begun = [
            replace(request, constraint=compiled.result()())
            for request, compiled in zip(requests, compiling, strict=False)
        ]
        return [*begun, *requests[count:]]


def _schema(number: int) -> Constrained:
    """A list of small objects, as rows ask for that extract something, without an end."""
    properties: dict[str, Any] = {
        f"name{number}": {"type": "string", "maxLength": 40},
        f"count{number}": {"type": "integer", "minimum": 0, "maximum": 100_000 + number},
        "kind": {"enum": ["a", "b", f"kind {number}"]},
        "score": {"type": "number"},
    }
    item = {"type": "object", "properties": properties, "required": [*properties]}
    schema = {"type": "array", "items": item | {"additionalProperties": False}, "minItems": 100_000}
    return Constrained(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
