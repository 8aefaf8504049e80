"""Pages behind a proxy that adds a prefix to every path: what they refer to stays below it."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from urllib.parse import urljoin, urlsplit

import httpx2

from tests.unit.server.browser import Browser
from tests.unit.server.conftest import OPS, Server

PREFIX = "/mill"
_REFERENCE = re.compile(r'(?:href|src|action|data-go|data-stream)="([^"#][^"]*)"')


def _referred(page: httpx2.Response) -> Iterator[str]:
    """The paths at this server that a page refers to, where a browser sees it below the prefix."""
    asked = urlsplit(str(page.request.url))
    seen = f"{PREFIX}{asked.path}?{asked.query}"
    found = _REFERENCE.findall(page.text)
    if (there := page.headers.get("location")) is not None:
        found.append(there)
    for reference in found:
        path = urlsplit(urljoin(seen, reference.replace("&amp;", "&")))
        assert path.path.startswith(f"{PREFIX}/") and not path.netloc, (seen, reference)
        yield path.path.removeprefix(PREFIX) + (f"?{path.query}" if path.query else "")


def test_all_pages_and_forms_stay_below_a_proxys_prefix(
    start: Callable[..., AbstractContextManager[Server]],
) -> None:
    with start() as server:
        client = server.client
        rows = [{"prompt": "a"}] * 3 + [{"promt": "b"}]
        client.submit_batch(rows, name="a/b c", scheduled_at=timedelta(hours=8))
        browser = Browser(server, OPS)
        browser.http.follow_redirects = False
        upload = {"file": ("night.jsonl", '{"prompt": "one", "max_tokens": 2}\n')}
        form = {"form_token": browser.token("/hand-in"), "purpose": "batch"}
        uploaded = browser.http.post("/hand-in", data=form, files=upload)
        tried = browser.send("/try", "/try", prompt="a", kind="plain", max_tokens="2")
        wrong = browser.send("/try", "/job/cancel", id="none")
        assert (uploaded.status_code, tried.status_code, wrong.status_code) == (303, 303, 404)
        asked: dict[str, int] = {}
        to_ask = {path for page in (uploaded, tried, wrong) for path in _referred(page)} | {
            "/",
            "/night",
            "/docs",
        }
        while to_ask:
            path = to_ask.pop()
            page = browser.http.get(path)
            asked[path] = page.status_code
            if page.headers.get("content-type", "").startswith("text/html") or page.has_redirect_location:
                endless = ("/night?", "/job/events?")  # days before and after; what waits for a text
                to_ask |= {one for one in _referred(page) if not one.startswith(endless)} - asked.keys()
        kinds = {path.partition("?")[0] for path in asked}
        posted = {
            "/sign-out",
            "/batch/cancel",
            "/batch/retry",
            "/job/cancel",
            "/job/repeat",
            "/hand-in/begin",
        }
        read = {
            "/",
            "/batch",
            "/batch/results",
            "/batch/errors",
            "/job",
            "/hand-in",
            "/hand-in/file",
            "/try",
            "/night",
        }
        assert kinds >= posted | read | {
            "/static/pages.css",
            "/static/pages.js",
            "/static/icon.svg",
            "/openapi.json",
        }
        assert asked.pop("/batch") == 404  # the form that filters rows, without their batch
        for path, status in asked.items():
            assert status == (405 if path.partition("?")[0] in posted | {"/job/retry"} else 200), path
        # Whoever is not signed in goes there, and comes back to where they were.
        stranger = Browser(server).http
        stranger.follow_redirects = False
        for path in ("/batch?name=a%2Fb+c", "/hand-in/file?id=x"):
            (there,) = _referred(stranger.get(path))
            assert there.startswith("/sign-in?next=%2F"), there
            page = stranger.get(there)
            (token,) = re.findall(r'name="form_token" value="([^"]+)"', page.text)
            (back,) = re.findall(r'name="next" value="([^"]+)"', page.text)
            form = {"form_token": token, "key": OPS, "next": back.replace("&amp;", "&")}
            assert list(_referred(stranger.post("/sign-in", data=form))) == [path]
            stranger.cookies.clear()
