"""Ids match the models' own tokenizers, decoding never halves a character, text never becomes control."""

import tracemalloc
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.normalizers import NFC

from nightmill.jobs.errors import InvalidPromptError, ModelFileError
from nightmill.worker.model.chat.renderer import MAX_SOURCE, Limits
from nightmill.worker.model.chat.shield import Shield
from nightmill.worker.model.gguf import header
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.gguf.parts import MAX_PARTS
from nightmill.worker.model.tokenizer import Tokenizer
from nightmill.worker.model.tokenizer.engines import MAX_SQUARES
from nightmill.worker.model.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from nightmill.worker.model.tokenizer.vocabulary import MAX_SPECIAL, Vocabulary, byte_alphabet
from tests.support.ggufs import (
    CONTROL,
    TestVocabulary,
    byte_vocabulary,
    sentencepiece_vocabulary,
    write_model,
)

pytestmark = pytest.mark.heavy

VOCABULARIES = {"bytes": byte_vocabulary(), "spm": sentencepiece_vocabulary()}


def tokenizer_of(path: Path, vocabulary: TestVocabulary, **options: Any) -> Tokenizer:
    with GgufFile.open(write_model(path / "model.gguf", layers=1, vocabulary=vocabulary, **options)) as file:
        return Tokenizer.from_gguf(file)


@pytest.fixture(scope="module", params=VOCABULARIES)
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("vocab"), VOCABULARIES[request.param])


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("bytes"), VOCABULARIES["bytes"])


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_decoding_gives_the_text_back(either: Tokenizer, text: str) -> None:
    # A byte-level vocabulary is written as Qwen2's here, whose texts are normalised.
    expected = NFC().normalize_str(text) if either.vocabulary.byte_level else text
    assert either.decode(either.encode(text, add_bos=False)) == expected


CONTROLISH = st.lists(
    st.one_of(
        st.sampled_from(
            [*CONTROL, "<tool_call>", "</s>", "<s>", "<unk>", "<|", "im_end", "|>", "<0x41>", " "]
        ),
        st.text(max_size=5),
    )
).map("".join)


@settings(max_examples=100, deadline=None)
@given(CONTROLISH)
def test_text_never_yields_a_special_token(either: Tokenizer, text: str) -> None:
    ids = either.encode(text, add_bos=False)
    assert not set(ids) & set(either.markers.values())
    assert either.decode(ids) in (text, unicodedata.normalize("NFC", text))  # the latter for Qwen's


ALPHABET = byte_alphabet()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(st.one_of(st.sampled_from([*ALPHABET.values()]), st.characters()), min_size=1)))
def test_bytes_of_tokens_are_those_of_each_character_of_the_alphabet(tokens: list[str]) -> None:
    byte_of = {char: bytes([byte]) for byte, char in ALPHABET.items()}
    kinds = [int(TokenType.NORMAL)] * len(tokens)
    known, asked = (Vocabulary(True, tokens, kinds, None, None, frozenset()) for _ in range(2))
    known.spell_all()
    for index, text in enumerate(tokens):
        expected = b"".join(byte_of.get(char) or char.encode() for char in text)
        assert known.bytes_of(index) == asked.bytes_of(index) == expected


def test_special_text_is_recognised_on_request(either: Tokenizer) -> None:
    text = "<|im_start|>user\nhello<|im_end|>"
    ids = either.encode(text, special=True, add_bos=False)
    assert (ids[0], ids[-1]) == (either.markers["<|im_start|>"], either.markers["<|im_end|>"])
    assert either.decode(ids).strip() == "user\nhello"
    assert either.decode(ids, special=True).replace(" ", "") == text


def test_ordinary_vocabularies_cannot_form_a_control_token_by_merging(tmp_path: Path) -> None:
    vocabulary = byte_vocabulary(extra=[("stop", TokenType.CONTROL)])
    vocabulary.merges.extend(["s t", "o p", "st op"])  # type: ignore[union-attr]
    vocabulary.tokens[256:256] = ["st", "op"]
    vocabulary.types[256:256] = [1, 1]
    for pre in ("qwen2", "llama-bpe"):  # the latter looks whole words up in the vocabulary
        tokenizer = tokenizer_of(tmp_path, vocabulary, pre=pre)
        stop = vocabulary.id("stop")
        assert stop not in tokenizer.encode("stop")
        assert tokenizer.encode("stop", special=True, add_bos=False) == [stop]


