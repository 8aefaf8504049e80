"""Printing of jobs and batches, for people or as JSON for programs."""

import json
import shlex
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.base.printable import printable
from nightmill.jobs.base.times import describe_moment
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.progress import duration
from nightmill.jobs.commands.terminal import LiveLine, ProgressLine, echo, echo_text, to_json, type_text
from nightmill.jobs.formats.results import answer_values, reply_values
from nightmill.jobs.reply.batch_status import MOST_COUNTED, BatchState, BatchStatus, unserved_sentence
from nightmill.jobs.reply.embeddings import written
from nightmill.jobs.reply.history import EXTEND, begins_with
from nightmill.jobs.reply.job import Job
from nightmill.jobs.reply.parsing import Reply
from nightmill.jobs.request.limits import describe_amount, describe_share

_LONGEST_LINE = 300  # characters of a prompt in a list; `show` prints all of it
_LABEL = 20


def follow(client: Client, ids: list[str], *, show: bool, total_label: str = "jobs") -> Iterator[Job]:
    """Yield finished jobs under a progress bar (on a terminal) with tokens per second."""
    began = time.monotonic()
    tokens = 0
    with LiveLine(ProgressLine(name=total_label, total=len(ids)), show=show) as live:
        for job in client.results(ids, order="finished"):
            tokens += job.completion_tokens or 0
            speed = tokens / max(time.monotonic() - began, 1e-9)
            live.update(replace(live.line, done=live.line.done + 1, speed=f"{speed:,.0f} tokens/s"))
            with live.paused():
                yield job


def say_if_nobody_serves(client: Client, model: str | None) -> None:
    """Warn on stderr if no live worker serves `model`."""
    if not client.worker_store.serving(model):
        if asleep := client.worker_store.sleeping(model):
            echo(f"The worker sleeps, {printable(asleep[0].detail or '')}", err=True)
            return
        if model is not None and (in_turn := client.worker_store.could_serve(model)):
            now = printable(in_turn[0].model)
            echo(f"The worker serves {now} now, and loads {printable(model)} in its turn", err=True)
            return
        which = "" if model is None else f" that serves {printable(model)!r}"
        echo(f"No worker is running{which}: start one, nightmill worker --model FILE", err=True)


def print_job(job: Job) -> None:
    """Print a finished job for a person to read."""
    echo(f"{job.id}  {job.state}, {job.stop_reason}, {_tokens(job)}")
    echo(f"  prompt: {prompt_line(job)}")
    if job.error:
        echo(f"  error: {printable(job.error)}")
    if job.several:
        _print_several(job)
        echo()
        return
    echo_text(f"{job.text or ''}\n")


def print_stream(client: Client, job_id: str) -> Job:
    """Print the text of a job while it is generated, with remarks on stderr; returns the job."""
    echo(f"{job_id}  {prompt_line(client.get(job_id))}", err=True)
    for piece in client.stream(job_id):
        type_text(piece)
    echo_text("")
    job = client.get(job_id)
    _print_several(job, after=0)
    error = f": {printable(job.error)}" if job.error else ""
    echo(f"{job.state}, {job.stop_reason}, {_tokens(job)}{error}", err=True)
    return job


_APART = ("text", "answers", "errors", "history", "embedding")  # fields that are printed in their own way
_NUMBERS = 4  # of an embedding that are shown


def print_all_of(job: Job) -> None:
    """Print all fields of a job, its text last."""
    for name, value in json.loads(to_json(job_values(job))).items():
        if name == "held" and not value:
            continue
        if value not in (None, [], {}, "") and name not in _APART:
            echo(_field(name, value if isinstance(value, str) else to_json(value)))
    for entry in job.errors:
        if "attempt" in entry:
            echo(_field(f"attempt {entry['attempt']}", f"{entry['at']} {entry['error']}"))
    for entry in job.history:
        echo(_field(f"before {entry.get('change')}", _former(job, entry)))
    if job.several:
        _print_several(job)
    elif job.embedding is not None:
        begins = ", ".join(f"{number:.4f}" for number in job.embedding[:_NUMBERS])
        echo(_field("embedding", f"{len(job.embedding):,} numbers: {begins}, ..."))
    elif job.relevance is not None:
        echo(_field("relevance", f"{job.relevance:.6f}"))
    elif job.text is not None:
        echo()
        _print_text(job.text, job.replies[0] if job.answers else None)


