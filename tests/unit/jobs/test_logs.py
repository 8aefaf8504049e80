"""Logs for programs: whatever is logged, a line is one object, and no secret is in it."""

import io
import json
import logging
from datetime import UTC, datetime
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nightmill.jobs.base.logs import fit
from nightmill.jobs.base.printable import printable
from nightmill.jobs.base.settings import Settings

SETTINGS = Settings(
    data_dir=Path("/nowhere"), log_format="json", broker_url="redis://:hush-hush@localhost:6379/0"
)


def logged(message: str, **fields: object) -> tuple[str, dict[str, object]]:
    """The line that a message becomes, logged beside a failure, and what it holds."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    fit([handler], SETTINGS.log_format, SETTINGS.scrubbed)
    log = logging.Logger("nightmill.test")
    log.addHandler(handler)
    try:
        raise ValueError(message)
    except ValueError:
        log.warning("%s", message, exc_info=True, extra=fields)
    line = written.getvalue()
    return line, json.loads(line)


@given(st.text())
def test_a_record_is_one_line_whatever_it_quotes(text: str) -> None:
    line, values = logged(text, field=text)
    assert line == f"{printable(line[:-1])}\n"
    assert (values["level"], values["logger"]) == ("warning", "nightmill.test")
    assert values["message"] == values["field"] == text
    assert str(values["traceback"]).endswith(f"ValueError: {text}" if text else "ValueError")


def test_fields_are_values_of_json_and_hold_no_secret() -> None:
    moment = datetime(2026, 11, 22, 6, tzinfo=UTC)
    quoted = f"cannot reach {SETTINGS.broker_url}"
    line, values = logged(quoted, rows=3, speed=float("nan"), until=moment, why=quoted)
    assert "hush" not in line
    shown = "cannot reach redis://:***@localhost:6379/0"
    expected = {"message": shown, "why": shown, "rows": 3, "speed": "nan", "until": moment.isoformat()}
    assert values.items() >= expected.items()
    assert datetime.fromisoformat(str(values["time"])).tzinfo is not None
