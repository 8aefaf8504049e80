"""Text to token ids and back, exactly as the model was trained: a GGUF vocabulary on the `tokenizers` engine.

Special tokens are split off here, before the engine sees the text, and the engine does not even know them:
no text given with `special=False` can ever become a control token.
"""

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, Self

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from nightmill.jobs.errors import InvalidPromptError, ModelFileError
from nightmill.worker.model.gguf_file import GgufFile
from nightmill.worker.model.vocabulary import Vocabulary, byte_alphabet

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # the GPT-2 release
_CL100K = (  # OpenAI's cl100k, with the digits each model groups
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = (_CL100K % "{1,3}",)
_QWEN2 = (_CL100K % "",)
# How text is cut into words before merging, by `tokenizer.ggml.pre` (names as in llama.cpp's vocabulary).
PRE_TOKENIZERS: Final[dict[str, tuple[str, ...]]] = {
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
}
_SPACE: Final = "\u2581"
MAX_SQUARES: Final = 1 << 26
"""Every way to split a SentencePiece token is tried, which costs the square of its length: this is the most
that the squares may add up to. Llama 2's 32,000 tokens have 2**20; Qwen2's 151,936 would have 2**23."""

Piece = str | int  # ordinary text, or the id of a token that stands by itself


class Tokenizer:
    """One model's tokenizer. Immutable once built; safe to use from several threads."""

    bos_id: int | None
    eos_ids: frozenset[int]
    """The tokens that end an answer: declared in the metadata, or known by their text."""
    add_bos: bool
    """Whether prompts of this model start with `bos_id`."""
    markers: dict[str, int]
    """The special tokens by text: never recognised in user content."""
    vocab_size: int
    """Tokens in the vocabulary; the embedding may have more rows."""

    def __init__(self, vocabulary: Vocabulary, engine: tokenizers.Tokenizer, add_bos: bool, prefix: bool):
        self.vocabulary = vocabulary
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        self.vocab_size = len(vocabulary.tokens)
        self.add_bos = add_bos
        self._engine = engine
        self._space_prefix = prefix and not vocabulary.byte_level
        self.markers = vocabulary.markers()
        self._plain = vocabulary.plain()
        self._find_marker = _matcher(self.markers)
        self._find_plain = _matcher(self._plain)
        self._find_marked = _matcher(self.markers | self._plain)

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Self:
        """Build from the file's vocabulary; raises ModelFileError that names the key at fault."""
        vocabulary = Vocabulary.from_gguf(file)
        if vocabulary.byte_level:
            engine, bos_default = _byte_level_engine(file, vocabulary)
        else:
            engine, bos_default = _sentencepiece_engine(file, vocabulary), True
        add_bos = file.boolean("tokenizer.ggml.add_bos_token", default=None)
        if add_bos and vocabulary.bos_id is None:
            file.fail("tokenizer.ggml.bos_token_id: is missing, but add_bos_token asks for it")
        wanted = bos_default if add_bos is None else add_bos
        prefix = file.boolean("tokenizer.ggml.add_space_prefix", default=True)
        return cls(vocabulary, engine, wanted and vocabulary.bos_id is not None, prefix)

    def encode(self, text: str, *, special: bool = False, add_bos: bool | None = None) -> list[int]:
        """The ids of `text`.

        special: recognise markers (control tokens, `<tool_call>` and the like); for rendered templates, not
        for user content. add_bos: None follows the model's metadata.
        Raises InvalidPromptError where `text` holds a lone surrogate.
        """
        return self.encode_batch([text], special=special, add_bos=add_bos)[0]

    def encode_batch(
        self, texts: Sequence[str], *, special: bool = False, add_bos: bool | None = None
    ) -> list[list[int]]:
        """`encode` for many texts at once, on all cores and without holding the interpreter lock."""
        return self.encode_pieces([self.split(text, special=special) for text in texts], add_bos=add_bos)

    def split(self, text: str, *, special: bool) -> list[Piece]:
        """Cut `text` at the tokens that stand by themselves; what is left between them is ordinary text."""
        find = self._find_marked if special else self._find_plain
        pieces: list[Piece] = []
        start = 0
        for match in find.finditer(text) if find else ():
            if match.start() > start:
                pieces.append(text[start : match.start()])
            token = match[0]
            pieces.append(self.markers[token] if token in self.markers else self._plain[token])
            start = match.end()
        if start < len(text):
            pieces.append(text[start:])
        return pieces

    def next_marker(self, text: str, start: int) -> re.Match[str] | None:
        """The first marker in `text` from `start` on; of those that start there, the longest."""
        return self._find_marker.search(text, start) if self._find_marker else None

    def encode_pieces(
        self, prompts: Sequence[Sequence[Piece]], *, add_bos: bool | None = None
    ) -> list[list[int]]:
        """The ids of prompts that were cut by `split` or by other rules about what is special."""
        texts = [text for pieces in prompts for text in self._spelt(pieces)]
        try:
            encoded = iter(self._engine.encode_batch_fast(texts, add_special_tokens=False))
        except TypeError as error:  # the engine's word for a string that is not valid Unicode
            raise InvalidPromptError("the text contains a lone surrogate: it is not valid Unicode") from error
        wants_bos = self.add_bos if add_bos is None else add_bos
        start = [self.bos_id] if wants_bos and self.bos_id is not None else []
        results = []
        for pieces in prompts:
            ids = list(start)
            for piece in pieces:
                if isinstance(piece, int):
                    ids.append(piece)
                else:
                    ids.extend(next(encoded).ids)
            results.append(ids)
        return results

    def encode_each(
        self, prompts: Sequence[Sequence[Piece]], *, add_bos: bool | None = None
    ) -> list[list[int] | InvalidPromptError]:
        """`encode_pieces`, where a text that is not valid Unicode fails its own prompt alone."""
        try:
            return list(self.encode_pieces(prompts, add_bos=add_bos))
        except InvalidPromptError as error:
            if len(prompts) == 1:
                return [error]
            return [self.encode_each([pieces], add_bos=add_bos)[0] for pieces in prompts]

    def _spelt(self, pieces: Sequence[Piece]) -> Iterable[str]:
        """The ordinary texts of a prompt as the engine wants them."""
        after_text = False
        for piece in pieces:
            if isinstance(piece, str):
                if not self.vocabulary.byte_level:
                    # llama.cpp prefixes the first text and each text after a special token.
                    prefix = _SPACE if self._space_prefix and not after_text else ""
                    yield prefix + piece.replace(" ", _SPACE)
                else:
                    yield piece
            after_text = isinstance(piece, str)

    def decode(self, ids: Iterable[int], *, special: bool = False, continues: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD.

        special: write control tokens out instead of leaving them out. continues: the ids follow other text,
        so the space that SentencePiece puts before the first word is kept.
        """
        if special:
            spelt = (self.vocabulary.bytes_of(i) or self.vocabulary.text_of(i).encode() for i in ids)
        else:
            spelt = (self.vocabulary.bytes_of(i) for i in ids)
        data = b"".join(spelt)
        if self._space_prefix and not continues:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def stream(self, *, continues: bool = False) -> "TextStream":
        """Decode token by token; the parts join to what `decode` gives for the same ids."""
        return TextStream(self.vocabulary, strip_space=self._space_prefix and not continues)


class TextStream:
    """Decodes one sequence as it grows, in constant time per token, never handing out half a character."""

    __slots__ = ("_decoder", "_strip_space", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, *, strip_space: bool) -> None:
        self._vocabulary = vocabulary
        self._strip_space = strip_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that is complete now; empty while a character lacks bytes, and for control tokens."""
        data = self._vocabulary.bytes_of(token_id)
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The end of the text: U+FFFD for a character that was never completed, else empty."""
        return self._decoder.decode(b"", final=True)


def _matcher(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Finds the leftmost, then longest of `texts`."""
    alternatives = [re.escape(text) for text in sorted(texts, key=len, reverse=True)]
    return re.compile("|".join(alternatives)) if alternatives else None


def _byte_level_engine(file: GgufFile, vocabulary: Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """The engine of a GPT-2 style vocabulary, and whether its prompts start with BOS by default."""
    name = file.string("tokenizer.ggml.pre", default="default")
    patterns = PRE_TOKENIZERS.get(name)
    if patterns is None:
        # Guessing would tokenise most text slightly wrong and nobody would see why answers got worse.
        file.fail(
            f"tokenizer.ggml.pre: {name!r} is not supported; supported are {', '.join(PRE_TOKENIZERS)}. "
            "Where an old file lacks the key, set it with gguf-new-metadata --pre-tokenizer"
        )
    ordinary = vocabulary.ordinary()
    # Real vocabularies lack bytes that never occurred in training (SmolLM2's 0x04 and others). The engine
    # leaves such a byte out, and so does llama.cpp: llm_tokenizer_bpe looks up the bytes of a symbol that is
    # no token, and skips those that are none either. The unknown token would be worse: it is often a
    # control token (SmolLM2's is <|endoftext|>), which text must not form.
    if not any(char in ordinary for char in byte_alphabet().values()):
        file.fail("tokenizer.ggml.tokens: has no token for any single byte, as a gpt2 vocabulary has")
    llama3 = patterns is _LLAMA3
    engine = _engine(file, ordinary, _merges(file, vocabulary, ordinary), ignore_merges=llama3)
    if patterns is _QWEN2:
        # Qwen's own tokenizers normalise, so the models have seen composed characters only; llama.cpp does
        # not, and gives such a model "e" and an accent where its training had "é".
        engine.normalizer = normalizers.NFC()
    split: list[Any] = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return engine, llama3


def _merges(file: GgufFile, vocabulary: Vocabulary, ordinary: dict[str, int]) -> list[tuple[str, str]]:
    known = set(vocabulary.tokens)
    merges = []
    for index, line in enumerate(file.strings("tokenizer.ggml.merges")):
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if left in ordinary and right in ordinary and left + right in ordinary:
            merges.append((left, right))
        elif cut < 0 or not {left, right, left + right} <= known:
            file.fail(
                f"tokenizer.ggml.merges: item {index}, {line[:80]!r}, names a token that does not exist"
            )
        # else it names a special token, which text must not form
    return merges


def _sentencepiece_engine(file: GgufFile, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece BPE: of all adjacent pairs that form a piece, the best-scoring is merged first.

    The same as byte-pair encoding with every way to split a piece as a merge, ranked by the piece's score;
    so Hugging Face converts Llama's tokenizer (transformers, convert_slow_tokenizer.py).
    """
    scores = file.numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary.tokens):
        file.fail(f"tokenizer.ggml.scores: has {len(scores)} entries for {len(vocabulary.tokens)} tokens")
    ordinary = vocabulary.ordinary()
    for byte in range(256):
        if f"<0x{byte:02X}>" not in ordinary:
            file.fail(f"tokenizer.ggml.tokens: has no token <0x{byte:02X}> for byte {byte}")
    squares = sum(len(piece) ** 2 for piece in ordinary)
    if squares > MAX_SQUARES:
        file.fail(
            f"tokenizer.ggml.tokens: the squares of the tokens' lengths add up to {squares:,}, "
            f"more than {MAX_SQUARES:,}: there are too many long ones"
        )
    ranked: list[tuple[float, int, int, str, str]] = []
    one = {piece: piece for piece in ordinary}  # so that the merges hold no texts of their own
    for piece, index in ordinary.items():
        for cut in range(1, len(piece)):
            left, right = one.get(piece[:cut]), one.get(piece[cut:])
            if left and right:
                ranked.append((-scores[index], -len(left), -len(right), left, right))
    ranked.sort(key=lambda merge: merge[:3])
    return _engine(file, ordinary, [merge[3:] for merge in ranked], byte_fallback=True)


def _engine(
    file: GgufFile, vocab: dict[str, int], merges: list[tuple[str, str]], **options: bool
) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the engine raises nothing more precise
        raise ModelFileError(f"{file.path}: tokenizer.ggml.merges: {error}") from error
