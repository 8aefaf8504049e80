"""Files of lines, whatever their bytes: encodings, line ends, broken and hostile JSON, gzip."""

import bz2
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.formats import FileFormat, InputFile
from nightmill.jobs.formats.jsonlines import read_objects
from tests.unit.formats.files import read_rows, write_lines

GOOD = b'{"prompt": "a"}'


def codes(tmp_path: Path, content: bytes) -> list[tuple[int, str | None]]:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    return [(row.number, row.error.code if row.error else None) for row in read_rows(path, FileFormat.JSONL)]


@pytest.mark.parametrize(
    ("content", "numbers"),
    [
        (GOOD, [1]),
        (GOOD + b"\n", [1]),
        (b"\xef\xbb\xbf" + GOOD + b"\n" + GOOD, [1, 2]),
        (GOOD + b"\r\n" + GOOD + b"\r\n", [1, 2]),
        (b"\n \t\n" + GOOD + b"\n\n\r\n" + GOOD, [3, 6]),
        (b"  " + GOOD + b"  ", [1]),
    ],
)
def test_line_ends_empty_lines_and_a_byte_order_mark(
    tmp_path: Path, content: bytes, numbers: list[int]
) -> None:
    assert codes(tmp_path, content) == [(number, None) for number in numbers]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{", "invalid_json"),
        (b'{"prompt": "a"} x', "invalid_json"),
        (b'{"prompt": "a"}{"prompt": "b"}', "invalid_json"),
        (b"[1]", "invalid_json"),
        (b'"text"', "invalid_json"),
        (b"null", "invalid_json"),
        (b"5", "invalid_json"),
        (b'{"prompt": "a", "prompt": "b"}', "invalid_json"),
        (b'{"prompt": "a", "metadata": {"x": 1, "x": 2}}', "invalid_json"),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_json"),
        (b'{"prompt": "a", "temperature": -Infinity}', "invalid_json"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b'{"prompt": "a\x01"}', "invalid_json"),
        (b'{"prompt": "a\x00"}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"metadata": ' * 100_000, "invalid_json"),
        (b'{"prompt": "\xff"}', "invalid_encoding"),
        (b'{"prompt": "\xed\xa0\x80"}', "invalid_encoding"),  # a surrogate as three bytes
        (b'{"prompt": "\xe4"}', "invalid_encoding"),  # Latin-1
        (b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}", "invalid_value"),
        (b'{"prompt": "a", "temperature": 1e999}', "invalid_value"),
        (b'{"prompt": "a", "metadata": {"x": 1e999}}', "invalid_value"),
        (b'{"prompt": "\\ud800"}', "invalid_value"),
        (b'{"prompt": "\\u0000"}', "invalid_value"),
    ],
)
def test_a_broken_line_is_an_error_of_its_own_and_the_next_one_is_read(
    tmp_path: Path, line: bytes, code: str
) -> None:
    assert codes(tmp_path, GOOD + b"\n" + line + b"\n" + GOOD) == [(1, None), (2, code), (3, None)]


def test_the_message_says_where_in_the_line_the_fault_is(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [b'{"prompt" "a"}', b'{"prompt": "\xe4"}', b'{"a":1,"a":2}'])
    messages = [row.error.message for row in read_rows(path) if row.error]
    assert messages[0].startswith("is not JSON: Expecting ':' delimiter at character 11;")
    assert messages[1].startswith("byte 13 of the line (0xE4) is not UTF-8;")
    assert messages[2].startswith("the key 'a' is there twice")


@pytest.mark.parametrize("excess", [-1, 0, 1, 2, 3, 50, 51, 52, 53, 104, 105])
def test_a_line_past_the_limit_is_an_error_and_the_lines_after_it_are_whole(
    tmp_path: Path, excess: int
) -> None:
    limit = 50
    frame = len(json.dumps({"prompt": ""}))
    long = {"prompt": "x" * (limit - frame + excess)}
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, long, {"prompt": "b"}])
    with path.open("rb") as stream:
        read = list(read_objects(stream, limit))
    assert [number for number, _ in read] == [1, 2, 3]
    assert [record for _, record in read[::2]] == [{"prompt": "a"}, {"prompt": "b"}]
    if excess <= 0:
        assert read[1][1] == long
    else:
        assert getattr(read[1][1], "code", None) == "too_long"


