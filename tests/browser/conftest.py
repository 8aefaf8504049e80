"""Chromium, a server, and a worker whose texts are known: as `tests/unit/server` has them."""

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.unit.server.conftest import Server, start  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """Where the browser is, if there is one."""
    return os.environ.get("NIGHTMILL_TEST_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)


@pytest.fixture(scope="module")
def chromium() -> "Iterator[Browser]":
    """A browser; without one, tests are skipped on a laptop and fail in CI.

    It ends with the module: Playwright's event loop would be in the way of other tests' loops.
    """
    path = find_chromium()
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        path = None
    if path is None:
        said = "needs Chromium and playwright: apt-get install chromium, pip install -e '.[dev]'"
        if os.environ.get("CI"):
            pytest.fail(said)
        pytest.skip(said)
    with sync_playwright() as playwright:
        # As root, which containers are, Chromium starts only without its sandbox. The pages are our own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def _is_bad(message: "ConsoleMessage") -> bool:
    """Warnings and errors, but for a page of ours that says 404."""
    return message.type in ("warning", "error") and "status of 404" not in message.text


@pytest.fixture
def page(chromium: "Browser") -> "Iterator[Page]":
    """A page that must not complain on its console."""
    context = chromium.new_context(viewport={"width": 1180, "height": 800}, accept_downloads=True)
    made = context.new_page()
    complaints: list[str] = []
    made.on("console", lambda message: complaints.append(message.text) if _is_bad(message) else None)
    made.on("pageerror", lambda error: complaints.append(str(error)))
    made.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    made.set_default_timeout(15_000)
    yield made
    context.close()
    assert complaints == []
