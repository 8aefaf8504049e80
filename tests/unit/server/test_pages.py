"""Pages: who may see and do what, what is escaped, and where forms lead. What moves is in `tests/browser`."""

import hashlib
import hmac
import json
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from sqlalchemy import delete, update

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import DatabaseUnreachableError
from nightmill.jobs.reply.job import Job
from nightmill.jobs.reply.night import night_of
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.server.job_service import JobService
from nightmill.jobs.server.pages import night, session
from nightmill.jobs.server.pages.actions import _again
from nightmill.jobs.server.pages.plot import HEIGHT, draw
from nightmill.jobs.sql import dashboard_queries
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.dashboard_queries import DashboardQueries, Minute, RowFilter
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.http_tables import ServerSecretRow
from nightmill.jobs.sql.tables import JobRow
from tests.support.servers import Clock, wait_until
from tests.unit.server.conftest import ALICE, BOB, EVE, KEYS, OPS, Server, listening

Start = Callable[..., AbstractContextManager[Server]]
HOSTILE = "<script>alert('x')</script>\x1b[2J"


class Browser:
    """Plain HTTP with cookies, that reads the token of a page before it sends a form."""

    def __init__(self, server: Server, key: str | None = None) -> None:
        self.http = httpx2.Client(base_url=server.url, timeout=240, follow_redirects=True)
        if key is not None:
            answer = self.send("/sign-in", "/sign-in", key=key, next="/")
            assert answer.status_code == 200, answer.text

    def get(self, path: str, **query: str) -> httpx2.Response:
        return self.http.get(path, params=query)

    def token(self, path: str) -> str:
        (token, *_) = re.findall(r'name="form_token" value="([^"]+)"', self.get(path).text)
        return token

    def send(self, page: str, path: str, **form: str) -> httpx2.Response:
        """The form at `path` with the token of `page`."""
        return self.http.post(path, data={"form_token": self.token(page)} | form)


@pytest.fixture
def alone(start: Start) -> Any:
    """A server without keys and without a worker."""
    with start(keys=None, worker=False) as server:
        yield server


def test_without_a_key_nothing_is_seen_and_each_key_sees_its_own(start: Start) -> None:
    with start(worker=False) as server:
        mine = server.client.enqueueing.enqueue_spec(JobSpec.parse("secret of alice"), owner="alice")
        for path in ("/", "/batch?name=x", f"/job?id={mine}", "/hand-in", "/try", f"/job/events?id={mine}"):
            answer = Browser(server).http.get(path, follow_redirects=False)
            assert answer.status_code == 303, path
            assert urlsplit(answer.headers["location"]).path == "/sign-in", path
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


def test_what_strangers_wrote_is_text_and_pages_run_no_script_of_theirs(alone: Server) -> None:
    name = "<img src=x onerror=alert(1)> & co"
    rows = [{"prompt": HOSTILE, "custom_id": "<b>one</b>"}, {"<i>promt</i>": "x"}]
    alone.client.submit_batch(rows, name=name)
    (job, *_) = alone.client.list_jobs(batch=name, state="queued")
    browser = Browser(alone)
    pages = [browser.get("/"), browser.get("/batch", name=name), browser.get("/job", id=job.id)]
    for page in pages:
        assert page.status_code == 200
        assert not re.search(r"<(script>|img src=x|b>one|i>promt)", page.text)
        assert "\x1b" not in page.text
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    assert "&lt;img src=x" in pages[0].text
    assert "&lt;script&gt;" in pages[2].text
    assert browser.get("/batch", name="no such").status_code == 404
    assert browser.get("/job", id="x").status_code == 404


