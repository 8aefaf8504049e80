"""Plain rows of JSONL files, and the same from Python."""

from collections.abc import Generator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from nightmill.jobs.formats import FileFormat, InputFile, InputRow, rows_from
from nightmill.jobs.formats.inputs import Record
from tests.unit.formats.files import read_rows, said, write_lines


def only(tmp_path: Path, row: Any) -> InputRow:
    (read,) = read_rows(write_lines(tmp_path / "in.jsonl", [row]), FileFormat.JSONL)
    return read


def test_a_plain_row_gives_a_prompt_and_the_keywords_of_enqueue(tmp_path: Path) -> None:
    fields = {
        "max_tokens": 3, "temperature": 0.5, "top_k": 2, "top_p": 0.5, "min_p": 0.1, "seed": 4,
        "repetition_penalty": 1.1, "stop": ["x", "y"], "ignore_eos": True, "model": "demo", "priority": 7,
        "metadata": {"a": [1]}, "max_attempts": 2, "stop_token_ids": [3, 4], "min_tokens": 2,
    }  # fmt: skip
    row = only(tmp_path, {"prompt": "Once", "custom_id": "x"} | fields)
    assert (row.number, row.custom_id, row.prompt, row.error) == (1, "x", "Once", None)
    assert said(row) == fields | {"stop": ("x", "y"), "stop_token_ids": (3, 4)}


def test_a_prompt_may_be_token_ids(tmp_path: Path) -> None:
    row = only(tmp_path, {"prompt": [3, 1, 4]})
    assert (row.error, row.prompt) == (None, [3, 1, 4])


def test_messages_may_stand_in_place_of_a_prompt(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert only(tmp_path, {"messages": messages}).prompt == messages


def test_rows_without_a_custom_id_are_called_by_their_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, b"", {"prompt": "b", "custom_id": None}])
    assert [row.custom_id for row in read_rows(path)] == ["row-1", "row-3"]


def test_null_counts_as_absent(tmp_path: Path) -> None:
    assert said(only(tmp_path, {"prompt": "a", "messages": None, "seed": None, "model": None})) == {}


@pytest.mark.parametrize(
    ("row", "code", "field"),
    [
        ({}, "missing_field", "prompt"),
        ({"prompt": None}, "missing_field", "prompt"),
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"prompt": 5}, "invalid_value", "prompt"),
        ({"prompt": "a", "messages": []}, "invalid_value", "prompt"),
        ({"prompt": "a\0"}, "invalid_value", "prompt"),
        ({"prompt": "a", "metadata": 5}, "invalid_value", "metadata"),
        ({"prompt": "a", "metadata": {"x": "\0"}}, "invalid_value", "metadata"),
        ({"prompt": "a", "priority": 10}, "invalid_value", "priority"),
        ({"prompt": "a", "max_attempts": 0}, "invalid_value", "max_attempts"),
        ({"prompt": "a", "batch": "x"}, "unsupported_field", "batch"),
        ({"prompt": "a", "deadline": "06:00"}, "unsupported_field", "deadline"),
        ({"prompt": "a", "scheduled_at": "01:00"}, "unsupported_field", "scheduled_at"),
        ({"prompt": "a", "idempotency_key": "x"}, "unsupported_field", "idempotency_key"),
        ({"prompt": "a", "max_token": 5}, "unsupported_field", "max_token"),
        ({"messages": [{"role": "user"}]}, "missing_field", "messages[0].content"),
    ],
)
def test_a_bad_plain_row_names_its_field(tmp_path: Path, row: Any, code: str, field: str) -> None:
    error = only(tmp_path, row).error
    assert error is not None
    assert (error.code, error.field) == (code, field)
    assert error.message.startswith(f"{field}: ")


def test_a_misspelt_key_is_answered_with_the_one_that_was_meant(tmp_path: Path) -> None:
    error = only(tmp_path, {"prompt": "a", "max_token": 5}).error
    assert error is not None
    assert error.message == "max_token: is not supported: did you mean max_tokens?"


def test_the_second_of_two_rows_with_one_custom_id_is_the_bad_one(tmp_path: Path) -> None:
    rows = [
        {"custom_id": "x", "prompt": "a"},
        {"prompt": "b"},
        {"custom_id": "x", "prompt": "c"},
        {"custom_id": "row-2", "prompt": "d"},
    ]
    read = read_rows(write_lines(tmp_path / "in.jsonl", rows))
    assert [row.error is None for row in read] == [True, True, False, False]
    assert read[2].error is not None and read[3].error is not None
    assert read[2].error.code == read[3].error.code == "duplicate_custom_id"
    assert read[2].error.message == "custom_id: 'x' is also that of row 1; give each row its own"
    assert "row 2" in read[3].error.message


def test_a_custom_id_that_a_bad_row_has_is_taken(tmp_path: Path) -> None:
    rows = [{"custom_id": "x"}, {"custom_id": "x", "prompt": "c"}]
    codes = [row.error and row.error.code for row in read_rows(write_lines(tmp_path / "in.jsonl", rows))]
    assert codes == ["missing_field", "duplicate_custom_id"]


def test_python_items_meet_the_same_checks() -> None:
    message = {"role": "user", "content": "hi"}
    items: list[Any] = [
        "text",
        [message],
        (dict(message) for _ in range(2)),
        {"prompt": "x", "max_tokens": 3, "stop": ("a",), "custom_id": "mine"},
        {"messages": [message], "deadline": timedelta(1)},
        None,
        b"bytes",
        {5: "x", "prompt": "y"},
        "\ud800",
    ]
    rows = list(rows_from(items))
    assert [row.number for row in rows] == list(range(1, 10))
    assert [row.prompt for row in rows[:4]] == ["text", [message], [message] * 2, "x"]
    assert said(rows[3]) == {"max_tokens": 3, "stop": ("a",)}
    assert [row.error and row.error.code for row in rows[4:]] == [
        "unsupported_field", "missing_field", "invalid_value", "unsupported_field", "invalid_value"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        ({"promt": "a"}, "did you mean prompt?"),
        ({"review": "a"}, "rows of a table take a template, as --template TEXT"),
        ({"prompt": "a", "review": "b"}, "remove it; "),
    ],
)
def test_a_key_that_is_not_known_has_the_remedy_that_is_likeliest(
    row: dict[str, str], remedy: str, tmp_path: Path
) -> None:
    error = only(tmp_path, row).error
    assert error is not None and remedy in error.message


def test_a_reader_whose_file_was_closed_before_it_ends_in_silence(tmp_path: Path) -> None:
    """As garbage they are closed in any order."""
    source = InputFile(write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}]))
    records = cast(Generator[Record, None, None], source._records())
    assert next(records)[0] == 1
    assert source._stream is not None
    source._stream.close()
    records.close()
    assert source.position >= 0
