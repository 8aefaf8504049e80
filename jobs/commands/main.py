"""The `nightmill` command: its subcommands, imported when they run, as imports take time.

Commands of the worker come from the entry points `nightmill.commands`, which name a table like the one here.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import click

from nightmill.jobs.base.importing import imports
from nightmill.jobs.base.printable import printable
from nightmill.jobs.commands.options import INTERRUPTED, CommandGroup
from nightmill.jobs.errors import DeliveryDelayedWarning, IgnoredColumnWarning, NightmillError


class Lazy(NamedTuple):
    """A command that is not loaded yet: its location, and the first sentence of its help."""

    path: str  # module:attribute
    says: str


COMMANDS = {
    "batch": Lazy(
        "nightmill.jobs.commands.batches:batch", "Batches of prompts: submit, follow, read, cancel, retry."
    ),
    "cancel": Lazy(
        "nightmill.jobs.commands.jobs:cancel",
        "Cancel jobs: queued ones at once, running ones at their next step, keeping the text so far.",
    ),
    "enqueue": Lazy(
        "nightmill.jobs.commands.jobs:enqueue", "Queue PROMPTS, one job each, and print their ids."
    ),
    "list": Lazy("nightmill.jobs.commands.jobs:list_command", "List the newest jobs."),
    "migrate": Lazy("nightmill.jobs.commands.jobs:migrate", "Migrate the database to this version."),
    "night": Lazy(
        "nightmill.jobs.commands.night:night",
        "Say what a night was: models, rows, tokens, what workers spent their time on, and what failed.",
    ),
    "prune": Lazy(
        "nightmill.jobs.commands.batches:prune",
        "Delete jobs and batches that ended long ago, and empty batches.",
    ),
    "retry": Lazy(
        "nightmill.jobs.commands.jobs:retry",
        "Queue failed or cancelled jobs again, under their ids and seeds.",
    ),
    "serve": Lazy(
        "nightmill.jobs.commands.serve:serve",
        "Answer HTTP requests with OpenAI's endpoints; every request is a job.",
    ),
    "show": Lazy("nightmill.jobs.commands.jobs:show", "Show one job, with its text and error history."),
    "stats": Lazy(
        "nightmill.jobs.commands.jobs:stats", "Count jobs by state and stop reason, and show the workers."
    ),
    "stop": Lazy(
        "nightmill.jobs.commands.jobs:stop",
        "Stop the embedded Redis; its data is kept for the next start.",
    ),
    "verify": Lazy(
        "nightmill.jobs.commands.verify:verify",
        "Compute rows of a batch again from their seeds, and compare the texts, bit by bit.",
    ),
}


class NightmillGroup(CommandGroup):
    """A command group that finds commands by name, and turns Nightmill's errors into one line on stderr and
    exit code 1.

    Ctrl-C exits with INTERRUPTED.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        warnings.showwarning = _show_warning
        with _printable_errors():
            try:
                return super().invoke(ctx)
            except NightmillError as error:
                raise click.ClickException(str(error)) from error
            except KeyboardInterrupt:
                raise SystemExit(INTERRUPTED) from None

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the arguments before the command's name."""
        with _printable_errors():
            return super().make_context(*args, **kwargs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(self._commands())

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import and return a command."""
        lazy = self._commands().get(name)
        if lazy is None:
            return None
        module, _, attribute = lazy.path.partition(":")
        with imports():
            command: click.Command = getattr(import_module(module), attribute)
        return command

    def sentences(self, ctx: click.Context) -> list[tuple[str, str]]:
        """Return names and first sentences of commands without importing them."""
        return [(name, lazy.says) for name, lazy in sorted(self._commands().items())]

    @staticmethod
    def _commands() -> dict[str, Lazy]:
        found = dict(COMMANDS)
        for entry in entry_points(group="nightmill.commands"):
            more: Mapping[str, tuple[str, str]] = entry.load()
            found |= {name: Lazy(*one) for name, one in more.items()}
        return found


@click.group(cls=NightmillGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="nightmill")
def main() -> None:
    """Nightmill: a batch text generator for your own GPUs.

    Prompts go in as jobs; a worker generates; text and stop reasons are rows in a database.

    \b
      nightmill demo                                  a demonstration without a GPU
      nightmill worker --model model.gguf             serve a model
      nightmill enqueue "Once upon a time" --wait     run one prompt
      nightmill run prompts.jsonl -o results.jsonl --model model.gguf
                                                      a whole file, in one command
      nightmill batch --help                          files overnight, unattended
      nightmill stats                                 jobs and workers

    Settings come from NIGHTMILL_* variables: NIGHTMILL_DATABASE_URL and NIGHTMILL_BROKER_URL name your
    own PostgreSQL and Redis; without them, both are embedded in NIGHTMILL_DATA_DIR.
    """


@contextmanager
def _printable_errors() -> Iterator[None]:
    """Escape Click's error messages, which quote the user's input."""
    try:
        yield
    except click.ClickException as error:
        error.message = printable(error.message, keep="\n\t")  # type: ignore[misc]
        raise


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, DeliveryDelayedWarning | IgnoredColumnWarning):
        from nightmill.jobs.commands.terminal import echo

        echo(f"Warning: {message}", err=True)