def test_a_night_is_handed_in_watched_and_downloaded(start: Start) -> None:
    with start() as server:
        browser = Browser(server, ALICE)
        rows = '{"prompt": "one", "custom_id": "a"}\n{"prompt": "two", "max_tokens": 9}\n{"promt": "three"}\n'
        form = {"form_token": browser.token("/hand-in"), "purpose": "batch"}
        looked = browser.http.post("/hand-in", data=form, files={"file": ("night.jsonl", rows)})
        assert looked.status_code == 200, looked.text
        assert urlsplit(str(looked.url)).path == "/hand-in/file"
        assert "did you mean prompt?" in looked.text
        (file_id,) = re.findall(r'name="file" value="(file-[^"]+)"', looked.text)
        form = {"file": file_id, "name": "tonight", "max_tokens": "20", "deadline": "8h", "model": ""}
        begun = browser.send("/hand-in", "/hand-in/begin", **form)
        assert begun.status_code == 200, begun.text
        wait_until(lambda: len(server.client.list_batches()) == 1)
        (batch,) = server.client.list_batches()
        name = batch.name
        status = batch.wait(timeout=120)
        assert (status.succeeded, status.unsuccessful) == (2, 1)
        page = browser.get("/batch", name=name).text
        assert "tonight" in page
        assert "completed with errors" in page
        results = browser.get("/batch/results", name=name)
        assert [row["custom_id"] for row in map(json.loads, results.text.splitlines())] == ["a", "row-2"]
        assert "attachment" in results.headers["content-disposition"]
        assert len(browser.get("/batch/errors", name=name).text.splitlines()) == 1
        assert Browser(server, BOB).get("/batch/results", name=name).status_code == 404
        bad = browser.send("/hand-in", "/hand-in/begin", file=file_id, temperature="hot")
        assert (bad.status_code, "temperature: " in bad.text) == (400, True)


def test_models_in_turn_and_what_rows_cost_are_shown(alone: Server) -> None:
    claims = Claims(alone.client.database, "a" * 32)
    claims.register("host", 1, "loaded", None)
    claims.register_models(["loaded", "next", "third"], swap_for_interactive=False)
    (job_id,) = alone.client.enqueue_many(["a"], batch="night")
    (claim,) = claims.claim([job_id])
    claims.finish(
        [Outcome(job_id, claim.attempt, StopReason.EOS, "b", 1, 2, gpu_seconds=1800.0, energy_joules=7.2e6)]
    )
    browser = Browser(alone)
    night = " ".join(browser.get("/").text.split())
    assert "loaded <small>in turn with next, third</small>" in night
    assert "<option>third</option>" in browser.get("/try").text
    batch = browser.get("/batch", name="night").text
    assert "<dt>GPU hours</dt><dd>0.50</dd>" in batch and "<dt>kWh</dt><dd>2.000</dd>" in batch
    job = browser.get("/job", id=job_id).text
    assert "<dt>GPU seconds</dt><dd>1800.000</dd>" in job and "<dt>Joules</dt><dd>7200000.0</dd>" in job


def test_a_prompt_is_tried_and_repeated_to_the_letter(start: Start) -> None:
    with start() as server:
        browser = Browser(server, OPS)
        made = browser.send("/try", "/try", prompt="hello", kind="plain", max_tokens="12", temperature="1")
        first = parse_qs(urlsplit(str(made.url)).query)["id"][0]
        server.client.wait(first, timeout=120)
        again = browser.send("/", "/job/repeat", id=first)
        second = parse_qs(urlsplit(str(again.url)).query)["id"][0]
        server.client.wait(second, timeout=120)
        assert second != first
        assert server.client.get(second).text == server.client.get(first).text
        events = browser.get("/job/events", id=first).text
        assert '"over": true' in events


def test_a_batch_is_cancelled_and_what_has_no_result_is_retried(alone: Server) -> None:
    batch = alone.client.submit_batch([{"prompt": "x"}] * 3, name="a/b c")
    browser = Browser(alone)
    browser.send("/try", "/batch/cancel", name="a/b c")
    assert batch.status().states[JobState.CANCELLED] == 3
    browser.send("/try", "/batch/retry", name="a/b c")
    assert batch.status().states[JobState.QUEUED] == 3


