"""Prompts to token ids: plain texts by a model's tokenizer, chats by its template, token ids as they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeGuard

from nightmill.jobs.base.contract import AS_USUAL, CallFormat, Prompt, Rendering, is_token_ids
from nightmill.jobs.errors import ChatTemplateError, NightmillError
from nightmill.worker.model.chat import ChatTemplate, Limits
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer import Tokenizer


def chat_of(file: GgufFile, tokenizer: Tokenizer, tool_format: str, limits: Limits) -> ChatTemplate | str:
    """The file's chat template, or why there is none: plain prompts work without one.

    tool_format: as of `Settings`
    """
    calls = None if tool_format == "auto" else CallFormat(tool_format)
    try:
        return ChatTemplate.from_gguf(file, tokenizer, limits, calls)
    except ChatTemplateError as error:
        return str(error)


@dataclass(frozen=True, kw_only=True)
class PromptEncoder:
    """Turns prompts into token ids, with a model's tokenizer and chat template."""

    tokenizer: Tokenizer
    chat: ChatTemplate | str  # or why there is none

    def encode(self, prompt: Prompt, rendering: Rendering | None = None) -> tuple[int, ...]:
        """A prompt's token ids. Raises what `encode_all` would answer."""
        ids = self.encode_all([prompt], [rendering])[0]
        if isinstance(ids, NightmillError):
            raise ids
        return ids

    def encode_all(
        self,
        prompts: Sequence[Prompt],
        renderings: Sequence[Rendering | None] = (),
        times: Sequence[datetime | None] = (),
    ) -> list[tuple[int, ...] | NightmillError]:
        """For each prompt its token ids, or why it has none: a ChatTemplateError, InvalidPromptError.

        Token ids stay as they are. Raises RunnerError where the process that renders chats cannot be started.

        renderings: how each of them becomes a prompt if it is a chat; by default all as usual
        times: when each was asked for, which is the time for chat templates; by default now
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        said = renderings or [None] * len(prompts)
        chats = [
            (prompt, rendering or AS_USUAL, time) if _is_chat(prompt) else None
            for prompt, rendering, time in zip(prompts, said, times or [None] * len(prompts), strict=True)
        ]
        found = [chat for chat in chats if chat is not None]
        of_texts = iter(
            self.tokenizer.encode_each([self.tokenizer.split(text, special=False) for text in texts])
        )
        of_chats = iter(
            [ChatTemplateError(self.chat)] * len(found)
            if isinstance(self.chat, str)
            else self.chat.encode_all(
                [chat for chat, _, _ in found],
                [rendering for _, rendering, _ in found],
                [time for _, _, time in found],
            )
        )
        answers: list[tuple[int, ...] | NightmillError] = []
        for prompt, chat in zip(prompts, chats, strict=True):
            if chat is not None or isinstance(prompt, str):
                ids = next(of_texts if chat is None else of_chats)
                answers.append(ids if isinstance(ids, NightmillError) else tuple(ids))
            elif is_token_ids(prompt):
                answers.append(tuple(prompt))
            else:
                answers.append(ChatTemplateError("the messages are not a list of objects"))
        return answers

    def marks_in(self, prompt: Prompt) -> set[str]:
        """The model's special tokens that a plain prompt spells out, and that are read as characters."""
        found: set[str] = set()
        start = 0
        while isinstance(prompt, str) and (match := self.tokenizer.next_marker(prompt, start)):
            found.add(match[0])
            start = match.end()
        return found

    def template_fault(self) -> str | None:
        """Which special tokens the chat template writes that stay out of reach, and what to do; or None."""
        return None if isinstance(self.chat, str) else self.chat.reach().fault

    def close(self) -> None:
        """End the process that renders chats. It ends by itself when this process does."""
        if not isinstance(self.chat, str):
            self.chat.close()


def _is_chat(messages: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """True if a row's messages are a list of mappings, as every client stores them."""
    if isinstance(messages, str):
        return False
    # Abstract classes are asked last: that takes many times as long.
    if type(messages) is not list and not isinstance(messages, Sequence):
        return False
    for message in messages:  # noqa: SIM110  (`all` would take longer than the rest)
        if type(message) is not dict and not isinstance(message, Mapping):
            return False
    return True
