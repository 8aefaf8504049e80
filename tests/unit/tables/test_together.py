"""Folders of files, and files that match a pattern, as one input: on this disk, and where fsspec leads."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import parquet

from nightmill.jobs.batches.result_files import destinations
from nightmill.jobs.errors import BatchFileError, BatchFileUnavailableError
from nightmill.jobs.formats.ahead import AHEAD
from nightmill.jobs.formats.parquet_reader import ParquetReader
from nightmill.jobs.formats.places import OnThisDisk, taken_from
from nightmill.jobs.formats.rows import FileFormat
from nightmill.jobs.formats.together import FilesTogether, open_input
from nightmill.jobs.tables.options import TableOptions
from nightmill.jobs.tables.reading import TableFile
from nightmill.jobs.tables.together import open_table

OPTIONS = TableOptions.of({"template": "{{ word }}"})


def table(path: Path | str, format: FileFormat | None = None, **options: Any) -> TableFile:
    assert OPTIONS is not None
    return open_table(path, format, options=OPTIONS, **options)


def prompts(source: Any) -> list[tuple[int, str]]:
    return [(row.number, row.spec.messages[0]["content"]) for row in source.rows()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards of Parquet as others write them, with what lies beside such."""
    made = tmp_path / "shards"
    (made / "day=2").mkdir(parents=True)
    for name, words in (("b.parquet", ["c"]), ("a.parquet", ["a", "b"]), ("day=2/c.parquet", ["d", "e"])):
        parquet.write_table(
            pyarrow.table({"word": words, "n": range(len(words))}), made / name, row_group_size=1
        )
    for name in ("_SUCCESS", ".a.parquet.crc", "_tmp.parquet", "README.md"):
        (made / name).write_text("no rows")
    return made


@pytest.fixture
def csv_folder(tmp_path: Path) -> Path:
    """Three shards of CSV, which are read without a process for each."""
    made = tmp_path / "csv-shards"
    (made / "day=2").mkdir(parents=True)
    for name, words in (("b.csv", ["c"]), ("a.csv", ["a", "b"]), ("day=2/c.csv", ["d", "e"])):
        (made / name).write_text("".join(f"{word}\n" for word in ("word", *words)))
    return made


@pytest.mark.heavy  # each Parquet file is read by a process
def test_a_folder_is_its_files_in_the_order_of_their_names(folder: Path) -> None:
    source = table(folder)
    assert isinstance(source, FilesTogether)
    whole = [(1, "a"), (2, "b"), (3, "c"), (4, "d"), (5, "e")]
    assert prompts(source) == whole == prompts(source)
    assert source.position == source.size == sum(path.stat().st_size for path in source.files)
    assert source.table.shape.kept == (("word", "string"), ("n", "int64"))
    assert prompts(table(f"{folder}/*.parquet")) == whole[:3]
    assert prompts(table(f"{folder}/**/c*.parquet")) == [(1, "d"), (2, "e")]
    with pytest.raises(BatchFileUnavailableError, match=r"\*.csv: no input files found"):
        table(f"{folder}/*.csv")


@pytest.mark.heavy  # each Parquet file is read by a process
@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_folders_that_are_named_as_partitions_give_columns(tmp_path: Path, ending: str) -> None:
    for folder, word in (("day=2/kind=a%2Fb", "x"), ("day=__HIVE_DEFAULT_PARTITION__/kind=c", "y")):
        (tmp_path / folder).mkdir(parents=True)
        part = tmp_path / folder / f"part.{ending}"
        match ending:
            case "csv":
                part.write_text(f"word\n{word}\n")
            case "jsonl":
                part.write_text(json.dumps({"word": word}))
            case _:
                parquet.write_table(pyarrow.table({"word": [word]}), part)
    options = TableOptions.of({"template": "{{ word }} {{ kind }} {{ day }}", "empty": "keep"})
    assert options is not None
    source = open_table(tmp_path, options=options)
    assert prompts(source) == [(1, "x a/b 2"), (2, "y c ")]
    assert source.table.shape.kept == (("word", "string"), ("day", "string"), ("kind", "string"))
    assert [row.kept for row in source.rows()] == [
        {"word": "x", "day": "2", "kind": "a/b"},
        {"word": "y", "kind": "c"},
    ]


