"""The vocabulary of a GGUF file, checked: which text or bytes each token id stands for, and what it is for.

Tokens fall into four groups. *Ordinary* tokens are what text is spelt with. *Markers* are control tokens
and everything that looks like one (`<|im_end|>`, `[INST]`): they structure a prompt and are never read out
of user content. *Plain* user-defined tokens (runs of spaces, words, tags of HTML) belong to text and are
recognised anywhere. *Unused* tokens are padding.
"""

import re
from codecs import charmap_encode
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Self

from gguf import TokenType

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer.ends import DECLARED_ENDS, ends_by_text, without_steps
from nightmill.worker.model.tokenizer.pre_tokenizers import WORD_PIECE, pre_tokenizer_of

MAX_SPECIAL: Final = 1 << 18
"""Characters of all control and user-defined tokens, which are looked for in every text (Llama 3: 7,498)."""

SPACE: Final = "\u2581"  # SentencePiece's visible space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# What looks like structure of a prompt, and is not one of the tags of HTML that are tokens of Gemma's.
_MARKUP = re.compile(
    r"(?!</?(?:table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|blockquote|strong|em|[biu]|su[bp]|code)>)"
    r"<\S+>|\[\S+\]"
)
# What models put around thoughts and calls of tools, which whoever reads their texts looks for. It counts if
# the model's template has it: else it is a token that means nothing.
_MARKS: Final = frozenset(
    {
        "<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>",
        "<|START_THINKING|>", "<|END_THINKING|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>",
        "<|constrain|>", "<|channel>", "<channel|>",
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>",
        "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call>", "<tool_call|>", '<|"|>',
        "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call|>", "<|/tool_call|>", "<|python_start|>",
        "<|python_end|>", "<|function_call|>", "<TOOLCALL>", "</TOOLCALL>", "<tool_calls>", "</tool_calls>",
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
        "<|tool_calls_section_end|>", "<|START_ACTION|>", "<|END_ACTION|>",
        "<seed:tool_call>", "</seed:tool_call>", "<minimax:tool_call>", "</minimax:tool_call>",
    }
)  # fmt: skip
_SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
_SILENT = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED)


