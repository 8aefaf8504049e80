"""The engines that merge ordinary text into tokens, for the kinds of vocabulary that GGUF files have.

One has a list of merges, and text is first cut into words in the way that its pre-tokenizer is named for.
SentencePiece's merge by the scores of tokens, or (`unigram`) take the tokens that are likeliest together.
"""

import os
from typing import Any, Final

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from nightmill.jobs.errors import ModelFileError
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer.pre_tokenizers import (
    UNIGRAM,
    WORD_PIECE,
    PreTokenizer,
    pre_tokenizer_of,
)
from nightmill.worker.model.tokenizer.unigram import unigram_engine
from nightmill.worker.model.tokenizer.vocabulary import SPACE, Vocabulary, byte_alphabet

__all__ = ["MAX_SQUARES", "build_engine", "splitter"]

THREADS: Final = 4
"""Threads that tokenise, unless RAYON_NUM_THREADS says otherwise. The library would take all cores in every
worker of a host, and the engine and the client need theirs; one reads 600,000 tokens of Qwen2's a second."""
_INSIDE: Final = "##"
"""The beginning of WordPiece's tokens inside of words."""
MAX_SQUARES: Final = 1 << 26
"""Every way to split a SentencePiece token is tried, which costs the square of its length: this is the most
that the squares may add up to. Llama 2's 32,000 tokens have 2**20; Qwen2's 151,936 would have 2**23."""


def build_engine(file: GgufFile, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """The engine of a vocabulary. Raises ModelFileError, which names the key at fault."""
    # Rayon, which the library computes with, reads it when it first needs its threads.
    os.environ.setdefault("RAYON_NUM_THREADS", str(min(THREADS, os.cpu_count() or 1)))
    how = pre_tokenizer_of(file)
    if file.string("tokenizer.ggml.model") == WORD_PIECE:
        return _word_piece_engine(file, vocabulary)
    if file.string("tokenizer.ggml.model") == UNIGRAM:
        return unigram_engine(file, vocabulary)
    if how is None:
        return _sentencepiece_engine(file, vocabulary)
    return _word_engine(file, vocabulary, how)


def splitter(how: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """Build the pre-tokenizer that cuts text into words by the patterns of `how`, one after another."""
    splits: list[Any] = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in how.patterns
    ]
    return pre_tokenizers.Sequence(splits)


def _word_engine(file: GgufFile, vocabulary: Vocabulary, how: PreTokenizer) -> tokenizers.Tokenizer:
    """The engine that cuts text into words and merges each by the file's list of merges."""
    ordinary = vocabulary.ordinary()
    if how.byte_alphabet:
        # Real vocabularies lack bytes that never occurred in training (SmolLM2's 0x04 and others). The engine
        # leaves such a byte out, and so does llama.cpp: llm_tokenizer_bpe looks up the bytes of a symbol that
        # is no token, and skips those that are none either. The unknown token would be worse: it is often a
        # control token (SmolLM2's is <|endoftext|>), which text must not form.
        if not any(char in ordinary for char in byte_alphabet().values()):
            file.fail("tokenizer.ggml.tokens: has no token for any single byte, as a gpt2 vocabulary has")
    else:
        _check_byte_tokens(file, ordinary)
    engine = _engine(
        file, ordinary, _merges(file, vocabulary, ordinary),
        ignore_merges=how.whole_words, byte_fallback=not how.byte_alphabet,
    )  # fmt: skip
    if how.composes:
        # llama.cpp does not, and gives such a model "e" and an accent where its training had "é".
        engine.normalizer = normalizers.NFC()
    steps = [splitter(how)]
    if how.byte_alphabet:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    engine.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return engine


def _word_piece_engine(file: GgufFile, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """BERT's: words without accents in small letters, each cut into the longest tokens from its beginning.

    As llama.cpp does; a file says nothing of capital letters.
    """
    key = "tokenizer.ggml.unknown_token_id"
    unknown = file.integer(key, minimum=0, maximum=len(vocabulary.tokens) - 1)
    pieces = {
        text[1:] if text.startswith(SPACE) else f"{_INSIDE}{text}": index
        for text, index in vocabulary.ordinary().items()
    }
    word = vocabulary.text_of(unknown)
    engine = tokenizers.Tokenizer(models.WordPiece(vocab=pieces | {word: unknown}, unk_token=word))
    engine.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(SPACE, " "),
            normalizers.BertNormalizer(
                clean_text=True, handle_chinese_chars=True, strip_accents=True, lowercase=True
            ),
        ]
    )
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return engine


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
    _check_byte_tokens(file, ordinary)
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


def _check_byte_tokens(file: GgufFile, ordinary: dict[str, int]) -> None:
    for byte in range(256):
        if f"<0x{byte:02X}>" not in ordinary:
            file.fail(f"tokenizer.ggml.tokens: has no token <0x{byte:02X}> for byte {byte}")


def _engine(
    file: GgufFile, vocab: dict[str, int], merges: list[tuple[str, str]], **options: bool
) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the engine raises nothing more precise
        raise ModelFileError(f"{file.path}: tokenizer.ggml.merges: {error}") from error
