"""Pages of other hosts: none may call the server from a browser but those whose origin is named."""

from collections.abc import Callable
from typing import Any

import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import SettingsError
from nightmill.jobs.server.job_service import ServerLimits
from nightmill.jobs.server.serving import serve
from tests.unit.server.conftest import ALICE, KEYS

APP, OTHER = "https://app.example.org", "https://other.example.org"
ASKED: dict[str, Any] = {"model": "model", "prompt": "Once", "max_tokens": 3}
ASKS = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


def test_off_unless_origins_are_named(start: Callable[..., Any]) -> None:
    with start() as server, server.http(None) as http:
        answer = http.options("/v1/completions", headers={"Origin": APP} | ASKS)
        assert answer.status_code == 405
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("keys", [None, KEYS])
def test_a_page_of_a_named_origin_may_ask_and_read_also_what_is_refused(
    start: Callable[..., Any], keys: str | None
) -> None:
    with start(keys=keys, origins=[APP]) as server, server.http(ALICE if keys else None) as http:
        asks = http.options("/v1/completions", headers={"Origin": APP} | ASKS)
        assert (asks.status_code, asks.headers["access-control-allow-origin"]) == (200, APP)
        assert "POST" in asks.headers["access-control-allow-methods"]
        assert asks.headers["access-control-allow-headers"] == ASKS["Access-Control-Request-Headers"]
        assert "access-control-allow-credentials" not in asks.headers
        stream = ASKED | {"stream": True}
        for body, status in ((ASKED, 200), (stream, 200), (ASKED | {"max_tokens": -1}, 400)):
            answer = http.post("/v1/completions", json=body, headers={"Origin": APP})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, APP)
            assert "X-Request-ID" in answer.headers["access-control-expose-headers"]
        if keys:
            unknown = http.get("/v1/models", headers={"Origin": APP, "Authorization": "Bearer no"})
            assert (unknown.status_code, unknown.headers["access-control-allow-origin"]) == (401, APP)


@pytest.mark.parametrize("keys", [None, KEYS])
def test_a_page_of_another_origin_may_not(start: Callable[..., Any], keys: str | None) -> None:
    with start(keys=keys, origins=[APP]) as server, server.http(ALICE if keys else None) as http:
        asks = http.options("/v1/completions", headers={"Origin": OTHER} | ASKS)
        assert asks.status_code == 400 and "access-control-allow-origin" not in asks.headers
        answer = http.get("/v1/models", headers={"Origin": OTHER})
        assert answer.status_code == (200 if keys else 403)
        assert "access-control-allow-origin" not in answer.headers
        assert http.get("/v1/models", headers={"Origin": APP, "Host": "evil.example"}).status_code == (
            200 if keys else 403
        )


@pytest.mark.parametrize(
    ("origin", "keys", "said"),
    [
        ("*", None, "--cors-origin '\\*' lets any page"),
        *(
            (bad, KEYS, f"--cors-origin {bad}: must be a scheme, a host")
            for bad in ("app.example.org", f"{APP}/", f"{APP}/x", "ftp://a", "https://A.example", "null")
        ),
    ],
)
def test_what_is_no_origin_is_said_at_the_start(
    sqlite_settings: Settings, origin: str, keys: str | None, said: str
) -> None:
    settings = sqlite_settings.model_copy(update={"api_keys": keys})
    with pytest.raises(SettingsError, match=said):
        serve(settings, "127.0.0.1", 1, ServerLimits(), [origin])