def test_gzip_is_undone_and_progress_counts_the_packed_bytes(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(b'{"prompt": "%d"}\n' % i for i in range(1000))))
    file = InputFile(path)
    assert [row.prompt for row in file.rows()] == [str(i) for i in range(1000)]
    assert file.position == file.size == path.stat().st_size


@pytest.mark.heavy
def test_a_gzip_file_that_was_cut_short_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl.gz"
    lines = b"".join(b'{"prompt": "%d"}\n' % (i * i) for i in range(20_000))
    path.write_bytes(gzip.compress(lines)[:-2000])
    with pytest.raises(BatchFileError, match=r"in\.jsonl\.gz: is a broken gzip file"):
        list(InputFile(path).rows())


def test_rows_can_be_read_again_and_progress_starts_anew(tmp_path: Path) -> None:
    file = InputFile(write_lines(tmp_path / "in.jsonl", [{"prompt": str(i)} for i in range(5000)]))
    first = file.rows()
    next(first)
    assert 0 < file.position < file.size
    first.close()
    assert len(list(file.rows())) == len(list(file.rows())) == 5000
    assert file.position == file.size


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    one = InputFile(write_lines(tmp_path / "a.jsonl", [{"prompt": "a"}]))
    same = InputFile(write_lines(tmp_path / "b.jsonl", [{"prompt": "a"}]))
    other = InputFile(write_lines(tmp_path / "c.jsonl", [{"prompt": "b"}]))
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("in.jsonl", b"", "is empty"),
        ("in.jsonl", b"\n\n", "holds no rows"),
        ("in.jsonl", '{"prompt": "a"}'.encode("utf-16"), "is UTF-16; save it as UTF-8"),
        ("in.json", b'[{"prompt": "a"}]', "jq -c"),
        ("in.txt", b"hello", "has no known format"),
        ("in.jsonl.gz", b"not gzip", "is a broken gzip file"),
        (
            "in.csv",
            b"question\nwhat?\n",
            "template= of jobs.submit_batch, such as 'Classify: {{ question }}')",
        ),
        ("in.csv", "prompt;Gr\xf6\xdfe\n".encode("cp1252"), "iconv -f WINDOWS-1252 -t UTF-8"),
        ("in.csv", b"\n;;\n", "has no column prompt or messages"),
        ("in.csv.zst", b"\x28\xb5\x2f\xfd\0", "is packed with zstd; unpack it (zstd -d FILE)"),
        ("in.xz", b"\xfd7zXZ\0", "is packed with xz; unpack it"),
        ("in.csv", bz2.compress(b"prompt\na\n"), "is packed with bzip2; unpack it"),
        (
            "in.csv",
            b"PK\3\4{",
            "is a ZIP archive or a workbook; unpack it, or save the sheet as CSV",
        ),
        ("in.xls", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "is a workbook of old Excel; save the sheet as CSV"),
        ("in.db", b"SQLite format 3\0", "is a database of SQLite; name its rows with --query and --from"),
        ("in.csv", b"prompt,colour\na,b\n", "column 'colour' is not supported"),
        ("in.csv", b"prompt,prompt\na,b\n", "is there twice"),
        ("in.parquet", b"PAR1 not really", "cannot be read as Parquet"),
    ],
)
def test_a_file_that_is_none_names_itself_and_the_remedy(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BatchFileError) as caught:
        list(InputFile(path).rows())
    assert str(path) in str(caught.value)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match="there is no such file"):
        InputFile(tmp_path / "none.jsonl")
    with pytest.raises(BatchFileError, match="is not a file"):
        InputFile(tmp_path)


def test_a_row_of_any_name_is_read_where_it_holds_json(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.txt", [{"prompt": "a"}])
    assert [row.prompt for row in read_rows(path)] == ["a"]


def test_keys_that_only_differ_in_depth_are_no_duplicates(tmp_path: Path) -> None:
    row: dict[str, Any] = {"prompt": "a", "metadata": {"prompt": {"prompt": 1}}}
    assert read_rows(write_lines(tmp_path / "in.jsonl", [row]))[0].error is None
