"""The pages in a real browser: what moves, what is filled in and sent, and what readers need."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.conftest import ALICE, Server

if TYPE_CHECKING:
    from playwright.sync_api import Page

Start = Callable[..., AbstractContextManager[Server]]
CHECKS = (Path(__file__).parent / "checks.js").read_text()
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


@pytest.fixture
def server(start: Start) -> Any:
    """Without keys, with a worker."""
    with start(keys=None) as made:
        yield made


def test_every_page_can_be_read_by_everybody(server: Server, page: "Page") -> None:
    """In light and dark, on a wide screen and on a phone; strangers' markup stays text."""
    rows = [{"prompt": HOSTILE, "custom_id": HOSTILE}, {"prompt": "two"}, {"promt": "three"}]
    batch = server.client.submit_batch(rows, name=HOSTILE, max_tokens=30, deadline=timedelta(hours=2))
    server.client.submit_batch(rows, name="later", scheduled_at=timedelta(hours=3))
    batch.wait(timeout=120)
    (job, *_) = server.client.list_jobs(batch=HOSTILE, state="succeeded")
    for scheme, width in (("light", 1180), ("dark", 390)):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.set_viewport_size({"width": width, "height": 800})
        page.goto(f"{server.url}/")
        page.get_by_role("link", name="<img src=x").click()
        page.wait_for_url("**/batch?**")
        for path in (None, "/", f"/job?id={job.id}", "/hand-in", "/try", "/job?id=none"):
            if path is not None:
                with page.expect_response("**") as answer:
                    page.goto(f"{server.url}{path}")
                assert answer.value.status == (404 if path.endswith("none") else 200)
            assert page.evaluate(CHECKS) == [], (path, scheme)
            assert page.locator("img[src=x], main script").count() == 0


def test_a_file_is_handed_in_watched_and_downloaded(server: Server, page: "Page", tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one", "custom_id": "a"}\n{"prompt": "two"}\n{"promt": "three"}\n')
    page.goto(f"{server.url}/hand-in")
    page.get_by_label("File").set_input_files(file)
    page.get_by_role("button", name="Upload and look").click()
    page.get_by_text("did you mean prompt?").wait_for()
    page.get_by_label("Most tokens of an answer").fill("200")
    page.get_by_role("button", name="Hand in 2 rows").click()
    # The page follows the batch by itself, from the rows that are entered to the end.
    page.wait_for_url("**/batch?**")
    page.locator(".state", has_text="completed with errors").first.wait_for()
    with page.expect_download() as download:
        page.get_by_role("link", name="Download results").click()
    results = Path(download.value.path()).read_text().splitlines()
    assert len(results) == 2
    assert download.value.suggested_filename.endswith(".results.jsonl")


def test_a_batch_is_cancelled_by_a_button_and_its_page_shows_it(start: Start, page: "Page") -> None:
    with start(worker=False) as server:
        server.client.submit_batch([{"prompt": "x"}] * 60, name="long", deadline=timedelta(hours=1))
        page.goto(f"{server.url}/sign-in?next=/")
        page.get_by_label("API key").fill("ops-does-anything")
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("link", name="long").click()
        page.get_by_role("link", name="Next rows").click()
        page.get_by_text("Back to the first rows").click()
        page.get_by_role("button", name="Cancel batch").click()
        page.locator(".state", has_text="cancelled").first.wait_for()
        page.locator("select[name=state]").select_option("queued")
        page.get_by_role("button", name="Show").click()
        page.get_by_text("row fits").wait_for()
        assert ALICE not in page.content()
        page.close()  # which asks the server how the batch goes for as long as it is open


def test_a_prompt_is_answered_before_ones_eyes(server: Server, page: "Page") -> None:
    page.goto(f"{server.url}/try")
    page.get_by_label("Prompt").fill("tell me")
    page.get_by_label("Most tokens").fill("190")
    page.get_by_label("As").select_option("plain")
    page.get_by_role("button", name="Generate").click()
    page.wait_for_url("**/job?**")
    page.locator(".state", has_text="succeeded").wait_for()
    (job,) = server.client.list_jobs()
    assert page.locator("pre.answer").inner_text() == job.text
    page.get_by_role("button", name="Repeat it").click()
    page.locator(".state", has_text="succeeded").wait_for()
    assert page.locator("pre.answer").inner_text() == job.text


def test_a_page_that_nobody_sees_asks_for_nothing(server: Server, page: "Page") -> None:
    page.goto(f"{server.url}/")
    asked: list[str] = []
    page.on("request", lambda one: asked.append(one.url) if one.resource_type == "fetch" else None)
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    page.wait_for_timeout(3_500)
    assert asked == []
    page.evaluate("Object.defineProperty(document, 'hidden', {value: false, configurable: true})")
    page.locator("[data-live][data-fetched]").wait_for()
    assert asked
