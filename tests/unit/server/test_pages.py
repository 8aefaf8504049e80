"""Pages: who may see and do what, what is escaped, and where forms lead. What moves is in `tests/browser`."""

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from sqlalchemy import update

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import DatabaseUnreachableError
from nightmill.jobs.reply.job import Job
from nightmill.jobs.reply.night import night_of
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.server.job_service import JobService
from nightmill.jobs.server.pages import night
from nightmill.jobs.server.pages.actions import _again
from nightmill.jobs.server.pages.plot import HEIGHT, draw
from nightmill.jobs.sql import dashboard_queries
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.dashboard_queries import DashboardQueries, Minute, RowFilter
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.tables import JobRow
from tests.support.servers import Clock, wait_until
from tests.unit.server.browser import Browser
from tests.unit.server.conftest import ALICE, BOB, OPS, Server

Start = Callable[..., AbstractContextManager[Server]]
HOSTILE = "<script>alert('x')</script>\x1b[2J"


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
    assert f'href="./job?id={job.prior}"' in page and "waits for it" in page


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
        return re.findall(r'href="./batch\?name=(\w+)"', browser.get("/").text)

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