def test_a_partition_is_no_column_where_the_file_has_it_or_other_files_lack_it(tmp_path: Path) -> None:
    for day in "12":
        (tmp_path / f"days/day={day}").mkdir(parents=True)
        (tmp_path / f"days/day={day}/a.csv").write_text(f"word,day\nx,{day}0\n")
    assert [row.kept for row in table(tmp_path / "days").rows()] == [
        {"word": "x", "day": "10"},
        {"word": "x", "day": "20"},
    ]
    (tmp_path / "mixed/day=1").mkdir(parents=True)
    for name in ("a.csv", "day=1/b.csv"):
        (tmp_path / "mixed" / name).write_text("word\nx\n")
    assert [row.kept for row in table(tmp_path / "mixed").rows()] == [{"word": "x"}] * 2


def test_the_fingerprint_is_of_names_and_contents_and_changes_are_seen(
    csv_folder: Path, tmp_path: Path
) -> None:
    folder = csv_folder
    source = table(folder)
    first = source.fingerprint()
    assert not source.changed() and not source.changed(first)
    folder.rename(tmp_path / "elsewhere")
    assert table(tmp_path / "elsewhere").fingerprint() == first
    (tmp_path / "elsewhere").rename(folder)
    (folder / "a.csv").rename(folder / "aa.csv")
    assert source.changed()
    assert table(folder).fingerprint() != first
    (folder / "aa.csv").rename(folder / "a.csv")
    assert not source.changed(first)
    (folder / "b.csv").write_bytes((folder / "day=2" / "c.csv").read_bytes())
    assert source.changed() and source.changed(first)


@pytest.mark.heavy  # each Parquet file is read by a process
def test_files_that_do_not_go_together_are_named(folder: Path) -> None:
    parquet.write_table(pyarrow.table({"word": ["x"], "n": ["1"]}), folder / "z.parquet")
    with pytest.raises(BatchFileError, match=r"z.parquet has other columns than .*a.parquet \('n' is string"):
        table(folder)
    (folder / "z.parquet").unlink()
    (folder / "z.csv").write_text("word,n\nx,1\n")
    with pytest.raises(BatchFileError, match=r"z.csv is csv, and .*a.parquet is parquet; divide them"):
        table(folder)


