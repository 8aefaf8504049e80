"""Files that batches over HTTP are made of, and what callers are told of what in them cannot be run."""

from collections.abc import Iterator
from pathlib import Path

from nightmill.jobs.contract import JsonObject
from nightmill.jobs.errors import (
    BatchFileError,
    InvalidRequestError,
    MissingExtraError,
    NightmillError,
    RowCode,
)
from nightmill.jobs.formats import FileFormat, InputFile, InputRow, RowError
from nightmill.jobs.formats.inputs import NOTHING_SAID
from nightmill.jobs.formats.openai import CHAT
from nightmill.jobs.formats.rows import bad_row
from nightmill.jobs.spec import JobSpec


class EndpointFile(InputFile):
    """A stranger's file whose rows must all be for one of OpenAI's endpoints; None: in any format.

    Its content is at `path`; the ending of `filename`, as its owner calls it, says which format it has.
    Raises BatchFileError.
    """

    immutable = True  # under its name since its row is there; a backup may change its mode or links, no more

    def __init__(self, path: Path, endpoint: str | None, filename: str = "") -> None:
        super().__init__(
            path, FileFormat.OPENAI if endpoint else None, label=str(path), name=filename, trusted=False
        )
        self._endpoint = endpoint

    def rows(self, defaults: JobSpec = NOTHING_SAID) -> Iterator[InputRow]:
        """As of any file; a row for another endpoint is a bad one."""
        try:
            for row in super().rows(defaults):
                if self._endpoint is None or row.spec is None or self._is_for(row.spec):
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

    def _is_for(self, spec: JobSpec) -> bool:
        return (spec.messages is not None) == (self._endpoint == CHAT)


def row_error(line: int, error: JsonObject) -> JsonObject:
    """OpenAI's object for a row that cannot be run; `error` is the last one of its job."""
    return {
        "code": error.get("code"),
        "line": line,
        "message": error.get("error"),
        "param": error.get("field"),
    }


def file_error(error: NightmillError, path: Path) -> JsonObject:
    """The same for the file as a whole, without where it lies."""
    code, param = "invalid_file", "input_file_id"
    if isinstance(error, InvalidRequestError):
        code, param = str(error.code), error.field or param
    said = str(error)
    if isinstance(error, BatchFileError):
        said = said.removeprefix(f"{path}: ").replace(str(path), "the file")
    return {"code": code, "line": None, "message": said, "param": param}
