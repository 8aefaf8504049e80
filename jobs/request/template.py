"""A template: a text in which `{{ column }}` stands for a row's value. Substitution, and nothing else.

    Classify: {{ review }}                a value as text
    Of these: {{ tags | json }}           a value as JSON: any value, lists and objects too
    {{ conversation | messages }}         a chat, as a list of messages or its JSON; it must stand alone
    {{ `a|b` }}                           a column whose name has marks of the template's own
    {{ "{{" }}                            a text, for what would else begin a substitution

There is no control flow, no attribute and no call: what a row holds is data wherever it comes to stand, and
what is substituted is never looked at again.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Self

from nightmill.jobs.base.contract import unstorable
from nightmill.jobs.base.printable import printable
from nightmill.jobs.errors import InvalidParameterError, InvalidRequestError, RowCode
from nightmill.jobs.request.prompts import json_type

MAX_CHARACTERS = 1 << 18
"""The most characters of a template."""
PRIOR = "prior."
"""The prefix of what a template takes from the row before it, if it follows one."""
_OPEN, _CLOSE = "{{", "}}"
_STATEMENT = re.compile(
    r"\{%[-+]?\s*(?:if|elif|else|endif|for|endfor|set|macro|endmacro|block|include|import|from|extends|call"
    r"|filter|raw|with)\b"
)
_TEXT = re.compile(r'"[^"\n]*"|\'[^\'\n]*\'')
_QUOTED = re.compile(r"`([^`\n]+)`")
_FILTERED = re.compile(r"\|\s*(\w*)\s*")
_MOST_LISTED = 30  # columns
_LONGEST_SHOWN = 60  # characters of a stranger's word


class Filter(StrEnum):
    """The form in which a value is written."""

    TEXT = ""
    JSON = "json"
    MESSAGES = "messages"


class Empty(StrEnum):
    """The fate of a row in which a column that the template names has no value."""

    ERROR = "error"
    """It fails, and says which column it was."""
    SKIP = "skip"
    """It is left out, of results and errors."""
    KEEP = "keep"
    """It is run, with nothing in the value's place."""


class Slot(NamedTuple):
    """A position in a template for a column's value. Lines and columns of the template count from 1."""

    column: str
    filter: Filter
    line: int
    place: int


class EmptyColumnError(InvalidRequestError):
    """A row has no value where the template wants one."""


class MissingColumnError(InvalidParameterError):
    """A template names a column that is not there; `reason` says which one, and which there are."""

    reason = ""

    @classmethod
    def of(cls, label: str, where: str, reason: str) -> Self:
        """Return the error for a position in the template that is called `label`."""
        error = cls(f"{label}: {where}: {reason}", field=label)
        error.reason = reason
        return error

    def renamed(self, field: str) -> Self:
        """Return this error for a field that is the column's name: who gave that wrote no template."""
        error = type(self)(f"{field}: {self.reason}", field=field, code=self.code)
        error.reason = self.reason
        return error


