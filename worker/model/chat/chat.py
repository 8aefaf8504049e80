"""A chat as a template takes it: its messages and tools, and how they are rendered."""

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Self

from nightmill.jobs.base.contract import Rendering
from nightmill.jobs.errors import ChatTemplateError
from nightmill.worker.model.chat.content import ContentUse
from nightmill.worker.model.chat.shield import Messages

Rendered = str | ChatTemplateError
"""The text of a chat, or why it has none."""


@dataclass(frozen=True)
class Chat:
    """Messages and tools as the template takes them, and how to render them.

    end    a character of its own behind a last message to go on with
    time   what `strftime_now` shows; None: now
    use    in which form the template takes contents
    fault  why the template cannot be given them
    """

    messages: Messages
    rendering: Rendering
    end: str
    tools: Messages | None = None
    time: datetime | None = None
    use: ContentUse = field(default_factory=ContentUse)
    fault: ChatTemplateError | None = None

    @property
    def said(self) -> Messages:
        """All that comes from the row: messages, then tools."""
        return [*self.messages, *(self.tools or ())]

    def saying(self, said: Messages) -> Self:
        """The same chat with these in the place of `said`."""
        count = len(self.messages)
        return replace(self, messages=said[:count], tools=None if self.tools is None else said[count:])

    def variables(self) -> dict[str, Any]:
        """Return the template's variables; nothing that a caller names takes the place of ours."""
        messages = list(self.messages)
        if self.end:
            last = messages[-1]
            messages[-1] = {**last, "content": last["content"] + self.end}
        if self.use.in_parts:
            messages = [self.use.given(message) for message in messages]
        opens = self.rendering.add_generation_prompt
        tools = None if self.tools is None else list(self.tools)
        ours = {"messages": messages, "tools": tools, "add_generation_prompt": opens}
        return {**self.rendering.variables, **ours}

    def cut(self, text: Rendered) -> Rendered:
        """The rendered text up to where the model is to go on."""
        if not self.end or isinstance(text, ChatTemplateError):
            return text
        before, found, _ = text.rpartition(self.end)
        if found:
            return before
        return ChatTemplateError(
            "continue_final_message: the model's chat template does not show the end of the last message, so "
            "that it cannot be continued"
        )
