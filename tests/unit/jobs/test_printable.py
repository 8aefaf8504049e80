"""Text from outside is printable before it is printed, and JSON stays what it was."""

import ast
import json
import logging
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightmill.jobs.base.printable import PrintableRecords, json_printable, printable

ANY = st.text(st.characters(exclude_categories=()))
BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def test_every_control_character_is_spelled_out() -> None:
    assert printable("a\x1b]0;title\x07b\r\n\tc\x9b\x7f") == "a\\x1b]0;title\\x07b\\r\\n\\tc\\x9b\\x7f"
    assert printable("see [/b] \u202egpj.exe \u2028 \udcff") == "see [/b] \\u202egpj.exe \\u2028 \\udcff"
    assert printable("\U000e0041") == "\\U000e0041"
    assert printable("two\nlines\tand\x1b", keep="\n\t") == "two\nlines\tand\\x1b"


def test_ordinary_text_of_any_script_stays_as_it_is() -> None:
    text = "Grüße, 夜の粉屋, שלום, नमस्ते, می‌خواهم, 👩‍👩‍👧, naïve café \\n"
    assert printable(text) == text


@given(ANY)
def test_nothing_that_steers_a_terminal_or_a_reader_is_left(text: str) -> None:
    shown = printable(text)
    assert all(unicodedata.category(one) not in ("Cc", "Zl", "Zp", "Cs") for one in shown)
    assert not set(shown) & set(BIDI)
    shown.encode()


def test_a_text_is_cut_to_a_limit() -> None:
    assert printable("x" * 10_000, 300) == "x" * 299 + "…"
    assert printable("x" * 300, 300) == "x" * 300
    assert printable("\x1b" * 300, 300) == "\\x1b" * 74 + "\\x1…"  # escapes count


@given(ANY)
def test_escaped_json_means_exactly_the_same(text: str) -> None:
    encoded = json_printable(json.dumps({"text": text}, ensure_ascii=False))
    assert json.loads(encoded) == {"text": text}
    assert printable(encoded) == encoded


def test_a_message_of_a_log_forges_no_line_and_steers_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.addFilter(PrintableRecords())
    logging.getLogger("night").error("the model %s", "x\x1b[2J\n[2026-01-01: INFO] all is well")
    assert caplog.messages == ["the model x\\x1b[2J\n    [2026-01-01: INFO] all is well"]


def test_only_one_module_prints() -> None:
    """What ruff forbids in our own code (TID251, T201) is what would go past that module."""
    root = Path(__file__).parents[3]
    bypasses = []
    for path in [*root.glob("jobs/**/*.py"), *root.glob("worker/**/*.py")]:
        if path.name == "terminal.py":
            continue
        text = path.read_text(encoding="utf-8")
        if not any(word in text for word in ("print", "click", "rich")):
            continue  # to parse all takes seconds
        tree = ast.parse(text)
        guarded = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            said = ast.unparse(node) if isinstance(node, ast.Call | ast.Import | ast.ImportFrom) else ""
            if node not in guarded and said.startswith(
                ("print(", "click.echo", "click.secho", "click.confirm", "import rich", "from rich")
            ):
                bypasses.append(f"{path.relative_to(root)}: {said}")
    assert bypasses == []
