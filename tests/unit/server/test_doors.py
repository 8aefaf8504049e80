"""Who gets in, with what, and what everybody is told."""

import gzip
import json
import socket
import sys
from collections.abc import Callable
from typing import Any

import openai
import pytest

from nightmill import jobs
from nightmill.jobs import server as package
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.commands.serve import serve as command
from nightmill.jobs.errors import DatabaseUnreachableError, NightmillError, SettingsError
from nightmill.jobs.server import bodies, health
from nightmill.jobs.server.guards import is_loopback
from nightmill.jobs.server.job_service import ServerLimits
from nightmill.jobs.server.keys import ApiKeys, Caller, Right
from nightmill.jobs.server.serving import serve
from nightmill.jobs.server.tiers import Tier
from tests.unit.server.conftest import ALICE, EVE, OPS, Server

ASKED: dict[str, Any] = {"model": "model", "prompt": "Once", "max_tokens": 3}


def error_of(answer: Any) -> dict[str, Any]:
    """OpenAI's error object of an answer."""
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


# -- keys ----------------------------------------------------------------------------------------


def test_keys_have_names_and_rights_and_are_kept_as_hashes() -> None:
    digest = "sha256:1de3ed7ceebb7d2a6b2f1f0ed1c57ef1bd7d9ebd65ac7c1d79bd29b0db5ab2fd"
    keys = ApiKeys.parse(f" a=aaaaaaaaaaaaaaaa, b:read=bbbbbbbbbbbbbbbb=, c.d:admin={digest},")
    assert list(keys._callers.values()) == [
        Caller("a", Right.SUBMIT),
        Caller("b", Right.READ),
        Caller("c.d", Right.ADMIN),
    ]
    assert bytes.fromhex(digest[7:]) in keys._callers
    assert bytes.fromhex(digest[7:]) in ApiKeys.parse(f"a=sha256:{digest[7:].upper()}")._callers
    flex = ApiKeys.parse("a:flex=aaaaaaaaaaaaaaaa, b:admin:flex=bbbbbbbbbbbbbbbb")
    assert list(flex._callers.values()) == [
        Caller("a", Right.SUBMIT, Tier.FLEX),
        Caller("b", Right.ADMIN, Tier.FLEX),
    ]
    assert not ApiKeys.parse(None) and not ApiKeys.parse(" , ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("secretsecretsecret", "entry 1 is not NAME=KEY"),
        ("a=aaaaaaaaaaaaaaaa,b:root=secretsecretsecret", "entry 2 has the right 'root'; there are submit"),
        ("a=secret", "entry 1 has a key of fewer than 16 characters"),
        ("a=secretsecretsecret,b=secretsecretsecret", "entry 2 has the key of another entry"),
        ("a b=secretsecretsecret", "entry 1 is not"),
        # Else it would be a key itself, which whoever reads the settings has.
        (f"a=sha256:{'secret' * 10}", "entry 1 has sha256: and not the 64 hexadecimal digits"),
        ("a:flex:read=secretsecretsecret", "entry 1 is not"),
        ("a:flexible=secretsecretsecret", "entry 1 has the right 'flexible'; there are submit"),
    ],
)
def test_a_bad_entry_is_named_without_its_key(text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=f"NIGHTMILL_API_KEYS: {said}") as caught:
        ApiKeys.parse(text)
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(Settings(api_keys=text))


@pytest.mark.parametrize("key", [None, "x", "unknown-unknown-unknown", "\xe9\xff" * 9, "x" * 5000])
def test_without_a_known_key_nothing_is_told(server: Server, key: str | None) -> None:
    with server.http(None) as http:
        given = [] if key is None else [(b"Authorization", f"Bearer {key}".encode("latin-1"))]
        for path in ("/v1/models", "/v1/models/model"):
            answer = http.get(path, headers=given)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert error_of(answer)["code"] == "invalid_api_key"
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
            assert http.post(path, content=b"x" * 100_000, headers=given).status_code == 401
    assert server.client.list_jobs() == []


