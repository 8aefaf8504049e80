"""Files that a user names for output: nothing but rows of the batch at hand is ever replaced."""

import hashlib
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nightmill.jobs.contract import JobState, StopReason
from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.formats import Destination, FileFormat, ResultFile, error_row, result_row
from nightmill.jobs.formats.destination import partial_of
from tests.servers import clean_environment
from tests.unit.formats.files import job

FORMATS = list(FileFormat)
SUFFIX = {FileFormat.CSV: ".csv", FileFormat.PARQUET: ".parquet"}
FOREIGN = b"the only copy of a thesis\n"
BATCH = {f"{number:032x}" for number in range(200)}


def owns(ids: list[str]) -> bool:
    """The jobs of the batch that these tests are about."""
    return set(ids) <= BATCH


def named(directory: Path, format: FileFormat, stem: str = "out") -> Path:
    return directory / f"{stem}{SUFFIX.get(format, '.jsonl')}"


def rows(
    format: FileFormat, numbers: range, *, errors: bool = False, text: str = "x"
) -> list[dict[str, Any]]:
    ids = [f"{number:032x}" for number in numbers]
    if errors:
        failed = {"state": JobState.FAILED, "stop_reason": StopReason.DEADLINE, "text": None}
        return [error_row(job(id=job_id, **failed), format) for job_id in ids]
    return [result_row(job(id=job_id, text=text, custom_id=job_id), format) for job_id in ids]


def write(path: Path, format: FileFormat, written: list[dict[str, Any]], *, errors: bool = False) -> Path:
    with ResultFile(path, format, errors=errors) as file:
        for row in written:
            file.write(row)
    return path


@contextmanager
def vetted(path: Path, format: FileFormat, **options: Any) -> Iterator[Destination]:
    with Destination(path, format, **options) as destination:
        destination.vet("night", owns, options.get("fingerprint"))
        yield destination


def replace(path: Path, format: FileFormat, numbers: range = range(3), **options: Any) -> None:
    with vetted(path, format, **options) as destination, destination.replace() as file:
        for row in rows(format, numbers, errors=options.get("errors", False)):
            file.write(row)


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def refused(path: Path, format: FileFormat, why: str, **options: Any) -> None:
    """Neither vetted nor with anything left behind, in one line that names the file."""
    before = names(path.parent)
    with pytest.raises(BatchFileError) as caught:
        replace(path, format, **options)
    said = str(caught.value)
    assert said.startswith(f"{path}: ") and why in said and "\n" not in said, said
    assert names(path.parent) == before


# -- whose file it is ----------------------------------------------------------------------------


