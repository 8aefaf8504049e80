"""Options for the fields of a job, as the table of fields describes them."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from nightmill.jobs.errors import InvalidRequestError
from nightmill.jobs.fields import FIELDS, OF_A_BATCH, PARAMETERS, Kind
from nightmill.jobs.formats.jsonlines import parse_value
from nightmill.jobs.when import parse_moment

Command = TypeVar("Command", bound=Callable[..., Any])

PARAMETER_OPTIONS = tuple(name for name in FIELDS if name in PARAMETERS)
BATCH_OPTIONS = tuple(name for name in FIELDS if name in OF_A_BATCH and name != "model")
AT = "scheduled_at"


def job_options(*names: str) -> Callable[[Command], Command]:
    """Options for these fields of a job, as the table of fields describes them; see `given`."""

    def add(command: Command) -> Command:
        for name in names if isinstance(command, click.Command) else reversed(names):
            command = _job_option(name)(command)
        return command

    return add


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `job_options` that were given, as keywords of enqueue or submit_batch."""
    found: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in options.items()
        if value not in (None, ())
    }
    now = datetime.now(UTC)
    for name, option in ((AT, "--at"), ("deadline", "--deadline")):
        if name in found:  # a time of day for the deadline is the next one after the begin
            now = found[name] = parse_moment(option, found[name], now)
    return found


def _json(text: str) -> Any:
    try:
        return parse_value(text)
    except InvalidRequestError as error:
        said = str(error).removesuffix("; write one JSON object on each line")  # which is for files
        raise click.BadParameter(said) from None


_NAMES = {AT: "--at"}
_KINDS: dict[Kind, dict[str, Any]] = {
    Kind.INTEGER: {"type": int},
    Kind.NUMBER: {"type": float},
    Kind.FLAG: {"is_flag": True, "default": None},
    Kind.TEXT: {},
    Kind.TEXTS: {"multiple": True},
    Kind.INTEGERS: {"multiple": True, "type": int},
    Kind.MOMENT: {"metavar": "TIME"},
    Kind.OBJECT: {"type": _json, "metavar": "JSON"},
    Kind.OBJECTS: {"type": _json, "metavar": "JSON"},
}


def _job_option(name: str) -> Callable[[Command], Command]:
    field = FIELDS[name]
    default = "" if field.default in (None, (), {}) or field.default is False else f" [{field.default:g}]"
    again = " (may be given several times)" if field.kind in (Kind.TEXTS, Kind.INTEGERS) else ""
    says = f"{field.says.removesuffix('.')}{again}{default}."
    option = _NAMES.get(name, f"--{name.replace('_', '-')}")
    if field.kind is Kind.FLAG and field.default is None:  # what happens else, the job decides
        option = f"{option}/--no-{option.removeprefix('--')}"
    return click.option(option, name, help=says, **_KINDS[field.kind])
