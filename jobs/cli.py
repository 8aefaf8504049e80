"""The `nightmill` command: thin over `jobs.client`. Commands of the worker attach through entry points."""

import json
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from jobs.announcing import DeliveryDelayedWarning
from jobs.batch_cli import batch, prune
from jobs.cli_options import given, json_option, parameter_options
from jobs.client import Client
from jobs.contract import JobState
from jobs.embedded import EmbeddedRedis
from jobs.errors import NightmillError
from jobs.printing import describe, follow, job_json, plain, print_table, prompt_line
from jobs.settings import Settings
from jobs.when import describe_moment


class NightmillGroup(click.Group):
    """Turns Nightmill's errors into one line on stderr and exit code 1, and loads plugged-in commands."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loaded: set[str] = set()

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        warnings.showwarning = _show_warning
        try:
            return super().invoke(ctx)
        except NightmillError as error:
            raise click.ClickException(str(error)) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands."""
        self._load_plugins()
        return super().list_commands(ctx)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """A command by its name."""
        self._load_plugins()
        return super().get_command(ctx, name)

    def _load_plugins(self) -> None:
        for entry in entry_points(group="nightmill.commands"):
            if entry.name in self._loaded:
                continue
            self._loaded.add(entry.name)
            register: Callable[[click.Group], None] = entry.load()
            register(self)


@click.group(cls=NightmillGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="nightmill")
def main() -> None:
    """Nightmill: a batch text generator for your own GPUs.

    Prompts go in as jobs; a worker generates; text and stop reasons are rows in a database.

    \b
      nightmill demo                                  see all of it work, without a GPU
      nightmill worker --model model.gguf             serve a model
      nightmill enqueue "Once upon a time" --wait     run one prompt
      nightmill run prompts.jsonl -o results.jsonl --model model.gguf
                                                      a whole file, whatever happens
      nightmill batch --help                          files overnight, unattended
      nightmill stats                                 where everything stands

    Settings come from NIGHTMILL_* variables: NIGHTMILL_DATABASE_URL and NIGHTMILL_BROKER_URL name your
    own PostgreSQL and Redis; without them, both are embedded in NIGHTMILL_DATA_DIR.
    """


