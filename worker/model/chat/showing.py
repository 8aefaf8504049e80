"""A conversation of all roles that a template takes, for people, and to see which tokens it writes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from nightmill.jobs.base.contract import AS_USUAL, Rendering, Tools
from nightmill.jobs.errors import ChatTemplateError
from nightmill.worker.model.chat.shield import Messages

__all__ = ["EXAMPLE_TOOLS", "Conversation", "conversation"]

EXAMPLE_TOOLS: Final = Tools(
    [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "The weather of a place.",
                "parameters": {
                    "type": "object",
                    "properties": {"place": {"type": "string"}},
                    "required": ["place"],
                },
            },
        }
    ]
)
_ID: Final = "abcdefghi"  # Mistral's templates want nine letters and digits
_CALL: Final = {"name": "weather", "arguments": '{"place": "Rome"}'}
_SYSTEM: Final = {"role": "system", "content": "Be brief."}
_TALK: Final = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Good evening."},
    {"role": "user", "content": "Is it warm in Rome?"},
]
_CALLING: Final[list[dict[str, Any]]] = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": _ID, "type": "function", "function": _CALL}],
    },
    {"role": "tool", "tool_call_id": _ID, "name": "weather", "content": "31 degrees"},
]
_WITH_TOOLS: Final = Rendering(tools=EXAMPLE_TOOLS)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat that a template takes, of as many roles as it takes.

    refused  why it takes no messages of a role, by roles; "tools": none at all
    """

    messages: Messages
    rendering: Rendering
    refused: Mapping[str, str]


def conversation(render: Callable[[Messages, Rendering], object]) -> Conversation:
    """The longest chat that `render` takes, which raises ChatTemplateError; it raises that of a greeting."""
    refused: dict[str, str] = {}
    rendering, before, behind = AS_USUAL, [_SYSTEM], _CALLING

    def taken(messages: Messages, rendering: Rendering, role: str) -> bool:
        try:
            render(messages, rendering)
        except ChatTemplateError as error:
            refused[role] = str(error)
            return False
        return True

    render(_TALK[:1], AS_USUAL)
    if not taken([_SYSTEM, *_TALK[:1]], AS_USUAL, "system"):
        before = []
    if not taken(_TALK, AS_USUAL, "assistant"):
        return Conversation([*before, *_TALK[:1]], AS_USUAL, refused)
    if taken(_TALK, _WITH_TOOLS, "tools"):
        rendering = _WITH_TOOLS
        if not taken([*before, *_TALK, *_CALLING], rendering, "tool"):
            behind = []
    else:
        behind = []
    return Conversation([*before, *_TALK, *behind], rendering, refused)
