"""Find out how a model's template shows contents of messages, by rendering a text that occurs nowhere else.

Some templates take a message's content as a text, some as a list of typed parts only, and some have no branch
for a role at all: given what they do not know, they render a prompt without the message, and no error.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from nightmill.jobs.errors import ChatTemplateError

Render = Callable[[Mapping[str, Any]], str | ChatTemplateError]
"""A chat's variables to its text."""

_SOUGHT: Final = "qzwordthatnobodywritesqz"  # lower case and one word: templates strip, split and fold
_PIECES: Final = (_SOUGHT[3:12], _SOUGHT[12:-3])  # of which a template may change one
_HELLO: Final = {"role": "user", "content": "Hello"}
_FUNCTION: Final = {"name": "look_up", "arguments": {"word": "mill"}}
_CALLING: Final = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": _FUNCTION}],
}
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_AROUND: Final[dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]]] = {
    "user": ([], []),
    "system": ([], [_HELLO]),
    "assistant": ([_HELLO], [_HELLO]),
    "tool": ([_HELLO, _CALLING], []),
}
"""The messages before and behind a message of each role that make a usual chat of it."""


@dataclass(frozen=True, slots=True)
class ContentUse:
    """A template's treatment of contents, by role.

    in_parts  roles whose content it takes as a list of typed parts, and not as a text
    dropped   roles whose messages it leaves out without a word
    """

    in_parts: frozenset[str] = field(default_factory=frozenset)
    dropped: frozenset[str] = field(default_factory=frozenset)

    def given(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message in the form that the template takes."""
        content = message.get("content")
        if message.get("role") in self.in_parts and isinstance(content, str):
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def fault(self, message: Mapping[str, Any]) -> ChatTemplateError | None:
        """Why this message cannot be given to the template."""
        role = message.get("role")
        if role not in self.dropped or not message.get("content"):
            return None
        return ChatTemplateError(
            f"the model's chat template leaves out messages of the role {role!r}: say it in a message of "
            "another role, or give a plain prompt"
        )


def content_use(render: Render) -> ContentUse:
    """Try each role with a text and with parts; a role that the template refuses is not dropped."""
    in_parts, dropped = set(), set()
    for role, (before, behind) in _AROUND.items():
        text, parts = (
            render(_variables([*before, {**_named(role), "content": content}, *behind]))
            for content in (_SOUGHT, [{"type": "text", "text": _SOUGHT}])
        )
        if _shown(text):
            continue
        if _shown(parts):
            in_parts.add(role)
        elif not isinstance(text, ChatTemplateError):
            dropped.add(role)
    return ContentUse(frozenset(in_parts), frozenset(dropped))


def _named(role: str) -> dict[str, Any]:
    return {"role": role} | ({"tool_call_id": "abcdefghi", "name": "look_up"} if role == "tool" else {})


def _variables(messages: list[dict[str, Any]]) -> dict[str, Any]:
    tools = [_TOOL] if any(message["role"] == "tool" for message in messages) else None
    return {"messages": messages, "tools": tools, "add_generation_prompt": True}


def _shown(text: str | ChatTemplateError) -> bool:
    return isinstance(text, str) and any(piece in text.lower() for piece in _PIECES)
