"""Input files of HTTP batches, and their errors for callers."""

from collections.abc import Iterator
from pathlib import Path

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import (
    BatchFileError,
    InvalidRequestError,
    MissingExtraError,
    NightmillError,
    RowCode,
)
from nightmill.jobs.formats import FileFormat, InputFile, InputRow, RowError
from nightmill.jobs.formats.inputs import NOTHING_SAID
from nightmill.jobs.formats.openai import endpoint_of
from nightmill.jobs.formats.rows import bad_row
from nightmill.jobs.request.spec import JobSpec


class EndpointFile(InputFile):
    """An untrusted file whose rows must all be for one of OpenAI's endpoints; None: any format.

    The content is at `path`; the ending of the owner's `filename` gives its format. Raises BatchFileError.
    """

    plain_remedy = "hand a file of plain rows in with POST /v1/night"
    immutable = True  # complete since it has its name; a backup may change only its mode or links

    def __init__(self, path: Path, endpoint: str | None, filename: str = "") -> None:
        super().__init__(
            path, FileFormat.OPENAI if endpoint else None, label=str(path), name=filename, trusted=False
        )
        self._endpoint = endpoint
        if endpoint:
            self._refuse_tables()

    def rows(self, defaults: JobSpec = NOTHING_SAID) -> Iterator[InputRow]:
        """Yield the rows like any file; a row for another endpoint is a bad one."""
        try:
            for row in super().rows(defaults):
                if self._endpoint is None or row.spec is None or endpoint_of(row.spec) == self._endpoint:
                    yield row
                    continue
                error = RowError(
                    RowCode.INVALID_VALUE, f"url: must be {self._endpoint}, as the batch says", "url"
                )
                yield bad_row(row.number, error, row.custom_id)
        except MissingExtraError:
            said = (
                "this server cannot read Parquet, for pyarrow is not installed there; send JSON lines or CSV"
            )
            raise BatchFileError(f"{self.label}: {said}") from None

    def _refuse_tables(self) -> None:
        """Refuse a table once, with the endpoint that accepts it, instead of an error for each line."""
        with self._errors():
            table = self._table_format(self._start())
        if table is not None:
            kind = "CSV" if table is FileFormat.CSV else "Parquet"
            said = (
                f"is {kind}, and POST /v1/batches takes OpenAI's JSON lines only; POST /v1/night takes {kind}"
            )
            raise BatchFileError(f"{self.label}: {said}")


def row_error(line: int, error: JsonObject) -> JsonObject:
    """Build OpenAI's object for a bad row; `error` is the last one of its job."""
    return {
        "code": error.get("code"),
        "line": line,
        "message": error.get("error"),
        "param": error.get("field"),
    }


def file_error(error: NightmillError, path: Path) -> JsonObject:
    """Build OpenAI's object for an error of the whole file, without its path."""
    code, param = "invalid_file", "input_file_id"
    if isinstance(error, InvalidRequestError):
        code, param = str(error.code), error.field or param
    said = str(error)
    if isinstance(error, BatchFileError):
        said = said.removeprefix(f"{path}: ").replace(str(path), "the file")
    return {"code": code, "line": None, "message": said, "param": param}