@pytest.mark.parametrize("more", [{}, {"Authorization": "Basic eDp5"}])
def test_a_key_may_come_as_x_api_key_unless_there_is_a_bearers(server: Server, more: dict[str, str]) -> None:
    with server.http(None) as http:
        known = http.post("/v1/completions", json=ASKED, headers=more | {"X-Api-Key": ALICE})
        assert known.status_code == 200 and server.client.list_jobs()[0].owner == "alice"
        assert (
            http.get("/v1/models", headers=more | {"X-Api-Key": "unknown-unknown-unknown"}).status_code == 401
        )
        both = {"Authorization": "Bearer unknown-unknown-unknown", "X-Api-Key": ALICE}
        assert http.get("/v1/models", headers=both).status_code == 401
        said = error_of(http.get("/v1/models", headers=more))["message"]
        assert said == "give a key: Authorization: Bearer KEY, or X-Api-Key: KEY"


def test_rights(server: Server) -> None:
    with pytest.raises(openai.PermissionDeniedError, match="may only read"):
        server.openai(EVE).completions.create(**ASKED)
    assert [model.id for model in server.openai(EVE).models.list()] == ["model"]
    assert server.openai(OPS).completions.create(**ASKED).model == "model"
    assert [job.owner for job in server.client.list_jobs()] == ["ops"]
    alice = Caller("alice", Right.SUBMIT)
    assert [alice.sees("alice"), alice.sees("bob"), alice.sees(None)] == [True, False, False]
    assert Caller("eve", Right.READ).sees("bob")


# -- without keys --------------------------------------------------------------------------------


def test_without_keys_everybody_on_this_machine_may_ask_and_no_page_of_another(
    start: Callable[..., Any],
) -> None:
    with start(keys=None) as server, server.http(None) as http:
        assert http.post("/v1/completions", json=ASKED).status_code == 200
        assert server.client.list_jobs()[0].owner is None
        for headers in (
            {"Host": "evil.example"},
            {"Host": "evil.example:8080", "Origin": "http://evil.example:8080"},
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Host": ""},
            {"Host": "[::1"},
            {"Origin": "http://[::1"},
        ):
            answer = http.post("/v1/completions", json=ASKED, headers=headers)
            assert (answer.status_code, error_of(answer)["code"]) == (403, "foreign_origin"), headers
        assert http.get("/v1/models", headers={"Origin": server.url}).status_code == 200
        assert len(server.client.list_jobs()) == 1
        assert "access-control-allow-origin" not in http.options("/v1/models").headers


def test_other_machines_are_served_with_keys_only(sqlite_settings: Settings) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"):
        with pytest.raises(SettingsError, match=f"--host {host} can be reached from other machines"):
            serve(sqlite_settings, host, 1, ServerLimits())
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert not is_loopback("") and not is_loopback("localhost.example.org")


def test_an_address_that_cannot_be_had_is_one_sentence(sqlite_settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = f"cannot listen on 127.0.0.1, port {port}: address already in use; give another with --host or"
        with pytest.raises(SettingsError, match=said):
            serve(sqlite_settings, "127.0.0.1", port, ServerLimits())


def test_without_its_extra_the_command_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "server", package)  # which the import binds anew, for all tests after this one
    for name in [name for name in sys.modules if name.startswith("nightmill.jobs.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette.requests", None)
    with pytest.raises(NightmillError, match=r"pip install .*\[server\]"):
        command.main([], standalone_mode=False)


# -- bodies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "is empty; send one JSON object"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"[]", "is a list"),
        (b"{", "is not JSON"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"model": "model", "model": "b"}', "the key 'model' is there twice"),
        (b'{"a": "\xff"}', "is not UTF-8"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"a": ' + b"1" * 10_000 + b"}", "too many digits"),
    ],
)
def test_bodies_that_are_no_objects(server: Server, body: bytes, said: str) -> None:
    with server.http() as http:
        answer = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert said in error_of(answer)["message"]
        assert str(error_of(answer)["message"]).startswith("the body: ")


def test_a_byte_order_mark_is_passed_over_and_a_packed_body_named(server: Server) -> None:
    with server.http() as http:
        json_type = {"Content-Type": "application/json"}
        answer = http.post("/v1/completions", content=b'\xef\xbb\xbf{"prompt": 5}', headers=json_type)
        assert (answer.status_code, error_of(answer)["param"]) == (400, "prompt")
        packed = json_type | {"Content-Encoding": "gzip"}
        answer = http.post("/v1/completions", content=gzip.compress(b"{}"), headers=packed)
        assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_media_type")
        assert "bodies packed as gzip are not read; send JSON without Cont" in error_of(answer)["message"]


