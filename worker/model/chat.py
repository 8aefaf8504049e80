"""Chat messages to a prompt, by the model's own template, so that nobody can forge a turn in a message.

A template writes control tokens such as `<|im_end|>`; a user may write the same characters. Only the
template's count. So special tokens are looked for in the rendered text, and each that came from a message
is passed over. What lies between two special tokens, template text and content together, is tokenised in
one piece: words and merges cross the border as they did in training.

To know which ones came from a message, the messages are rendered with a *mark*, a character that occurs
nowhere else, before each special token in them; an occurrence behind a mark is not special, and the marks
are removed before tokenising. Messages without such text, nearly all, are rendered as they are, and so
templates may trim, test or split contents. Where marks do change what a template does (Qwen3's looks for
`<tool_response>`), the text is rendered again with the special tokens in messages broken up, unreadable for
the template too.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any, Self

from jinja2 import TemplateError

from jobs.errors import ChatTemplateError
from worker.model.gguf_file import GgufFile
from worker.model.sandbox import RefusedError, Sandbox
from worker.model.tokenizer import Piece, Tokenizer

Messages = Sequence[Mapping[str, Any]]
_KEY = "tokenizer.chat_template"
_ROLE = re.compile(
    r"[A-Za-z0-9_-]{1,64}"
)  # such a role may form a token with the template: '<|' + role + '|>'


class ChatTemplate:
    """A model's chat template with its tokenizer. Safe to use from several threads."""

    def __init__(self, source: str, tokenizer: Tokenizer, label: str) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._label = label
        with self._errors():
            self._sandbox = Sandbox(source)
        self._starts = _overlapping(tokenizer.markers)
        self._heads = {text[:end] for text in tokenizer.markers for end in range(1, len(text))}
        self._tails = {text[start:] for text in tokenizer.markers for start in range(1, len(text))}
        self._joined = "\n".join(tokenizer.markers)
        self._longest = max(map(len, tokenizer.markers), default=0)

    @classmethod
    def from_gguf(cls, file: GgufFile, tokenizer: Tokenizer) -> Self:
        """The file's template; raises ChatTemplateError where it has none, or a broken one."""
        source = file.string(_KEY, default="")
        if not source.strip():
            raise ChatTemplateError(
                f"{file.path}: {_KEY}: the model has no chat template; give plain prompts instead of "
                "messages, or add a template with gguf-new-metadata --chat-template"
            )
        return cls(source, tokenizer, str(file.path))

    def render(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """The prompt as text. Raises ChatTemplateError where the template is broken or refuses."""
        vocabulary = self._tokenizer.vocabulary

        def text_of(token_id: int | None) -> str:
            return "" if token_id is None else vocabulary.text_of(token_id)

        variables = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "bos_token": text_of(vocabulary.bos_id),
            "eos_token": text_of(vocabulary.eos_id),
            "tools": None,
            "documents": None,
        }
        with self._errors():
            return self._sandbox.run(variables)

    def encode(self, messages: Messages, *, add_generation_prompt: bool = True) -> list[int]:
        """The prompt as token ids; starts with BOS exactly once where the model wants one.

        Raises ChatTemplateError as `render` does, InvalidPromptError for text that is not valid Unicode.
        """
        text, mark = self._marked(messages, add_generation_prompt)
        pieces = list(self._pieces(text, mark))
        ids = self._tokenizer.encode_pieces([pieces], add_bos=False)[0]
        bos_id = self._tokenizer.bos_id
        if self._tokenizer.add_bos and bos_id is not None and ids[:1] != [bos_id]:
            ids.insert(0, bos_id)
        return ids

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Jinja's errors, and those that a template provokes, as ChatTemplateError."""
        try:
            yield
        except RefusedError as error:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error
        except (TemplateError, RecursionError) as error:
            raise ChatTemplateError(f"{self._label}: {_KEY}: {error}") from error
        except Exception as error:  # a template can provoke any error of the values it handles
            raise ChatTemplateError(f"{self._label}: {_KEY}: {type(error).__name__}: {error}") from error

    def _marked(self, messages: Messages, add_generation_prompt: bool) -> tuple[str, str]:
        """The rendered text with a mark before each special token that a message wrote, and the mark."""
        plain = self.render(messages, add_generation_prompt=add_generation_prompt)
        mark = _unused_character(chain([plain, self._source], _strings(messages)))
        shielded = _map_content(messages, lambda text: self._shield(text, mark))
        if shielded == list(messages):
            return plain, mark
        text = self.render(shielded, add_generation_prompt=add_generation_prompt)
        if text.replace(mark, "") != plain:
            broken = _map_content(messages, lambda text: self._shield(text, mark, broken=True))
            text = self.render(broken, add_generation_prompt=add_generation_prompt)
        return text, mark

    def _shield(self, text: str, mark: str, *, broken: bool = False) -> str:
        """`text` with a mark before each special token, and (if `broken`) also within it.

        A token that only the template's text before or after would complete is marked likewise. Marks that
        turn out needless cost nothing but the second rendering.
        """
        places = {match.start() for match in self._starts.finditer(text)}
        if broken:
            places |= {place + 1 for place in places}
        lead = len(text) - len(text.lstrip())
        tail = len(text.rstrip())
        for length in range(1, min(self._longest, tail - lead + 1)):
            if text[tail - length : tail] in self._heads:
                places.add(tail - length)
            if text[lead : lead + length] in self._tails:
                places.add(lead)
        if (core := text[lead:tail]) and core in self._joined:
            places.add(lead)
        if not places:
            return text
        cuts = [0, *sorted(places), len(text)]
        return mark.join(text[start:end] for start, end in pairwise(cuts))

    def _pieces(self, text: str, mark: str) -> Iterator[Piece]:
        """Special tokens that no mark precedes as ids, the rest as text without marks."""
        start = search = 0
        while match := self._tokenizer.next_marker(text, search):
            if text[match.start() - 1 : match.start()] == mark:
                search = match.start() + 1
                continue
            yield from self._tokenizer.split(text[start : match.start()].replace(mark, ""), special=False)
            yield self._tokenizer.markers[match[0]]
            start = search = match.end()
        yield from self._tokenizer.split(text[start:].replace(mark, ""), special=False)


def _overlapping(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches the first character of each occurrence of one of `texts`, so also of overlapping ones."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[0], []).append(re.escape(text[1:]))
    # (?!) never matches. The literal first character lets the search skip what cannot start a token.
    starts = (f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())
    return re.compile("|".join(starts) or "(?!)")


def _map_content(messages: Messages, change: Callable[[str], str]) -> list[dict[str, Any]]:
    """The messages with every string changed, also within parts and tool calls, except ordinary roles."""

    def visit(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, Mapping):
            return {visit(key): visit(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [visit(item) for item in value]
        return value

    def is_role(key: str, value: Any) -> bool:
        return key == "role" and isinstance(value, str) and _ROLE.fullmatch(value) is not None

    return [
        {key: value if is_role(key, value) else visit(value) for key, value in message.items()}
        for message in messages
    ]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings([*value.keys(), *value.values()])
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _unused_character(texts: Iterable[str]) -> str:
    """A Unicode noncharacter (or, where all are taken, a private one) that is in none of the texts."""
    used = set().union(*texts)
    candidates = chain(range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE))
    return next(char for char in map(chr, candidates) if char not in used)
