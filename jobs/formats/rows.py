"""What a row is, what can be wrong with it, and the checks that all formats share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from nightmill.jobs.contract import GenerationParams, JsonObject, Prompt
from nightmill.jobs.errors import InvalidRequestError
from nightmill.jobs.requests import PARAMETERS, Options, check_prompt

_LONGEST_MESSAGE = 300  # characters; what a row holds is quoted, and a row may hold megabytes


class FileFormat(StrEnum):
    """The formats of batch files; a batch's results have the format of its input."""

    OPENAI = "openai"
    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"


class RowCode(StrEnum):
    """Why a row cannot be run, in one word."""

    INVALID_ENCODING = "invalid_encoding"
    INVALID_JSON = "invalid_json"
    INVALID_CSV = "invalid_csv"
    TOO_LONG = "too_long"
    MISSING_FIELD = "missing_field"
    UNSUPPORTED_FIELD = "unsupported_field"
    INVALID_VALUE = "invalid_value"
    DUPLICATE_CUSTOM_ID = "duplicate_custom_id"


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a row cannot be run. `message` is one printable line that names the field and the remedy."""

    code: str
    message: str
    field: str | None = None


@dataclass(frozen=True, slots=True)
class InputRow:
    """One row of an input file, checked: either a prompt with its settings, or an error."""

    number: int
    """1-based line of the file (JSONL) or record (CSV, Parquet, Python items)."""
    custom_id: str | None
    """As the row says; a plain row without one is called "row-<number>". None: a bad row that has none."""
    prompt: Prompt | None
    settings: JsonObject
    """The keywords of enqueue that the row gives, without custom_id."""
    error: RowError | None = None


class RowRefusedError(Exception):
    """A row cannot be run. Never leaves this package: it becomes the row's error."""

    def __init__(self, code: RowCode, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.error = RowError(code.value, printable(message), None if field is None else printable(field))


Split = Callable[[JsonObject], tuple[Any, JsonObject]]
"""Takes a row without its custom_id apart: (prompt, keywords of enqueue). Raises RowRefusedError, or
InvalidRequestError as enqueue does."""


def check_row(
    number: int, values: Mapping[str, Any], split: Split, *, id_required: bool = False, inside: str = ""
) -> InputRow:
    """Apply the checks of enqueue to one row. `inside` goes before the names of parameters in errors."""
    rest = dict(values)
    given = rest.pop("custom_id", None)
    custom_id: str | None = None
    try:
        if given is None and id_required:
            raise RowRefusedError(
                RowCode.MISSING_FIELD,
                "custom_id: is missing; give each row a text that no other row has",
                "custom_id",
            )
        _check_id(given)
        custom_id = f"row-{number}" if given is None else given
        prompt, settings = split(rest)
        text, messages = check_prompt(prompt)
        GenerationParams.parse({name: value for name, value in settings.items() if name in PARAMETERS})
        Options(**{name: value for name, value in settings.items() if name not in PARAMETERS})
    except RowRefusedError as refused:
        return bad_row(number, refused.error, custom_id)
    except InvalidRequestError as error:
        named = RowRefusedError(RowCode.INVALID_VALUE, f"{inside}{error}", f"{inside}{error.field}")
        return bad_row(number, named.error, custom_id)
    checked: Prompt | None = text if messages is None else messages
    return InputRow(number, custom_id, checked, settings)


def _check_id(custom_id: Any) -> None:
    try:
        Options(custom_id=custom_id)
    except InvalidRequestError as error:
        raise RowRefusedError(RowCode.INVALID_VALUE, str(error), "custom_id") from None


def bad_row(number: int, error: RowError, custom_id: str | None = None) -> InputRow:
    """A row that cannot be run."""
    return InputRow(number, custom_id, None, {}, error)


def printable(text: str) -> str:
    """`text` as one line of bounded length that every terminal, JSON reader and SQL column takes."""
    if len(text) > _LONGEST_MESSAGE:
        text = f"{text[: _LONGEST_MESSAGE * 3 // 4]} ... {text[-_LONGEST_MESSAGE // 5 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
