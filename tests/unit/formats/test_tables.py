"""CSV and Parquet: cells to values, and cells that are none."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from nightmill.jobs.errors import BatchFileError, MissingExtraError
from nightmill.jobs.formats import FileFormat, InputFile, InputRow, csvfile
from tests.unit.formats.files import read_rows, said

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

MESSAGES = [{"role": "user", "content": 'say "hi", please'}]


def csv_rows(tmp_path: Path, content: str | bytes, name: str = "in.csv") -> list[InputRow]:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_rows(path)


def parquet_rows(tmp_path: Path, **columns: Any) -> list[InputRow]:
    path = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    return read_rows(path)


def test_csv_cells_are_read_by_their_column(tmp_path: Path) -> None:
    (row,) = csv_rows(
        tmp_path,
        "custom_id,prompt,max_tokens,temperature,seed,stop,ignore_eos,metadata,model,priority,stop_token_ids\n"
        '007,"a ""b"",\nc",64.0,0.5,9007199254740993,"[""x"", ""y""]",TRUE,"{""k"": 1}",demo,3,"[5, 6]"\n',
    )
    assert (row.number, row.custom_id, row.prompt) == (1, "007", 'a "b",\nc')
    assert said(row) == {
        "max_tokens": 64, "temperature": 0.5, "seed": 9007199254740993, "stop": ("x", "y"),
        "ignore_eos": True, "metadata": {"k": 1}, "model": "demo", "priority": 3,
        "stop_token_ids": (5, 6),
    }  # fmt: skip


def test_a_cell_may_hold_one_token_id(tmp_path: Path) -> None:
    good, bad = csv_rows(tmp_path, "prompt,stop_token_ids\na,7\na,x\n")
    assert said(good) == {"stop_token_ids": (7,)}
    assert bad.error is not None and bad.error.field == "stop_token_ids"


def test_messages_in_a_csv_cell_are_json(tmp_path: Path) -> None:
    cell = '[{""role"": ""user"", ""content"": ""say \\""hi\\"", please""}]'
    (row,) = csv_rows(tmp_path, f'messages\n"{cell}"\n')
    assert row.prompt == MESSAGES


def test_empty_cells_are_absent_and_empty_lines_are_not_counted(tmp_path: Path) -> None:
    rows = csv_rows(tmp_path, "prompt,max_tokens,stop\na,,\n\nb,5,x\n")
    assert [(r.number, r.custom_id, said(r)) for r in rows] == [
        (1, "row-1", {}),
        (2, "row-2", {"max_tokens": 5, "stop": ("x",)}),
    ]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_delimiter_is_found_in_the_header(tmp_path: Path, delimiter: str, end: str) -> None:
    text = f"\ufeffprompt{delimiter}max_tokens{end}a, b; c{delimiter}3"
    rows = csv_rows(tmp_path, text.replace("a, b; c", '"a, b; c"'))
    assert [(row.prompt, said(row)) for row in rows] == [("a, b; c", {"max_tokens": 3})]


@pytest.mark.parametrize(
    ("record", "code", "field"),
    [
        (b"a,b,c", "invalid_csv", None),
        (b"a", "invalid_csv", None),
        (b'"a"b,1', "invalid_csv", None),
        (b"\xe4,1", "invalid_encoding", None),
        (b"a,many", "invalid_value", "max_tokens"),
        (b"a,1.5", "invalid_value", "max_tokens"),
        (b"a,1e400", "invalid_value", "max_tokens"),
        (b",5", "missing_field", "prompt"),
        (b"a\0,5", "invalid_value", "prompt"),
    ],
)
def test_a_bad_record_is_an_error_of_its_own_and_the_next_one_is_read(
    tmp_path: Path, record: bytes, code: str, field: str | None
) -> None:
    rows = csv_rows(tmp_path, b"prompt,max_tokens\nx,1\n" + record + b"\ny,2\n")
    assert [row.prompt for row in rows] == ["x", None, "y"]
    assert rows[1].error is not None
    assert (rows[1].number, rows[1].error.code, rows[1].error.field) == (2, code, field)


@pytest.mark.parametrize("first", ["", "\r\n", "\ufeffsep=;\r\n", "SEP=;\n\n"])
def test_excels_first_line_and_empty_cells_at_the_ends_of_lines_do_not_count(
    tmp_path: Path, first: str
) -> None:
    rows = csv_rows(tmp_path, f"{first}prompt;max_tokens;;\r\na,b;3;;\r\nc;4\r\nd;5; ;;;;\r\ne;6;;f\r\n")
    assert [(row.prompt, row.error and row.error.code) for row in rows] == [
        ("a,b", None),
        ("c", None),
        ("d", None),
        (None, "invalid_csv"),
    ]


def test_a_quote_is_no_delimiter_but_part_of_a_name(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match=r"has no column prompt or messages.*sep="):
        csv_rows(tmp_path, 'sep="\nprompt;x\n')  # newer versions of Python refuse to divide cells by quotes


def test_cells_that_lack_and_quotes_that_stay_open_have_remedies_of_their_own(tmp_path: Path) -> None:
    rows = csv_rows(tmp_path, 'prompt,max_tokens,seed\na,1\nb,1,2,c\n"d,1,2\ne,1,2\n')
    assert [row.error and row.error.message for row in rows] == [
        "has 2 cells for 3 columns; quote cells that hold line ends, and write the delimiters of empty ones",
        "has 4 cells for 3 columns; quote cells that hold the delimiter",
        "a cell's quote is not closed, so that all lines behind it are part of it; close it",
    ]


def test_messages_that_are_no_json_are_refused_by_name(tmp_path: Path) -> None:
    (row,) = csv_rows(tmp_path, "messages\nhello\n")
    assert row.error is not None
    assert (row.error.code, row.error.field) == ("invalid_value", "messages")


@pytest.mark.parametrize("quote", ["", '"'])
def test_a_record_past_the_limit_is_an_error_and_the_next_one_is_read(
    tmp_path: Path, quote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csvfile, "LINE_LIMIT", 200_000)
    long = quote + "x" * 700_000 + quote
    rows = csv_rows(tmp_path, f"prompt,max_tokens\na,1\n{long},2\nb,3\n")
    assert [row.prompt for row in rows] == ["a", None, "b"]
    assert rows[1].error is not None
    assert rows[1].error.code == "too_long"


def test_quotes_that_are_never_closed_are_an_error(tmp_path: Path) -> None:
    rows = csv_rows(tmp_path, 'prompt\na\n"b\nc\n')
    assert [row.error and row.error.code for row in rows] == [None, "invalid_csv"]


def test_parquet_columns_are_keys_and_nulls_are_absent(tmp_path: Path) -> None:
    rows = parquet_rows(
        tmp_path,
        prompt=["a", None, None],
        messages=[None, MESSAGES, MESSAGES],
        max_tokens=[1.0, None, 2.5],
        custom_id=[7, 8, 9],
        stop=[["x"], None, None],
        metadata=[{"k": "v"}, None, None],
    )
    assert [(row.number, row.custom_id, row.prompt) for row in rows[:2]] == [
        (1, "7", "a"),
        (2, "8", MESSAGES),
    ]
    assert said(rows[0]) == {"max_tokens": 1, "stop": ("x",), "metadata": {"k": "v"}}
    assert said(rows[1]) == {}
    assert rows[2].error is not None
    assert rows[2].error.field == "max_tokens"


def test_messages_in_a_parquet_column_may_be_json(tmp_path: Path) -> None:
    (row,) = parquet_rows(tmp_path, messages=['[{"role": "user", "content": "hi"}]'])
    assert row.prompt == [{"role": "user", "content": "hi"}]


def test_a_parquet_text_that_is_not_utf8_is_an_error_of_its_row(tmp_path: Path) -> None:
    raw = pyarrow.array([b"a", b"\xff", b"c"], type=pyarrow.binary())
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 3, raw.buffers())
    rows = parquet_rows(tmp_path, prompt=texts)
    assert [row.prompt for row in rows] == ["a", None, "c"]
    assert rows[1].error is not None
    assert rows[1].error.code == "invalid_encoding"


def test_a_parquet_file_is_read_in_parts_and_says_how_far(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.table({"prompt": [str(i) for i in range(3000)]}), path)
    file = InputFile(path)
    rows = file.rows()
    read = [next(rows) for _ in range(1500)]
    assert 0 < file.position < file.size
    read += rows
    assert [row.prompt for row in read] == [str(i) for i in range(3000)]
    assert file.position == file.size


def test_an_unknown_parquet_column_is_an_error_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match="column 'colour' is not supported"):
        parquet_rows(tmp_path, prompt=["a"], colour=["b"])


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a"]}), path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[parquet\]"):
        list(InputFile(path, FileFormat.PARQUET).rows())
