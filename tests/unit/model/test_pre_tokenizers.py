"""Text is cut into the words that each vocabulary was trained on, in a time proportional to its length."""

import json
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from nightmill.jobs.errors import ModelFileError
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer import Tokenizer
from nightmill.worker.model.tokenizer.engines import splitter
from nightmill.worker.model.tokenizer.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from tests.support.ggufs import byte_vocabulary, write_model

pytestmark = pytest.mark.heavy

# The lengths of the words of 29 texts in 25 scripts, with numbers, code, emoji and control characters; for
# each group of names that cut alike. They come from llama.cpp's own splitter (unicode_regex_split), which
# agrees in all groups but eight. For gpt-4o, tekken, kimi-k2, tiny_aya and youtu it approximates the patterns
# of the models' own tokenizers; for superbpe it knows fewer digits, and for deepseek-llm and deepseek-coder
# less white space. There they come from Oniguruma, with the patterns of the models' tokenizer.json files.
EXPECTED: dict[str, Any] = json.loads(Path(__file__).with_name("splits.json").read_text(encoding="utf-8"))
GROUPS = EXPECTED["names"]
PAGE = Path(__file__).parents[3] / "docs" / "models.md"
# One text of each kind of characters that patterns tell apart.
KINDS = ("a", "A", "1", " ", "\n", "\r", ".", "'", "\u4e2d", "\u0301", "\U0001f680", "Aa", "a ", "1.", " \n")
ENDS = ("", "a", "1", ".", "\u4e2d")


def documented() -> str:
    """The table of names in docs/models.md."""
    flags = {"composes": "NFC", "whole_words": "whole words", "starts_with_bos": "BOS"}
    alike: dict[PreTokenizer, list[str]] = {}
    for name, how in PRE_TOKENIZERS.items():
        alike.setdefault(how, []).append(f"`{name}`")
    rows = []
    for how, names in alike.items():
        also = [word for flag, word in flags.items() if getattr(how, flag)]
        rows.append(f"| {', '.join(names)} | {', '.join(also) or '-'} |")
    return "\n".join(["| cut alike | also |", "| --- | --- |", *rows])


def test_names_are_those_that_are_documented() -> None:
    assert f"\n\n{documented()}\n\n<!-- end -->" in PAGE.read_text(encoding="utf-8")


def test_every_name_has_expected_words() -> None:
    assert [name for names in GROUPS.values() for name in names] == list(PRE_TOKENIZERS)


@pytest.mark.parametrize("group", GROUPS)
def test_words_are_those_of_the_vocabulary(group: str) -> None:
    for name in GROUPS[group]:
        cut = splitter(PRE_TOKENIZERS[name])
        for text, lengths in zip(EXPECTED["texts"], EXPECTED["lengths"][group], strict=True):
            words = [word for word, _ in cut.pre_tokenize_str(text)]
            assert "".join(words) == text
            assert " ".join(str(len(word)) for word in words) == lengths, (name, text)


def seconds(cut: tokenizers.pre_tokenizers.PreTokenizer, text: str) -> float:
    start = time.process_time()
    cut.pre_tokenize_str(text)
    return time.process_time() - start


def is_quadratic(how: PreTokenizer) -> bool:
    """Whether four times the text ever takes ten times the time: the square would be 16 times."""
    cut = splitter(how)

    def grows(kind: str, end: str) -> bool:
        short, long = (kind * (length // len(kind)) + end for length in (1_000, 4_000))
        # What takes less than two microseconds a character is not worth a second look.
        return seconds(cut, long) > 0.008 and all(
            min(seconds(cut, long) for _ in range(3)) > 10 * seconds(cut, short) for _ in range(3)
        )

    return any(grows(kind, end) for kind, end in product(KINDS, ENDS))


@pytest.mark.parametrize("group", GROUPS)
def test_time_is_proportional_to_the_text(group: str) -> None:
    assert not is_quadratic(PRE_TOKENIZERS[group])


@pytest.mark.parametrize("pattern", [r"\s+$", r"\d{1,3}(?=(?:\d{3})*\b)", r"(?=(\d{3})+(?!\d))"])
def test_patterns_as_the_models_files_have_them_would_take_the_square(pattern: str) -> None:
    assert is_quadratic(PreTokenizer(patterns=(pattern,)))


def test_names_that_are_not_known_are_refused_with_those_that_are(tmp_path: Path) -> None:
    for metadata, said in {
        "imaginary": "tokenizer.ggml.pre: 'imaginary' is not supported; supported are default, gpt-2,",
        None: "tokenizer.ggml.pre: the key is missing; .* gguf-new-metadata --pre-tokenizer",
    }.items():
        path = write_model(tmp_path / "m.gguf", layers=1, metadata={"tokenizer.ggml.pre": metadata})
        with GgufFile.open(path) as file, pytest.raises(ModelFileError, match=said):
            Tokenizer.from_gguf(file)


@pytest.mark.parametrize("model", ["rwkv", "plamo2", "hybriddna", "whitespace", "imaginary"])
def test_vocabularies_that_no_generator_here_has_are_refused_by_name(model: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", layers=1, metadata={"tokenizer.ggml.model": model})
    said = f"tokenizer.ggml.model: '{model}'.* is not supported; supported are gpt2, llama, gemma4"
    with GgufFile.open(path) as file, pytest.raises(ModelFileError, match=said):
        Tokenizer.from_gguf(file)


def test_a_word_that_is_a_token_is_not_merged_where_the_name_says_so(tmp_path: Path) -> None:
    # "hello" is a token, and the merges build only its beginnings.
    vocabulary = byte_vocabulary()
    vocabulary.merges.remove("hell o")  # type: ignore[union-attr]
    for name, how in PRE_TOKENIZERS.items():
        if how.byte_alphabet:
            path = write_model(tmp_path / "m.gguf", layers=1, vocabulary=vocabulary, pre=name)
            with GgufFile.open(path) as file:
                tokenizer = Tokenizer.from_gguf(file)
            ids = tokenizer.encode("hello", add_bos=False)
            assert (ids == [vocabulary.id("hello")]) is how.whole_words, name
            assert tokenizer.add_bos is how.starts_with_bos, name


if __name__ == "__main__":
    before, start, rest = PAGE.read_text(encoding="utf-8").partition(
        "<!-- written by python -m tests.unit.model."
    )
    first, _, after = rest.partition("\n\n")
    PAGE.write_text(
        f"{before}{start}{first}\n\n{documented()}\n\n<!-- end -->{after.partition('<!-- end -->')[2]}"
    )
