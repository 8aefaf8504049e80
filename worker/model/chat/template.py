"""Chat messages to a prompt, by the model's own template, so that nobody can forge a turn in a message.

A template writes control tokens such as `<|im_end|>`; a user may write the same characters. Only the
template's count. So special tokens are looked for in the rendered text, and each that came from a message
is passed over. What lies between two special tokens, template text and content together, is tokenised in
one piece: words and merges cross the border as they did in training.

To know which ones came from a message, the messages are rendered with marks before the special tokens in
them (`worker.model.chat.shield`). Messages without such text, nearly all, are rendered as they are, and so
templates may trim, test or split contents. Where marks do change what a template does (Qwen3's looks for
`<tool_response>`), the text is rendered again with the special tokens in messages broken up, unreadable for
the template too.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Self

from gguf import TokenType

from nightmill.jobs.contract import AS_USUAL, CallFormat, Markup, Rendering
from nightmill.jobs.errors import ChatTemplateError, NightmillError
from nightmill.jobs.thinking import CHANNELS
from nightmill.worker.model.chat.content import ContentUse, content_use
from nightmill.worker.model.chat.renderer import Limits, Renderer
from nightmill.worker.model.chat.shield import Messages, Shield, strings, unused_character
from nightmill.worker.model.chat.tools import ToolUse, tool_use
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer.tokenizer import Piece, Tokenizer

_KEY = "tokenizer.chat_template"

Rendered = str | ChatTemplateError

_THINKING = {
    "</think>": ("<think>", "</think>"),
    "[/THINK]": ("[THINK]", "[/THINK]"),
    "</seed:think>": ("<seed:think>", "</seed:think>"),
    "<|END_THINKING|>": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "<|start|>assistant<|channel|>final<|message|>": CHANNELS,
}
"""What models put around what they think before they answer, by what their templates have of it."""
_END_TOKENS = 16  # of a prompt, in which such a mark may stand; it may be spelt out


@dataclass(frozen=True)
class _Chat:
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

    def variables(self) -> dict[str, Any]:
        """What the template sees; nothing that a caller names takes the place of ours."""
        messages = list(self.messages)
        if self.end:
            last = messages[-1]
            messages[-1] = {**last, "content": last["content"] + self.end}
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


class ChatTemplate:
    """A model's chat template with its tokenizer. Safe to use from several threads; `close` it."""

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        label: str,
        limits: Limits | None = None,
        calls: CallFormat | None = None,
    ) -> None:
        """Compile `source`. Raises ChatTemplateError where it is broken, RunnerError where nothing starts.

        calls: how the model writes calls of tools; by default as its template shows
        """
        self._calls = calls
        self._use: ToolUse | None = None
        self._contents: ContentUse | None = None
        self._source = source
        self._tokenizer = tokenizer
        self._shield = Shield(tokenizer.markers)
        vocabulary = tokenizer.vocabulary
        ends = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id}
        texts = {name: "" if number is None else vocabulary.text_of(number) for name, number in ends.items()}
        variables = {**texts, "documents": None}
        self._renderer = Renderer(source, variables, limits or Limits(), f"{label}: {_KEY}")

    @classmethod
    def from_gguf(
        cls,
        file: GgufFile,
        tokenizer: Tokenizer,
        limits: Limits | None = None,
        calls: CallFormat | None = None,
    ) -> Self:
        """The file's template; raises ChatTemplateError where it has none, or a broken one."""
        source = file.string(_KEY, default="")
        if not source.strip():
            raise ChatTemplateError(
                f"{file.path}: {_KEY}: the model has no chat template; give plain prompts instead of "
                "messages, or add a template with gguf-new-metadata --chat-template"
            )
        return cls(source, tokenizer, str(file.path), limits, calls)

    def render(self, messages: Messages, rendering: Rendering = AS_USUAL) -> str:
        """The prompt as text. Raises ChatTemplateError where the template is broken or refuses."""
        text = self._render_all([self._chat(messages, rendering)])[0]
        if isinstance(text, ChatTemplateError):
            raise text
        return text

    def encode(self, messages: Messages, rendering: Rendering = AS_USUAL) -> list[int]:
        """The prompt as token ids; starts with BOS exactly once where the model wants one.

        Raises ChatTemplateError as `render` does, InvalidPromptError for text that is not valid Unicode.
        """
        ids = self.encode_all([messages], [rendering])[0]
        if isinstance(ids, NightmillError):
            raise ids
        return ids

    def encode_all(
        self,
        chats: Sequence[Messages],
        renderings: Sequence[Rendering] | None = None,
        times: Sequence[datetime | None] | None = None,
    ) -> list[list[int] | NightmillError]:
        """`encode` for many chats at once; what it raises for one of them is the answer to that one.

        times  what the template takes for the time, for each; None: now
        """
        answers: list[list[int] | NightmillError] = []
        said = renderings or [AS_USUAL] * len(chats)
        prompts = [
            rendered if isinstance(rendered, ChatTemplateError) else list(self._pieces(*rendered))
            for rendered in self._marked(
                [
                    replace(self._chat(chat, rendering), time=time)
                    for chat, rendering, time in zip(chats, said, times or [None] * len(chats), strict=True)
                ]
            )
        ]
        encoded = iter(
            self._tokenizer.encode_each(
                [prompt for prompt in prompts if isinstance(prompt, list)], add_bos=False
            )
        )
        for prompt in prompts:
            ids = next(encoded) if isinstance(prompt, list) else prompt
            answers.append(ids if isinstance(ids, NightmillError) else self._with_bos(ids))
        return answers

    def close(self) -> None:
        """End the process that renders; one that renders again starts a new one."""
        self._renderer.close()

    @property
    def pid(self) -> int | None:
        """The process that renders, where it runs."""
        return self._renderer.pid

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos_id = self._tokenizer.bos_id
        if self._tokenizer.add_bos and bos_id is not None and ids[:1] != [bos_id]:
            ids.insert(0, bos_id)
        return ids

    def _chat(self, messages: Messages, rendering: Rendering) -> "_Chat":
        last = messages[-1].get("content") if messages else None
        end = (
            unused_character([self._source, last if isinstance(last, str) else ""])
            if rendering.continue_final_message
            else ""
        )
        contents = self.contents()
        told: Sequence[Mapping[str, Any]] = messages
        tools = None
        if rendering.tools is not None or any(map(_concerns_tools, messages)):
            try:
                use = self._tool_use()
            except ChatTemplateError as error:
                if rendering.tools is not None:
                    return _Chat(messages, rendering, end, fault=error)
                use = ToolUse(CallFormat.JSON)  # earlier calls alone: the template may do what it likes
            told, tools = use.told(messages, rendering.tools)
        fault = next(filter(None, map(contents.fault, told)), None)
        return _Chat(told, rendering, end, tools, use=contents, fault=fault)

    def contents(self) -> ContentUse:
        """In which form the template takes what messages say, and which roles it leaves out."""
        if self._contents is None:
            self._contents = content_use(lambda chat: self._renderer.render_all([chat])[0])
        return self._contents

    def _tool_use(self) -> ToolUse:
        """What the template does with tools; raises ChatTemplateError."""
        if self._use is None:
            self._use = tool_use(lambda chat: self._renderer.render_all([chat])[0], self._calls)
        return self._use

    def markup(self, rendering: Rendering | None, prompt_ids: Sequence[int]) -> Markup | None:
        """What answers to a chat hold beside what they say; its prompt begins them if it ends in thinking.

        Raises ChatTemplateError where `encode` does.
        """
        calls = None
        if rendering is not None and rendering.tools is not None:
            calls = self._tool_use().calls
        thinking = thinking_marks(self._source)
        if calls is None and thinking is None:
            return None
        opened = thinking is not None and self._tokenizer.decode(
            prompt_ids[-_END_TOKENS:], special=True
        ).rstrip().endswith(thinking[0])
        return Markup(calls, thinking, opened)

    def _render_all(self, chats: Sequence["_Chat"]) -> list[Rendered]:
        faults = [self._fault(chat) for chat in chats]
        fit = [chat for chat, fault in zip(chats, faults, strict=True) if fault is None]
        texts = iter(
            self._renderer.render_all([chat.variables() for chat in fit], [chat.time for chat in fit])
        )
        return [fault or chat.cut(next(texts)) for chat, fault in zip(chats, faults, strict=True)]

    def _fault(self, chat: "_Chat") -> ChatTemplateError | None:
        """Why a chat cannot be given to the template."""
        if chat.fault is not None:
            return chat.fault
        for name, value in chat.rendering.variables.items():
            if isinstance(value, str) and (found := self._tokenizer.next_marker(value, 0)):
                return ChatTemplateError(
                    f"chat_template_kwargs: {name} holds {found[0]!r}, a special token of the model; "
                    "remove it"
                )
        if chat.end and not (chat.messages and isinstance(chat.messages[-1].get("content"), str)):
            return ChatTemplateError("continue_final_message: the last message has no text to continue")
        return None

    def _marked(self, chats: Sequence["_Chat"]) -> list[tuple[str, str] | ChatTemplateError]:
        """Each rendered text with a mark before each special token that a message wrote, and the mark."""
        plain = self._render_all(chats)
        marked: list[Rendered] = list(plain)
        marks: dict[int, str] = {}

        def again(indexes: Iterable[int], *, broken: bool) -> list[int]:
            """Render those that marks change; returns those of which more than the marks has changed."""
            shielded: dict[int, _Chat] = {}
            for index in indexes:
                chat = chats[index]
                try:
                    given = [*chat.messages, *(chat.tools or ())]
                    texts = [str(plain[index]), self._source, chat.end, *strings(given)]
                    marks[index] = unused_character(texts)
                    changed = self._shield.mark(given, marks[index], broken=broken)
                    if changed != given:
                        count = len(chat.messages)
                        tools = None if chat.tools is None else changed[count:]
                        shielded[index] = replace(chat, messages=changed[:count], tools=tools)
                except RecursionError:
                    marked[index] = ChatTemplateError("the messages are nested too deep")
            anew = self._render_all(list(shielded.values()))
            for index, text in zip(shielded, anew, strict=True):
                marked[index] = text
            return [
                index
                for index, text in zip(shielded, anew, strict=True)
                if isinstance(text, str) and text.replace(marks[index], "") != plain[index]
            ]

        rendered = [index for index, text in enumerate(plain) if isinstance(text, str)]
        again(again(rendered, broken=False), broken=True)
        found = [
            text if isinstance(text, ChatTemplateError) else (text, marks[index])
            for index, text in enumerate(marked)
        ]
        return self._unforged(chats, found)

    def _unforged(
        self, chats: Sequence["_Chat"], found: list[tuple[str, str] | ChatTemplateError]
    ) -> list[tuple[str, str] | ChatTemplateError]:
        """The same, but for chats of which a template's edits make control tokens.

        A template that deletes "/think" from a message joins what stood around it. So a chat that has a
        character of those that mark special tokens is rendered with marks between all characters, too: what
        control tokens there are then, the template has written itself.
        """
        divided: dict[int, _Chat] = {}
        for index, one in enumerate(found):
            chat = chats[index]
            if isinstance(one, ChatTemplateError):
                continue
            given = [*chat.messages, *(chat.tools or ())]
            if self._shield.concerns(given):
                changed = self._shield.divide(given, one[1])
                count = len(chat.messages)
                tools = None if chat.tools is None else changed[count:]
                divided[index] = replace(chat, messages=changed[:count], tools=tools)
        anew = self._render_all(list(divided.values()))
        for index, text in zip(divided, anew, strict=True):
            one = found[index]
            if isinstance(one, ChatTemplateError) or isinstance(text, ChatTemplateError):
                continue  # it refuses marked messages, see docs/models.md
            if self._control_tokens(text) != self._control_tokens(*one):
                found[index] = ChatTemplateError(
                    "the model's chat template makes control tokens of what these messages say, by what it "
                    "deletes or replaces in them: remove what looks like parts of such tokens"
                )
        return found

    def _control_tokens(self, text: str, mark: str | None = None) -> list[int]:
        """The control tokens of a rendered text, without those that a mark precedes."""
        kinds, found, start = self._tokenizer.vocabulary.kinds, [], 0
        while match := self._tokenizer.next_marker(text, start):
            start = match.start() + 1
            if mark is None or text[match.start() - 1 : match.start()] != mark:
                start = self._tokenizer.after(match)
                token_id = self._tokenizer.markers[match[0]]
                found += [token_id] * (kinds[token_id] == TokenType.CONTROL)
        return found

    def _pieces(self, text: str, mark: str) -> Iterator[Piece]:
        """Special tokens that no mark precedes as ids, the rest as text without marks."""
        start = search = 0
        while match := self._tokenizer.next_marker(text, search):
            if text[match.start() - 1 : match.start()] == mark:
                search = match.start() + 1
                continue
            yield from self._tokenizer.split(text[start : match.start()].replace(mark, ""), special=False)
            yield self._tokenizer.markers[match[0]]
            start = search = self._tokenizer.after(match)
        yield from self._tokenizer.split(text[start:].replace(mark, ""), special=False)


def _concerns_tools(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "tool" or bool(message.get("tool_calls"))


def thinking_marks(source: str) -> tuple[str, str] | None:
    """What the model of this template puts around its thoughts; None if nothing that is known."""
    return next((marks for sign, marks in _THINKING.items() if sign in source), None)
