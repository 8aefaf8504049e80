"""Logs: for people a line for each message, for programs an object of JSON on each line."""

import json
import logging
import math
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Literal

from nightmill.jobs.printable import PrintableRecords, json_printable

LogFormat = Literal["text", "json"]

_OF_LOGGING = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
"""What every record has. Anything else of it are fields: `log.info("...", extra={"rows": 3})`."""
_ALWAYS = frozenset({"time", "level", "logger", "process", "message", "traceback"})


class JsonLines(logging.Formatter):
    """A record as one line of JSON: time (UTC), level, logger, process, message, and the record's fields.

    Whatever a message or a field quotes is a value of JSON, and forges no line and no field. `scrubbed` takes
    secrets out of every text.
    """

    def __init__(self, scrubbed: Callable[[str], str] = str) -> None:
        super().__init__()
        self._scrubbed = scrubbed

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
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
    """Have handlers write in this format; either way nothing from outside forges a line or shows a secret."""
    for handler in handlers:
        if format == "json":
            handler.setFormatter(JsonLines(scrubbed))
        else:
            handler.addFilter(PrintableRecords(scrubbed))
