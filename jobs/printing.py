"""How commands print jobs, batches and tables: for people, and as JSON for programs."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jobs.batch_status import BatchState, BatchStatus
from jobs.client import Client
from jobs.contract import Job, JobState
from jobs.progress import duration
from jobs.when import describe_moment

_PIPE_WIDTH = 200  # of a table that goes into a file or another program


def follow(client: Client, ids: list[str], *, show: bool, total_label: str = "jobs") -> Iterator[Job]:
    """Finished jobs as they finish, under a progress bar (on a terminal) with tokens per second."""
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not show,
    )
    began = time.monotonic()
    tokens = 0
    with progress:
        task = progress.add_task(total_label, total=len(ids), speed="")
        for job in client.results(ids, order="finished"):
            tokens += job.completion_tokens or 0
            speed = tokens / max(time.monotonic() - began, 1e-9)
            progress.update(task, advance=1, speed=f"{speed:,.0f} tokens/s")
            yield job


def describe(job: Job) -> str:
    """A finished job for a person to read."""
    tokens = f"{job.prompt_tokens or 0} + {job.completion_tokens or 0} tokens"
    head = f"{job.id}  {job.state}, {job.stop_reason}, {tokens}"
    error = f"\n  error: {job.error}" if job.error else ""
    return f"{head}\n  prompt: {prompt_line(job)}{error}\n{job.text or ''}\n"


def job_json(job: Job) -> str:
    """A job as one line of JSON."""
    values = asdict(job) | {"params": job.params.model_dump(mode="json", warnings=False)}
    return json.dumps(values, default=plain, ensure_ascii=False)


def prompt_line(job: Job) -> str:
    """The prompt, or the last message, on one line."""
    text = job.prompt if job.prompt is not None else (job.messages or [{"content": ""}])[-1]["content"]
    return " ".join(str(text).split())


def print_table(table: Table) -> None:
    """A table in the terminal's width, or in full where it goes into a file or another program."""
    console = Console()
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    console.print(table)


def status_json(status: BatchStatus) -> dict[str, Any]:
    """A batch's status as an object for programs; `done`, `succeeded`, `unsuccessful` are numbers of rows."""
    values = asdict(status)
    values |= {name: getattr(status, name) for name in ("done", "succeeded", "unsuccessful")}
    values["states"] = {str(state): status.states.get(state, 0) for state in JobState}
    values["stop_reasons"] = {str(reason): rows for reason, rows in status.stop_reasons.items()}
    return values


def dump(values: Mapping[str, Any]) -> str:
    """An object as one line of JSON."""
    return json.dumps(values, default=plain, ensure_ascii=False)


def counted(number: int, noun: str) -> str:
    """A number of things: 1 row, 2,000 rows, 2 batches."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def describe_status(status: BatchStatus) -> str:
    """A batch's status for a person to read."""
    lines = [f"{status.name}: {status.state}"]

    def say(label: str, text: str) -> None:
        lines.append(f"  {label:11}{text}")

    if status.source or status.format:
        say("source", f"{status.source or 'Python'} ({status.format}), model {status.model or 'any'}")
    entered = "" if status.row_count in (None, status.rows) else f" of {status.row_count:,}"
    states = ", ".join(f"{status.states.get(state, 0):,} {state}" for state in JobState)
    say("rows", f"{status.rows:,}{entered}: {states}")
    if status.stop_reasons:
        ranked = sorted(status.stop_reasons.items(), key=lambda item: -item[1])
        say("stopped by", ", ".join(f"{reason} {rows:,}" for reason, rows in ranked))
    speed = "" if status.tokens_per_second is None else f", {status.tokens_per_second:,.0f} tokens/s"
    say("tokens", f"{status.prompt_tokens:,} read, {status.completion_tokens:,} written{speed}")
    if status.scheduled_at is not None:
        say("begins", describe_moment(status.scheduled_at))
    if status.deadline_at is not None:
        say("deadline", describe_moment(status.deadline_at))
    if status.estimated_end is not None:
        left = (status.estimated_end - datetime.now(status.estimated_end.tzinfo)).total_seconds()
        late = status.deadline_at is not None and status.estimated_end > status.deadline_at
        say(
            "ends",
            f"about {describe_moment(status.estimated_end)}, in {duration(left)}"
            + (", too late" if late else ""),
        )
    if status.cancel_requested_at is not None:
        say("cancelled", describe_moment(status.cancel_requested_at))
    for group in status.errors:
        say("error" if group is status.errors[0] else "", f"{group.rows:,} x {group.message}")
    if status.state is BatchState.SUBMITTING:
        lines.append(
            "  If nobody is submitting it any more, submit the file again: it goes on where it stood."
        )
    return "\n".join(lines)


def plain(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
