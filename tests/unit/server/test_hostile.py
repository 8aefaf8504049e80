"""Nothing that a stranger sends gives a 5xx other than 503 and 504, or a traceback in the log."""

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any
from urllib.parse import quote_from_bytes, urlsplit

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from starlette.routing import Route

from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.request.fields import FIELDS
from nightmill.jobs.server.app import make_app
from nightmill.jobs.server.job_service import ServerLimits
from nightmill.jobs.server.keys import ApiKeys
from tests.unit.server.conftest import ALICE, KEYS, Server

ID = IdSource().draw()
HOSTILE_TEXTS = (
    "",
    "\x00",
    "\xe9",
    "\ud800",
    "x" * 70_000,
    "../../etc/passwd",
    "%00",
    "-1",
    "0",
    "1e999",
    "NaN",
    "9" * 5000,
    "٣",
    "²",
    "9999-12-31T23:59:58-12:00",
    "0001-01-01T00:00:00+14:00",
    "0001-01-01T00:00:00",
    "9999999d",
    "<script>",
    "'; DROP TABLE jobs; --",
    "ops|99999999999|\xe9",
    ID,
    f"file-{ID}",
    f"batch_{ID}",
    "http://[::1",
    "1-99999999999999999999",
    "\r",
    "succeeded",
    "24h",
    "/v1/completions",
    "https://u:p@h/",
    "model",
)
texts = st.one_of(st.sampled_from(HOSTILE_TEXTS), st.text(max_size=20))
BODY_FIELDS = (
    *FIELDS,
    "prompt",
    "messages",
    "prompt_ids",
    "stream",
    "stream_options",
    "suffix",
    "logprobs",
    "echo",
    "user",
    "input_file_id",
    "endpoint",
    "completion_window",
    "webhook",
    "file",
    "name",
    "best_of",
    "input",
    "max_completion_tokens",
    "response_format",
    "functions",
    "encoding_format",
    "thinking",
    "reasoning_effort",
)
QUERY = (
    "limit",
    "after",
    "before",
    "order",
    "purpose",
    "id",
    "name",
    "state",
    "reason",
    "next",
    "answer",
    "batch",
)
HEADERS = (
    "Cookie",
    "Authorization",
    "Last-Event-ID",
    "Idempotency-Key",
    "Origin",
    "Sec-Fetch-Site",
    "Content-Type",
    "Range",
    "Accept",
    "If-None-Match",
    "X-Forwarded-For",
    "Expect",
    "Transfer-Encoding",
    "Content-Length",
    "Host",
)
values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, -0.0, 0.5]),
        texts,
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(
                st.sampled_from(["role", "content", "type", "text", "function", "name", "1", "$ref"]), texts
            ),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=6,
)
TOKEN = "x" * 43
PAGES = ("/", "/batch?name=night", "/job", "/try", "/hand-in", "/job/events")
IMPATIENT = ServerLimits(request_seconds=0.05, grace_seconds=0.05)


def routes(server: Server) -> list[tuple[str, str]]:
    """Every method and path that the server has."""
    return sorted(
        (method, route.path)
        for route in make_app(server.client, ApiKeys.parse(None)).routes
        if isinstance(route, Route)
        for method in (route.methods or ())
    )


@st.composite
def requests(draw: st.DrawFn, known: list[tuple[str, str]]) -> tuple[bytes, str]:
    """The bytes of a request as a browser or a program would send it, but for what stands in its fields."""
    method, path = draw(st.sampled_from(known))
    while "{" in path:
        before, _, rest = path.partition("{")
        path = before + quote(draw(texts)) + rest.partition("}")[2]
    query = draw(st.dictionaries(st.sampled_from(QUERY), texts, max_size=3))
    target = path + (
        "?" + "&".join(f"{name}={quote(value)}" for name, value in query.items()) if query else ""
    )
    headers = {"Host": "HOST", "Connection": "close"}
    body = b""
    if method not in ("GET", "HEAD"):
        if path.startswith("/v1/files") or path == "/hand-in":
            headers["Content-Type"] = "multipart/form-data; boundary=b"
            fields = draw(
                st.dictionaries(st.sampled_from(["purpose", "file", "form_token", "x"]), texts, max_size=3)
            )
            for name, value in ({"form_token": TOKEN} | fields).items():
                filename = f'; filename="{draw(texts)}"' if name == "file" else ""
                said = f'--b\r\nContent-Disposition: form-data; name="{name}"{filename}\r\n\r\n{value}\r\n'
                body += said.encode("utf-8", "surrogatepass")
            body += b"--b--\r\n"
            headers["Cookie"] = f"nightmill_form={TOKEN}"
        elif path.startswith("/v1") or path == "/execute":
            headers["Content-Type"] = "application/json"
            said = {"prompt": "x"} | draw(st.dictionaries(st.sampled_from(BODY_FIELDS), values, max_size=4))
            body = json.dumps(said).encode()
        else:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            names = st.sampled_from(
                ["id", "name", "file", "key", "next", "kind", "model", "deadline", *FIELDS]
            )
            form = draw(st.dictionaries(names, texts, max_size=4))
            body = (
                "form_token=" + TOKEN + "".join(f"&{name}={quote(text)}" for name, text in form.items())
            ).encode()
            headers["Cookie"] = f"nightmill_form={TOKEN}"
        headers["Content-Length"] = str(len(body))
    headers |= draw(st.dictionaries(st.sampled_from(HEADERS), texts, max_size=2))
    return head(method, target, headers) + body, f"{method} {target[:200]}"


