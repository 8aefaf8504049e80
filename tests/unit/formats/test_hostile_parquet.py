"""Hostile Parquet files cost memory in proportion to their size, and are refused with one clear error."""

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from nightmill.jobs.errors import BatchFileError, IgnoredColumnWarning, RowCode
from nightmill.jobs.formats import FileFormat, InputFile, parquet_reader
from nightmill.jobs.formats.parquet import read_parquet
from nightmill.jobs.formats.parquet_reader import Expansion, ParquetReader
from tests.support.thinning import thinned
from tests.unit.formats.hostile_parquet import hostile, mutated, repeated, written

pytestmark = pytest.mark.heavy

MEBI = 1 << 20
READER = """
import json, resource, sys
from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.formats import FileFormat, InputFile
for path in sys.argv[1:]:
    rows, error = 0, None
    try:
        for row in InputFile(path, FileFormat.PARQUET, label="f", trusted=False).rows():
            rows += 1
    except BatchFileError as caught:
        error = str(caught)
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(json.dumps([rows, error, *peaks]), flush=True)
"""


def read_apart(paths: list[Path]) -> list[list[Any]]:
    """(rows, error, KiB at most of the reader, of its children) after each file, all read in one process."""
    command = [sys.executable, "-c", READER, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("first", thinned(range(2), 2))
def test_hostile_files_stay_within_100_mib_and_are_refused_as_a_whole(first: int, tmp_path: Path) -> None:
    """Every second one by default; each is of a kind of its own."""
    harmless = tmp_path / "harmless.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["Once"]}), harmless)
    names, paths = [], []
    for number, (name, made) in enumerate(islice(hostile().items(), first, None, 2)):
        names.append(name)
        paths.append(tmp_path / f"{number}.parquet")
        paths[-1].write_bytes(made())
    baseline, *found = read_apart([harmless, *paths])
    assert baseline[:2] == [1, None]
    for name, content, (rows, error, own, child) in zip(names, paths, found, strict=True):
        allowed = 100 * MEBI + 8 * content.stat().st_size
        assert (own - baseline[2]) * 1024 < allowed, name
        assert (child - baseline[3]) * 1024 < allowed, name
        assert error is not None and error.startswith("f: "), (name, rows, error)
        assert "\n" not in error and len(error) < 700, name


def test_changed_bytes_are_read_or_refused_and_crash_nobody(tmp_path: Path) -> None:
    paths = []
    for number, content in enumerate(mutated(16)):
        paths.append(tmp_path / f"{number}.parquet")
        paths[-1].write_bytes(content)
    found = read_apart(paths)
    assert len(found) == len(paths)
    assert all(error is None or error.startswith("f: ") for _, error, *_ in found)
    assert any(error is None for _, error, *_ in found) and any(error for _, error, *_ in found)


def test_what_a_file_may_expand_to_grows_with_its_size() -> None:
    small, large, larger = (Expansion.of_stranger(size) for size in (400, 10 * MEBI, 20 * MEBI))
    assert small.memory < 100 * MEBI and small.row_bytes < 5 * MEBI and small.rows < 101_000
    assert larger.rows - 100_000 == 2 * (large.rows - 100_000)
    assert larger.bytes - 256 * MEBI == 2 * (large.bytes - 256 * MEBI)
    assert Expansion.of_stranger(1 << 40).memory == 512 * MEBI


def records(path: Path, expansion: Expansion) -> list[Any]:
    return [
        record for _, record in read_parquet(ParquetReader(path, "f", expansion), "f", lambda share: None)
    ]


def test_rows_are_read_a_few_at_a_time_where_the_memory_does_not_suffice_for_all(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    path.write_bytes(repeated(MEBI, 200))  # 200 MiB of texts at once
    expansion = Expansion(memory=60 * MEBI)
    assert [len(record["prompt"]) for record in records(path, expansion)] == [MEBI] * 200


def test_a_row_that_is_too_long_fails_alone_in_a_file_of_its_size(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    path.write_bytes(written(pyarrow.table({"prompt": ["a", "b" * 17 * MEBI, "c"]})))
    first, long, last = records(path, Expansion())
    assert (first["prompt"], long.code, last["prompt"]) == ("a", RowCode.TOO_LONG, "c")
    with pytest.raises(BatchFileError, match="too much for a Parquet file of"):
        records(path, Expansion(row_bytes=MEBI))


def test_an_index_of_nanoseconds_is_ignored_without_numpy_and_pandas(tmp_path: Path) -> None:
    path, count = tmp_path / "in.parquet", 20_000  # more than a pipe takes
    index = pyarrow.array(range(count), pyarrow.timestamp("ns"))
    units = {
        f"__index_level_{level}__": index.cast("int64").cast(kind)
        for level, kind in enumerate((pyarrow.time64("ns"), pyarrow.duration("ns"), index.type))
    }
    path.write_bytes(written(pyarrow.table({"prompt": ["Once"] * count} | units)))
    with pytest.warns(IgnoredColumnWarning, match="__index_level_2__"):
        records = InputFile(path)._records(reader := InputFile(path).reader_of_rows())
        assert next(records) == (1, {"prompt": "Once"})
    assert reader is not None
    loaded = Path(f"/proc/{reader.pid}/maps").read_text()
    assert "libarrow" in loaded and "numpy" not in loaded
    assert sum(1 for _ in records) == count - 1


def test_processor_time_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    path.write_bytes(repeated(100_000, 100_000))
    with pytest.raises(BatchFileError, match="processor time"):
        records(path, Expansion(seconds=1))


def test_the_process_ends_with_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.parquet"
    path.write_bytes(repeated(10_000, 100_000))
    readers = []
    real = parquet_reader.ParquetReader.columns

    def columns(self: parquet_reader.ParquetReader) -> Any:
        readers.append(self)
        return real(self)

    monkeypatch.setattr(parquet_reader.ParquetReader, "columns", columns)
    rows = InputFile(path, FileFormat.PARQUET).rows()
    next(rows)
    (reader,) = readers
    assert reader._process.poll() is None
    rows.close()  # type: ignore[attr-defined]
    assert reader._process.poll() is not None


def test_values_of_types_that_json_lacks_are_numbers_or_refused_by_name(tmp_path: Path) -> None:
    import datetime
    import decimal

    path = tmp_path / "in.parquet"
    table = pyarrow.table({
        "prompt": ["a"],
        "temperature": [decimal.Decimal("0.5")],
        "max_tokens": [decimal.Decimal(7)],
        "custom_id": [datetime.date(2026, 1, 1)],
    })  # fmt: skip
    parquet.write_table(table, path)
    (record,) = records(path, Expansion())
    assert (record["temperature"], record["max_tokens"]) == (0.5, 7)
    assert type(record["custom_id"]).__name__ == "date"
    (row,) = InputFile(path).rows()
    assert row.error is not None and row.error.field == "custom_id"