def test_plain_user_defined_tokens_belong_to_text(tmp_path: Path) -> None:
    vocabulary = byte_vocabulary(extra=[("\n\n\n", TokenType.USER_DEFINED)])
    tokenizer = tokenizer_of(tmp_path, vocabulary)
    ids = tokenizer.encode("a\n\n\nb<tool_call>")
    assert ids[1] == vocabulary.id("\n\n\n")
    assert vocabulary.id("<tool_call>") not in ids
    assert tokenizer.decode(ids) == "a\n\n\nb<tool_call>"
    assert tokenizer.encode("<tool_call>", special=True) == [vocabulary.id("<tool_call>")]
    assert tokenizer.decode([vocabulary.id("<tool_call>")]) == "<tool_call>"


def test_control_tokens_declared_as_text_are_recognised_as_control(tmp_path: Path) -> None:
    vocabulary = byte_vocabulary(extra=[("<|eot_id|>", TokenType.USER_DEFINED), ("<|mark|>", 4)])
    tokenizer = tokenizer_of(tmp_path, vocabulary)
    assert vocabulary.id("<|eot_id|>") in tokenizer.eos_ids
    assert tokenizer.decode([vocabulary.id("<|eot_id|>"), vocabulary.id("<|mark|>")]) == ""
    untyped = tokenizer_of(tmp_path, vocabulary, metadata={"tokenizer.ggml.token_type": None})
    assert untyped.encode("<|im_start|>", special=True) == [vocabulary.id("<|im_start|>")]


def test_bos_follows_the_metadata_unless_told(tmp_path: Path) -> None:
    on = tokenizer_of(tmp_path, byte_vocabulary(), metadata={"tokenizer.ggml.add_bos_token": True})
    off = tokenizer_of(
        tmp_path, byte_vocabulary(), pre="llama-bpe", metadata={"tokenizer.ggml.add_bos_token": False}
    )
    assert on.encode("a")[0] == on.bos_id
    assert on.encode("a", add_bos=False) == off.encode("a")
    assert off.encode("a", add_bos=True) == on.encode("a")
    assert on.encode("") == [on.bos_id]
    assert off.encode("") == []
    assert off.encode_batch([]) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model: the key is missing"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens: the key is missing"),
        (
            {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.token_type": None},
            "bos_token_id: is 348, but there are 1 tokens",
        ),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type: has 2 entries for 351 tokens"),
        (
            {"tokenizer.ggml.eos_token_id": 351},
            "tokenizer.ggml.eos_token_id: is 351, but there are 351 tokens",
        ),
        ({"tokenizer.ggml.bos_token_id": 2**32 - 1}, "tokenizer.ggml.bos_token_id: is 4294967295"),
        ({"tokenizer.ggml.bos_token_id": -1}, "tokenizer.ggml.bos_token_id: is -1, expected 0"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges: the key is missing"),
        (
            {"tokenizer.ggml.merges": ["h e", "he zz"]},
            "merges: item 1, 'he zz', names a token that does not exist",
        ),
        ({"tokenizer.ggml.merges": ["he"]}, "merges: item 0, 'he', names a token"),
        (
            {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True},
            "bos_token_id: is missing, but add_bos_token asks for it",
        ),
    ],
)
def test_faulty_vocabulary_is_refused_by_key(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message):
        tokenizer_of(tmp_path, byte_vocabulary(), metadata=options)


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe"])
def test_bytes_that_the_vocabulary_lacks_are_left_out(pre: str, tmp_path: Path) -> None:
    # As SmolLM2's vocabulary, which has no 0x04, and whose unknown token is a control token.
    lacking = byte_vocabulary()
    for byte in (0x04, 0xC3):
        lacking.tokens[byte] = f"replaced {byte}"
    unknown = {"tokenizer.ggml.unknown_token_id": lacking.id("<|endoftext|>")}
    tokenizer = tokenizer_of(tmp_path, lacking, pre=pre, metadata=unknown)
    assert tokenizer.encode("hello\x04 world", add_bos=False) == tokenizer.encode(
        "hello world", add_bos=False
    )
    assert tokenizer.encode("\x04", add_bos=False) == []
    assert tokenizer.encode("é", add_bos=False) == [0xA9]  # what is left of C3 A9, as llama.cpp does


def test_prompts_are_normalised_where_training_did_and_others_are_not(tmp_path: Path) -> None:
    composed, decomposed = "caf\u00e9 \uac00", "cafe\u0301 \u1100\u1161"
    for pre, normalises in {
        "qwen2": True,
        "deepseek-r1-qwen": True,
        "command-r": True,
        "olmo": True,
        "llama-bpe": False,
        "smollm": False,
    }.items():
        tokenizer = tokenizer_of(tmp_path, byte_vocabulary(), pre=pre)
        assert PRE_TOKENIZERS[pre].composes is normalises
        assert (tokenizer.encode(composed) == tokenizer.encode(decomposed)) is normalises
        assert tokenizer.decode(tokenizer.encode(decomposed)) == (composed if normalises else decomposed)
    pieces = tokenizer_of(tmp_path, sentencepiece_vocabulary())
    assert pieces.decode(pieces.encode(decomposed)) == decomposed


