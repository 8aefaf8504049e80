"""A batch's results and errors as files: whose they may be, and written whole in the order of the input."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from nightmill.jobs.contract import JsonObject
from nightmill.jobs.formats import Destination, FileFormat, InputFile, error_row, result_row
from nightmill.jobs.formats.places import Place
from nightmill.jobs.job import Job
from nightmill.jobs.sql.batches import BatchStore
from nightmill.jobs.sql.jobs import Selection, Store

ROWS_PER_CALL = 100  # of `on_rows`


def output_row(job: Job, format: FileFormat, *, errors: bool) -> JsonObject:
    """A job as a row of the result file, or of the error file."""
    return error_row(job, format) if errors else result_row(job, format)


@contextmanager
def destinations(
    source: InputFile, results: Place, errors: Place, *, overwrite: bool
) -> Iterator[tuple[Destination, Destination]]:
    """The result file and the error file of an input: three different files. Raises BatchFileError."""
    apart = {"the input": source.path}
    with (
        Destination(
            results.path, source.format, overwrite=overwrite, apart_from=apart, label=results.label
        ) as first,
        Destination(
            errors.path,
            source.format,
            errors=True,
            overwrite=overwrite,
            apart_from=apart | {"the file of results": results.path},
            label=errors.label,
        ) as second,
    ):
        yield first, second


def vet(destination: Destination, store: BatchStore, batch: str, fingerprint: str | None) -> None:
    """Refuse a destination that holds anything but rows of this batch, which need not be entered yet.

    Raises BatchFileError.
    """
    jobs = Store(store.database)

    def owns(ids: list[str]) -> bool:
        return len(jobs.ids(Selection(ids=ids, batch=batch), len(ids))) == len(set(ids))

    destination.vet(batch, owns, fingerprint)


def write_in_order(
    destination: Destination,
    jobs: Iterable[Job],
    format: FileFormat,
    *,
    errors: bool = False,
    on_rows: Callable[[int], None] | None = None,
) -> int:
    """Write these jobs; returns how many rows that are.

    The file appears under its name when it is complete; until then a file that was there stays. Raises
    BatchFileError if it cannot be written.
    """
    written = 0
    with destination.replace() as file:
        for job in jobs:
            file.write(output_row(job, format, errors=errors))
            written += 1
            if on_rows is not None and written % ROWS_PER_CALL == 0:
                on_rows(written)
    return written


def source_of(path: str | None) -> Mapping[str, Path]:
    """What a destination must be apart from: the input of a batch, if that is a file."""
    return {"the input": Path(path)} if path else {}