def _print_text(text: str, reply: Reply | None) -> None:
    """Print a text: its thoughts, its answer and its calls apart, if it has more than an answer."""
    if reply is None or (reply.reasoning is None and not reply.tool_calls):
        echo_text(text)
        return
    if reply.reasoning is not None:
        echo("thoughts, which were cut" if reply.unfinished else "thoughts")
        echo_text(reply.reasoning)
    if reply.content:
        echo("answer")
        echo_text(reply.content)
    for call in reply.tool_calls:
        echo(_field(f"call {call.name}", call.arguments))


def _former(job: Job, entry: dict[str, Any]) -> str:
    """Describe what a job was before it was queued again with other parameters."""
    was = [f"{name} {to_json(value)}" for name, value in (entry.get("params") or {}).items()]
    was += [f"seed {entry['seed']}"] if "seed" in entry else []
    was.append(f"ended {entry.get('state')} ({entry.get('stop_reason')}) at {entry.get('at')}")
    if entry.get("completion_tokens") is not None:
        was.append(f"after {entry['completion_tokens']} tokens")
    if entry.get("change") == EXTEND and job.state.final:
        held = begins_with(job.text, entry)
        was += [] if held is None else ["the text begins with its text" if held else "another text"]
    if entry.get("arithmetic") not in (None, job.arithmetic):
        was.append(f"computed by {entry['arithmetic']}")
    return ", ".join(was)


def _print_several(job: Job, after: int = -1) -> None:
    """Print several answers, starting after number `after`, each below a line with its stop reason."""
    for number, (answer, reply) in enumerate(zip(job.several, job.replies, strict=False)):
        if number > after:
            how = f"{answer.stop_reason}, {answer.completion_tokens} tokens, seed {answer.seed}"
            echo(f"\nanswer {number}  {how}")
            _print_text(answer.text, reply)


def _tokens(job: Job) -> str:
    parts = [
        f"{count} of them {what}"
        for count, what in ((job.cached_tokens, "cached"), (job.reasoning_tokens, "thoughts"))
        if count
    ]
    said = f", {', '.join(parts)}" if parts else ""
    return f"{job.prompt_tokens or 0} + {job.completion_tokens or 0} tokens{said}"


def _field(name: str, value: str) -> str:
    """Format a name and its value with further lines indented, so that no line can pass for a field."""
    return f"{name:{_LABEL}} " + value.replace("\n", "\n" + " " * (_LABEL + 1))


def job_values(job: Job) -> dict[str, Any]:
    """Return a job as a JSON object; `answers` are as in result rows."""
    values = asdict(job) | {"params": job.params.model_dump(mode="json", warnings=False)}
    for name in ("several", "packed_logprobs", "packed_prompt_logprobs", "packed_embedding"):
        del values[name]
    read = reply_values(job.replies[0]) if job.answers else {}
    if job.packed_embedding is not None:
        ranked = job.relevance is not None
        read |= {"relevance": job.relevance} if ranked else {"embedding": written(job.packed_embedding)}
    return values | {"answers": answer_values(job)} | read


def prompt_line(job: Job) -> str:
    """Return the prompt, or the last message, on one line."""
    text: object = job.prompt
    if job.prompt_ids is not None:
        text = f"token ids {' '.join(map(str, job.prompt_ids[:_LONGEST_LINE]))}"
    elif text is None:
        text = (job.messages or [{"content": ""}])[-1]["content"]
    return printable(" ".join(str(text)[: 10 * _LONGEST_LINE].split()), _LONGEST_LINE)


def as_argument(name: str) -> str:
    """Format a name for a command line that people copy into a shell."""
    return shlex.quote(printable(name))


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: 1 row, 2,000 rows, 2 batches."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def describe_cost(
    gpu_seconds: float, kwh: float | None, price_per_kwh: float | None, joules_per_token: float | None = None
) -> str:
    """Format what computing cost: GPU hours, and if they are known energy and money."""
    said = [
        f"{gpu_seconds / 3600:,.2f} GPU hours" if gpu_seconds >= 36 else f"{gpu_seconds:,.1f} GPU seconds"
    ]
    if kwh is not None:
        said.append(f"{kwh:,.3f} kWh" if kwh >= 0.01 else f"{kwh * 1000:,.3f} Wh")
        if joules_per_token is not None:
            said.append(f"{joules_per_token:,.{0 if joules_per_token >= 100 else 3}f} J a token")
        if price_per_kwh is not None:
            said.append(f"{kwh * price_per_kwh:,.2f} at {price_per_kwh:g} a kWh")
    return ", ".join(said)