def test_memory_for_a_vocabulary_is_proportional_to_it(tmp_path: Path) -> None:
    """Long tokens cost no more than their length, or are refused; limits are those of docs/models.md."""

    def peak(vocabulary: TestVocabulary) -> int:
        path = write_model(tmp_path / "m.gguf", layers=1, vocabulary=vocabulary)
        with GgufFile.open(path) as file:
            tracemalloc.start()
            try:
                Shield(Tokenizer.from_gguf(file).markers)
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

    def runs(longest: int) -> TestVocabulary:
        pieces = sentencepiece_vocabulary()
        tokens = [*pieces.tokens, *("\u2581" * length for length in range(2, longest + 1))]
        more = [0.0] * (len(tokens) - len(pieces.tokens))
        kinds = [*pieces.types, *([int(TokenType.NORMAL)] * len(more))]
        return TestVocabulary("llama", tokens, kinds, scores=[*(pieces.scores or []), *more])

    usual = peak(byte_vocabulary())
    one_long = byte_vocabulary(extra=[("<" + "a" * 20_000 + ">", TokenType.CONTROL)])
    assert peak(one_long) < usual + 20_000 * 500
    with pytest.raises(ModelFileError, match="user-defined tokens have 300,048 characters"):
        peak(byte_vocabulary(extra=[("<" + "a" * 300_000 + ">", TokenType.CONTROL)]))
    assert peak(runs(128)) < peak(runs(2)) + 128**2 // 2 * 400
    with pytest.raises(ModelFileError, match="the squares of the tokens' lengths add up to 358,"):
        peak(runs(1024))


def test_limits_are_those_that_are_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text().split("\n## Limits of a file\n")[1]
    bounds = (
        header.MAX_KEYS, header.MAX_NAME, header.MAX_ITEMS, header.MAX_TENSORS, MAX_PARTS,
        MAX_SPECIAL, MAX_SQUARES, MAX_SOURCE,
    )  # fmt: skip
    rows = [line.split("|")[2].strip() for line in page.splitlines() if line.startswith("| ")]
    assert [row for row in rows if row[0].isdigit()] == [f"{bound:,}" for bound in bounds]
    limits = Limits()
    assert f"with {limits.memory >> 20} MiB of memory, {limits.render_seconds:g} s of processor" in page
    assert f"and {limits.seconds_per_byte * 1e6:g} s more for each megabyte" in page
    assert f"and {limits.compile_seconds:g} s to" in page


def test_missing_byte_tokens_and_scores_are_refused_by_key(tmp_path: Path) -> None:
    words = byte_vocabulary()
    words.tokens[:256] = [f"word {number}" for number in range(256)]
    with pytest.raises(ModelFileError, match=r"tokenizer.ggml.tokens: has no token for any single byte"):
        tokenizer_of(tmp_path, words)
    pieces = sentencepiece_vocabulary()
    with pytest.raises(ModelFileError, match=r"tokenizer.ggml.scores: has 1 entries for \d+ tokens"):
        tokenizer_of(tmp_path, pieces, metadata={"tokenizer.ggml.scores": [0.5]})
    pieces.tokens[3 + 0x0A] = "replaced"
    with pytest.raises(ModelFileError, match="has no token <0x0A> for byte 10"):
        tokenizer_of(tmp_path, pieces)


def test_an_empty_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer.ggml.tokens: (has no tokens|the key is missing)"):
        tokenizer_of(tmp_path, byte_vocabulary(), metadata={"tokenizer.ggml.tokens": []})


def test_sentencepiece_merges_the_best_scoring_pair_first(tmp_path: Path) -> None:
    vocabulary = sentencepiece_vocabulary()
    scores = list(vocabulary.scores or [])
    extra = {"ab": -1.0, "bc": -0.5, "abc": -9.0}
    tokens = vocabulary.tokens + list(extra)
    tokenizer = tokenizer_of(
        tmp_path,
        TestVocabulary("llama", tokens, vocabulary.types + [1] * 3, scores=scores + list(extra.values())),
        metadata={"tokenizer.ggml.add_space_prefix": False},
    )
    ids = tokenizer.encode("xabcab", add_bos=False)
    assert [tokens[i] for i in ids] == ["x", "abc", "ab"]  # bc before ab, then a with bc
    assert tokenizer.decode(ids) == "xabcab"


