"""Tables fit the terminal, and the door to the screen takes nothing for markup or for colours."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from nightmill.jobs.commands.terminal import echo, echo_json, echo_text, table, type_text

ROWS = [
    ("0" * 32, "succeeded", "stop_sequence", 1234, "2026-11-22 22:00:00 CET", "x" * 3000),
    ("0" * 32, "queued", "", "", "2026-11-22 22:00:00 CET", "夜の粉屋" * 30),
]
HEADINGS = ("id", "state", "stop reason", "tokens", "created", "prompt")


@pytest.mark.parametrize("width", [80, 110, 200])
def test_a_table_fits_its_terminal_and_keeps_what_must_be_whole(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    table(HEADINGS, ROWS, cut="prompt", whole={"id": 32, "state": 9})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert max(map(cell_len, lines)) <= max(width, 88)  # what must be whole takes 88
    assert lines[1].startswith("0" * 32 + "  succeeded  ")
    assert lines[1].endswith("xx…") and "夜の" in lines[2]
    assert ("2026-11-22 22:00:00 CET" in lines[1]) == (width >= 110)


def test_a_file_gets_a_table_in_full_but_for_long_cells(capsys: pytest.CaptureFixture[str]) -> None:
    table(HEADINGS, ROWS, cut="prompt")
    _, first, _ = capsys.readouterr().out.splitlines()
    assert first.endswith("2026-11-22 22:00:00 CET  " + "x" * 99 + "…")


def test_a_table_of_nothing_has_its_headings(capsys: pytest.CaptureFixture[str]) -> None:
    table(("name", "state"), [])
    assert capsys.readouterr().out == "name  state\n"


def test_lines_texts_and_json_are_what_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    echo("see [/b] [red]\x1b[2J\r\nnext\tone")
    echo_text("raw \x1b[2J\r")
    echo_json({"text": "\x1b[2J\x9b\x7f\u2028\U000e0041 [/b]"})
    said = capsys.readouterr().out
    assert said.startswith("see [/b] [red]\\x1b[2J\\r\nnext\tone\nraw \x1b[2J\r\n")
    assert json.loads(said.splitlines()[-1]) == {"text": "\x1b[2J\x9b\x7f\u2028\U000e0041 [/b]"}
    assert said.splitlines()[-1].isprintable()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_text_that_is_typed_out_in_pieces_is_printed_as_the_whole_would_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    text = "one\x1b[2J\r\n\ttwo\x9b\u2028 [/b] é"
    for character in text:
        type_text(character)
    echo_text("")
    typed = capsys.readouterr().out
    echo_text(text)
    assert typed == capsys.readouterr().out
    assert ("\x1b" in typed) is not terminal


def test_a_full_disk_for_what_is_said_ends_no_work() -> None:
    said = (
        "from nightmill.jobs.commands.terminal import LiveLine, ProgressLine, echo, echo_err\n"
        "echo_err('x' * 20_000)\n"
        "LiveLine(ProgressLine(name='a')).say('b')\n"
        "echo('done')"
    )
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-c", said], stdout=subprocess.PIPE, stderr=full, check=False)
    assert (done.returncode, done.stdout) == (0, b"done\n")


def test_a_full_disk_for_what_is_printed_is_told_in_a_sentence() -> None:
    said = (
        "import click\n"
        "from nightmill.jobs.commands.terminal import echo\n"
        "click.command()(lambda: echo('ids'))()"
    )
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-c", said], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert done.stderr == b"Error: standard output cannot be written: No space left on device\n"