def describe_status(status: BatchStatus, price_per_kwh: float | None = None) -> str:
    """Format a batch's status for people; `price_per_kwh`: with what its energy cost."""
    lines = [f"{printable(status.name)}: {status.state}"]

    def say(label: str, text: str) -> None:
        lines.append(f"  {label:11}{printable(text)}")

    if status.source or status.format:
        say("source", f"{status.source or 'Python'} ({status.format}), model {status.model or 'any'}")
    entered = "" if status.row_count in (None, status.rows) else f" of {status.row_count:,}"
    states = ", ".join(f"{status.states.get(state, 0):,} {state}" for state in JobState)
    say("rows", f"{status.rows:,}{entered}: {states}")
    if status.state is BatchState.FAILED and not status.rows:
        say("error", "the file holds no rows; write one row on each line")
    if status.stop_reasons:
        ranked = sorted(status.stop_reasons.items(), key=lambda item: -item[1])
        say("stopped by", ", ".join(f"{reason} {rows:,}" for reason, rows in ranked))
    speed = "" if status.tokens_per_second is None else f", {status.tokens_per_second:,.0f} tokens/s"
    cached = f" ({status.cached_tokens:,} cached)" if status.cached_tokens else ""
    thought = f" ({status.reasoning_tokens:,} thoughts)" if status.reasoning_tokens else ""
    say(
        "tokens",
        f"{status.prompt_tokens:,} read{cached}, {status.completion_tokens:,} written{thought}{speed}",
    )
    if status.gpu_seconds:
        cost = (status.gpu_seconds, status.energy_kwh, price_per_kwh, status.joules_per_token)
        say("cost", describe_cost(*cost))
    if status.uncounted_attempts:
        lost = counted(status.uncounted_attempts, "attempt")
        say("not known", f"what {lost} cost that ended with a worker")
    if status.scheduled_at is not None:
        say("begins", describe_moment(status.scheduled_at))
    if status.deadline_at is not None:
        say("deadline", describe_moment(status.deadline_at))
    for measure, most in (status.budget or {}).items():
        say(
            "budget", f"{describe_amount(measure, status.spent[measure])} of {describe_amount(measure, most)}"
        )
    if status.max_failures is not None:
        say("failures", f"at most {describe_share(status.max_failures)} of the rows")
    if status.stopped_because is not None:
        first, *kinds = status.stopped_because.split("; ")
        say("stopped", first)
        for kind in kinds:
            say("", kind)
        if not status.state.final or StopReason.BUDGET in status.stop_reasons:
            say("", f"to go on: nightmill batch budget {as_argument(status.name)} with a higher limit")
    if status.wakes_at is not None:
        say("sleeps", f"until {describe_moment(status.wakes_at)}, when the hours of its workers begin")
    if status.rows_before is not None:
        many = "more than " if status.rows_before >= MOST_COUNTED else ""
        say("before it", f"{many}{counted(status.rows_before, 'row')} of others")
    if status.estimated_end is not None:
        left = (status.estimated_end - datetime.now(status.estimated_end.tzinfo)).total_seconds()
        late = status.deadline_at is not None and status.estimated_end > status.deadline_at
        say(
            "ends",
            f"about {describe_moment(status.estimated_end)}, in {duration(left)}"
            + (", too late" if late else ""),
        )
    if status.held:
        say("waits", f"{counted(status.held, 'row')} for the rows that they follow")
    if status.unserved:
        deadline = None if status.deadline_at is None else describe_moment(status.deadline_at)
        say(
            "waits",
            f"{unserved_sentence(status.unserved, deadline)}; nightmill worker --model FILE --name NAME",
        )
    if status.cancel_requested_at is not None and status.state is not BatchState.FAILED:
        say("cancelled", describe_moment(status.cancel_requested_at))
    for group in status.errors:
        say("error" if group is status.errors[0] else "", f"{group.rows:,} x {group.message}")
    if status.unlisted_errors:
        say("", f"and {counted(status.unlisted_errors, 'row')} with other errors: nightmill batch errors")
    if status.state is BatchState.SUBMITTING:
        lines.append(
            "  If nobody is submitting it any more, submit the file again: it goes on where it stood."
        )
    return "\n".join(lines)