def test_sentencepiece_space_is_stripped_only_where_a_text_begins(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, sentencepiece_vocabulary())
    ids = tokenizer.encode("hello world", add_bos=False)
    assert tokenizer.decode(ids) == "hello world"
    assert tokenizer.decode(ids, continues=True) == " hello world"
    stream = tokenizer.stream(continues=True)
    assert "".join(map(stream.push, ids)) == " hello world"
    bare = tokenizer_of(
        tmp_path, sentencepiece_vocabulary(), metadata={"tokenizer.ggml.add_space_prefix": False}
    )
    assert bare.decode(bare.encode(" hello", add_bos=False)) == " hello"


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = tokenizer.stream()
    return "".join(map(stream.push, ids)) + stream.flush()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40), st.lists(st.integers(0, 40)))
def test_streaming_any_bytes_equals_decoding_them(
    byte_level: Tokenizer, data: bytes, breaks: list[int]
) -> None:
    ids = list(data)  # ids 0 to 255 are the bytes
    for place in breaks:
        ids.insert(min(place, len(ids)), byte_level.markers["<|im_end|>"])  # adds nothing to the text
    assert streamed(byte_level, ids) == byte_level.decode(ids) == data.decode("utf-8", errors="replace")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_streaming_any_ids_equals_decoding_them(either: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, either.vocab_size + 3)))
    assert streamed(either, ids) == either.decode(ids)
    stream = either.stream(continues=True)
    assert "".join(map(stream.push, ids)) + stream.flush() == either.vocabulary.decode(ids)


def test_stream_holds_back_half_a_character(byte_level: Tokenizer) -> None:
    stream = byte_level.stream()
    assert [stream.push(byte) for byte in "a🦙é".encode()] == ["a", "", "", "", "🦙", "", "é"]
    assert [stream.push(byte) for byte in b"\xf0\x9f"] == ["", ""]
    assert stream.push(ord("x")) == "\ufffdx"  # can no longer be completed
    assert stream.push(0xC3) == ""
    assert stream.flush() == "\ufffd"


def test_padding_ids_add_nothing_and_negative_ids_are_refused(byte_level: Tokenizer) -> None:
    assert byte_level.decode([65, byte_level.vocab_size + 10, 66]) == "AB"
    with pytest.raises(ValueError, match="negative"):
        byte_level.decode([-1])


def test_lone_surrogates_are_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidPromptError, match="lone surrogate"):
        byte_level.encode("a\udc80")


def test_a_text_that_the_engine_gives_up_on_is_refused_alone(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, byte_vocabulary(), pre="qwen2")
    endless = " " * 12_000_000 + "a"  # more than the 10 million steps that Oniguruma takes at one place
    with pytest.raises(InvalidPromptError, match="a run of millions of spaces or letters"):
        tokenizer.encode(endless)
    refused, fine = tokenizer.encode_each([[endless], ["hello"]])
    assert isinstance(refused, InvalidPromptError)
    assert fine == tokenizer.encode("hello")


def test_texts_that_prompts_share_are_encoded_once(byte_level: Tokenizer) -> None:
    long = "You are a helpful assistant who answers in a word. " * 2
    prompts = [[long, 7, "user\n", f"Is room {number} good?"] for number in range(3)]
    alone = [byte_level.encode_pieces([prompt])[0] for prompt in prompts]
    taken: list[list[str]] = []

    class Counting:
        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            taken.append(sorted(texts))
            return engine.encode_batch_fast(texts, **options)

    engine, byte_level._engine = byte_level._engine, Counting()  # type: ignore[assignment]
    try:
        byte_level._known.clear()
        assert byte_level.encode_pieces(prompts) == alone
        assert byte_level.encode_pieces(prompts) == alone
    finally:
        byte_level._engine = engine
    assert len(taken[0]) == 5 and taken[1] == [long]  # short ones are remembered, long ones are not
    known = len(byte_level._known)
    byte_level.encode_pieces([[f"{number}"] for number in range(5000)])
    byte_level.encode_pieces([["one more"]])
    assert known == 4 and set(byte_level._known) == {"one more"}
    assert byte_level.encode_pieces(prompts) == alone


def test_threads_may_share_a_tokenizer(either: Tokenizer) -> None:
    texts = [f"hello world {n} <|im_end|> ß🦙" * 20 for n in range(64)]
    alone = [either.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(either.encode, texts)) == alone
        assert all(pool.map(lambda _: either.encode_batch(texts) == alone, range(8)))
