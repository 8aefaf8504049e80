"""What commands share, and is quickly loaded: an option, an exit code, groups with whole sentences."""

from typing import Any, get_args

import click

from nightmill.jobs.logs import LogFormat

_SENTENCE = 1000  # characters; the first sentence is shorter

LOG_FORMAT: dict[str, Any] = {
    "type": click.Choice(get_args(LogFormat)),
    "help": "How to log: lines for people, or an object of JSON on each line [NIGHTMILL_LOG_FORMAT].",
}
INTERRUPTED = 130
"""The exit code after Ctrl-C, as of a command that SIGINT ends."""
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


class Group(click.Group):
    """A group whose list of commands has the whole first sentence of each, on several lines if need be."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list."""
        with formatter.section("Commands"):
            formatter.write_dl(self.sentences(ctx))

    def sentences(self, ctx: click.Context) -> list[tuple[str, str]]:
        """Names, and the first sentence of each command's help."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        return [(name, first_sentence(one)) for name, one in commands if one and not one.hidden]


def first_sentence(command: click.Command) -> str:
    """Of its help."""
    return command.get_short_help_str(_SENTENCE)
