"""The command that a message names installs the extra into the installation that is there."""

import json
import re
from importlib.metadata import PackageNotFoundError

import pytest

from nightmill.jobs.base import extras
from nightmill.jobs.base.extras import pip_install
from tests.support.pages import ROOT


class Installed:
    """A distribution with what the installer noted of its origin."""

    def __init__(self, origin: object) -> None:
        self.noted = None if origin is None else json.dumps(origin)

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.noted


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'nightmill[server]'"),  # from an index
        (
            {"url": "file:///srv/night%20mill", "dir_info": {"editable": True}},
            "pip install -e '/srv/night mill[server]'",
        ),
        ({"url": "file:///srv/nightmill", "dir_info": {}}, "pip install '/srv/nightmill[server]'"),
        (
            {"url": "file:///tmp/nightmill-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install '/tmp/nightmill-0.1.0-py3-none-any.whl[server]'",
        ),
        (
            {"url": "https://host/nightmill-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'nightmill[server] @ https://host/nightmill-0.1.0-py3-none-any.whl'",
        ),
        (
            {"url": "https://host/nightmill.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            "pip install 'nightmill[server] @ git+https://host/nightmill.git'",
        ),
    ],
)
def test_the_command_names_what_this_installation_came_from(
    monkeypatch: pytest.MonkeyPatch, origin: object, command: str
) -> None:
    monkeypatch.setattr(extras, "distribution", lambda name: Installed(origin))
    assert pip_install("server") == command


def test_code_that_was_never_installed_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", absent)
    assert pip_install("hub") == "pip install 'nightmill[hub]'"


def test_no_other_place_spells_the_command() -> None:
    spelt = re.compile(r"pip install[^\n]*nightmill")
    files = [path for folder in ("jobs", "worker") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    found = [path for path in files if spelt.search(path.read_text(encoding="utf-8"))]
    assert [path.name for path in found] in ([], ["extras.py"])


def test_no_page_promises_an_index() -> None:
    """Until a release is on an index, what is named to install is a clone or a wheel (docs/installing.md)."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    promise = re.compile(r"pip install (?:-\S+ )*'?nightmill")
    assert [str(page) for page in pages if promise.search(page.read_text(encoding="utf-8"))] == []