@pytest.mark.heavy  # each Parquet file is read by a process
def test_files_are_read_ahead_faults_come_in_their_turn_and_no_process_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[ParquetReader] = []
    start = ParquetReader.__init__

    def started(self: ParquetReader, *arguments: Any) -> None:
        start(self, *arguments)
        begun.append(self)

    for number in range(AHEAD + 3):
        words = [f"{number}-{row}" for row in range(3)]
        parquet.write_table(pyarrow.table({"prompt": words}), tmp_path / f"{number}.parquet")
    source = open_input(tmp_path)
    (tmp_path / "1.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "2.parquet").unlink()
    monkeypatch.setattr(ParquetReader, "__init__", started)
    rows = source.rows()
    assert [next(rows).custom_id for _ in range(3)] == ["row-1", "row-2", "row-3"]
    assert len(begun) == 1 + len({1, *range(3, AHEAD + 1)})  # the second one is gone
    with pytest.raises(BatchFileError, match=r"1.parquet: cannot be read as Parquet"):
        next(rows)
    assert not any(Path(f"/proc/{reader.pid}").exists() for reader in begun)
    parquet.write_table(pyarrow.table({"prompt": ["in time"]}), tmp_path / "1.parquet")
    rows = source.rows()
    assert [row.number for _, row in zip(range(4), rows, strict=False)] == [1, 2, 3, 4]
    with pytest.raises(BatchFileError, match=r"2.parquet: cannot be read: No such file"):
        next(rows)
    parquet.write_table(pyarrow.table({"prompt": ["too"]}), tmp_path / "2.parquet")
    rows = source.rows()
    assert [next(rows).number for _ in range(5)] == [1, 2, 3, 4, 5]
    rows.close()  # type: ignore[attr-defined]
    assert not any(Path(f"/proc/{reader.pid}").exists() for reader in begun)
    assert len(list(source.rows())) == 3 * (AHEAD + 1) + 2


def test_rows_of_prompts_in_several_files_have_ids_of_their_own(tmp_path: Path) -> None:
    for name, rows in (("1.jsonl.gz", ["a", "b"]), ("2.jsonl", ["c"])):
        data = "".join(json.dumps({"prompt": row}) + "\n" for row in rows).encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    (tmp_path / "3.jsonl").write_text('{"custom_id": "row-1", "prompt": "d"}\n')
    rows = list(open_input(tmp_path).rows())
    assert [(row.number, row.custom_id, row.error is None) for row in rows] == [
        *((1, "row-1", True), (2, "row-2", True), (3, "row-3", True), (4, "row-1", False)),
    ]


@pytest.mark.heavy  # each Parquet file is read by a process
def test_results_do_not_become_a_file_of_the_input(folder: Path, tmp_path: Path) -> None:
    source = table(folder)
    outside = OnThisDisk(tmp_path / "out.errors.parquet")
    for name in ("results.parquet", "day=2/results.parquet"):
        with (
            pytest.raises(BatchFileError, match=r"would be one of the files of .* the next time"),
            destinations(source, OnThisDisk(folder / name), outside, overwrite=False),
        ):
            pass
    with destinations(source, OnThisDisk(tmp_path / "out.parquet"), outside, overwrite=False) as (first, _):
        assert first.format is FileFormat.PARQUET


@pytest.fixture
def hub() -> Iterator[MemoryFileSystem]:
    """A file system behind hf://, as the package huggingface_hub registers one."""
    known = fsspec.registry.get("hf")

    class Hub(MemoryFileSystem):
        protocol = "hf"
        store: dict[str, Any] = {}  # noqa: RUF012 - as its base has it
        pseudo_dirs = [""]  # noqa: RUF012

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return "/" + path.removeprefix("hf://").strip("/")

    fsspec.register_implementation("hf", Hub, clobber=True)
    yield Hub()
    if known is not None:
        fsspec.register_implementation("hf", known, clobber=True)


def test_patterns_and_folders_of_the_hub_are_fetched_within_the_bound(
    hub: MemoryFileSystem, csv_folder: Path
) -> None:
    for path in table(csv_folder).files:
        name = f"/datasets/me/words/data/{path.name}"
        hub.pipe_file(name, path.read_bytes())
    hub.pipe_file("/datasets/me/words/data/README.md", b"about")
    for name in ("hf://datasets/me/words/data/*.csv", "hf://datasets/me/words/data/"):
        with taken_from(name, most=1 << 20, opened=table) as source:
            assert prompts(source) == [(1, "a"), (2, "b"), (3, "c"), (4, "d"), (5, "e")]
            assert source.label == name
            fingerprint = source.fingerprint()
    with taken_from(name, most=1 << 20, opened=table) as source:
        assert source.fingerprint() == fingerprint  # so the same batch goes on
    with pytest.raises(BatchFileError, match="raise NIGHTMILL_SPOOL_BYTES"), taken_from(name, most=20):
        pass
    with (
        pytest.raises(BatchFileError, match="there is no such file"),
        taken_from(f"{name}*.jsonl", most=2000),
    ):
        pass
    with taken_from("hf://datasets/me/words/data/b.csv", most=1 << 20, opened=table) as source:
        assert prompts(source) == [(1, "c")]
