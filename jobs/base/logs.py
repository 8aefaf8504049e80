"""Log formats: lines of text for people, or one JSON object a line for programs."""

import json
import logging
import math
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Literal

from nightmill.jobs.base.printable import PrintableRecords, json_printable

LogFormat = Literal["text", "json"]

_OF_LOGGING = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
"""Attributes of every record. Other attributes are fields: `log.info("...", extra={"rows": 3})`."""
_ALWAYS = frozenset({"time", "level", "logger", "process", "message", "traceback"})


class JsonLines(logging.Formatter):
    """A formatter that writes a record as one line of JSON: time (UTC), level, logger, process, message, and
    the record's fields.

    Quoted text is always a JSON value, so it cannot forge a line or a field. `scrubbed` removes secrets from
    every text.
    """

    def __init__(self, scrubbed: Callable[[str], str] = str) -> None:
        super().__init__()
        self._scrubbed = scrubbed

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its newline."""
        values: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.processName,
            "message": record.getMessage(),
        }
        values |= {
            name: value
            for name, value in vars(record).items()
            if name not in _OF_LOGGING and name not in _ALWAYS
        }
        if record.exc_info:
            values["traceback"] = self.formatException(record.exc_info)
        clean = {name: self._clean(value) for name, value in values.items()}
        return json_printable(json.dumps(clean, ensure_ascii=False))

    def _clean(self, value: Any) -> Any:
        if value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
            return value
        return self._scrubbed(value.isoformat() if isinstance(value, datetime) else str(value))


def fit(handlers: Iterable[logging.Handler], format: LogFormat, scrubbed: Callable[[str], str]) -> None:
    """Install this format in the handlers; with either one, quoted text can neither forge a line nor show a
    secret."""
    for handler in handlers:
        if format == "json":
            handler.setFormatter(JsonLines(scrubbed))
        else:
            handler.addFilter(PrintableRecords(scrubbed))