@pytest.mark.parametrize("errors", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_a_file_appears_when_it_is_whole_and_one_of_the_batch_is_replaced(
    tmp_path: Path, format: FileFormat, errors: bool
) -> None:
    path = named(tmp_path, format)
    with vetted(path, format, errors=errors) as destination, destination.replace() as file:
        for row in rows(format, range(150), errors=errors):
            file.write(row)
        assert not path.exists()
    first = path.read_bytes()
    replace(path, format, range(150), errors=errors)
    assert path.read_bytes() == first
    assert names(tmp_path) == [path.name]


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_of_something_else_needs_overwrite(tmp_path: Path, format: FileFormat) -> None:
    path = named(tmp_path, format)
    mixed = [*rows(format, range(3)), *rows(format, range(1000, 1001))]  # the last row is of another batch
    others: list[Callable[[], object]] = [
        lambda: path.write_bytes(FOREIGN),
        lambda: write(path, format, rows(format, range(1000, 1003))),
        lambda: write(path, format, mixed),
        lambda: write(path, format, rows(format, range(3), errors=True), errors=True),
    ]
    for make in others:
        make()
        before = path.read_bytes()
        refused(path, format, "is there already, and is not of batch 'night'")
        assert path.read_bytes() == before
    replace(path, format, overwrite=True)
    replace(path, format)  # now it is of this batch


def test_results_with_columns_of_the_users_own_are_the_users(tmp_path: Path) -> None:
    for format in (FileFormat.JSONL, FileFormat.OPENAI):
        path = write(named(tmp_path, format), format, [row | {"label": 1} for row in rows(format, range(3))])
        refused(path, format, "is not of batch 'night'")
    path = write(tmp_path / "out.csv", FileFormat.CSV, rows(FileFormat.CSV, range(3)))
    path.write_text("".join(f"{line},1\n" for line in path.read_text().splitlines()))
    refused(path, FileFormat.CSV, "is not of batch 'night'")
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = write(tmp_path / "out.parquet", FileFormat.PARQUET, rows(FileFormat.PARQUET, range(3)))
    table = parquet.read_table(path)
    parquet.write_table(table.append_column("label", arrow.array([1, 2, 3])), path)
    refused(path, FileFormat.PARQUET, "is not of batch 'night'")


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_without_rows_holds_nothing_to_lose(tmp_path: Path, format: FileFormat) -> None:
    path = named(tmp_path, format)
    path.touch()
    replace(path, format)
    write(path, format, [])
    replace(path, format)


@pytest.mark.parametrize("format", [FileFormat.OPENAI, FileFormat.JSONL, FileFormat.CSV])
def test_a_row_that_a_crash_cut_in_two_is_still_of_the_batch(tmp_path: Path, format: FileFormat) -> None:
    path = named(tmp_path, format)
    first = len(write(path, format, rows(format, range(1), text='a "b"\nc')).read_bytes())
    whole = write(path, format, rows(format, range(2), text='a "b"\nc')).read_bytes()
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        with vetted(path, format):
            pass
    path.write_bytes(whole + b"a note of my own\n")
    refused(path, format, "is not of batch 'night'")


def test_a_file_put_there_while_the_batch_ran_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with (
        pytest.raises(BatchFileError, match="is there already"),
        vetted(path, FileFormat.JSONL) as destination,
        destination.replace() as file,
    ):
        file.write(rows(FileFormat.JSONL, range(1))[0])
        path.write_bytes(FOREIGN)
    assert path.read_bytes() == FOREIGN
    assert names(tmp_path) == [path.name]


# -- three different files -----------------------------------------------------------------------


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


# -- what is no regular file ---------------------------------------------------------------------


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
            FileFormat.JSONL,
            "ends in .csv, but the results of this batch are JSON lines, as its input: ",
        ),
        ("x.parquet", FileFormat.OPENAI, "name a file that ends in .jsonl"),
        ("x.jsonl", FileFormat.PARQUET, "name a file that ends in .parquet"),
        ("x.JSON", FileFormat.CSV, "name a file that ends in .csv"),
        ("x.jsonl.gz", FileFormat.JSONL, "results are not compressed: name a file without .gz"),
    ):
        refused(tmp_path / name, format, said)
    for name, format in (("x.ndjson", FileFormat.OPENAI), ("x", FileFormat.CSV), ("x.txt", FileFormat.JSONL)):
        replace(tmp_path / name, format)


# -- one at a time -------------------------------------------------------------------------------


def test_a_second_writer_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    paths = {format: named(tmp_path, format, str(format)) for format in FORMATS}
    program = (
        "import sys; from nightmill.jobs.formats import Destination, FileFormat\n"
        "pairs = zip(sys.argv[1::2], sys.argv[2::2])\n"
        "held = [Destination(path, FileFormat(format)) for format, path in pairs]\n"
        "print('mine', flush=True)\n"
        "sys.stdin.read()"
    )
    arguments = [str(word) for pair in paths.items() for word in pair]
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=clean_environment(),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as first:
        assert first.stdout is not None and first.stdout.readline() == "mine\n"
        for format, path in paths.items():
            refused(path, format, "another process is writing it: wait until that has ended, or name another")
        first.kill()
    assert set(names(tmp_path)) == {partial_of(path).name for path in paths.values()}
    for format, path in paths.items():  # what a killed one leaves is taken over
        replace(path, format)
    assert set(names(tmp_path)) == {path.name for path in paths.values()}