@dataclass(frozen=True)
class Template:
    """A parsed template. `label` is what errors call it."""

    text: str
    label: str
    parts: tuple[str | Slot, ...]

    @classmethod
    def parse(cls, text: Any, label: str = "template") -> Self:
        """Raises InvalidParameterError, with the line and column of what is wrong."""
        if not isinstance(text, str):
            raise InvalidParameterError(f"{label}: must be a text, not {json_type(text)}", field=label)
        if not text.strip():
            raise InvalidParameterError(f"{label}: is empty; write a text with {{{{ column }}}}", field=label)
        if len(text) > MAX_CHARACTERS:
            said = f"{label}: has {len(text):,} characters, more than {MAX_CHARACTERS:,}; shorten it"
            raise InvalidParameterError(said, field=label)
        if problem := unstorable(text):
            raise InvalidParameterError(f"{label}: {problem}", field=label)
        return cls(text, label, tuple(_Parser(text, label).parts()))

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The substitutions, in order."""
        return tuple(part for part in self.parts if isinstance(part, Slot))

    @property
    def messages(self) -> Slot | None:
        """The column with a chat that is all of the template; None of a template for text."""
        return next((slot for slot in self.slots if slot.filter is Filter.MESSAGES), None)

    def check(self, columns: Collection[str], *, follows: bool = False) -> None:
        """Raises InvalidParameterError for a column that is not one of these.

        follows  each row follows another, of which `prior.NAME` tells
        """
        for slot in self.slots:
            if follows and slot.column.startswith(PRIOR):
                continue
            if slot.column not in columns:
                where = f"line {slot.line}, column {slot.place}"
                hint = "; rows that follow others are submitted with after" if PRIOR in slot.column else ""
                reason = f"there is no column {_shown(slot.column)}; {listed(columns)}{hint}"
                raise MissingColumnError.of(self.label, where, reason)

    def check_braces(self, columns: Collection[str]) -> None:
        """Check that a template without substitutions has no `{column}`, which would be alike in all rows.

        Raises InvalidParameterError.
        """
        found = next((name for name in columns if f"{{{name}}}" in self.text), None)
        if found is not None and not self.slots:
            name = printable(found, _LONGEST_SHOWN)
            raise InvalidParameterError(
                f"{self.label}: names no column, as {{{name}}} is a text; write {{{{ {name} }}}}",
                field=self.label,
            )

    def fill(self, row: Mapping[str, Any], empty: Empty = Empty.ERROR) -> str:
        """The text for a row. Raises EmptyColumnError for no value, InvalidRequestError for one of no use."""
        return "".join(
            part if isinstance(part, str) else write_value(part, row.get(part.column), empty)
            for part in self.parts
        )


def write_value(slot: Slot, value: Any, empty: Empty) -> str:
    """The text for a value. Raises EmptyColumnError for none, InvalidRequestError for one of no use."""
    if value is None:
        if empty is not Empty.KEEP:
            raise no_value(slot.column)
        return "null" if slot.filter is Filter.JSON else ""
    if isinstance(value, str) and slot.filter is Filter.TEXT:
        return value
    if slot.filter is Filter.TEXT and isinstance(value, list | Mapping):
        said = f"{_shown(slot.column)}: is {json_type(value)}; write {{{{ {slot.column} | json }}}}"
        raise InvalidRequestError(said, field=slot.column)
    return json.dumps(value, ensure_ascii=False)


def no_value(column: str) -> EmptyColumnError:
    """The error of a row without a value in `column`."""
    return EmptyColumnError(
        f"{_shown(column)}: has no value, and the template names it; fill it in, or leave such rows out "
        "(--empty skip), or run them with nothing there (--empty keep)",
        field=column,
        code=RowCode.MISSING_FIELD,
    )


def listed(columns: Collection[str]) -> str:
    """A clause that names the columns there are, or the first of many."""
    names = list(columns)
    if not names:
        return "there are none"
    more = f" and {len(names) - _MOST_LISTED:,} more" if len(names) > _MOST_LISTED else ""
    return f"there are {', '.join(_shown(name) for name in names[:_MOST_LISTED])}{more}"


class _Parser:
    """Reads a template from the left to the right, once."""

    def __init__(self, text: str, label: str) -> None:
        self._text = text
        self._label = label
        self._depth = 0  # of single braces in literal text, as of JSON that is shown to the model

    def parts(self) -> list[str | Slot]:
        parts: list[str | Slot] = []
        at = 0
        while (opened := self._text.find(_OPEN, at)) >= 0:
            self._literal(at, opened)
            parts.append(self._text[at:opened])
            part, at = self._expression(opened)
            parts.append(part)
        self._literal(at, len(self._text))
        parts.append(self._text[at:])
        self._check_alone(parts)
        return [part for part in parts if part != ""]

    def _literal(self, start: int, end: int) -> None:
        """Refuse control flow, and `}}` that closes neither a substitution nor braces of the text's own."""
        if found := _STATEMENT.search(self._text, start, end):
            said = f"{found[0]!r}: a template has no control flow, only {{{{ column }}}}; to write it as it "
            raise self._error(found.start(), f'{said}stands: {{{{ "{{%" }}}}')
        for place in range(start, end):
            mark = self._text[place]
            if mark == "{":
                self._depth += 1
            elif mark == "}":
                before = self._text[max(place - 1, start) : place] == "}"
                doubled = before or self._text[place + 1 : place + 2] == "}"
                if self._depth == 0 and doubled:
                    raise self._error(
                        place - before, "'}}' closes nothing: write {{ before the column's name"
                    )
                self._depth = max(0, self._depth - 1)

    def _expression(self, opened: int) -> tuple[str | Slot, int]:
        """Read the expression between `{{` and `}}`; returns it and the index at which the text goes on."""
        at = self._skip_blank(opened + len(_OPEN))
        if text := _TEXT.match(self._text, at):
            end = self._skip_blank(text.end())
            if not self._text.startswith(_CLOSE, end):
                raise self._unclosed(opened)
            return text[0][1:-1], end + len(_CLOSE)
        end = self._end(opened, at)
        inside = self._text[at:end]
        if quoted := _QUOTED.match(inside):
            name, rest = quoted[1], inside[quoted.end() :].strip()
            bare = ""
        else:
            name, mark, rest = inside.partition("|")
            bare = name = name.strip()
            rest = mark + rest
        if "{" in bare or "\n" in bare:
            raise self._unclosed(opened)
        if not name:
            raise self._error(opened, "'{{ }}' names no column: write {{ column }}")
        line, place = self._position(opened)
        return Slot(name, self._filter(opened, rest), line, place), end + len(_CLOSE)

    def _end(self, opened: int, at: int) -> int:
        """Find the end of the expression: behind a name in backticks, which may have braces."""
        quoted = _QUOTED.match(self._text, at)
        end = self._text.find(_CLOSE, quoted.end() if quoted else at)
        if end < 0:
            raise self._unclosed(opened)
        return end

    def _filter(self, opened: int, rest: str) -> Filter:
        if not rest:
            return Filter.TEXT
        found = _FILTERED.fullmatch(rest)
        name = found[1] if found else rest.lstrip("| ").strip()
        if not found or name not in (Filter.JSON, Filter.MESSAGES):
            raise self._error(opened, f"{_shown(name)} is not a filter; there are json and messages")
        return Filter(name)

    def _check_alone(self, parts: list[str | Slot]) -> None:
        slots = [part for part in parts if isinstance(part, Slot)]
        chats = [slot for slot in slots if slot.filter is Filter.MESSAGES]
        text = "".join(part for part in parts if isinstance(part, str))
        if chats and (len(slots) > 1 or text.strip()):
            raise InvalidParameterError(
                f"{self._label}: line {chats[0].line}, column {chats[0].place}: a chat stands alone: "
                f"leave nothing but {{{{ {chats[0].column} | messages }}}}, or write it as text with | json",
                field=self._label,
            )

    def _skip_blank(self, at: int) -> int:
        while at < len(self._text) and self._text[at] in " \t":
            at += 1
        return at

    def _position(self, at: int) -> tuple[int, int]:
        return self._text.count("\n", 0, at) + 1, at - self._text.rfind("\n", 0, at)

    def _unclosed(self, opened: int) -> InvalidParameterError:
        said = "'{{' is not closed by '}}' behind a column's name; to write the braces themselves: "
        return self._error(opened, f'{said}{{{{ "{{{{" }}}}')

    def _error(self, at: int, said: str) -> InvalidParameterError:
        line, place = self._position(at)
        return InvalidParameterError(f"{self._label}: line {line}, column {place}: {said}", field=self._label)


def _shown(name: str) -> str:
    return repr(printable(name, _LONGEST_SHOWN))
