"""Whatever requests come, as /openapi.json allows them or not: answers are as it says, none a failure."""

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import hypothesis.strategies as st
from hypothesis import HealthCheck, example, given, settings
from jsonschema import Draft202012Validator

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.server.job_service import ServerLimits
from nightmill.jobs.server.openapi import document
from tests.unit.server.conftest import EVE, OPS

DOCUMENT = document()
OPERATIONS = [
    (method.upper(), path, operation)
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
]
TEXTS = st.text(max_size=12) | st.sampled_from(
    ["\x00", "\ud800", "8h", "batch_" + "0" * 32, "file-" + "0" * 32]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


def values(schema: JsonObject) -> st.SearchStrategy[Any]:
    """Values that a schema of the document allows."""
    if "$ref" in schema:
        return values(DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema:
        return st.one_of(list(map(values, schema["anyOf"])))
    kinds = schema.get("type", "anything")
    return st.one_of([_of_kind(kind, schema) for kind in ([kinds] if isinstance(kinds, str) else kinds)])


def _of_kind(kind: str, schema: JsonObject) -> st.SearchStrategy[Any]:
    least, most = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    match kind:
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(least, most)
        case "number":
            return st.floats(least, most, allow_nan=False, allow_infinity=False)
        case "string":
            return TEXTS | st.sampled_from(schema.get("examples", ["x"]))
        case "array":
            return st.lists(values(schema.get("items", {})), min_size=schema.get("minItems", 0), max_size=3)
        case "object" if "properties" in schema:
            known = {name: values(one) for name, one in schema["properties"].items()}
            needed = {name: known.pop(name) for name in schema.get("required", ())}
            return st.builds(
                lambda must, may: must | may,
                st.fixed_dictionaries(needed),
                # A few at a time: with all at once nothing gets past the first that contradicts another.
                st.lists(st.sampled_from(sorted(known)), max_size=3).flatmap(
                    lambda names: st.fixed_dictionaries({name: known[name] for name in names})
                )
                if known
                else st.just({}),
            )
        case "object":
            return st.dictionaries(TEXTS, ANYTHING, max_size=3)
    return ANYTHING


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str, str, dict[str, str], Any]:
    """(method, path as the document has it, path, query, body or None)."""
    method, path, operation = draw(st.sampled_from(OPERATIONS))
    filled, query = path, {}
    for parameter in operation["parameters"]:
        value = draw(values(parameter["schema"]) | TEXTS)
        if parameter["in"] == "path":
            filled = filled.replace(f"{{{parameter['name']}}}", _quoted(str(value) or "x"))
        elif draw(st.booleans()):
            query[parameter["name"]] = str(value).encode("utf-8", "replace").decode()
    body = None
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        if kind == "application/json":
            body = draw(values(content["schema"]) | values(content["schema"]) | ANYTHING)
    return method, path, filled, query, body


def _quoted(text: str) -> str:
    return quote(text.encode("utf-8", "surrogatepass"), safe="") if text not in (".", "..") else "x"


def test_answers_are_as_the_document_says(start: Callable[..., Any]) -> None:
    limits = ServerLimits(request_seconds=0.5, grace_seconds=0.0)
    with start(worker=False, limits=limits) as server, server.http() as http:
        server.bench.claims.sign_off()  # nobody answers prompts, so nobody waits
        validators: dict[str, Draft202012Validator] = {}

        def check(name: str, value: Any) -> None:
            schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
            validators.setdefault(name, Draft202012Validator(schema)).validate(value)

        @settings(max_examples=120, suppress_health_check=list(HealthCheck))
        @example(("POST", "/v1/jobs", "/v1/jobs", {}, {"\ud800": "\x1b"}), OPS)
        @example(("GET", "/v1/batches", "/v1/batches/", {}, None), OPS)
        @given(request=requests(), key=st.sampled_from([None, EVE, OPS]))
        def ask(request: tuple[str, str, str, dict[str, str], Any], key: str | None) -> None:
            method, path, filled, query, body = request
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            content = None
            if body is not None:
                content = json.dumps(body).encode()
                headers["Content-Type"] = "application/json"
            answer = http.request(method, filled, params=query, content=content, headers=headers)
            assert answer.status_code != 500 and "Traceback" not in answer.text, answer.text
            said = DOCUMENT["paths"][path][method.lower()]["responses"]
            if answer.status_code >= 400 and path != "/ready":
                error = said["default"]["content"]["application/json"]["schema"]["$ref"]
                check(error.rpartition("/")[2], answer.json())
                return
            for kind, content_of in said["2XX"]["content"].items() if "2XX" in said else ():
                if answer.headers["content-type"].startswith(kind) and "$ref" in content_of["schema"]:
                    check(content_of["schema"]["$ref"].rpartition("/")[2], answer.json())

        ask()