def test_a_partial_that_is_no_plain_file_is_left_alone(tmp_path: Path) -> None:
    path, thesis = tmp_path / "out.jsonl", tmp_path / "thesis"
    thesis.write_bytes(FOREIGN)
    partial = partial_of(path)
    for make in (
        lambda: partial.symlink_to(thesis),
        lambda: os.link(thesis, partial),
        lambda: os.mkfifo(partial),
    ):
        make()
        refused(path, FileFormat.JSONL, "cannot be written")
        partial.unlink()
    assert thesis.read_bytes() == FOREIGN


# -- what cannot be finished ---------------------------------------------------------------------


@contextmanager
def full_disk(at: int) -> Iterator[None]:
    """No file of this process grows beyond `at` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("format", FORMATS)
def test_a_full_disk_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, format: FileFormat, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(named(tmp_path, format), format, rows(format, range(9)))
    before = path.read_bytes()
    long = [rows(format, range(n, n + 1), text=os.urandom(2000).hex())[0] for n in range(200)]
    with (
        full_disk(100_000),
        pytest.raises(BatchFileError) as caught,
        vetted(path, format) as destination,
        destination.replace() as file,
    ):
        for row in long:
            file.write(row)
    assert str(caught.value).startswith(f"{path}: cannot be ") and "too large" in str(caught.value)
    assert path.read_bytes() == before
    assert names(tmp_path) == [path.name]
    del caught
    assert capfd.readouterr().err == ""  # nor does anything complain later


@pytest.mark.parametrize("format", FORMATS)
def test_an_exception_leaves_what_was_there_and_nothing_else(tmp_path: Path, format: FileFormat) -> None:
    path = named(tmp_path, format)
    with (
        pytest.raises(KeyboardInterrupt),
        vetted(path, format) as destination,
        destination.replace() as file,
    ):
        file.write(rows(format, range(1))[0])
        raise KeyboardInterrupt
    assert names(tmp_path) == []


@pytest.mark.parametrize("format", [FileFormat.OPENAI, FileFormat.JSONL, FileFormat.CSV])
def test_a_growing_file_ends_with_a_whole_row_where_the_disk_is_full(
    tmp_path: Path, format: FileFormat
) -> None:
    path = named(tmp_path, format)
    long = rows(format, range(3), text="y" * 40_000)
    with vetted(path, format) as destination:
        file = destination.grow()
        file.write(long[0])
        file.flush()
        whole = path.read_bytes()
        file.write(long[1])
        with full_disk(60_000), pytest.raises(BatchFileError, match="cannot be written: File too large"):
            file.flush()
        assert path.read_bytes() == whole
        file.discard()
    assert names(tmp_path) == [path.name]
    with vetted(path, format) as destination, destination.grow() as file:  # there is room again
        assert file.ids() == {long[0]["id"]}
        file.write(long[1])
    assert path.read_bytes().startswith(whole)


def test_other_names_of_a_file_that_is_begun_anew_keep_its_content(tmp_path: Path) -> None:
    path, backup = tmp_path / "out.jsonl", tmp_path / "backup.jsonl"
    path.write_bytes(FOREIGN)
    os.link(path, backup)
    with vetted(path, FileFormat.JSONL, overwrite=True) as destination, destination.grow() as file:
        file.write(rows(FileFormat.JSONL, range(1))[0])
    assert backup.read_bytes() == FOREIGN


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match=r"none/out\.jsonl: cannot be written: No such file"):
        Destination(tmp_path / "none" / "out.jsonl", FileFormat.JSONL)
    with pytest.raises(BatchFileError, match="cannot be written: Not a directory"):
        (tmp_path / "file").touch()
        Destination(tmp_path / "file" / "out.jsonl", FileFormat.JSONL)
