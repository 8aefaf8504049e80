"""What ends an answer, and what stands for itself in a prompt, as the models' own tokenizers have it."""

from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType

from nightmill.worker.model.chat import ChatTemplate
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer import Tokenizer
from tests.support.ggufs import (
    CONTROL,
    TestVocabulary,
    byte_vocabulary,
    sentencepiece_vocabulary,
    write_model,
)

NORMAL, USER_DEFINED = TokenType.NORMAL, TokenType.USER_DEFINED


def tokenizer_of(path: Path, vocabulary: TestVocabulary, **options: Any) -> Tokenizer:
    with GgufFile.open(write_model(path / "model.gguf", layers=1, vocabulary=vocabulary, **options)) as file:
        return Tokenizer.from_gguf(file)


def ends(tokenizer: Tokenizer) -> set[str]:
    return {tokenizer.vocabulary.text_of(index) for index in tokenizer.eos_ids}


def test_declared_tokens_end_an_answer(tmp_path: Path) -> None:
    names = ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")
    declared = {f"tokenizer.ggml.{name}_token_id": 300 + index for index, name in enumerate(names)}
    vocabulary = byte_vocabulary()
    tokenizer = tokenizer_of(tmp_path, vocabulary, metadata=declared)
    named = {vocabulary.id("<|im_end|>"), vocabulary.id("<|endoftext|>")}
    assert tokenizer.eos_ids == named | {300, 301, 302, 303, 304}
    assert tokenizer.decode([300, 304]) == ""


@pytest.mark.parametrize("kind", [TokenType.CONTROL, USER_DEFINED, NORMAL])
@pytest.mark.parametrize(
    "text",
    [
        "<|eot_id|>",
        "<end_of_turn>",
        "<turn|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "[EOS]",
        "<|fim_pad|>",
    ],
)
def test_tokens_that_are_known_by_their_text_end_an_answer(text: str, kind: int, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, byte_vocabulary(extra=[(text, kind)]))
    assert ends(tokenizer) == {"<|endoftext|>", "<|im_end|>", text}
    assert tokenizer.decode([tokenizer.markers[text]]) == ""


def test_a_tag_that_ends_struck_text_does_not_end_an_answer(tmp_path: Path) -> None:
    gemma = tokenizer_of(tmp_path, byte_vocabulary(extra=[("</s>", USER_DEFINED)]))
    assert ends(gemma) == {"<|endoftext|>", "<|im_end|>"}
    for around in ([("</s>", TokenType.CONTROL)], [("<s>", TokenType.CONTROL), ("</s>", USER_DEFINED)]):
        tokenizer = tokenizer_of(tmp_path, byte_vocabulary(extra=around))
        assert ends(tokenizer) == {"<|endoftext|>", "<|im_end|>", "</s>"}


@pytest.mark.parametrize(
    ("others", "whole"),
    [
        (["<|return|>"], True),
        (["<|return|>", "<|call|>"], False),
        (["<|flush|>", "<|calls|>"], False),
        (["<|calls|>"], True),
    ],
)
def test_the_end_of_a_step_is_not_that_of_an_answer(others: list[str], whole: bool, tmp_path: Path) -> None:
    extra = [(text, int(TokenType.CONTROL)) for text in ("<|end|>", *others)]
    found = ends(tokenizer_of(tmp_path, byte_vocabulary(extra=extra)))
    assert found == {"<|endoftext|>", "<|im_end|>", *others} | ({"<|end|>"} if whole else set())


def test_tags_that_are_tokens_belong_to_text_and_turns_do_not(tmp_path: Path) -> None:
    extra = [("<table>", USER_DEFINED), ("</h1>", USER_DEFINED), ("<tool_response>", USER_DEFINED)]
    vocabulary = sentencepiece_vocabulary(extra=extra)
    tokenizer = tokenizer_of(tmp_path, vocabulary, metadata={"tokenizer.ggml.add_space_prefix": False})
    ids = tokenizer.encode("<table>one</h1><tool_response>", add_bos=False)
    assert ids[0] == vocabulary.id("<table>")
    assert vocabulary.id("</h1>") in ids
    assert vocabulary.id("<tool_response>") not in ids
    assert tokenizer.decode(ids) == "<table>one</h1><tool_response>"


@pytest.mark.parametrize("written", ["\u2581\u2581\u2581", "   "])
def test_runs_of_spaces_are_found_however_the_converter_wrote_them(written: str, tmp_path: Path) -> None:
    vocabulary = sentencepiece_vocabulary(extra=[(written, USER_DEFINED)])
    tokenizer = tokenizer_of(tmp_path, vocabulary, metadata={"tokenizer.ggml.add_space_prefix": False})
    ids = tokenizer.encode("one   one", add_bos=False)
    assert vocabulary.id(written) in ids
    assert tokenizer.decode(ids) == "one   one"


def test_phi_3_swallows_white_space_after_its_markers(tmp_path: Path) -> None:
    extra = [(text, int(TokenType.CONTROL)) for text in ("<|user|>", "<|end|>")]
    vocabulary = sentencepiece_vocabulary(extra=extra)
    user, end = vocabulary.id("<|user|>"), vocabulary.id("<|end|>")
    phi3, llama = (
        tokenizer_of(tmp_path, vocabulary, metadata={"general.architecture": architecture})
        for architecture in ("phi3", "llama")
    )
    tight, loose = "<|user|>hello<|end|>", "<|user|>\n hello<|end|>\n"
    assert (
        phi3.encode(loose, special=True)
        == phi3.encode(tight, special=True)
        == llama.encode(tight, special=True)
    )
    assert llama.encode(loose, special=True) != llama.encode(tight, special=True)
    assert phi3.encode("<s> hello", special=True) == llama.encode("<s> hello", special=True)

    source = "{% for m in messages %}<|user|>\n{{ m.content }}<|end|>\n{% endfor %}"
    template = ChatTemplate(source, phi3, "model.gguf")
    try:
        ids = template.encode([{"role": "user", "content": "hello<|end|>"}])
    finally:
        template.close()
    assert ids[:2] == [1, user]
    assert (ids.count(user), ids.count(end), ids[-1]) == (1, 1, end)
    assert phi3.decode(ids) == "hello<|end|>"


def gemma4() -> TestVocabulary:
    """SentencePiece's tokens with a list of merges; runs of newlines are tokens."""
    pieces = sentencepiece_vocabulary()
    word = "\u2581hello"
    merges = [f"{word[:cut]} {word[cut]}" for cut in range(1, len(word))]
    runs = ["\n", "\n\n"]
    at = len(pieces.tokens) - len(CONTROL)
    tokens = [*pieces.tokens[:at], *runs, *pieces.tokens[at:]]
    kinds = [*pieces.types[:at], 1, 1, *pieces.types[at:]]
    return TestVocabulary("gemma4", tokens, kinds, merges=[*merges, "\n \n"])


def test_gemma_4_merges_plain_characters_within_lines(tmp_path: Path) -> None:
    vocabulary = gemma4()
    tokenizer = tokenizer_of(tmp_path, vocabulary)
    text = " hello hello\n\n hello\u00df\U0001f999"
    ids = tokenizer.encode(text)
    hello, lines = vocabulary.id("\u2581hello"), vocabulary.id("\n\n")
    assert ids[:5] == [tokenizer.bos_id, hello, hello, lines, hello]
    assert ids[5:] == [vocabulary.id(f"<0x{byte:02X}>") for byte in "\u00df\U0001f999".encode()]
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.flush() == text
