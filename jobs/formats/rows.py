"""What a row is, what can be wrong with it, and how each format's rows become jobs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from nightmill.jobs.contract import JsonObject, Prompt
from nightmill.jobs.errors import InvalidRequestError, RowCode
from nightmill.jobs.fields import check_option
from nightmill.jobs.spec import JobSpec

_LONGEST_MESSAGE = 300  # characters; what a row holds is quoted, and a row may hold megabytes


class FileFormat(StrEnum):
    """The formats of batch files; a batch's results have the format of its input."""

    OPENAI = "openai"
    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a row cannot be run. `message` is one printable line that names the field and the remedy."""

    code: RowCode
    message: str
    field: str | None = None

    @classmethod
    def of(cls, error: InvalidRequestError) -> "RowError":
        """What a check has found."""
        return cls(error.code, printable(str(error)), error.field and printable(error.field))


@dataclass(frozen=True, slots=True)
class InputRow:
    """One row of an input file, checked: either a job, or an error."""

    number: int
    """1-based line of the file (JSONL) or record (CSV, Parquet, Python items)."""
    custom_id: str | None
    """As the row says; a plain row without one is called "row-<number>". None: a bad row that has none."""
    spec: JobSpec | None
    error: RowError | None = None

    @property
    def prompt(self) -> Prompt | None:
        """The text or messages of a good row."""
        return None if self.spec is None else self.spec.prompt


ReadJob = Callable[[JsonObject, JobSpec], JobSpec]
"""A row and the defaults of its batch as a job; raises InvalidRequestError."""


def read_row(
    number: int, values: Mapping[str, Any], read: ReadJob, defaults: JobSpec, *, id_required: bool = False
) -> InputRow:
    """A row, checked; `defaults` hold if it says nothing."""
    custom_id: str | None = None
    try:
        given = values.get("custom_id")
        if given is not None:
            check_option("custom_id", given)
        elif id_required:
            raise missing("custom_id", "give each row a text that no other row has")
        custom_id = f"row-{number}" if given is None else given
        return InputRow(number, custom_id, read({**values, "custom_id": custom_id}, defaults))
    except InvalidRequestError as error:
        return bad_row(number, RowError.of(error), custom_id)


def bad_row(number: int, error: RowError, custom_id: str | None = None) -> InputRow:
    """A row that cannot be run."""
    return InputRow(number, custom_id, None, error)


def missing(field: str, remedy: str) -> InvalidRequestError:
    """The error for a key that is needed."""
    return InvalidRequestError(f"{field}: is missing; {remedy}", field=field, code=RowCode.MISSING_FIELD)


def invalid(field: str, said: str) -> InvalidRequestError:
    """The error for a value that is not what it should be."""
    return InvalidRequestError(f"{field}: {said}", field=field)


def printable(text: str) -> str:
    """`text` as one line of bounded length that every terminal, JSON reader and SQL column takes."""
    if len(text) > _LONGEST_MESSAGE:
        text = f"{text[: _LONGEST_MESSAGE * 3 // 4]} ... {text[-_LONGEST_MESSAGE // 5 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