def head(method: str, target: str, headers: dict[str, str]) -> bytes:
    """A request's head, with whatever bytes its fields have."""
    lines = [f"{method} {target} HTTP/1.1".encode("latin-1", "replace")]
    for name, value in headers.items():
        said = value.encode("utf-8", "surrogatepass").replace(b"\r", b"").replace(b"\n", b"")
        lines.append(name.encode() + b": " + said)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def quote(text: str) -> str:
    """As in a URL, whatever it is."""
    return quote_from_bytes(text[:4000].encode("utf-8", "surrogatepass"), safe="")


def status_of(server: Server, request: bytes) -> int:
    """What the server answers; 0 if it only closes."""
    there = urlsplit(server.url)
    with socket.create_connection((there.hostname, there.port), timeout=240) as connection:
        try:
            connection.sendall(request.replace(b"Host: HOST", f"Host: {there.netloc}".encode()))
            answer = connection.recv(64)
        except ConnectionError:  # it refuses what is too long before all of it has come
            return 0
    return int(answer[9:12]) if answer else 0


@pytest.fixture(params=[None, KEYS], ids=["open", "keys"])
def server(start: Callable[..., Any], request: pytest.FixtureRequest) -> Iterator[Server]:
    with start(keys=request.param, limits=IMPATIENT, worker=False) as server:
        server.client.enqueue("x", custom_id="<b>")
        server.client.submit_batch([{"prompt": "x"}, {"promt": "y"}], name="night")
        yield server


def hold(server: Server, caplog: pytest.LogCaptureFixture, request: bytes, said: str) -> None:
    status = status_of(server, request)
    assert status < 500 or status in (503, 504), (said, status)
    faults = [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
    assert faults == [], said


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
@given(data=st.data())
def test_no_request_of_a_stranger_breaks_anything(
    server: Server, caplog: pytest.LogCaptureFixture, data: st.DataObject
) -> None:
    request, said = data.draw(requests(routes(server)))
    if b"Authorization" not in request and data.draw(st.booleans()):
        request = request.replace(
            b"Connection: close", f"Connection: close\r\nAuthorization: Bearer {ALICE}".encode()
        )
    hold(server, caplog, request, said)


def test_a_cookie_of_any_bytes_is_no_session(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    ends = str(int(time.time()) + 3600).encode()
    cookies = (
        *(b"ops|" + ends + b"|" + seal for seal in (b"\xe9", b"\xff\xfe", b"")),
        *(b"\xe9|1|", b"ops|\xb2|x", b"|||\xff", b'"\\351"', b"ops|1" + b"0" * 5000),
    )
    for path, name, cookie in product(PAGES, (b"nightmill_session", b"nightmill_form"), cookies):
        request = head("GET", path, {"Host": "HOST", "Connection": "close"}).removesuffix(b"\r\n")
        hold(server, caplog, request + b"Cookie: " + name + b"=" + cookie + b"\r\n\r\n", path)


def test_the_ends_of_time_are_a_fault_of_the_request(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    ends = ("9999-12-31T23:59:58-12:00", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:58Z", "2912000d")
    paths = ("/v1/jobs", "/v1/night", "/v1/generate", "/execute")
    for path, name, text in product(paths, ("scheduled_at", "deadline"), ends):
        body = json.dumps({name: text} if path == "/v1/night" else {"prompt": "x", name: text})
        fields = {
            "Host": "HOST",
            "Connection": "close",
            "Authorization": f"Bearer {ALICE}",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
        }
        assert status_of(server, head("POST", path, fields) + body.encode()) == 400, (path, name, text)
    assert [record for record in caplog.records if record.exc_info] == []
