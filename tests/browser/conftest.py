"""Chromium, a server, and a worker whose texts are known: as `tests/unit/server` has them."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.needs import Need, missing
from tests.unit.server.conftest import Server, start  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_INSTALLED = Path(__file__).parents[2] / ".venv" / "chromium" / "chromium"  # by `make browser`, without root


def find_chromium() -> str | None:
    """Where the browser is, if there is one."""
    named = os.environ.get("NIGHTMILL_TEST_CHROMIUM")
    return named or next(filter(None, map(shutil.which, (*_NAMES, str(_INSTALLED)))), None)


@pytest.fixture(scope="module")
def chromium() -> "Iterator[Browser]":
    """A browser, which `make browser` installs; without one, tests are skipped, or fail if one is required.

    It ends with the module: Playwright's event loop would be in the way of other tests' loops.
    """
    path = find_chromium()
    if path is None:
        missing(Need.BROWSER)
    from playwright.sync_api import sync_playwright

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
