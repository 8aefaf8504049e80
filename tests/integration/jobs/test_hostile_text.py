"""Prompts, names and texts of strangers reach no terminal as commands, and break no command."""

import json
import os
import pty
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import click
import pytest
from click.testing import CliRunner, Result

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.sql.claims import Claims, Outcome
from tests.support.servers import worker_env

HOSTILE = (
    "see [/b]",
    "[/x][red]",
    "\x1b]0;owned\x07\x1b[2J",
    "one\r\ntwo: succeeded",
    "\u202egpj.exe\u2066\u200f",
    "\x85\x9b31m\x7f\u2028\u2029",
    "x" * 10_000,
)
"""Markup of rich, commands of terminals, forged lines, turned writing, C1 and DEL, and much of it."""
Run = Callable[..., Result]


@pytest.fixture
def run(sqlite_settings: Settings) -> Run:
    """Runs `nightmill ARGUMENTS` in this process, with the settings of the test."""

    def invoke(*arguments: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(main, list(arguments), input=stdin, env=worker_env(sqlite_settings))

    return invoke


@pytest.fixture
def hostile(sqlite_settings: Settings, tmp_path: Path) -> list[tuple[str, str]]:
    """(job id, batch name) of finished and failed jobs, all of whose texts are hostile; a worker, too."""
    made = []
    with Client(sqlite_settings) as client:
        claims = Claims(client.database, "a" * 32)
        claims.register("host\x1b[2J", 1, "model[/x]\x1b", None)
        for number, text in enumerate(HOSTILE):
            name = text[:200]
            metadata = {text[:50]: text}
            job_id = client.enqueue(text, batch=name, custom_id=text[:512], metadata=metadata)
            (claim,) = claims.claim([job_id])
            error = text if number % 2 else None
            reason = StopReason.ERROR if error else StopReason.EOS
            claims.finish([Outcome(claim.job_id, claim.attempt, reason, text, 2, 3, error)])
            made.append((job_id, name))
        path = tmp_path / "see [x]\u202e.jsonl"
        rows = [json.dumps({"prompt": text, "custom_id": text[:512]}) for text in HOSTILE]
        path.write_text("\n".join([*rows, json.dumps({"prompt": 1, "custom_id": "\x1b[2J"})]))
        client.submit_batch(path, name="file\x1b]0;x\x07")
    return made


def fit(text: str) -> bool:
    """Whether a terminal does nothing with this but to show it."""
    return all(
        character == "\n" or unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp")
        for character in text
    ) and not set(text) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f")


def test_every_command_prints_hostile_text_harmlessly(
    run: Run, hostile: list[tuple[str, str]], tmp_path: Path
) -> None:
    commands: list[list[str]] = [["list"], ["list", "-n", "50"], ["batch", "list"], ["stats"]]
    file = "file\x1b]0;x\x07"
    for job_id, name in [*hostile, (hostile[0][0], file)]:
        output = str(tmp_path / "out\u202e.jsonl")
        commands += [["list", "--batch", name], ["stats", "--batch", name], ["batch", "status", name]]
        commands += [["retry", job_id], ["cancel", job_id], ["cancel", "--batch", name]]
        commands += [["batch", "results", name, "-o", output], ["batch", "errors", name, "-o", output]]
        commands += [["batch", "retry-failed", name], ["batch", "cancel", name]]
        commands += [
            ["verify", name, "--timeout", "0.1s"],
            ["batch", "watch", name],
            ["batch", "delete", name, "--yes"],
        ]
    for text in HOSTILE:
        short = text[:100]
        commands += [
            ["show", text],
            ["cancel", text],
            ["retry", text],
            ["batch", "status", text],
            ["verify", text],
        ]
        commands += [["batch", "watch", text], ["batch", "delete", text], ["batch", "submit", short]]
        commands += [["verify", text, "--timeout", "0.1s"]]
        commands += [
            ["enqueue", "x", "--model", text],
            ["enqueue", "x", "--batch", text],
            [text],
            ["--" + text],
        ]
        commands += [["list", "--state", text], ["list", "--limit", text], ["prune", "--older-than", text]]
        commands += [
            ["batch", "submit", "f.jsonl", "--at", text],
            ["plan", short],
            ["run", short, "-o", short],
            ["try", short],
            ["try", "f.jsonl", "--template", text],
            ["embed", short, "-o", short],
            ["embed", "f.csv", "-o", "e.csv", "--column", text],
            ["night", text],
            ["benchmark", short, "-o", str(tmp_path / "report.json")],
        ]
        commands += [["check", "--model", short], ["check", "--model", f"hf:{short}"]]
        commands += [["pull", short], ["pull", f"hf:{short}"], ["models", "--gpu", text]]
        commands += [["serve", "--host", short], ["serve", "--port", text]]
    for command in commands:
        result = run(*command)
        assert result.exception is None or isinstance(result.exception, SystemExit), (command, result)
        assert fit(result.stdout), (command, result.stdout)
        assert fit(result.stderr), (command, result.stderr)


def test_no_cell_of_a_table_is_longer_than_its_line(run: Run, hostile: list[tuple[str, str]]) -> None:
    for command in (["list"], ["batch", "list"], ["stats"]):
        lines = run(*command).stdout.splitlines()
        assert max(map(len, lines)) <= 250
    listed = run("list").stdout.splitlines()
    assert len(listed) == 1 + len(hostile) + len(HOSTILE) + 1  # a line each: the last is a bad row


def test_programs_get_every_text_exactly(run: Run, hostile: list[tuple[str, str]]) -> None:
    for command in (["list", "-n", "50"], ["batch", "list"], ["stats"]):
        result = run(*command, "--json")
        assert fit(result.stdout)
    for (job_id, name), text in zip(hostile, HOSTILE, strict=True):
        said = run("show", job_id, "--json")
        assert fit(said.stdout)
        job = json.loads(said.stdout)
        assert (job["prompt"], job["batch"], job["text"], job["custom_id"]) == (text, name, text, text[:512])
        assert job["metadata"] == {text[:50]: text}


def test_a_file_gets_a_text_as_it_is_and_a_terminal_escapes(
    sqlite_settings: Settings, hostile: list[tuple[str, str]]
) -> None:
    job_id, _ = hostile[2]
    command = [str(Path(sys.executable).with_name("nightmill")), "show", job_id]
    environment = worker_env(sqlite_settings)
    piped = subprocess.run(command, env=environment, capture_output=True, timeout=240, check=True)
    assert piped.stdout.endswith(b"\n\x1b]0;owned\x07\x1b[2J\n")
    assert b"\x1b" not in piped.stdout.removesuffix(b"\n\x1b]0;owned\x07\x1b[2J\n")
    ours, theirs = pty.openpty()
    seen: list[bytes] = []

    def read() -> None:
        try:
            while piece := os.read(ours, 4096):
                seen.append(piece)
        except OSError:  # the other end is closed
            return

    reader = Thread(target=read)
    reader.start()
    shown = subprocess.run(command, env=environment, stdout=theirs, timeout=240, check=False)
    os.close(theirs)
    reader.join()
    os.close(ours)
    said = b"".join(seen)
    assert shown.returncode == 0
    assert b"\x1b" not in said and b"\x07" not in said
    assert b"\\x1b]0;owned\\x07\\x1b[2J" in said


def test_a_screen_without_unicode_gets_escapes_and_no_error(
    sqlite_settings: Settings, tmp_path: Path
) -> None:
    with Client(sqlite_settings) as client:
        job_id = client.enqueue("夜の粉屋 😀")
    environment = worker_env(sqlite_settings) | {"PYTHONIOENCODING": "ascii"}
    nightmill = str(Path(sys.executable).with_name("nightmill"))
    for arguments in (["list"], ["show", job_id], ["show", job_id, "--json"]):
        done = subprocess.run(
            [nightmill, *arguments], env=environment, capture_output=True, timeout=240, check=False
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"\\u591c" in done.stdout
    assert json.loads(done.stdout)["prompt"] == "夜の粉屋 😀"


def test_every_command_was_tried() -> None:
    """A new command belongs into the test above."""
    assert set(main.list_commands(click.Context(main))) == {
        *("batch", "benchmark", "cancel", "check", "demo", "embed", "enqueue", "list", "migrate", "models"),
        *(
            "night",
            "plan",
            "prune",
            "pull",
            "retry",
            "run",
            "serve",
            "show",
            "stats",
            "stop",
            "try",
            "verify",
            "worker",
        ),
    }
