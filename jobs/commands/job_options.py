"""Command-line options for the fields of a job, generated from the table of fields."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from nightmill.jobs.base.times import parse_moment
from nightmill.jobs.commands.options import text_of
from nightmill.jobs.errors import InvalidRequestError
from nightmill.jobs.formats.jsonlines import LINE_LIMIT, parse_value
from nightmill.jobs.request.fields import FIELDS, OF_A_BATCH, PARAMETERS, FieldKind

Command = TypeVar("Command", bound=Callable[..., Any])

PARAMETER_OPTIONS = tuple(name for name in FIELDS if name in PARAMETERS)
BATCH_OPTIONS = tuple(name for name in FIELDS if name in OF_A_BATCH and name != "model")
AT = "scheduled_at"


def job_options(*names: str, defaults: bool = True) -> Callable[[Command], Command]:
    """Make the options for these fields of a job; see `given`. `defaults`: the help shows the defaults."""

    def add(command: Command) -> Command:
        for name in names if isinstance(command, click.Command) else reversed(names):
            command = _job_option(name, defaults)(command)
        return command

    return add


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options of `job_options` as keywords of enqueue or submit_batch."""
    found: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in options.items()
        if value not in (None, ())
    }
    now = datetime.now(UTC)
    for name, option in ((AT, "--at"), ("deadline", "--deadline")):
        if name in found:  # a deadline's time of day is the next one after the begin
            now = found[name] = parse_moment(option, found[name], now)
    return found


def _json(value: str) -> Any:
    try:
        return parse_value(_text(value))
    except InvalidRequestError as error:
        said = str(error).removesuffix("; write one JSON object on each line")  # the remedy for files
        if not value.startswith("@") and len(value) < _LONGEST_NAME and Path(value).is_file():
            said = f"{value!r} is a file; write @{value}"
        raise click.BadParameter(said) from None


def _text(value: str) -> str:
    return text_of(value, LINE_LIMIT)


_NAMES = {AT: "--at"}
_LONGEST_NAME = 255  # of a file
_TEXTS: dict[str, dict[str, Any]] = {"grammar": {"type": _text, "metavar": "TEXT|@FILE"}}
"""Texts that may have a file of their own."""
_KINDS: dict[FieldKind, dict[str, Any]] = {
    FieldKind.INTEGER: {"type": int},
    FieldKind.NUMBER: {"type": float},
    FieldKind.FLAG: {"is_flag": True, "default": None},
    FieldKind.TEXT: {},
    FieldKind.TEXTS: {"multiple": True},
    FieldKind.INTEGERS: {"multiple": True, "type": int},
    FieldKind.MOMENT: {"metavar": "TIME"},
    FieldKind.OBJECT: {"type": _json, "metavar": "JSON|@FILE"},
    FieldKind.OBJECTS: {"type": _json, "metavar": "JSON|@FILE"},
}


def _job_option(name: str, defaults: bool) -> Callable[[Command], Command]:
    field = FIELDS[name]
    unsaid = not defaults or field.default in (None, (), {}) or field.default is False
    default = "" if unsaid else f" [{field.default:g}]"
    again = " (may be given several times)" if field.kind in (FieldKind.TEXTS, FieldKind.INTEGERS) else ""
    says = f"{field.says.removesuffix('.')}{again}{default}."
    option = _NAMES.get(name, f"--{name.replace('_', '-')}")
    # Without the option, the job's default applies.
    if field.kind is FieldKind.FLAG and field.default is None:
        option = f"{option}/--no-{option.removeprefix('--')}"
    return click.option(option, name, help=says, **_TEXTS.get(name, _KINDS[field.kind]))
