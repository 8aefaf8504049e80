"""Options that several commands share."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

_SENTENCE = 1000  # characters; the first sentence is shorter

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")

_PARAMETERS = [
    click.option("--max-tokens", type=int, help="Most tokens to generate [256]."),
    click.option("--temperature", type=float, help="0 is greedy [1.0]."),
    click.option("--top-k", type=int, help="Draw among the K likeliest tokens; 0 is off [0]."),
    click.option("--top-p", type=float, help="Draw among the likeliest tokens that make up P [1.0]."),
    click.option("--min-p", type=float, help="Drop tokens less likely than P times the likeliest [0]."),
    click.option(
        "--repetition-penalty", type=float, help="Above 1, tokens already there get less likely [1.0]."
    ),
    click.option("--seed", type=int, help="The same seed repeats the text; by default one is drawn."),
    click.option(
        "--ignore-eos", is_flag=True, default=None, help="Go on where the model would end its text."
    ),
    click.option("--stop", multiple=True, help="End before this text (may be given several times)."),
]


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


def parameter_options(command: Command) -> Command:
    """How to generate; the keywords of GenerationParams. Those not given are None, `stop` is empty."""
    for option in reversed(_PARAMETERS):
        command = option(command)
    return command


def given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given, as keywords of enqueue."""
    return {name: value for name, value in settings.items() if value not in (None, ())}
