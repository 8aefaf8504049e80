"""Result files: flushed in groups, whole after a crash, readable by others."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.formats import FileFormat, ResultFile, error_row, result_row
from tests.unit.formats.files import job

LINES = [FileFormat.OPENAI, FileFormat.JSONL, FileFormat.CSV]
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


def written(number: int, format: FileFormat, text: str = "x") -> dict[str, Any]:
    return result_row(job(id=f"{number:032x}", text=text, custom_id=f"c{number}"), format)


def read(path: Path, format: FileFormat) -> list[Any]:
    if format is FileFormat.CSV:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def texts(rows: list[Any], format: FileFormat) -> list[str]:
    if format is FileFormat.OPENAI:
        return [row["response"]["body"]["choices"][0]["text"] for row in rows]
    return [row["text"] for row in rows]


@pytest.mark.parametrize("format", LINES)
@given(values=st.lists(TEXTS, max_size=8))
def test_any_text_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, format: FileFormat, values: list[str]
) -> None:
    path = tmp_path_factory.mktemp("out") / "out"
    with ResultFile(path, format) as file:
        for number, text in enumerate(values):
            file.write(written(number, format, text))
    assert texts(read(path, format), format) == values


@pytest.mark.parametrize("format", LINES)
def test_rows_reach_the_disk_in_groups_and_when_asked(tmp_path: Path, format: FileFormat) -> None:
    path = tmp_path / "out"
    file = ResultFile(path, format)
    for number in range(63):
        file.write(written(number, format))
    assert read(path, format) == []
    file.write(written(63, format))
    assert len(read(path, format)) == 64
    file.write(written(64, format))
    file.flush()
    assert len(read(path, format)) == 65
    assert file.ids() == {f"{number:032x}" for number in range(65)}
    file.close()


@pytest.mark.heavy
@pytest.mark.parametrize("format", LINES)
def test_after_a_crash_at_any_byte_the_file_goes_on_with_whole_rows(
    tmp_path: Path, format: FileFormat
) -> None:
    path = tmp_path / "out"
    tricky = ['a"b', "line\nline", "ü\r\n,;", '"', "plain"]
    with ResultFile(path, format) as file:
        for number, text in enumerate(tricky):
            file.write(written(number, format, text))
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        with ResultFile(path, format, append=True) as file:
            kept = file.ids()
            for number, text in enumerate(tricky):
                row = written(number, format, text)
                if row["id"] not in kept:
                    file.write(row)
        assert path.read_bytes() == whole, f"cut at byte {cut}"


def test_without_append_a_file_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")
    ResultFile(path, FileFormat.JSONL).close()
    assert path.read_bytes() == b""


def test_a_csv_of_no_rows_names_its_columns(tmp_path: Path) -> None:
    ResultFile(tmp_path / "out.csv", FileFormat.CSV, errors=True).close()
    assert (
        tmp_path / "out.csv"
    ).read_text() == "custom_id,id,line,code,field,message,text,answers,content,reasoning,tool_calls\n"


def test_errors_in_a_csv_are_flat(tmp_path: Path) -> None:
    path = tmp_path / "errors.csv"
    expired = job(state=JobState.FAILED, stop_reason=StopReason.DEADLINE, text=None)
    with ResultFile(path, FileFormat.CSV, errors=True) as file:
        file.write(error_row(expired, FileFormat.CSV))
    (row,) = read(path, FileFormat.CSV)
    assert (row["line"], row["code"], row["field"], row["text"]) == ("3", "deadline", "", "")


def test_parquet_has_a_column_of_its_own_for_each_key(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "out.parquet"
    with ResultFile(path, FileFormat.PARQUET) as file:
        for number in range(5000):
            file.write(written(number, FileFormat.PARQUET, str(number)))
    table = parquet.read_table(path)
    assert table.column("text").to_pylist() == [str(number) for number in range(5000)]
    assert table.schema.names == list(written(0, FileFormat.PARQUET))


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match=r"none/out\.jsonl: cannot be written: No such file"):
        ResultFile(tmp_path / "none" / "out.jsonl", FileFormat.JSONL)
    with pytest.raises(BatchFileError, match="cannot be appended to"):
        ResultFile(tmp_path / "out.parquet", FileFormat.PARQUET, append=True)
