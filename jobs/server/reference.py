"""GET /docs: /openapi.json as a page, without scripts and external content."""

import base64
import hashlib
import json
from collections.abc import Iterator
from functools import cache
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.server.openapi import document

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem; }
code, pre { font-family: ui-monospace, monospace; font-size: 0.9em; }
section { border-top: 1px solid #8888; margin-top: 1.5rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid #8884; overflow-wrap: anywhere; padding: 0.25rem 0.75rem 0.25rem 0;
  text-align: left; vertical-align: top; }
""".strip()
_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_PREFIX = "#/components/schemas/"


async def answer(request: Request) -> Response:
    """GET /docs."""
    return HTMLResponse(page(), headers=HEADERS)


@cache
def page() -> str:
    """Render the whole page."""
    said = document()
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8"><title>Nightmill over HTTP</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{_STYLE}</style></head><body><main>",
            f"<h1>Nightmill {escape(said['info']['version'])} over HTTP</h1>",
            '<p>What <a href="openapi.json">openapi.json</a> says, to be read. With keys, send one as '
            "<code>Authorization: Bearer KEY</code>.</p>",
            "<nav><ul>",
            *(
                f'<li><a href="#{_anchor(method, path)}"><code>{method.upper()} {escape(path)}</code></a> '
                f"{escape(operation['summary'])}</li>"
                for path, operations in said["paths"].items()
                for method, operation in operations.items()
            ),
            "</ul></nav>",
            *(
                line
                for path, operations in said["paths"].items()
                for method, operation in operations.items()
                for line in _operation(method, path, operation)
            ),
            *(
                line
                for name, schema in said["components"]["schemas"].items()
                for line in _schema(name, schema)
            ),
            "</main></body></html>",
        ]
    )


def _anchor(method: str, path: str) -> str:
    return escape(f"{method}{path}".translate(str.maketrans("/{}", "---")), quote=True)


def _operation(method: str, path: str, operation: JsonObject) -> Iterator[str]:
    yield f'<section id="{_anchor(method, path)}">'
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p>"
    if operation["parameters"]:
        yield "<table><tr><th>parameter</th><th>in</th><th>values</th></tr>"
        for one in operation["parameters"]:
            yield f"<tr><td><code>{escape(one['name'])}</code></td><td>{escape(one['in'])}</td>"
            yield f"<td>{_type(one['schema'])}</td></tr>"
        yield "</table>"
    if (body := operation.get("requestBody")) is not None:
        yield f"<p>Takes {_content(body['content'])}.</p>"
    for status, one in operation["responses"].items():
        if one.get("content"):
            what = "Otherwise an error" if status == "default" else f"Answers {status}"
            yield f"<p>{what}: {_content(one['content'])}.</p>"
    yield "</section>"


def _content(content: JsonObject) -> str:
    return " or ".join(
        f"{_type(said['schema'])} as <code>{escape(kind)}</code>" for kind, said in content.items()
    )


def _schema(name: str, schema: JsonObject) -> Iterator[str]:
    yield f'<section id="{escape(name, quote=True)}"><h2>{escape(name)}</h2>'
    properties = schema.get("properties", {})
    if properties:
        required = schema.get("required", ())
        yield "<table><tr><th>field</th><th>values</th><th>what it is</th></tr>"
        for field, said in properties.items():
            mark = " (required)" if field in required else ""
            yield f"<tr><td><code>{escape(field)}</code>{mark}</td><td>{_type(said)}</td>"
            yield f"<td>{escape(said.get('description', ''))}</td></tr>"
        yield "</table>"
    else:
        yield f"<p>{_type(schema)}</p>"
    yield "</section>"


def _type(schema: JsonObject) -> str:
    """Describe the values of a schema in a few words."""
    if (reference := schema.get("$ref")) is not None:
        name = escape(reference.removeprefix(_PREFIX), quote=True)
        return f'<a href="#{name}">{name}</a>'
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(map(_type, schema[key]))
    if "enum" in schema or "const" in schema:
        values: list[Any] = schema.get("enum", [schema.get("const")])
        return ", ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    kinds = schema.get("type", "anything")
    said = escape(" or ".join([kinds] if isinstance(kinds, str) else kinds))
    if "items" in schema:
        said += f" of {_type(schema['items'])}"
    bounds = [
        f"{word} {escape(json.dumps(schema[key]))}"
        for key, word in (
            ("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "to"), ("default", "by default"),
        )
        if key in schema
    ]  # fmt: skip
    return ", ".join([said, *bounds])