def test_other_types_methods_and_paths(server: Server) -> None:
    with server.http() as http:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            answer = http.post("/v1/completions", content=b"{}", headers={"Content-Type": kind})
            assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_media_type")
        for path, status, shown in (
            ("/v1/completions", 405, "GET /v1/completions;"),
            ("/v1/nothing?key=secret", 404, "GET /v1/nothing;"),
            ("/%1b%5b2J%E2%80%AE" + "x" * 999, 404, "GET /\\x1b[2J\\u202exxx"),
        ):
            answer = http.get(path)
            assert (answer.status_code, error_of(answer)["code"]) == (status, "unknown_url")
            assert error_of(answer)["message"].startswith(f"there is no {shown}")
            assert "secret" not in answer.text and len(answer.text) < 500
        for path, remedy in (
            ("/chat/completions", "it is POST /v1/chat/completions (a client's base URL ends in /v1)"),
            ("/v1/v1/chat/completions", "it is POST /v1/chat/completions (a client's base URL ends in /v1)"),
            ("/v1/chat/completions/", "it is POST /v1/chat/completions (a client's base URL ends in /v1)"),
            ("/v1//embeddings", "it is POST /v1/embeddings (a client's base URL ends in /v1)"),
            ("/v1/tokenize", "it is POST /tokenize (a client's base URL ends in the host and its port)"),
            ("/v1/models", "this path takes GET"),
            ("/v1/jobs/abc", "this path takes DELETE, GET"),
            ("/v1/moderations", "GET /openapi.json lists what there is"),
        ):
            assert error_of(http.post(path, json={}))["message"] == f"there is no POST {path}; {remedy}"
        assert "POST" in http.get("/v1/completions").headers["allow"]
        assert error_of(http.get("/v1/models/../../etc/passwd"))["type"] == "not_found_error"


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large_is_not_read_to_its_end(
    server: Server, monkeypatch: pytest.MonkeyPatch, announced: bool
) -> None:
    monkeypatch.setattr(bodies, "MOST_BYTES", 100_000)
    port = int(server.url.rpartition(":")[2])
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {ALICE}",
        "Content-Type: application/json",
        "Content-Length: 1000000000" if announced else "Transfer-Encoding: chunked",
    ]
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n")
        if not announced:
            connection.sendall((b"186a0\r\n" + b" " * 100_000 + b"\r\n") * 2)
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_does_not_come_is_not_waited_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.1)
    port = int(server.url.rpartition(":")[2])
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ALICE}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall((head + "Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{").encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


# -- what everybody may ask ----------------------------------------------------------------------


def test_models_are_what_live_workers_serve(server: Server) -> None:
    client = server.openai()
    (model,) = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("model", "model", "nightmill")
    assert model.max_model_len == 200
    assert model.created == int(server.client.workers()[0].started_at.timestamp())
    assert client.models.retrieve("model") == model
    with pytest.raises(openai.NotFoundError, match="no live worker serves 'a/b'; served are: model"):
        client.models.retrieve("a/b")


def test_health_and_readiness_need_no_key_and_tell_little(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(limits=ServerLimits(requests=1), worker=False) as server, server.http(None) as http:
        assert http.get("/health").json() == {"status": "ok"}
        answer = http.get("/ready")
        ready = {"ready": True, "database": True, "broker": True, "worker": True}
        assert (answer.status_code, answer.json()) == (200, ready)
        server.bench.claims.sign_off()
        monkeypatch.setattr(health, "_FRESH_SECONDS", 0.0)
        answer = http.get("/ready")
        assert (answer.status_code, answer.json()) == (503, ready | {"ready": False, "worker": False})


def test_an_outage_is_told_without_where_the_servers_are(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = str(server.client.settings.data_dir)

    def away(*args: Any) -> Any:
        raise DatabaseUnreachableError(f"the database at {where} does not answer")

    monkeypatch.setattr(server.client.worker_store, "serving", away)
    with server.http() as http:
        for answer in (http.get("/v1/models"), http.post("/v1/completions", json=ASKED)):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
            assert error_of(answer)["code"] == "unavailable"
            assert where not in answer.text
        monkeypatch.setattr(server.client.worker_store, "serving", lambda *args: 1 / 0)
        answer = http.get("/v1/models")
        assert (answer.status_code, error_of(answer)["code"]) == (500, "internal_error")
        assert "Traceback" not in answer.text and "division" not in json.dumps(answer.json())
