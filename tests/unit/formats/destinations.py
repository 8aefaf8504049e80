"""What the tests of destinations share: rows of a batch, files of them, and refusals."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.formats import Destination, FileFormat, ResultFile, error_row, result_row
from nightmill.jobs.formats.rows import OF_PROMPTS
from tests.unit.formats.files import job

FORMATS = list(OF_PROMPTS)
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
