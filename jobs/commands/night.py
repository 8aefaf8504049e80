"""`nightmill night`: what a night was."""

from datetime import date, datetime, timedelta

import click

from nightmill.jobs.base.printable import printable
from nightmill.jobs.base.times import describe_moment
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.options import json_option
from nightmill.jobs.commands.printing import counted
from nightmill.jobs.commands.progress import duration
from nightmill.jobs.commands.terminal import echo, echo_json
from nightmill.jobs.reply.night import NightReport
from nightmill.jobs.request.limits import GPU_SECONDS, JOULES, describe_amount

_SPENT = {
    "computing": "computing",
    "memory": "computing while texts waited for memory",
    "tokenizer": "waiting for the tokenizer",
    "messages": "waiting for jobs",
    "loading": "loading models",
}


def _day(_: click.Context, parameter: click.Parameter, value: str | None) -> date | None:
    try:
        return None if value is None else date.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a date, such as 2026-11-26", param=parameter) from None


@click.command()
@click.argument("day", metavar="[DATE]", required=False, callback=_day)
@json_option
def night(day: date | None, as_json: bool) -> None:
    """Say what a night was: models, rows, tokens, what workers spent their time on, and what failed.

    A night is from the noon of DATE, such as 2026-11-26, to the next noon, in this machine's zone; by default
    it is the present one, or in the afternoon the last one. All of it is in the database, also a month later,
    until it is pruned.

    \b
      nightmill night
      nightmill night 2026-11-26 --json
    """
    with Client() as client:
        report, now = client.night(day), client.database.now()
    echo_json(report.values()) if as_json else echo(describe_night(report, now if day is None else None))


def describe_night(report: NightReport, now: datetime | None = None) -> str:
    """Format a report for people. With `now`, an empty one names the next night, if that has begun."""
    lines = [f"The night of {report.date:%Y-%m-%d}"]

    def say(label: str, text: str) -> None:
        lines.append(f"  {label:9}{printable(text)}")

    if report.began_at is None or report.ended_at is None:
        later = now is not None and now >= report.until
        next_day = f"{report.date + timedelta(days=1):%Y-%m-%d}"
        say("rows", "none ended" + (f"; for those since noon: nightmill night {next_day}" if later else ""))
    else:
        began, ended = describe_moment(report.began_at), describe_moment(report.ended_at)
        say("rows", f"{report.rows:,} from {began} to {ended}, {duration(report.seconds)}")
    for model in report.models:
        failed = f", {model.failed:,} failed" if model.failed else ""
        cached = f" ({model.cached_tokens:,} cached)" if model.cached_tokens else ""
        used = [
            describe_amount(measure, amount)
            for measure, amount in ((GPU_SECONDS, model.gpu_seconds), (JOULES, model.energy_joules))
            if amount is not None
        ]
        say(
            "model",
            f"{model.model or 'any'}: {counted(model.rows, 'row')}{failed}; {model.prompt_tokens:,} tokens "
            f"read{cached}, {model.completion_tokens:,} written" + "".join(f", {text}" for text in used),
        )
    for load in report.loads:
        where = " on ".join(filter(None, (load.gpu, load.host))) or "a worker"
        say("loaded", f"{load.model} at {describe_moment(load.at)} in {duration(load.seconds)}, {where}")
    for name, words in _SPENT.items():
        if spent := report.spent.get(name, 0.0):
            say("time", f"{duration(spent)} {words}")
    if report.slowest is not None:
        slowest = report.slowest
        say(
            "slowest",
            f"batch {slowest.name}: {counted(slowest.rows, 'row')} in {duration(slowest.seconds)}, "
            f"{slowest.completion_tokens / max(slowest.seconds, 1.0):,.0f} tokens/s",
        )
    for group in report.failures:
        say("failed", f"{group.rows:,} x {group.message}")
    lines += [f"  {sentence}" for sentence in report.sentences]
    return "\n".join(lines)
