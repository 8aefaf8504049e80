"""A batch's results and errors as files: whole, in the order of the input, and replaced at one stroke."""

from collections.abc import Callable
from pathlib import Path

from jobs.batches import Batch
from jobs.batchfile import FileFormat, ResultFile, error_row, result_row
from jobs.contract import Job, JsonObject


def output_row(job: Job, format: FileFormat, *, errors: bool) -> JsonObject:
    """A job as a row of the result file, or of the error file."""
    return error_row(job, format) if errors else result_row(job, format)


def write_in_order(
    batch: Batch, path: Path, *, errors: bool = False, on_rows: Callable[[int], None] | None = None
) -> int:
    """Write the results (or the errors) that a batch has now; returns how many rows that are.

    The file appears under its name when it is complete; until then a file that was there stays. Raises
    BatchFileError where it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    written = 0
    with ResultFile(partial, batch.format, errors=errors) as file:
        for job in batch.errors() if errors else batch.results():
            file.write(output_row(job, batch.format, errors=errors))
            written += 1
            if on_rows is not None and written % 100 == 0:
                on_rows(written)
    partial.replace(path)
    return written


def errors_path(path: Path) -> Path:
    """Where errors go unless something else is said: results.jsonl has its errors in results.errors.jsonl."""
    return path.with_name(f"{path.stem}.errors{path.suffix}")
