"""Chat messages to a prompt, by the model's own template, so that nobody can forge a turn in a message.

A template writes control tokens such as `<|im_end|>`; a user may write the same characters. Only the
template's count. So special tokens are looked for in the rendered text, and each that came from a message
is passed over. What lies between two special tokens, template text and content together, is tokenised in
one piece: words and merges cross the border as they did in training.

Which ones came from a message `worker.model.chat.marking` finds out. Messages without such text, nearly all,
are rendered as they are, and so templates may trim, test or split contents.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Self

from nightmill.jobs.base.contract import AS_USUAL, CallFormat, Markup, Rendering
from nightmill.jobs.errors import ChatTemplateError, NightmillError
from nightmill.jobs.reply.reasoning import CHANNELS, GEMMA
from nightmill.worker.model.chat.chat import Chat, Rendered
from nightmill.worker.model.chat.content import ContentUse, content_use
from nightmill.worker.model.chat.marking import Marking
from nightmill.worker.model.chat.reach import Reach, reach
from nightmill.worker.model.chat.renderer import Limits, Renderer
from nightmill.worker.model.chat.shield import Messages, unused_character
from nightmill.worker.model.chat.showing import Conversation, conversation
from nightmill.worker.model.chat.tools import ToolUse, tool_use
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer.tokenizer import Tokenizer

_KEY = "tokenizer.chat_template"
TOOLS_KEY = "tokenizer.chat_template.tool_use"
"""The template for chats with tools, where a file has one, as for llama.cpp and transformers."""

_THINKING = {
    "</think>": ("<think>", "</think>"),
    "[/THINK]": ("[THINK]", "[/THINK]"),
    "</seed:think>": ("<seed:think>", "</seed:think>"),
    "<|END_THINKING|>": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "<|start|>assistant<|channel|>final<|message|>": CHANNELS,
    "<channel|>": GEMMA,
}
"""The marks that models put around their reasoning, by the text that their templates have of them."""
_END_TOKENS = 16  # of a prompt, in which such a mark may stand; it may be spelt out


class ChatTemplate:
    """A model's chat template with its tokenizer. Safe to use from several threads; `close` it."""

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        label: str,
        limits: Limits | None = None,
        calls: CallFormat | None = None,
        *,
        key: str = _KEY,
    ) -> None:
        """Compile `source`. Raises ChatTemplateError where it is broken, RunnerError where nothing starts.

        calls: how the model writes calls of tools; by default as its template shows
        key: of the file, that it stands under
        """
        self._for_tools: ChatTemplate | ChatTemplateError | None = None
        self._calls = calls
        self._use: ToolUse | None = None
        self._contents: ContentUse | None = None
        self._source = source
        self._thinking = thinking_marks(source)
        self._tokenizer = tokenizer
        self._marking = Marking(tokenizer, source, self._render_all)
        vocabulary = tokenizer.vocabulary
        ends = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id}
        texts = {name: "" if number is None else vocabulary.text_of(number) for name, number in ends.items()}
        variables = {**texts, "documents": None}
        self._renderer = Renderer(source, variables, limits or Limits(), f"{label}: {key}")

    @classmethod
    def from_gguf(
        cls,
        file: GgufFile,
        tokenizer: Tokenizer,
        limits: Limits | None = None,
        calls: CallFormat | None = None,
    ) -> Self:
        """The file's template; raises ChatTemplateError where it has none, or a broken one."""
        named = {key: file.string(key, default="") for key in (_KEY, TOOLS_KEY)}
        named = {key: source for key, source in named.items() if source.strip()}
        if not named:
            raise ChatTemplateError(
                f"{file.path}: {_KEY}: the model has no chat template; give plain prompts instead of "
                "messages, or add a template with gguf-new-metadata --chat-template"
            )
        label = str(file.path)
        usual_key = min(named, key=len)  # that of tools alone serves all chats, as for llama.cpp
        usual = cls(named.pop(usual_key), tokenizer, label, limits, calls, key=usual_key)
        for key, source in named.items() if calls is not CallFormat.JSON else ():
            try:
                usual._for_tools = cls(source, tokenizer, label, limits, calls, key=key)
            except ChatTemplateError as error:  # of chats with tools alone
                usual._for_tools = error
        return usual

    def for_tools(self) -> "ChatTemplate":
        """The template of chats with tools: a file may have one of its own. Raises ChatTemplateError."""
        if isinstance(self._for_tools, ChatTemplateError):
            raise self._for_tools
        return self._for_tools or self

    def _of(self, rendering: Rendering | None) -> "ChatTemplate":
        return self if rendering is None or rendering.tools is None else self.for_tools()

    def render(self, messages: Messages, rendering: Rendering = AS_USUAL) -> str:
        """The prompt as text. Raises ChatTemplateError where the template is broken or refuses."""
        template = self._of(rendering)
        text = template._render_all([template._chat(messages, rendering)])[0]
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
        said, moments = renderings or [AS_USUAL] * len(chats), times or [None] * len(chats)
        if self._for_tools is None:
            return self._encode_all(chats, said, moments)
        answers: list[list[int] | NightmillError] = [ChatTemplateError()] * len(chats)
        for with_tools in (False, True):
            places = [place for place, one in enumerate(said) if (one.tools is not None) is with_tools]
            found: Sequence[list[int] | NightmillError]
            try:
                found = (self.for_tools() if with_tools else self)._encode_all(
                    [chats[place] for place in places],
                    [said[place] for place in places],
                    [moments[place] for place in places],
                )
            except ChatTemplateError as error:
                found = [error] * len(places)
            for place, one in zip(places, found, strict=True):
                answers[place] = one
        return answers

    def _encode_all(
        self, chats: Sequence[Messages], said: Sequence[Rendering], times: Sequence[datetime | None]
    ) -> list[list[int] | NightmillError]:
        answers: list[list[int] | NightmillError] = []
        prompts = self._marking.pieces(
            [
                self._chat(chat, rendering, time)
                for chat, rendering, time in zip(chats, said, times, strict=True)
            ]
        )
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
        """End what renders; one that renders again starts a new process."""
        self._renderer.close()
        if isinstance(self._for_tools, ChatTemplate):
            self._for_tools.close()

    @property
    def pid(self) -> int | None:
        """The process that renders, where it runs."""
        return self._renderer.pid

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos_id = self._tokenizer.bos_id
        if self._tokenizer.add_bos and bos_id is not None and ids[:1] != [bos_id]:
            ids.insert(0, bos_id)
        return ids

    def _chat(self, messages: Messages, rendering: Rendering, time: datetime | None = None) -> Chat:
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
                    return Chat(messages, rendering, end, time=time, fault=error)
                use = ToolUse(CallFormat.JSON)  # earlier calls alone: the template may do what it likes
            told, tools = use.told(messages, rendering.tools)
        if self._thinking == CHANNELS:
            told = [_with_thinking(message) for message in told]
        fault = next(filter(None, map(contents.fault, told)), None) if contents.dropped else None
        return Chat(told, rendering, end, tools, time, contents, fault)

    def conversation(self) -> Conversation:
        """A chat of all roles that the template takes; raises ChatTemplateError where it takes none."""
        return conversation(self.render)

    def reach(self) -> Reach:
        """The special tokens that the template writes and that stay out of reach."""
        texts = []
        with suppress(ChatTemplateError):  # a template that renders nothing writes nothing
            shown = self.conversation()
            texts = [self.render(shown.messages[:1]), self.render(shown.messages, shown.rendering)]
        sources = [self._source] + [self.for_tools()._source] * isinstance(self._for_tools, ChatTemplate)
        return reach("\n".join(sources), texts, self._tokenizer)

    def tool_use(self) -> ToolUse:
        """Return how tools are described and called in chats that have some; raises ChatTemplateError."""
        return self.for_tools()._tool_use()

    def contents(self) -> ContentUse:
        """In which form the template takes what messages say, and which roles it leaves out."""
        if self._contents is None:
            self._contents = content_use(lambda chat: self._renderer.render_all([chat])[0])
        return self._contents

    def _tool_use(self) -> ToolUse:
        """Find out, once, how this template describes and calls tools; raises ChatTemplateError."""
        if self._use is None:
            self._use = tool_use(lambda chat: self._renderer.render_all([chat])[0], self._calls)
        return self._use

    def markup(self, rendering: Rendering | None, prompt_ids: Sequence[int]) -> Markup | None:
        """Return the markup of reasoning and tool calls in answers to a chat; None if they have neither.

        Reasoning is already open where the prompt ends with its opening mark. Raises ChatTemplateError where
        `encode` does.
        """
        template = self._of(rendering)
        calls = None
        if rendering is not None and rendering.tools is not None:
            calls = template._tool_use().calls
        thinking = template._thinking
        if calls is None and thinking is None:
            return None
        tail = self._tokenizer.decode(prompt_ids[-_END_TOKENS:], special=True).rstrip()
        opened = thinking is not None and tail.endswith(thinking[0])
        return Markup(calls, thinking, opened, thinking is not None and tail.endswith(thinking[1]))

    def _render_all(self, chats: Sequence[Chat]) -> list[Rendered]:
        faults = [self._fault(chat) for chat in chats]
        fit = [chat for chat, fault in zip(chats, faults, strict=True) if fault is None]
        texts = iter(
            self._renderer.render_all([chat.variables() for chat in fit], [chat.time for chat in fit])
        )
        return [fault or chat.cut(next(texts)) for chat, fault in zip(chats, faults, strict=True)]

    def _fault(self, chat: Chat) -> ChatTemplateError | None:
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


def _concerns_tools(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "tool" or bool(message.get("tool_calls"))


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose reasoning stands where gpt-oss's template looks, which takes it only without a text."""
    thoughts = message.get("reasoning_content")
    return {**message, "thinking": thoughts} if thoughts and not message.get("content") else message


def thinking_marks(source: str) -> tuple[str, str] | None:
    """Return the marks that this template's model puts around its reasoning; None if none are known."""
    return next((marks for sign, marks in _THINKING.items() if sign in source), None)
