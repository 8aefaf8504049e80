"""Shared parts of commands that load quickly: options, an exit code, groups with whole sentences."""

from pathlib import Path
from typing import Any, get_args

import click

from nightmill.jobs.base.logs import LogFormat

_SENTENCE = 1000  # characters, more than any first sentence

LOG_FORMAT: dict[str, Any] = {
    "type": click.Choice(get_args(LogFormat)),
    "help": "Log format: lines of text, or one JSON object a line [NIGHTMILL_LOG_FORMAT].",
}
INTERRUPTED = 130
"""Exit code after Ctrl-C, like that of a command ended by SIGINT."""
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


def text_of(value: str, most: int) -> str:
    """A text, or with @ that of a file, without the line end that editors add; @@ begins a text with @.

    most  characters that are read, and no more

    Raises click.BadParameter.
    """
    if not value.startswith("@"):
        return value
    if value.startswith("@@"):
        return value[1:]
    path = Path(value[1:])
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(most)
    except UnicodeDecodeError:
        raise click.BadParameter(f"{path} is not UTF-8; save it as that") from None
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror or error}") from None
    return text.removesuffix("\n")


class CommandGroup(click.Group):
    """A group that lists each command with its whole first sentence, wrapped if needed."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands."""
        with formatter.section("Commands"):
            formatter.write_dl(self.sentences(ctx))

    def sentences(self, ctx: click.Context) -> list[tuple[str, str]]:
        """Return names and first sentences of commands."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        return [(name, first_sentence(one)) for name, one in commands if one and not one.hidden]


def first_sentence(command: click.Command) -> str:
    """Return the first sentence of a command's help."""
    return command.get_short_help_str(_SENTENCE)
