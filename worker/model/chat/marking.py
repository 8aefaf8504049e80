"""Tells the special tokens that a template writes from those that its messages spell out.

The messages are rendered with marks before the special tokens in them (`worker.model.chat.shield`). If
marks do change what a template does (Qwen3's looks for `<tool_response>`), the text is rendered again with
the special tokens in messages broken up, unreadable for the template too.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from gguf import TokenType

from nightmill.jobs.errors import ChatTemplateError
from nightmill.worker.model.chat.chat import Chat, Rendered
from nightmill.worker.model.chat.shield import Messages, Shield, strings, unused_character, without_words
from nightmill.worker.model.tokenizer.tokenizer import Piece, Tokenizer

Marked = tuple[str, str] | ChatTemplateError
"""A rendered text with a mark before each special token that a message wrote, and the mark."""

_FORGED = (
    "the model's chat template makes control tokens of what these messages say, by what it deletes or "
    "replaces in them: remove what looks like parts of such tokens"
)

_UNKNOWN = (
    "the model's chat template refuses these messages if their words are others, so that nobody knows which "
    "control tokens are its own: remove what looks like parts of such tokens"
)
_EDITING = re.compile(r"\b(replace|join|translate|format|urldecode|encode)\b")
"""Operations with which a template can make special tokens of texts that have none of their characters."""

_DROPPING = re.compile(r"\b(encode|isascii|isalnum|isalpha|isprintable|isidentifier|unique)\b")
"""Operations with which a template can drop marks, here or there."""


class Marking:
    """Renders the chats of one template so that the origin of each special token is known.

    source      the template
    render_all  the text of each chat
    """

    def __init__(
        self, tokenizer: Tokenizer, source: str, render_all: Callable[[Sequence[Chat]], list[Rendered]]
    ) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self._render_all = render_all
        self._shield = Shield(tokenizer.markers)
        self._edits = _EDITING.search(source) is not None
        self._drops = _DROPPING.search(source) is not None

    def pieces(self, chats: Sequence[Chat]) -> list[list[Piece] | ChatTemplateError]:
        """Each chat's prompt: special tokens of the template as ids, the rest as text; or why it has none."""
        marked = self._marked(chats)
        return [one if isinstance(one, ChatTemplateError) else self._pieces(*one) for one in marked]

    def _marked(self, chats: Sequence[Chat]) -> list[Marked]:
        plain = self._render_all(chats)
        marked: list[Rendered] = list(plain)
        texts: dict[int, list[str]] = {}
        marks: dict[int, str] = {}

        def again(indexes: Iterable[int], *, broken: bool) -> list[int]:
            """Render those that marks change; returns those of which more than the marks has changed."""
            shielded: dict[int, Chat] = {}
            for index in indexes:
                chat = chats[index]
                try:
                    said = chat.said
                    if index not in texts:
                        texts[index] = list(strings(said))
                    marks[index] = unused_character(
                        [str(plain[index]), self._source, chat.end, *texts[index]]
                    )
                    if self._shield.leaves(texts[index]):
                        continue
                    changed = self._shield.mark(said, marks[index], broken=broken)
                    if changed != said:
                        shielded[index] = chat.saying(changed)
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
        return self._unforged(chats, texts, found)

    def _unforged(
        self, chats: Sequence[Chat], texts: Mapping[int, Sequence[str]], found: list[Marked]
    ) -> list[Marked]:
        """The same, but for chats of which a template's edits make control tokens.

        A template that deletes "/think" from a message joins what stood around it. So a chat of which a
        special token may come is rendered with marks between all characters, too: what control tokens there
        are then, the template has written itself. If it refuses such messages, or drops marks, they are
        rendered with all characters replaced; if it refuses these too, nobody knows, and the chat is refused.
        """
        concerned = {
            index: one
            for index, one in enumerate(found)
            if not isinstance(one, ChatTemplateError) and self._concerns(texts[index])
        }

        def compare(change: Callable[[Messages, str], Messages], *, shows: bool) -> None:
            """Judge those chats that can be rendered with their words changed so, and take them out.

            shows  the mark is in the text, or the template drops marks, and nothing is known
            """
            anew = self._render_all(
                [
                    chats[index].saying(change(chats[index].said, mark))
                    for index, (_, mark) in concerned.items()
                ]
            )
            for (index, one), text in zip(list(concerned.items()), anew, strict=True):
                if isinstance(text, ChatTemplateError) or (shows and one[1] not in text):
                    continue
                if self._control_tokens(text) != self._control_tokens(*one):
                    found[index] = ChatTemplateError(_FORGED)
                del concerned[index]

        if not self._drops:
            compare(self._shield.divide, shows=True)
        compare(without_words, shows=False)
        for index in concerned:
            found[index] = ChatTemplateError(_UNKNOWN)
        return found

    def _concerns(self, texts: Sequence[str]) -> bool:
        """Return whether the template may make special tokens of a chat's texts.

        A template that edits texts may do so with any that is not blank; others need a text with a character
        that marks special tokens.
        """
        return any(map(str.strip, texts)) if self._edits else self._shield.concerns(texts)

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

    def _pieces(self, text: str, mark: str) -> list[Piece]:
        """Special tokens that no mark precedes as ids, the rest as text without marks."""
        tokenizer, pieces = self._tokenizer, list[Piece]()
        start = search = 0
        while match := tokenizer.next_marker(text, search):
            at = match.start()
            if text[at - 1 : at] == mark:
                search = at + 1
                continue
            if start < at:
                pieces += tokenizer.split(text[start:at].replace(mark, ""), special=False)
            pieces.append(tokenizer.markers[match[0]])
            start = search = tokenizer.after(match)
        return pieces + tokenizer.split(text[start:].replace(mark, ""), special=False)
