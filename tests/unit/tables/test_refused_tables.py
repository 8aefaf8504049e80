"""Tables, and options of them, that are refused before the first row."""

from pathlib import Path
from typing import Any

import pytest

from nightmill.jobs.errors import BatchFileError, InvalidParameterError
from nightmill.jobs.tables.reading import TableFile
from tests.unit.tables.sources import options, rows_of


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("in.csv", "x,y,x\n1,2,3\n", "column 'x' is there twice; rename one"),
        ("in.csv", "x,,y\n1,2,3\n", "column 2 has no name; give it one"),
        ("in.csv", "x,y\n", "holds no rows"),
        ("in.jsonl", '[{"x": 1}]', "is one JSON list"),
        (
            "in.jsonl",
            '{\n  "x": 1\n}\n',
            "holds no row that can be read; line 1 is not JSON: .* each line",
        ),
        ("in.jsonl", "{}\n\n{}\n", "holds no row that can be read; its objects have no keys"),
        ("in.feather", "FEA1\0\0\0\0", "is Feather of version 1; write it with version 2"),
        ("in.arrow", "ARROW1\0\0 not really", "cannot be read as Arrow"),
        (
            "in.csv",
            "x;Gr\udcf6\udcdfe\n1;2\n",
            "its columns hold bytes that are not UTF-8; .* iconv",
        ),
    ],
)
def test_a_table_that_cannot_be_one_is_refused_whole(
    name: str, text: str, fault: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text, "utf-8", "surrogateescape")
    with pytest.raises(BatchFileError, match=fault):
        rows_of(tmp_path / name)


def test_utf_16_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("x\n1\n", encoding="utf-16")
    with pytest.raises(BatchFileError, match="is UTF-16"):
        rows_of(tmp_path / "in.csv")


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"template": "{{ y }}"}, "template: line 1, column 1: there is no column 'y'; there are 'x', 'id'"),
        ({"system": "{{ y }}"}, "system: line 1, column 1: there is no column 'y'"),
        ({"template": "Of {x}?"}, r"template: names no column, as \{x\} is a text; write \{\{ x \}\}$"),
        ({"keep": ["x", "y"]}, "keep: there is no column 'y'"),
        ({"column": "id"}, "column: 'id' is a column of the table already"),
        ({"keep": "id"}, "keep: must be 'all', 'none' or a list"),
        ({"empty": "drop"}, "empty: must be one of error, skip, keep"),
        ({"column": " "}, "column: must be a text of 1 to 256"),
        ({"spread": True}, "spread: needs a JSON schema"),
        ({"spread": True, "response_format": {"type": "json_object"}}, "names its properties"),
        ({"plain": True, "system": "s"}, "plain: contradicts system"),
        ({"template": None, "column": "c"}, "column: is for tables with a template"),
    ],
)
def test_what_cannot_go_together_is_refused_before_the_first_row(
    more: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"x": 1, "id": 2}\n')
    with pytest.raises(InvalidParameterError, match=fault):
        TableFile(path, options=options(**({"template": "{{ x }}"} | more)))
