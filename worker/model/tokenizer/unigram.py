"""SentencePiece's Unigram vocabularies: of all ways to spell a text with tokens, the likeliest is taken.

Encoders of XLM-RoBERTa's kind have them (BGE-M3, Multilingual E5, Arctic Embed L). What is done with
characters before is a table in the file (`precompiled_charsmap`), which SentencePiece compiled: mostly NFKC,
and all white space becomes a space.
"""

from typing import Any, Final

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from nightmill.jobs.errors import ModelFileError
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer.vocabulary import SPACE, Vocabulary

__all__ = ["unigram_engine"]

_CHARSMAP: Final = "tokenizer.ggml.precompiled_charsmap"
_MOST_CHARSMAP: Final = 1 << 22  # bytes; XLM-RoBERTa's has 237,539
_LONGEST: Final = 256
"""Bytes that a character may become: NFKC makes 33 of one. Else a file could make gigabytes of a text."""
_TRIED: Final = "a\u00e9\ufb01\u3000\uff21\u0e33\U0001f600e\u0301"
"""A text that is looked up when a file is opened: a table that is cut short fails then."""


def unigram_engine(file: GgufFile, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Build the engine. Raises ModelFileError, which names the key at fault."""
    scores, tokens = file.numbers("tokenizer.ggml.scores"), vocabulary.tokens
    if len(scores) != len(tokens):
        file.fail(f"tokenizer.ggml.scores: has {len(scores)} entries for {len(tokens)} tokens")
    unknown = file.integer("tokenizer.ggml.unknown_token_id", minimum=0, maximum=len(tokens) - 1)
    ordinary = vocabulary.ordinary()
    if not ordinary:
        file.fail("tokenizer.ggml.tokens: has no ordinary token")
    # A token without a text is never found in one, so no text forms a control token. What is unknown costs 10
    # more than the least likely token, so the score of the others must not be less.
    best = max(scores[index] for index in ordinary.values())
    pieces = [
        (text, scores[index]) if ordinary.get(text) == index and index != unknown else ("", best)
        for index, text in enumerate(tokens)
    ]
    try:
        engine = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=unknown, byte_fallback=False))
    except Exception as error:  # the engine raises nothing more precise
        raise ModelFileError(f"{file.path}: tokenizer.ggml.tokens: {error}") from error
    steps = _characters(file)
    prefix = file.boolean("tokenizer.ggml.add_space_prefix", default=True)
    words: list[Any] = []
    if file.boolean("tokenizer.ggml.remove_extra_whitespaces", default=True):
        if prefix:
            words.append(pre_tokenizers.WhitespaceSplit())
        else:
            steps += [normalizers.Replace(tokenizers.Regex(r"\s+"), " "), normalizers.Strip()]
    words.append(pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always" if prefix else "never"))
    if steps:
        engine.normalizer = normalizers.Sequence(steps)
    engine.pre_tokenizer = pre_tokenizers.Sequence(words)
    return engine


def _characters(file: GgufFile) -> list[Any]:
    """The normalizer of the file's table of characters, if it has one."""
    numbers = file.integers(_CHARSMAP, default=None)
    if not numbers:
        return []
    if len(numbers) > _MOST_CHARSMAP:
        file.fail(f"{_CHARSMAP}: has {len(numbers):,} bytes, more than {_MOST_CHARSMAP:,}")
    if not all(-128 <= number < 256 for number in numbers):
        file.fail(f"{_CHARSMAP}: holds numbers that are not bytes")
    table = bytes(number & 0xFF for number in numbers)
    trie = int.from_bytes(table[:4], "little")
    if len(table) < 4 or trie % 4 or 4 + trie >= len(table):
        file.fail(
            f"{_CHARSMAP}: is not a table of SentencePiece's: its trie has {trie:,} bytes of {len(table):,}"
        )
    replacements = table[4 + trie :]
    longest = max(map(len, replacements.split(b"\0")))
    if longest > _LONGEST:
        file.fail(f"{_CHARSMAP}: makes {longest:,} bytes of a character, more than {_LONGEST}")
    try:
        normalizer = normalizers.Precompiled(table)
        normalizer.normalize_str(_TRIED)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise ModelFileError(
            f"{file.path}: {_CHARSMAP}: is not a table of SentencePiece's: {error}"
        ) from None
    return [normalizer]
