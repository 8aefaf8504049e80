"""Which files may be destinations: regular ones, apart from the input and from each other."""

import hashlib
import os
import socket
from pathlib import Path

import pytest

from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.formats import Destination, FileFormat
from nightmill.jobs.formats.destination import partial_of
from tests.unit.formats.destinations import (
    FOREIGN,
    FORMATS,
    named,
    names,
    owns,
    refused,
    replace,
    rows,
    vetted,
    write,
)


@pytest.mark.parametrize("format", FORMATS)
def test_the_input_is_never_replaced_under_whatever_name(
    tmp_path: Path, format: FileFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    input = write(named(tmp_path, format, "in"), format, rows(format, range(3)))  # even where it is like ours
    before = input.read_bytes()
    link, hard = named(tmp_path, format, "link"), named(tmp_path, format, "hard")
    link.symlink_to(input)
    os.link(input, hard)
    (tmp_path / "folder").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    through = named(tmp_path / "folder", format, "in")
    dotted = named(tmp_path / "sub" / "..", format, "in")
    (tmp_path / "sub").mkdir()
    for path in (input, link, hard, through, dotted, Path(input.name)):
        for apart in (input, Path(input.name)):
            refused(path, format, "is also the input", apart_from={"the input": apart}, overwrite=True)
    assert input.read_bytes() == before
    # its partial would be the input, or the input's partial it
    hidden = partial_of(named(tmp_path, format, "x"))
    refused(
        named(tmp_path, format, "x"),
        format,
        "is also the input",
        apart_from={"the input": hidden},
        overwrite=True,
    )
    assert names(tmp_path / "sub") == []


@pytest.mark.parametrize("format", FORMATS)
def test_two_names_of_a_file_that_is_not_there_yet_are_one_file(tmp_path: Path, format: FileFormat) -> None:
    (tmp_path / "folder").symlink_to(tmp_path)
    path = named(tmp_path, format)
    for other in (
        path,
        tmp_path / "folder" / path.name,
        tmp_path / "folder" / ".." / tmp_path.name / path.name,
    ):
        with Destination(path, format), pytest.raises(BatchFileError, match="is also the file of results"):
            Destination(other, format, errors=True, apart_from={"the file of results": path})
    assert names(tmp_path) == ["folder"]


def test_a_copy_of_the_input_is_known_by_its_content(tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(FOREIGN)
    digest = hashlib.sha256(FOREIGN).hexdigest()
    with (
        pytest.raises(BatchFileError, match="holds the prompts of batch 'night': name another file"),
        Destination(copy, FileFormat.JSONL, overwrite=True) as destination,
    ):
        destination.vet("night", owns, digest)
    assert copy.read_bytes() == FOREIGN


@pytest.mark.parametrize("format", FORMATS)
def test_only_regular_files_are_written(tmp_path: Path, format: FileFormat) -> None:
    directory, fifo, plug = (named(tmp_path, format, stem) for stem in ("dir", "fifo", "plug"))
    directory.mkdir()
    os.mkfifo(fifo)  # which must not block either
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(plug))
        device = named(tmp_path, format, "device")
        device.symlink_to(os.devnull)
        for path, kind in (
            (directory, "a directory"),
            (fifo, "a FIFO"),
            (plug, "a socket"),
            (device, "a device"),
            (Path(os.devnull), "a device"),
            (Path("/"), "a directory"),
        ):
            with pytest.raises(BatchFileError, match=f"is {kind}, not a regular file: name a file"):
                Destination(path, format, overwrite=True)
    assert Path(os.devnull).is_char_device() and fifo.is_fifo() and plug.is_socket()
    assert names(tmp_path) == sorted(path.name for path in (directory, fifo, plug, device))


def test_standard_output_is_not_a_file() -> None:
    with pytest.raises(BatchFileError, match="-: standard output is not supported: name a file"):
        Destination("-", FileFormat.JSONL)
    assert not Path("-").exists()


@pytest.mark.parametrize("format", FORMATS)
def test_a_link_is_followed_to_a_file_of_the_batch_and_to_no_other(
    tmp_path: Path, format: FileFormat
) -> None:
    target, link = named(tmp_path, format, "target"), named(tmp_path, format, "link")
    link.symlink_to(target)
    refused(link, format, f"is a link to {target}, which is not there: name that file itself", overwrite=True)
    target.write_bytes(FOREIGN)
    refused(link, format, "which is not of batch 'night': name that file itself", overwrite=True)
    assert target.read_bytes() == FOREIGN
    write(target, format, rows(format, range(9)))
    replace(link, format, range(3))
    assert link.is_symlink() and not target.is_symlink()
    with vetted(target, format):
        pass
    assert names(tmp_path) == [link.name, target.name]


def test_an_ending_of_another_format_is_refused_with_the_one_to_take(tmp_path: Path) -> None:
    for name, format, said in (
        (
            "x.csv",
            FileFormat.OPENAI,
            "ends in .csv, but the results of OpenAI's rows are JSON lines, as these: name a file that ends "
            "in .jsonl (for others: Batch.to_pandas() or .results() in Python)",
        ),
        ("x.parquet", FileFormat.OPENAI, "name a file that ends in .jsonl"),
        ("x.jsonl.gz", FileFormat.JSONL, "results are not compressed: name a file without .gz"),
        (
            "x.XLSX",
            FileFormat.CSV,
            "ends in .xlsx, in which no results are written: name a file that ends in .csv",
        ),
    ):
        refused(tmp_path / name, format, said)
    for name, format in (("x.ndjson", FileFormat.OPENAI), ("x", FileFormat.CSV), ("x.txt", FileFormat.JSONL)):
        replace(tmp_path / name, format)


@pytest.mark.parametrize("input_format", [FileFormat.JSONL, FileFormat.CSV, FileFormat.PARQUET])
@pytest.mark.parametrize("errors", [False, True])
def test_rows_of_ours_are_written_in_the_format_of_the_ending(
    input_format: FileFormat, errors: bool, tmp_path: Path
) -> None:
    endings = {
        ".jsonl": FileFormat.JSONL, ".JSON": FileFormat.JSONL, ".csv": FileFormat.CSV,
        ".parquet": FileFormat.PARQUET, ".pq": FileFormat.PARQUET, ".txt": input_format, "": input_format,
    }  # fmt: skip
    for ending, wanted in endings.items():
        path = tmp_path / f"out-{errors}{ending}"
        with vetted(path, input_format, errors=errors) as destination, destination.replace() as file:
            assert destination.format is file.format is wanted
            for row in rows(wanted, range(3), errors=errors):
                file.write(row)
        with vetted(path, input_format, errors=errors) as again:  # which knows its own rows
            assert again.holds([f"{number:032x}" for number in range(3)])
