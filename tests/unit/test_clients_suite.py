"""The suite of clients cannot pass by reporting nothing, and its list of failures is held to what happens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients import documented
from tests.clients.catalogue import CLIENTS, ENVIRONMENTS, NODE_ENVIRONMENTS
from tests.clients.environments import SCRIPTS
from tests.clients.running import CaseResult, ClientResult, table

OPENAI = CLIENTS[0]
RESULT = ClientResult(
    OPENAI, "2.0", (CaseResult("chat", "tiny", ""), CaseResult("echo", "tiny", "Error: no"))
)


def test_every_client_has_an_environment_and_a_script() -> None:
    for client in CLIENTS:
        assert client.environment in ENVIRONMENTS | NODE_ENVIRONMENTS
        assert (SCRIPTS / client.script).is_file()
    assert {path.name for path in SCRIPTS.iterdir() if path.is_file()} == {
        *("reporting.py", "openai_asking.py", "openai_responses.py"),  # which scripts import
        *(client.script for client in CLIENTS),
    }


def test_the_table_counts_cases_and_names_what_failed() -> None:
    lines = table([RESULT]).splitlines()
    assert lines[0].split() == ["client", "version", "cases", "passed"]
    assert lines[1].split() == ["openai", "2.0", "2", "1"]
    assert lines[2] == "FAILED openai: echo with tiny: Error: no"


def _page(folder: Path, lines: str) -> Path:
    page = folder / "http.md"
    page.write_text(f"| client | case | why it fails |\n| --- | --- | --- |\n{lines}\nMore.\n")
    return page


def test_a_failure_must_be_listed_and_what_is_listed_must_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documented, "_PAGE", _page(tmp_path, ""))
    assert documented.unexpected([RESULT]) == ["docs/http.md does not list that openai fails at echo"]
    why = "no prompt is told back here, which is a reason"
    lines = f"| openai | `echo` | {why} |\n| openai | `chat` | {why} |\n| llm | `chat` | {why} |"
    monkeypatch.setattr(documented, "_PAGE", _page(tmp_path, lines))
    assert documented.documented_failures()["openai", "echo"] == why
    assert documented.unexpected([RESULT]) == ["docs/http.md says that openai fails at chat, and it does not"]
    monkeypatch.setattr(documented, "_PAGE", _page(tmp_path, "| openai | `echo` | because |"))
    with pytest.raises(ValueError, match="openai, echo: say why"):
        documented.documented_failures()


def test_cases_are_reported_one_by_one_also_when_they_fail(tmp_path: Path) -> None:
    script = tmp_path / "cases.py"
    script.write_text(
        "from reporting import case, run_cases\n"
        "@case\ndef good(): pass\n"
        "@case\nasync def bad():\n    assert 1 == 2\n"
        "run_cases()\n"
    )
    names = ("URL", "MODEL", "KEY", "FOLDER", "MODEL_FOLDER")
    environment = os.environ | {f"CLIENTS_{name}": "x" for name in names} | {"PYTHONPATH": str(SCRIPTS)}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    good, bad, end = (json.loads(line) for line in done.stdout.splitlines())
    assert (good["case"], good["error"]) == ("good", "")
    assert bad["case"] == "bad" and bad["error"].startswith("AssertionError") and "1 == 2" in bad["error"]
    assert end == {"end": True}
