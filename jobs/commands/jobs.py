"""Commands for single jobs and for the installation, a thin layer over `jobs.client`."""

import sys
from dataclasses import asdict
from typing import Any

import click

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.printable import printable
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.base.times import describe_moment
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.batches import EXIT_CODES
from nightmill.jobs.commands.job_options import given, job_options
from nightmill.jobs.commands.naming import ids_of
from nightmill.jobs.commands.options import json_option
from nightmill.jobs.commands.printing import (
    counted,
    follow,
    job_values,
    print_all_of,
    print_job,
    print_stream,
    prompt_line,
    say_if_nobody_serves,
)
from nightmill.jobs.commands.terminal import echo, echo_json, table
from nightmill.jobs.messages.embedded import EmbeddedRedis
from nightmill.jobs.reply.batch_status import BatchState
from nightmill.jobs.reply.job import Job
from nightmill.jobs.request.fields import FIELDS


@click.command()
@click.argument("prompts", nargs=-1, required=True)
@click.option("--chat", is_flag=True, help="Send each prompt as a user's message, through the chat template.")
@click.option("--system", help="A system message to go before each prompt (implies --chat).")
@job_options(*FIELDS)
@click.option("--wait", is_flag=True, help="Wait, as an interactive job, and print the texts.")
@click.option("--stream", is_flag=True, help="As --wait, and print each text while it is generated.")
@json_option
def enqueue(
    prompts: tuple[str, ...],
    chat: bool,
    system: str | None,
    wait: bool,
    stream: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Queue PROMPTS, one job each, and print their ids. A prompt of - is read from standard input.

    With --wait or --stream the exit code is 3 if a job has failed or was cancelled. Ctrl-C only stops
    waiting.
    """
    if stream and as_json:
        raise click.UsageError("--json prints jobs that have ended: give --wait in place of --stream")
    settings = given(options)
    with Client() as client:
        ids = []
        for prompt in prompts:
            text = sys.stdin.read() if prompt == "-" else prompt
            asked = _messages(text, system) if chat or system else text
            ids.append(client.enqueue(asked, interactive=wait or stream, **settings))
        if not wait and not stream:
            echo_json({"ids": ids}) if as_json else echo("\n".join(ids))
            return
        if not as_json:
            say_if_nobody_serves(client, settings.get("model"))
        try:
            ended = _shown(client, ids, stream=stream, as_json=as_json)
        except KeyboardInterrupt:
            echo(f"Interrupted; {counted(len(ids), 'job')} handed in: {', '.join(ids)}", err=True)
            raise
    raise SystemExit(_exit_code(ended))


def _shown(client: Client, ids: list[str], *, stream: bool, as_json: bool) -> list[Job]:
    """Print the jobs as they end, or with `stream` as they are generated; returns them."""
    if stream:
        return [print_stream(client, job_id) for job_id in ids]
    ended = []
    for job in follow(client, ids, show=not as_json):
        ended.append(job)
        echo_json(job_values(job)) if as_json else print_job(job)
    return ended


def _exit_code(ended: list[Job]) -> int:
    """Return 3 if some jobs have not succeeded, like for a batch."""
    fine = all(job.state is JobState.SUCCEEDED for job in ended)
    return EXIT_CODES[BatchState.COMPLETED if fine else BatchState.COMPLETED_WITH_ERRORS]


@click.command("list")
@click.option(
    "--state", type=click.Choice([str(state) for state in JobState]), help="Only jobs in this state."
)
@click.option("--batch", help="Only jobs of this batch.")
@click.option("--model", help="Only jobs for this model.")
@click.option("-n", "--limit", type=click.IntRange(1), default=20, show_default=True, help="At most so many.")
@json_option
def list_command(state: str | None, batch: str | None, model: str | None, limit: int, as_json: bool) -> None:
    """List the newest jobs."""
    with Client() as client:
        found = client.list_jobs(state=state, batch=batch, model=model, limit=limit)
        if batch is not None and not found:
            client.get_batch(batch)  # a mistake in its name is told
    if as_json:
        for job in found:
            echo_json(job_values(job))
        return
    rows = (
        (
            job.id,
            job.state,
            job.stop_reason or "",
            "" if job.completion_tokens is None else job.completion_tokens,
            describe_moment(job.created_at),
            prompt_line(job),
        )
        for job in found
    )
    headings = ("id", "state", "stop reason", "tokens", "created", "prompt")
    table(headings, rows, cut="prompt", whole={"id": 32, "state": 9})


@click.command()
@click.argument("job_id")
@json_option
def show(job_id: str, as_json: bool) -> None:
    """Show one job, with its text and error history.

    JOB_ID may also be the id of an answer over HTTP (chatcmpl-..., cmpl-..., resp_..., msg_...); of a request
    with several prompts it shows each of its jobs.

    A terminal gets control characters as escapes (\\x1b); a file or another program gets the unchanged text.
    """
    with Client() as client:
        found = [client.get(one) for one in ids_of(client, job_id)]
    for job in found:
        echo_json(job_values(job)) if as_json else print_all_of(job)


@click.command()
@click.argument("job_ids", nargs=-1)
@click.option("--batch", help="Cancel every unfinished job of this batch.")
@json_option
def cancel(job_ids: tuple[str, ...], batch: str | None, as_json: bool) -> None:
    """Cancel jobs: queued ones at once, running ones at their next step, keeping the text so far.

    JOB_IDS may also be the ids of answers over HTTP (chatcmpl-..., cmpl-..., resp_..., msg_...).
    """
    if not job_ids and batch is None:
        raise click.UsageError("name job ids, or a --batch")
    with Client() as client:
        if batch is not None:
            client.get_batch(batch)  # a mistake in its name is told, and nothing cancelled
        named = {name: ids_of(client, name) for name in job_ids}
        states = {one: str(client.cancel(one)) for ids in named.values() for one in ids}
        if batch is not None:
            at_once, asked = client.cancel_batch(batch)
            states[f"batch {batch}"] = f"{at_once} cancelled, {asked} running and asked to stop"
    if as_json:
        echo_json(states)
        return
    for name, state in states.items():
        echo(f"{printable(name)}: {'running, asked to stop' if state == JobState.RUNNING else state}")


@click.command()
@click.argument("job_ids", nargs=-1, required=True)
@json_option
def retry(job_ids: tuple[str, ...], as_json: bool) -> None:
    """Queue failed or cancelled jobs again, under their ids and seeds.

    JOB_IDS may also be the ids of answers over HTTP (chatcmpl-..., cmpl-..., resp_..., msg_...).
    """
    with Client() as client:
        named = [one for name in job_ids for one in ids_of(client, name)]
        retried = [client.retry(job_id).id for job_id in named]
    echo_json({"ids": retried}) if as_json else echo("\n".join(f"{i}: queued" for i in retried))


@click.command()
@click.option("--batch", help="Only this batch.")
@json_option
def stats(batch: str | None, as_json: bool) -> None:
    """Count jobs by state and stop reason, and show the workers."""
    with Client() as client:
        counted = client.stats(batch)
        workers = client.workers()
        queue = client.broker.queue_length(None)
    if as_json:
        echo_json(counted | {"queue_messages": queue, "workers": [asdict(worker) for worker in workers]})
        return
    rows = [(str(state), f"{counted['state'].get(state, 0):,}") for state in JobState]
    rows += [
        (f"  stopped by {name}", f"{number:,}") for name, number in sorted(counted["stop_reason"].items())
    ]
    rows += [
        ("prompt tokens", f"{counted['prompt_tokens']:,}"),
        ("completion tokens", f"{counted['completion_tokens']:,}"),
        ("messages in the shared queue", f"{queue:,}"),
    ]
    for worker in workers[:10]:
        doing = f" ({worker.note})" if worker.note else ""
        others = [str(model) for model in worker.models or () if model != worker.model]
        in_turn = f", in turn with {', '.join(others)}" if others else ""
        together = f", together under {worker.together[:8]}" if worker.together else ""
        served = f"{worker.model}{in_turn} on {worker.host}{together}"
        rows.append((f"worker {worker.id[:8]}", f"{worker.state}{doing}, {served}"))
    table((), rows)


@click.command()
def migrate() -> None:
    """Migrate the database to this version. Safe to repeat."""
    with Client() as client:
        before = client.database.revision()
        client.database.migrate()
        after = client.database.revision()
        where = client.settings.safe_database_url
    echo(
        f"{where}: schema {after}"
        + (" (was up to date)" if before == after else f" (was {before or 'empty'})")
    )


@click.command()
def stop() -> None:
    """Stop the embedded Redis; its data is kept for the next start."""
    settings = Settings.from_env()
    if not settings.embedded_broker:
        raise click.ClickException(f"the broker is {settings.safe_broker_url}, which Nightmill did not start")
    stopped = EmbeddedRedis(settings.data_dir).stop()
    echo("embedded Redis stopped" if stopped else "no embedded Redis was running")


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": text}]