def byte_alphabet() -> dict[int, str]:
    """The character that stands for each byte in byte-level BPE vocabularies (GPT-2's bytes_to_unicode)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


_BYTE_OF: Final = {char: byte for byte, char in byte_alphabet().items()}
_CHARMAP: Final = {ord(char): byte for char, byte in _BYTE_OF.items()}  # the same, as a codec takes it


@dataclass(slots=True)
class Vocabulary:
    """Tokens by id.

    byte_level: tokens are written in GPT-2's alphabet of bytes; if not, in plain characters, with U+2581 for
    a space and tokens such as <0x0A> for bytes, as SentencePiece writes them.
    """

    byte_level: bool
    tokens: list[str]
    kinds: list[int]
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    marks: frozenset[int] = frozenset()
    """Tokens that answers are marked up with; they are shown in texts, control tokens or not."""
    _bytes: list[bytes | None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._bytes = [None] * len(self.tokens)

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Self:
        """Read the vocabulary; raises ModelFileError that names the key at fault."""
        how = pre_tokenizer_of(file)
        tokens = file.strings("tokenizer.ggml.tokens")
        if not tokens:
            file.fail("tokenizer.ggml.tokens: has no tokens")
        types = file.integers("tokenizer.ggml.token_type", default=None)
        if types is not None and len(types) != len(tokens):
            file.fail(f"tokenizer.ggml.token_type: has {len(types)} entries for {len(tokens)} tokens")

        def declared(name: str) -> int | None:
            key = f"tokenizer.ggml.{name}_token_id"
            if file.integer(key, default=0) >= len(tokens):
                file.fail(f"{key}: is {file.integer(key)}, but there are {len(tokens)} tokens")
            return file.integer(key, default=None)

        bos_id, eos_id = declared("bos"), declared("eos")
        if bos_id is None and file.string("general.architecture", default="").endswith(WORD_PIECE):
            bos_id = declared("cls")  # of encoders
        ends = {end for end in map(declared, DECLARED_ENDS) if end is not None}
        kinds = [int(TokenType.NORMAL)] * len(tokens) if types is None else types
        for index, text in enumerate(tokens):
            if _looks_control(text, kinds[index], typed=types is not None):
                kinds[index] = TokenType.CONTROL
        ends |= ends_by_text(tokens, kinds, bos_id)
        for index in ends if bos_id is None else ends | {bos_id}:
            kinds[index] = TokenType.CONTROL
        special = sum(len(text) for text, kind in zip(tokens, kinds, strict=True) if kind in _SPECIAL)
        if special > MAX_SPECIAL:
            file.fail(
                f"tokenizer.ggml.token_type: control and user-defined tokens have {special:,} characters in "
                f"all, more than {MAX_SPECIAL:,}"
            )
        byte_level = how is not None and how.byte_alphabet
        keys = ("tokenizer.chat_template", "tokenizer.chat_template.tool_use")
        template = "\n".join(file.string(key, default="") for key in keys)
        marks = {index for index, text in enumerate(tokens) if text in _MARKS and text in template}
        ends = set(without_steps(ends, tokens))
        return cls(byte_level, tokens, kinds, bos_id, eos_id, frozenset(ends), frozenset(marks - ends))

    def ordinary(self) -> dict[str, int]:
        """Ids of the tokens that text is spelt with; of tokens with the same text the last counts."""
        silent = {*_SILENT, TokenType.USER_DEFINED}
        return {
            text: index for index, text in enumerate(self.tokens) if text and self.kinds[index] not in silent
        }

    def markers(self) -> dict[str, int]:
        """Ids of the tokens that structure a prompt and are never recognised in user content."""
        return self._chosen(
            lambda kind, text: (
                kind in (TokenType.CONTROL, TokenType.UNKNOWN)
                or (kind == TokenType.USER_DEFINED and _MARKUP.fullmatch(text) is not None)
            )
        )

    def plain(self) -> dict[str, int]:
        """Ids of user-defined tokens that are recognised in any text, before it is split into words."""
        chosen = self._chosen(
            lambda kind, text: kind == TokenType.USER_DEFINED and _MARKUP.fullmatch(text) is None
        )
        # SentencePiece's runs of spaces; converters since 2024 write them as spaces themselves.
        return chosen if self.byte_level else {text.replace(SPACE, " "): chosen[text] for text in chosen}

    def _chosen(self, wanted: Callable[[int, str], bool]) -> dict[str, int]:
        return {
            text: index for index, text in enumerate(self.tokens) if text and wanted(self.kinds[index], text)
        }

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes a token adds to the text; empty for control, unused and padding ids."""
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative")
        if token_id >= len(self.tokens):
            return b""  # embedding rows past the vocabulary are padding
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def spell_all(self) -> None:
        """Find the bytes of every token now: 0.1 s for 150,000 that no text has to wait for later."""
        spell = self._spell
        self._bytes = [spell(index) if known is None else known for index, known in enumerate(self._bytes)]

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of `token_ids`, as a TextStream that strips no space would give it piece by piece."""
        return b"".join(map(self.bytes_of, token_ids)).decode("utf-8", errors="replace")

    def text_of(self, token_id: int) -> str:
        """The token as the vocabulary writes it, for display."""
        return self.tokens[token_id] if 0 <= token_id < len(self.tokens) else ""

    def _spell(self, token_id: int) -> bytes:
        text, kind = self.tokens[token_id], self.kinds[token_id]
        if token_id in self.marks:
            return text.encode()
        if kind in _SILENT:
            return b""
        if not self.byte_level:
            byte = _BYTE_TOKEN.fullmatch(text)
            return bytes([int(byte[1], 16)]) if byte else text.replace(SPACE, " ").encode()
        if kind == TokenType.USER_DEFINED:
            return text.encode()  # written as it is, not in the byte alphabet
        try:
            return charmap_encode(text, "strict", _CHARMAP)[0]
        except UnicodeEncodeError:  # a character that stands for no byte is written as it is
            return b"".join(bytes([_BYTE_OF[char]]) if char in _BYTE_OF else char.encode() for char in text)


def _looks_control(text: str, kind: int, *, typed: bool) -> bool:
    """Return whether a token is a control token that the file declares as something else.

    Converters before mid-2024 wrote `<|im_start|>` and its like as user-defined or normal tokens; llama.cpp
    overrides their type too.
    """
    return (kind == TokenType.USER_DEFINED or not typed) and (
        text.startswith("<|") and text.endswith("|>") and len(text) > 4
    )
