"""Sessions of pages: whose they are, and whose forms do something."""

import hashlib
import hmac
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from urllib.parse import urljoin, urlsplit

import httpx2
import pytest
from sqlalchemy import delete

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.server.pages import session
from nightmill.jobs.sql.http_tables import ServerSecretRow
from tests.unit.server.browser import Browser
from tests.unit.server.conftest import ALICE, BOB, EVE, KEYS, Server, listening

Start = Callable[..., AbstractContextManager[Server]]


def test_without_a_key_nothing_is_seen_and_each_key_sees_its_own(start: Start) -> None:
    with start(worker=False) as server:
        mine = server.client.enqueueing.enqueue_spec(JobSpec.parse("secret of alice"), owner="alice")
        for path in ("/", "/batch?name=x", f"/job?id={mine}", "/hand-in", "/try", f"/job/events?id={mine}"):
            answer = Browser(server).http.get(path, follow_redirects=False)
            assert answer.status_code == 303, path
            assert urlsplit(urljoin(path, answer.headers["location"])).path == "/sign-in", path
            assert "secret" not in answer.text
        wrong = Browser(server).send("/sign-in", "/sign-in", key="no-such-key-is-here", next="/")
        assert (wrong.status_code, "not known here" in wrong.text) == (403, True)
        alice, bob, eve = (Browser(server, key) for key in (ALICE, BOB, EVE))
        assert "secret of alice" in alice.get("/job", id=mine).text
        assert bob.get("/job", id=mine).status_code == 404
        assert "secret of alice" in eve.get("/job", id=mine).text
        assert "Workers" not in alice.get("/").text
        assert "Workers" in eve.get("/").text
        assert eve.send("/", "/job/cancel", id=mine).status_code == 403
        assert server.client.get(mine).state is JobState.QUEUED
        assert alice.send("/", "/job/cancel", id=mine).status_code == 200
        assert server.client.get(mine).state is JobState.CANCELLED
        alice.send("/", "/sign-out")
        assert "Sign in" in alice.get("/").text


def test_a_session_is_of_its_key_and_of_nobody_else(start: Start) -> None:
    with start(worker=False) as server:
        browser = Browser(server, ALICE)
        cookie = browser.http.cookies["nightmill_session"].strip('"')
        name, ends, seal = cookie.split("|")
        assert name == "alice"
        for forged in (
            f"ops|{ends}|{seal}",
            f"alice|{int(ends) + 1}|{seal}",
            "alice|9|x",
            "|||",
            "",
        ):
            browser.http.cookies.clear()
            browser.http.cookies.set("nightmill_session", forged)
            assert "Sign in" in browser.get("/").text, forged
        outside = Browser(server).send("/sign-in", "/sign-in", key=ALICE, next="//evil.example/")
        assert str(outside.url) == f"{server.url}/"


def test_the_digest_of_a_key_is_not_enough_for_a_session(start: Start) -> None:
    """It stands in settings, where others may read it."""
    digest = hashlib.sha256(ALICE.encode()).digest()
    with start(worker=False) as server:
        browser = Browser(server)
        for hours in (1, 11, 24 * 365):
            ends = str(int(time.time()) + hours * 3600)
            for key in (digest, digest.hex().encode(), ALICE.encode()):
                for sealed in (f"session|alice|{ends}", f"session|alice|{ends}|{digest.hex()}"):
                    seal = hmac.new(key, sealed.encode(), hashlib.sha256).hexdigest()
                    browser.http.cookies.clear()
                    browser.http.cookies.set("nightmill_session", f"alice|{ends}|{seal}")
                    assert "Sign in" in browser.get("/").text


def test_a_session_is_known_to_all_servers_until_the_secret_is_deleted_or_its_time_is_over(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(worker=False) as server, listening(server.client, KEYS, None) as port:
        other = f"http://127.0.0.1:{port}"
        browser = Browser(server, ALICE)
        sealed = browser.http.cookies["nightmill_session"].strip('"')
        signed_in = {"Cookie": f"nightmill_session={sealed}"}
        anonymous = httpx2.Client(timeout=240, headers=signed_in)

        def known(url: str) -> bool:
            return anonymous.get(url).status_code == 200

        assert known(server.url) and known(other)
        monkeypatch.setattr(session, "_SESSION_SECONDS", 3600)  # beyond what a server gives
        assert not known(server.url)
        monkeypatch.undo()
        with server.client.database.write() as connection:
            connection.execute(delete(ServerSecretRow))
        assert known(server.url)  # for a minute
        monkeypatch.setattr(session, "SECRET_SECONDS", 0.0)
        assert not known(server.url) and not known(other)


def test_forms_of_other_pages_do_nothing(alone: Server) -> None:
    job_id = alone.client.enqueue("x")
    browser = Browser(alone)
    browser.token("/try")
    for form in ({}, {"form_token": ""}, {"form_token": "x" * 43}):
        assert browser.http.post("/job/cancel", data=form | {"id": job_id}).status_code == 403
    other = httpx2.Client(base_url=alone.url, headers={"Origin": "http://evil.example"})
    assert other.post("/job/cancel", data={"id": job_id}).status_code == 403
    assert alone.client.get(job_id).state is JobState.QUEUED


def test_a_form_is_of_its_session_whatever_other_cookies_say(start: Start) -> None:
    """A page on another port or subdomain of the same site can set cookies here, and has the session sent."""
    with start(worker=False) as server:
        alice, bob = Browser(server, ALICE), Browser(server, BOB)
        tossed = "x" * 43
        alice.http.cookies.set("nightmill_form", tossed)
        for token in (tossed, bob.token("/try"), ""):
            said = alice.http.post("/try", data={"form_token": token, "kind": "plain", "prompt": "x"})
            assert said.status_code == 403, token
        assert server.client.list_jobs() == []
        assert alice.send("/try", "/try", kind="plain", prompt="x").status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "HERE"}, 303),
        ({"Origin": "HERE", "Sec-Fetch-Site": "same-origin"}, 303),
        ({"Sec-Fetch-Site": "none"}, 303),
        ({}, 303),
        ({"Origin": "http://evil.example:3000", "Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "http://evil.example:3000"}, 403),
        ({"Origin": "HERE", "Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://[::1"}, 403),
    ],
)
@pytest.mark.parametrize("keys", [None, f"alice={ALICE}"])
def test_forms_of_pages_of_other_hosts_are_refused(
    start: Start, headers: dict[str, str], status: int, keys: str | None
) -> None:
    with start(keys=keys, worker=False) as server:
        browser = Browser(server, ALICE if keys else None)
        form = {"form_token": browser.token("/try"), "kind": "plain", "prompt": "x"}
        said = {name: value.replace("HERE", server.url) for name, value in headers.items()}
        answer = browser.http.post("/try", data=form, headers=said, follow_redirects=False)
        assert answer.status_code == status, answer.text
        assert len(server.client.list_jobs()) == (status == 303)