def test_rows_that_wait_for_others_are_shown_as_such(alone: Server) -> None:
    alone.client.submit_batch([{"prompt": "x"}], name="first")
    second = alone.client.submit_batch(after="first", template="{{ prior.text }}", name="second")
    (job,) = alone.client.list_jobs(batch=second.name)
    browser = Browser(alone)
    assert "of these wait for others" in browser.get("/batch", name="second").text
    assert "of these wait for others" not in browser.get("/batch", name="first").text
    page = browser.get("/job", id=job.id).text
    assert f'href="/job?id={job.prior}"' in page and "waits for it" in page


def test_what_runs_is_listed_before_what_waits_and_what_has_ended(
    alone: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(night, "MOST_BATCHES", 4)
    submit = alone.client.submit_batch
    for name, later in (("runs", None), ("waits", None), ("later", timedelta(hours=1)), ("ended", None)):
        submit([{"prompt": "x"}], name=name, scheduled_at=later)
    (first,) = alone.client.list_jobs(batch="runs")
    alone.bench.claims.claim([first.id])
    alone.client.get_batch("ended").cancel()
    browser = Browser(alone)

    def listed() -> list[str]:
        return re.findall(r'href="/batch\?name=(\w+)"', browser.get("/").text)

    assert listed() == ["runs", "waits", "later", "ended"]
    submit([{"prompt": "x"}], name="new")  # what runs is shown, however old it is
    assert listed() == ["runs", "new", "waits", "later"]


def test_rows_are_found_and_read_by_pages(alone: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_queries, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(dashboard_queries, "SEARCHED_AT_ONCE", 10)
    rows = [{"prompt": "x", "custom_id": f"{'even' if n % 2 == 0 else 'odd'}-{n:02}"} for n in range(40)]
    alone.client.submit_batch(rows, name="b")
    found = DashboardQueries(alone.client.database)

    def all_of(wanted: RowFilter, few: int) -> tuple[list[str | None], int]:
        ids: list[str | None] = []
        pages, after = 0, None
        while pages == 0 or after is not None:
            page = found.lines("b", wanted, after, few)
            ids += [line.custom_id for line in page.lines]
            pages, after = pages + 1, page.after
        return ids, pages

    everything = [row["custom_id"] for row in rows]
    even = [name for name in everything if name.startswith("even")]
    for few in (0, 10**9):  # sorted at once, and searched for
        assert all_of(RowFilter(), few)[0] == everything
        assert all_of(RowFilter(custom_id="even-"), few)[0] == even
        assert all_of(RowFilter(custom_id="%"), few)[0] == []
        assert all_of(RowFilter(state=JobState.QUEUED), few)[0] == everything
        assert all_of(RowFilter(text="no such text"), few)[0] == []
    assert all_of(RowFilter(custom_id="odd-39"), 10**9) == (["odd-39"], 4)


def test_minutes_hold_what_ended_in_them(client: Client, clock: Clock) -> None:
    batch = client.submit_batch([{"prompt": "x"}] * 6, name="b")
    minute, begin = timedelta(minutes=1), client.database.now()
    jobs = list(client.list_jobs(batch="b"))
    for tokens, (job, after) in enumerate(zip(jobs, (1, 20, 59, 61, 62), strict=False), 1):
        with client.database.write() as connection:
            connection.execute(
                update(JobRow)
                .where(JobRow.id == job.id)
                .values(
                    state="succeeded", finished_at=begin + timedelta(seconds=after), completion_tokens=tokens
                )
            )
    clock.advance(120)
    batch.cancel()
    looking_at = DashboardQueries(client.database)
    found = looking_at.minutes(begin - minute, begin + 3 * minute, minute)
    assert [(one.rows, one.tokens) for one in found] == [(0, 0), (3, 6), (2, 9), (1, 0)]
    assert looking_at.ended(begin) == {JobState.CANCELLED: 1, JobState.SUCCEEDED: 5}
    client.enqueue_many(["a", "b"])
    assert looking_at.waiting() == {"queued": 2, "running": 0}


def test_a_plot_is_within_its_frame(clock: Callable[[], datetime]) -> None:
    begin, every = clock(), timedelta(minutes=5)
    minutes = [Minute(begin + every * n, 1, 300 * n) for n in range(144)]
    plot = draw(minutes, every)
    assert plot is not None
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", plot.line)]
    assert len(heights) == 144
    assert min(heights) >= 0
    assert max(heights) <= HEIGHT
    assert plot.most == 143
    assert draw([Minute(begin, 0, 0)], every) is None


def test_what_a_job_is_repeated_with_is_what_it_was_asked(client: Client) -> None:
    said = {"max_tokens": 7, "temperature": 0.5, "stop": ["x"], "logit_bias": {5: 1.0}, "n": 2}
    job: Job = client.get(client.enqueue([{"role": "user", "content": "hi"}], seed=3, **said))
    spec = _again(job)
    assert spec.params == job.params == GenerationParams(seed=3, **{**said, "stop": ("x",)})
    assert spec.messages == job.messages
    weather = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    for more in (
        {"tools": [weather], "tool_choice": "required", "parallel_tool_calls": False},
        {"choice": ["yes", "no"]},
        {"json_schema": {"type": "integer"}, "continue_final_message": True},
    ):
        chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is"}]
        other = client.get(client.enqueue(chat, **more))
        again = client.get(client.enqueueing.enqueue_spec(_again(other), owner=None))
        for name in ("messages", "rendering", "constrained", "params", "seed", "model"):
            assert getattr(again, name) == getattr(other, name), name


def test_nothing_but_the_pages_own_files_is_served(alone: Server) -> None:
    assert Browser(alone).get("/static/pages.js").headers["content-type"].startswith("text/javascript")
    assert Browser(alone).get("/static/../keys.py").status_code == 404
    assert Browser(alone).get("/static/session.py").status_code == 404


def test_a_page_asks_first_whether_the_database_answers_and_says_soon_that_it_does_not(
    alone: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own statements may take LOOK_SECONDS: they are not begun."""
    looked: list[object] = []

    async def look(service: JobService, function: Callable[..., Any], *arguments: Any) -> Any:
        looked.append(function)

    def silent(database: Database) -> datetime:
        raise DatabaseUnreachableError("no answer for 7 s")

    monkeypatch.setattr(JobService, "look", look)
    monkeypatch.setattr(Database, "read_clock", silent)
    for path in ("/", "/batch?name=x", "/job?id=x", "/hand-in", "/try"):
        answer = Browser(alone).http.get(path)
        assert answer.status_code == 503 and "the database cannot be used now" in answer.text, path
    assert looked == []


def test_what_a_night_was_is_a_page_for_those_who_see_all_jobs(start: Start) -> None:
    with start(worker=False) as server:
        alice, ops = Browser(server, ALICE), Browser(server, OPS)
        assert alice.get("/night").status_code == 403
        claims = Claims(server.client.database, "c" * 32)
        claims.register("mill", 1, "m", None)
        failing = server.client.enqueue("p", batch=HOSTILE)
        (claim,) = claims.claim([failing])
        claims.finish([Outcome(failing, claim.attempt, StopReason.ERROR, "", 3, 0, error=HOSTILE)])
        day, _, _ = night_of(None, server.client.database.now().astimezone())
        pages = [ops.get("/night"), ops.get("/night", date=str(day + timedelta(days=1)))]
        assert [page.status_code for page in pages] == [200, 200]
        told = next(page.text for page in pages if "No row ended" not in page.text)
        assert "<b>1</b> &lt;script&gt;alert" in told and "<script>alert" not in told
        for bad in ("yesterday", "9999-12-31", "0001-01-01"):
            assert ops.get("/night", date=bad).status_code == 400
