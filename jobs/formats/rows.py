"""Rows of input files: their errors, and their conversion to jobs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from nightmill.jobs.base.contract import JsonObject, Prompt
from nightmill.jobs.errors import InvalidRequestError, RowCode
from nightmill.jobs.request.fields import check_option
from nightmill.jobs.request.spec import JobSpec

FLOATS = "floats"
"""The type of a column of lists of float32: embeddings."""
_FRAME = frozenset({"method", "url", "body"})  # keys of OpenAI's rows only
_PROMPTS = frozenset({"prompt", "messages", "embed"})  # keys of plain rows
_LONGEST_MESSAGE = 300  # characters, as messages quote rows, which may have megabytes


class FileFormat(StrEnum):
    """The formats of batch files; a batch's results have the format of its input."""

    OPENAI = "openai"
    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"
    ARROW = "arrow"
    """A format of tables with a template alone."""


OF_PROMPTS = tuple(format for format in FileFormat if format is not FileFormat.ARROW)
"""The formats of files whose rows say themselves what is to be done."""


@dataclass(frozen=True, slots=True)
class RowError:
    """The reason why a row cannot be run. `message` is one printable line with the field and the remedy."""

    code: RowCode
    message: str
    field: str | None = None

    @classmethod
    def of(cls, error: InvalidRequestError) -> "RowError":
        """Convert a failed check."""
        return cls(error.code, printable(str(error)), error.field and printable(error.field))


@dataclass(frozen=True, slots=True)
class InputRow:
    """A checked row of an input file: either a job or an error."""

    number: int
    """1-based line of the file (JSONL) or record (CSV, Parquet, Python items)."""
    custom_id: str | None
    """The row's own id, "row-<number>" for a plain row without one, or None for a bad row without one."""
    spec: JobSpec | None
    error: RowError | None = None
    kept: JsonObject | None = None
    """Further values of the row's table, for the job's metadata, whether the row is good or bad."""
    prior: str | None = None
    """The id of the job that it follows."""

    @property
    def after(self) -> str | None:
        """The custom_id of the row before it that it follows."""
        return None if self.spec is None else self.spec.after

    @property
    def prompt(self) -> Prompt | None:
        """The text or messages of a good row."""
        return None if self.spec is None else self.spec.prompt


ReadJob = Callable[[JsonObject, JobSpec], JobSpec]
"""Parses a row with the defaults of its batch; raises InvalidRequestError."""


def read_row(
    number: int, values: Mapping[str, Any], read: ReadJob, defaults: JobSpec, *, id_required: bool = False
) -> InputRow:
    """Check a row; `defaults` apply where it has no value."""
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
    """Make a row that cannot be run."""
    return InputRow(number, custom_id, None, error)


def other_format(values: Mapping[str, Any], format: FileFormat, remedy: str) -> RowError | None:
    """Return the error for a bad row in the other JSON format than its file; None if it is not.

    remedy  remedy for plain rows in a file of OpenAI's format
    """
    framed, prompts = _FRAME & values.keys(), _PROMPTS & values.keys()
    if format is FileFormat.OPENAI and prompts and not framed:
        field = min(prompts)
        said = f"is a key of plain rows, and rows here are OpenAI's: custom_id, method, url, body; {remedy}"
    elif format is FileFormat.JSONL and framed and not prompts:
        field = min(framed)
        said = (
            "is a key of OpenAI's rows, and rows of this file are plain, as its first one is: prompt or "
            "messages; give rows of OpenAI's format a file of their own"
        )
    else:
        return None
    return RowError(RowCode.UNSUPPORTED_FIELD, f"{field}: {said}", field)


def missing(field: str, remedy: str) -> InvalidRequestError:
    """Make the error for a missing key."""
    return InvalidRequestError(f"{field}: is missing; {remedy}", field=field, code=RowCode.MISSING_FIELD)


def invalid(field: str, said: str) -> InvalidRequestError:
    """Make the error for an invalid value."""
    return InvalidRequestError(f"{field}: {said}", field=field)


def printable(text: str) -> str:
    """Return `text` as one line of bounded length for any terminal, JSON parser or SQL column."""
    if len(text) > _LONGEST_MESSAGE:
        text = f"{text[: _LONGEST_MESSAGE * 3 // 4]} ... {text[-_LONGEST_MESSAGE // 5 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