@main.command()
@click.argument("prompts", nargs=-1, required=True)
@click.option("--chat", is_flag=True, help="Send each prompt as a user's message, through the chat template.")
@click.option("--system", help="A system message to go before each prompt (implies --chat).")
@click.option("--model", help="Name of the model that must serve it; any by default.")
@click.option("--batch", help="Name of the batch to put the jobs in.")
@parameter_options
@click.option("--priority", type=int, help="0 to 9, higher is sooner [5].")
@click.option("--idempotency-key", help="A second enqueue with this key returns the first job.")
@click.option("--wait", is_flag=True, help="Wait, and print the texts.")
@json_option
def enqueue(
    prompts: tuple[str, ...],
    chat: bool,
    system: str | None,
    wait: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Queue PROMPTS, one job each, and print their ids. A prompt of - is read from standard input."""
    with Client() as client:
        ids = []
        for prompt in prompts:
            text = sys.stdin.read() if prompt == "-" else prompt
            ids.append(client.enqueue(_messages(text, system) if chat or system else text, **given(settings)))
        if not wait:
            click.echo(json.dumps({"ids": ids}) if as_json else "\n".join(ids))
            return
        for job in follow(client, ids, show=not as_json):
            click.echo(job_json(job) if as_json else describe(job))


@main.command("list")
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
    if as_json:
        for job in found:
            click.echo(job_json(job))
        return
    table = Table(box=None, pad_edge=False)
    whole = {"id": 32, "state": 9}  # columns that a narrow terminal may not cut
    for heading in ("id", "state", "stop reason", "tokens", "created", "prompt"):
        table.add_column(heading, no_wrap=True, overflow="ellipsis", min_width=whole.get(heading))
    for job in found:
        table.add_row(
            job.id,
            str(job.state),
            str(job.stop_reason or ""),
            "" if job.completion_tokens is None else str(job.completion_tokens),
            describe_moment(job.created_at),
            prompt_line(job),
        )
    print_table(table)


@main.command()
@click.argument("job_id")
@json_option
def show(job_id: str, as_json: bool) -> None:
    """Show one job, with its text and error history."""
    with Client() as client:
        job = client.get(job_id)
    if as_json:
        click.echo(job_json(job))
        return
    for name, value in json.loads(job_json(job)).items():
        if value not in (None, [], {}, "") and name not in ("text", "errors"):
            click.echo(
                f"{name:20} {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
            )
    for entry in job.errors:
        if "attempt" in entry:
            click.echo(f"{'attempt ' + str(entry['attempt']):20} {entry['at']} {entry['error']}")
    if job.text is not None:
        click.echo(f"\n{job.text}")


@main.command()
@click.argument("job_ids", nargs=-1)
@click.option("--batch", help="Cancel every unfinished job of this batch.")
@json_option
def cancel(job_ids: tuple[str, ...], batch: str | None, as_json: bool) -> None:
    """Cancel jobs: queued ones at once, running ones at their next step, keeping the text so far."""
    if not job_ids and batch is None:
        raise click.UsageError("name job ids, or a --batch")
    with Client() as client:
        states = {job_id: str(client.cancel(job_id)) for job_id in job_ids}
        if batch is not None:
            at_once, asked = client.cancel_batch(batch)
            states[f"batch {batch}"] = f"{at_once} cancelled, {asked} running and asked to stop"
    if as_json:
        click.echo(json.dumps(states))
        return
    for name, state in states.items():
        click.echo(f"{name}: {'running, asked to stop' if state == JobState.RUNNING else state}")


@main.command()
@click.argument("job_ids", nargs=-1, required=True)
@json_option
def retry(job_ids: tuple[str, ...], as_json: bool) -> None:
    """Queue failed or cancelled jobs again, under their ids and seeds."""
    with Client() as client:
        retried = [client.retry(job_id).id for job_id in job_ids]
    click.echo(json.dumps({"ids": retried}) if as_json else "\n".join(f"{i}: queued" for i in retried))


@main.command()
@click.option("--batch", help="Only this batch.")
@json_option
def stats(batch: str | None, as_json: bool) -> None:
    """Count jobs by state and stop reason, and show the workers."""
    with Client() as client:
        counted = client.stats(batch)
        workers = client.store.workers()
        queue = client.broker.queue_length(None)
    if as_json:
        click.echo(json.dumps(counted | {"queue_messages": queue, "workers": workers}, default=plain))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for state in JobState:
        table.add_row(str(state), f"{counted['state'].get(state, 0):,}")
    for reason, number in sorted(counted["stop_reason"].items()):
        table.add_row(f"  stopped by {reason}", f"{number:,}")
    table.add_row("prompt tokens", f"{counted['prompt_tokens']:,}")
    table.add_row("completion tokens", f"{counted['completion_tokens']:,}")
    table.add_row("messages in the shared queue", f"{queue:,}")
    for worker in workers[:10]:
        doing = f" ({worker['detail']})" if worker["detail"] else ""
        table.add_row(
            f"worker {worker['id'][:8]}", f"{worker['state']}{doing}, {worker['model']} on {worker['host']}"
        )
    Console().print(table)


@main.command()
def migrate() -> None:
    """Bring the database's tables to this version. Safe to run again."""
    with Client() as client:
        before = client.database.revision()
        client.database.migrate()
        after = client.database.revision()
        where = client.settings.safe_database_url
    click.echo(
        f"{where}: schema {after}"
        + (" (was up to date)" if before == after else f" (was {before or 'empty'})")
    )


@main.command()
def stop() -> None:
    """Stop the embedded Redis; what it holds is there again at the next start."""
    settings = Settings.from_env()
    if not settings.embedded_broker:
        raise click.ClickException(f"the broker is {settings.safe_broker_url}, which Nightmill did not start")
    stopped = EmbeddedRedis(settings.data_dir).stop()
    click.echo("embedded Redis stopped" if stopped else "no embedded Redis was running")


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": text}]


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, DeliveryDelayedWarning):
        click.echo(f"Warning: {message}", err=True)


main.add_command(batch)
main.add_command(prune)
