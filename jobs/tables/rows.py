"""A row of a table as a row of a batch: its prompt from the template, what is kept beside."""

from collections.abc import Mapping
from typing import Any

from nightmill.jobs.base.contract import JsonObject, unstorable
from nightmill.jobs.errors import InvalidPromptError, InvalidRequestError, RowCode
from nightmill.jobs.formats.jsonlines import parse_value
from nightmill.jobs.formats.rows import InputRow, RowError, printable
from nightmill.jobs.request.checks import json_object
from nightmill.jobs.request.prompts import json_type
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.request.template import Empty, EmptyColumnError, Slot, no_value
from nightmill.jobs.tables.kinds import kept_value
from nightmill.jobs.tables.options import TableOptions


class RowMaker:
    """Makes rows of a batch from those of a table.

    kept  the columns that come back
    """

    def __init__(self, options: TableOptions, kept: tuple[str, ...], defaults: JobSpec) -> None:
        self._options = options
        self._chat = options.template.messages
        self._key = "prompt" if options.plain else "messages"
        self._kept = kept
        self._defaults = defaults

    def row(
        self, number: int, values: JsonObject | RowError, custom_id: str | None = None
    ) -> InputRow | None:
        """A row, good or bad; None if it is to be left out."""
        custom_id = custom_id or f"row-{number}"
        if isinstance(values, RowError):
            return InputRow(number, custom_id, None, values)
        kept: JsonObject = {}
        try:
            self._keep(values, kept)
            return InputRow(number, custom_id, self._spec(values, custom_id), kept=kept)
        except EmptyColumnError as error:
            if self._options.empty is Empty.SKIP:
                return None
            return InputRow(number, custom_id, None, RowError.of(error), kept=kept)
        except InvalidRequestError as error:
            return InputRow(number, custom_id, None, RowError.of(error), kept=kept)

    def _spec(self, values: Mapping[str, Any], custom_id: str) -> JobSpec:
        return JobSpec.parse({self._key: self._prompt(values), "custom_id": custom_id}, self._defaults)

    def _prompt(self, values: Mapping[str, Any]) -> Any:
        options = self._options
        system: list[JsonObject] = []
        if options.system is not None:
            system = [{"role": "system", "content": options.system.fill(values, options.empty)}]
        if self._chat is not None:
            return _with_system(_messages(values, self._chat), system)
        text = options.template.fill(values, options.empty)
        if not text.strip():
            raise InvalidPromptError("template: gives an empty prompt for this row", field="template")
        return text if options.plain else [*system, {"role": "user", "content": text}]

    def _keep(self, values: Mapping[str, Any], kept: JsonObject) -> None:
        """Put what comes back into `kept`; raises InvalidRequestError for what SQL cannot hold."""
        for name in self._kept:
            value = values.get(name)
            if value is None:
                continue
            if isinstance(value, str):
                problem = unstorable(value)
            else:
                value = kept_value(value)
                problem = _unstorable_inside(value)
            if problem:
                said = f"{printable(repr(name))}: {problem}"
                raise InvalidRequestError(said, field=name, code=RowCode.INVALID_VALUE)
            kept[name] = value


def _unstorable_inside(value: Any) -> str | None:
    if not isinstance(value, list | Mapping):
        return None
    try:
        json_object({"value": value})
    except ValueError as error:
        return str(error)
    return None


def _messages(values: Mapping[str, Any], slot: Slot) -> Any:
    value = values.get(slot.column)
    if value is None:
        raise no_value(slot.column)
    if not isinstance(value, str):
        return value
    try:
        return parse_value(value)
    except InvalidRequestError:
        said = f"{slot.column!r}: must be a list of messages, or the JSON of one"
        raise InvalidRequestError(printable(said), field=slot.column) from None


def _with_system(messages: Any, system: list[JsonObject]) -> Any:
    """A chat behind a system message, unless it has one of its own."""
    if not system or messages == []:
        return messages
    if not isinstance(messages, list):
        raise InvalidPromptError(f"messages: must be a list, not {json_type(messages)}", field="messages")
    first = messages[0] if messages else None
    own = isinstance(first, Mapping) and first.get("role") in ("system", "developer")
    return messages if own else [*system, *messages]
