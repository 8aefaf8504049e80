"""Unigram vocabularies: SentencePiece's own ids, for one that it trained, and what is wrong with files."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from gguf import TokenType

from nightmill.jobs.errors import ModelFileError
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer import Tokenizer
from tests.support.encoder_models import write_bert

TRAINED = json.loads(Path(__file__).with_name("unigram.json").read_text("ascii"))
"""What SentencePiece 0.2.3 trained on this project's pages and some lines in other scripts, with 73 rules for
characters: its pieces with scores and types, its table of characters, and texts with the ids that it gives.
(Not there is what transformers' tokenizers read otherwise: U+2581 in a text, and two accents on a letter.)"""
PIECES = [piece for piece, _, _ in TRAINED["pieces"]]
CHARSMAP = base64.b64decode(TRAINED["charsmap"])


def keys_of(**others: Any) -> dict[str, Any]:
    keys = {
        "model": "t5", "tokens": PIECES, "scores": [score for _, score, _ in TRAINED["pieces"]],
        "token_type": [kind for _, _, kind in TRAINED["pieces"]],
        "precompiled_charsmap": list(CHARSMAP), "add_space_prefix": True, "remove_extra_whitespaces": True,
        "add_bos_token": True, "bos_token_id": 0, "padding_token_id": 1, "eos_token_id": 2,
        "unknown_token_id": 3, "seperator_token_id": 2,
    }  # fmt: skip
    return {f"tokenizer.ggml.{name}": value for name, value in (keys | others).items()}


def tokenizer_of(folder: Path, **others: Any) -> Tokenizer:
    with GgufFile.open(write_bert(folder / "m.gguf", keys=keys_of(**others))) as file:
        return Tokenizer.from_gguf(file)


def of_tokenizer_json() -> tokenizers.Tokenizer:
    """The same vocabulary as `tokenizer.json` of such models has it, which transformers reads."""
    special = [index for index, (_, _, kind) in enumerate(TRAINED["pieces"]) if kind != TokenType.NORMAL]
    added = [
        {"id": index, "content": PIECES[index], "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for index in special
    ]  # fmt: skip
    words = [
        {"type": "WhitespaceSplit"},
        {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
    ]
    vocab = [[piece, score] for piece, score, _ in TRAINED["pieces"]]
    spec = {
        "version": "1.0", "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": words},
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": TRAINED["charsmap"]},
        "model": {"type": "Unigram", "unk_id": 3, "vocab": vocab, "byte_fallback": False},
    }  # fmt: skip
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def test_ids_are_those_of_sentencepiece(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    for text, ids in TRAINED["texts"]:
        assert tokenizer.encode(text, add_bos=False) == ids, text
    texts = [text for text, _ in TRAINED["texts"]]
    assert len(texts) > 50 and tokenizer.encode_batch(texts) == [[0, *ids] for _, ids in TRAINED["texts"]]
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.end_id) == (0, True, 2)


def test_ids_are_those_of_the_models_own_tokenizer(tmp_path: Path) -> None:
    """At random, characters that grow, vanish and combine among them; `transformers` gives these ids."""
    tokenizer, own = tokenizer_of(tmp_path), of_tokenizer_json()
    rng = np.random.default_rng(5)
    letters = [*"abcdefghijklmnopqrstuvwxyz.,-'0123456789", " ", "  ", "\n", "\u3000", "\u2581", "e\u0301"]
    letters += [
        *"\ufb01\uff34\uff48\u200b\ufdfa\u00e9\u0301\u0338\u0e33\uac00\u1100\u1161\u591c\u041c\U0001f600\U00020000\x00\x07"
    ]
    texts = ["".join(rng.choice(letters, int(size))) for size in rng.integers(0, 60, 400)]
    wanted = [one.ids for one in own.encode_batch(texts, add_special_tokens=False)]
    assert tokenizer.encode_batch(texts, add_bos=False) == wanted
    assert sum(3 in ids for ids in wanted) > 100  # the unknown ones, which are one token where they follow


def test_no_text_forms_a_control_token(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    for text in ("<s>", "</s>", "a</s></s>b", "<unk>", "<pad>x", "\u2581<s>"):
        assert not {0, 1, 2} & set(tokenizer.encode(text, add_bos=False)), text
    assert tokenizer.encode("<s>a</s>", special=True, add_bos=False)[::2] == [0, 2]


@pytest.mark.parametrize(
    ("said", "text", "pieces"),
    [
        ({"add_space_prefix": False}, "  the  mill ", ["the", "\u2581mill"]),
        ({"remove_extra_whitespaces": False}, "the  mill", ["\u2581the", "\u2581", "\u2581mill"]),
        ({"precompiled_charsmap": []}, "\uff34\u3000the", ["\u2581", "<unk>", "\u2581the"]),
    ],
)
def test_what_a_file_says_of_spaces(
    said: dict[str, Any], text: str, pieces: list[str], tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(tmp_path, **said)
    found = [PIECES[token] for token in tokenizer.encode(text, add_bos=False)]
    assert "".join(found) == "".join(pieces)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scores": [0.0]}, "tokenizer.ggml.scores: has 1 entries for 500 tokens"),
        ({"unknown_token_id": 500}, "tokenizer.ggml.unknown_token_id: is 500, expected 0 to 499"),
        ({"token_type": [int(TokenType.CONTROL)] * 500}, "tokenizer.ggml.tokens: has no ordinary token"),
        ({"precompiled_charsmap": [1, 2]}, "is not a table of SentencePiece's: its trie has 513 bytes of 2"),
        ({"precompiled_charsmap": [300]}, "precompiled_charsmap: holds numbers that are not bytes"),
        ({"precompiled_charsmap": [0, 4, 0, 0, *[255] * 1024, 0]}, "not a table of SentencePiece's: index"),
        (
            {"precompiled_charsmap": [*CHARSMAP, *b"x" * 300, 0]},
            "precompiled_charsmap: makes 300 bytes of a character, more than 256",
        ),
        ({"model": "rwkv"}, "'rwkv' .for RWKV. is not supported; .* gpt2, llama, gemma4, bert, t5"),
    ],
)  # fmt: skip
def test_a_vocabulary_that_contradicts_itself_is_refused(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=message):
        tokenizer_of(tmp_path, **changed)
