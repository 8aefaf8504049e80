"""Result and error files of a batch: checks of the destination, and writing in the order of the input."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.formats import Destination, FileFormat, InputFile, error_row, result_row
from nightmill.jobs.formats.places import OutputTarget
from nightmill.jobs.formats.together import FilesTogether
from nightmill.jobs.reply.job import Job
from nightmill.jobs.sql.batches import BatchStore
from nightmill.jobs.sql.jobs import Selection, Store
from nightmill.jobs.tables.following import FollowingRows
from nightmill.jobs.tables.layout import layout_of
from nightmill.jobs.tables.reading import TableFile
from nightmill.jobs.tables.together import paths_of

ROWS_PER_CALL = 100  # rows between calls of `on_rows`


def output_row(job: Job, format: FileFormat, *, errors: bool) -> JsonObject:
    """Return a job as a row of the result file or the error file."""
    return error_row(job, format) if errors else result_row(job, format)


@contextmanager
def destinations(
    source: InputFile | FollowingRows, results: OutputTarget, errors: OutputTarget, *, overwrite: bool
) -> Iterator[tuple[Destination, Destination]]:
    """Open the result file and the error file of an input, which must be three different files. Raises
    BatchFileError."""
    shape = source.table.shape if isinstance(source, TableFile | FollowingRows) else None
    dialect = source.dialect
    apart = paths_of(source) if isinstance(source, InputFile) else {}
    for target in (results, errors):
        if isinstance(source, FilesTogether) and source.takes(_first_file(target.label)):
            raise BatchFileError(
                f"{target.label}: would be one of the files of {source.label} the next time: "
                "name another folder"
            )
    with (
        Destination(
            results.path,
            source.format,
            overwrite=overwrite,
            apart_from=apart,
            label=results.label,
            layout=layout_of(shape, source.format, results.path, dialect=dialect),
            dialect=dialect,
        ) as first,
        Destination(
            errors.path,
            source.format,
            errors=True,
            overwrite=overwrite,
            apart_from=apart | {"the file of results": results.path},
            label=errors.label,
            layout=layout_of(shape, source.format, errors.path, errors=True, dialect=dialect),
            dialect=dialect,
        ) as second,
    ):
        yield first, second


def vet(destination: Destination, store: BatchStore, batch: str, fingerprint: str | None) -> None:
    """Refuse a destination that contains anything but rows of this batch, which may not be entered yet.

    Raises BatchFileError.
    """
    jobs = Store(store.database)

    def owns(ids: list[str]) -> bool:
        return len(jobs.ids(Selection(ids=ids, batch=batch), len(ids))) == len(set(ids))

    destination.vet(batch, owns, fingerprint)


def write_in_order(
    destination: Destination,
    jobs: Iterable[Job],
    *,
    on_rows: Callable[[int], None] | None = None,
) -> int:
    """Write these jobs; returns the number of rows.

    The file appears under its name once it is complete; until then an existing file stays. Raises
    BatchFileError if it cannot be written.
    """
    written = 0
    with destination.replace() as file:
        for job in jobs:
            file.write(destination.layout.row(job))
            written += 1
            if on_rows is not None and written % ROWS_PER_CALL == 0:
                on_rows(written)
    return written


def _first_file(label: str) -> Path:
    """Return the path of the first file that is written."""
    return Path(label) / "part-00000.parquet" if label.endswith("/") else Path(label)


def source_of(path: str | None) -> Mapping[str, Path]:
    """Return the input file of a batch, if it is a file, which no destination may be."""
    return {"the input": Path(path)} if path else {}
