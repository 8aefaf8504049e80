r"""Rules that cut text into words before merging, by the name that a file gives as `tokenizer.ggml.pre`.

A vocabulary was trained on such words: no token crosses from one to the next. The file holds only the name.
Names, and what they stand for, are those of llama.cpp (src/llama-vocab.cpp in llama-cpp-python 0.3.36). Where
it quotes the pattern of the model's own tokenizer.json and computes something close to it, as for `tekken`
and `gpt-4o`, the model's own is here: it is what the model was trained with.

A pattern is a regular expression of Oniguruma, as in tokenizer.json. The first one cuts the text into its
matches and what lies between them, the next one cuts each of these parts, and so on.

Time must be proportional to the text, whoever wrote it. So a pattern that looks ahead over a whole run of
characters does so once, from its start.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from nightmill.worker.model.gguf.file import GgufFile

__all__ = ["PRE_TOKENIZERS", "UNIGRAM", "WORD_PIECE", "PreTokenizer", "pre_tokenizer_of"]


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """Rules by which text is cut into words and tokens are written; a name in a file stands for them."""

    patterns: tuple[str, ...]
    composes: bool = False
    """Characters are composed first (NFC): `e` with a combining accent becomes `é`."""
    whole_words: bool = False
    """A word that is a token is that token, whatever the merges would build."""
    starts_with_bos: bool = False
    """Prompts start with BOS unless the file says otherwise."""
    byte_alphabet: bool = True
    """Tokens are written in GPT-2's alphabet of bytes. If not: in plain characters, with U+2581 for a space,
    and with tokens such as <0x0A> for bytes."""


def _threes(digit: str, end: str, *, others: str = "*+") -> str:
    """Cuts runs of `digit` into threes, counted from the right: 1234567 is 1, 234, 567.

    The first one of a run looks ahead to its end, where `end` must hold; the `others` follow it.
    """
    first = rf"(?<!{digit}){digit}{{1,3}}(?=(?:{digit}{{3}}){others}{end})"
    return rf"{first}|\G(?<={digit}){digit}{{3}}"


_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_NUMBER, _NUMBERS_TO_3 = r"\p{N}", r"\p{N}{1,3}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SINGLE_NUMBERS = (_NUMBER, _GPT2)


def _cl100k(numbers: str) -> str:
    """OpenAI's cl100k_base, with the numbers that a model allows."""
    return rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"


def _o200k(numbers: str, *, suffix: str = _ENGLISH + "?", but: str = "", ends: str = r"[\r\n/]*") -> str:
    """OpenAI's o200k_base, whose words begin at a capital letter.

    suffix: what may follow a word. but: letters that form no such words. ends: what may follow punctuation.
    """
    capital, small = (
        rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]",
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]",
    )
    words = f"{capital}*{small}+{suffix}", f"{capital}+{small}*{suffix}"
    before = r"[^\r\n\p{L}\p{N}]?"
    return rf"{before}{words[0]}|{before}{words[1]}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+{ends}|{_LINES}"


_CL100K_1, _CL100K_3 = _cl100k(_NUMBER), _cl100k(_NUMBERS_TO_3)
_O200K = _o200k(_NUMBERS_TO_3)
_HAN_KANA = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
_DEEPSEEK3 = rf"{_DEEPSEEK3_WORDS}[\r\n]*|{_LINES}"
_DEEPSEEK_CJK = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LETTERS = (  # Latin, Greek, Cyrillic, Armenian, Georgian and Cherokee letters that have two cases
    r"\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    r"\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    r"\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    r"\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    r"\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    r"\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    r"\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    r"\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    r"\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    r"\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}"
    r"\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}]+"
)
_DEEPSEEK_MARKS = r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_NEWLINES = r"[^\n]+|[\n]+"

_TABLE: Final = {
    ("default",): PreTokenizer(
        patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ),
    (
        "gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "jais", "trillion", "granite-docling",
        "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code", "modern-bert",
        "roberta-bpe",
    ): PreTokenizer(patterns=(_GPT2,)),
    ("mpt", "olmo"): PreTokenizer(patterns=(_GPT2,), composes=True),  # GPT-NeoX's tokenizer
    ("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"): PreTokenizer(
        patterns=_SINGLE_NUMBERS
    ),
    ("command-r",): PreTokenizer(patterns=_SINGLE_NUMBERS, composes=True),
    ("falcon",): PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    ("qwen2", "deepseek-r1-qwen", "stablelm2"): PreTokenizer(patterns=(_CL100K_1,), composes=True),
    ("kormo", "f2llmv2", "megrez", "hunyuan", "solar-open", "grok-2"): PreTokenizer(
        patterns=(_CL100K_1,)
    ),
    ("qwen35",): PreTokenizer(  # transformers composes for these too; the ids that llama.cpp expects do not
        patterns=(
            _ENGLISH
            + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
            + _LINES,
        ),
    ),
    ("laguna",): PreTokenizer(patterns=(_NEWLINES, _CL100K_1)),
    ("ufakzeka",): PreTokenizer(patterns=(_CL100K_1.removeprefix(_ENGLISH + "|"),)),
    ("dbrx",): PreTokenizer(patterns=(_CL100K_3,)),
    # smaug-bpe is what converters call Llama 3's vocabulary where BOS is not added, as SmolLM3's. llama.cpp
    # does not look whole words up for it, and spells 588 of its tokens, such as " Việt", with others.
    ("smaug-bpe", "chatglm-bpe", "glm4", "glm5"): PreTokenizer(patterns=(_CL100K_3,), whole_words=True),
    (
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
        "jina-v5-nano",
    ): PreTokenizer(patterns=(_CL100K_3,), whole_words=True, starts_with_bos=True),
    ("minicpm5",): PreTokenizer(patterns=(_NUMBERS_TO_3, _cl100k(r"\p{N}+")), whole_words=True),
    ("jais-2",): PreTokenizer(
        patterns=(
            _CL100K_3.removesuffix(r"\s+(?!\S)|\s+")
            + "".join(rf"\s{{{count}}}(?!\S)|" for count in (512, 256, 128, 64, 32, 16, 8, 4))
            + r"\s{1,2}(?!\S)|\s{1}",
        ),
    ),
    ("seed-coder",): PreTokenizer(
        patterns=(
            _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _LINES,
        ),
    ),
    ("bailingmoe", "bailingmoe2", "llada-moe"): PreTokenizer(
        patterns=(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        ),
    ),
    ("exaone-moe",): PreTokenizer(  # its words go on over single spaces
        patterns=(
            _ENGLISH + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        ),
    ),
    ("gpt-4o", "llama4", "granite-embed-multi-97m"): PreTokenizer(patterns=(_O200K,), whole_words=True),
    ("kanana2", "talkie", "minimax-m2"): PreTokenizer(patterns=(_O200K,)),
    ("tekken",): PreTokenizer(
        patterns=(_o200k(_NUMBER, suffix=""),), whole_words=True, starts_with_bos=True
    ),
    ("kimi-k2",): PreTokenizer(
        patterns=(r"\p{Han}+|" + _o200k(_NUMBERS_TO_3, but=r"&&[^\p{Han}]", ends=r"[\r\n]*"),)
    ),
    ("tiny_aya", "cohere2moe"): PreTokenizer(patterns=(_threes(r"\d", r"\b"), _O200K)),
    ("youtu",): PreTokenizer(
        patterns=(
            r"[\uac00-\ud7a3\u3131-\u318e]+"
            r"|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
            r"|[\u3105-\u312f]+|" + _HAN_KANA,
            _o200k(_NUMBER),
        ),
        whole_words=True,
    ),
    ("superbpe",): PreTokenizer(patterns=(r"\p{N}+", _threes(r"\d", r"(?!\d)", others="++"))),
    ("afmoe",): PreTokenizer(
        patterns=(
            _threes(r"\p{N}", r"(?!\p{N})"),
            r"[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
            r"\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
            r"\u1100-\u11ff]+",
            _DEEPSEEK3,
        ),
    ),
    ("deepseek-llm",): PreTokenizer(
        patterns=(r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_MARKS, r"(?<!\s)\s+$", _DEEPSEEK_CJK, r"\p{N}+"),
    ),
    ("deepseek-coder",): PreTokenizer(
        patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, _NUMBER),
    ),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): PreTokenizer(
        patterns=(_NUMBERS_TO_3, _HAN_KANA, _DEEPSEEK3)
    ),
    ("spark2_5",): PreTokenizer(
        patterns=(_NUMBERS_TO_3, _HAN_KANA, _DEEPSEEK3_WORDS + r"|[\r\n]|\s+(?!\S)|\s+", _NUMBER),
    ),
    ("bloom", "poro-chat", "gpt3-finnish"): PreTokenizer(patterns=(_BLOOM,)),
    ("viking",): PreTokenizer(patterns=(_BLOOM, _NUMBER)),
    ("chameleon",): PreTokenizer(
        patterns=(
            r"<sentinel:[0-9]+>", r"(?:IMGIMG)[A-I]{1,4}Z", r"[\t\n]|    |  ", _NUMBER,
            r"[\p{P}!-/:-@\[-`{-~]", _GPT2,
        ),
        starts_with_bos=True,
    ),
    ("gemma4", "granite-embed-multi-311m"): PreTokenizer(
        patterns=(_NEWLINES,), starts_with_bos=True, byte_alphabet=False
    ),
    ("sarvam-moe",): PreTokenizer(patterns=(_NEWLINES,), byte_alphabet=False),
}  # fmt: skip
PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = MappingProxyType(
    {name: pre_tokenizer for names, pre_tokenizer in _TABLE.items() for name in names}
)
# What else llama.cpp reads, and why no model that is run here has it.
WORD_PIECE: Final = "bert"
"""The name of vocabularies of WordPiece, whose tokens begin with U+2581 where a word does."""
UNIGRAM: Final = "t5"
"""The name of SentencePiece's vocabularies of which the likeliest tokens of a text are taken (llama.cpp's
UGM): those of encoders of XLM-RoBERTa's kind."""
_OTHER_MODELS: Final = {
    "rwkv": "for RWKV",
    "plamo2": "for PLaMo 2",
    "hybriddna": "for models of DNA",
    "whitespace": "for models that embed texts",
}


def pre_tokenizer_of(file: GgufFile) -> PreTokenizer | None:
    """Return the rules that cut text for a file's vocabulary; None for SentencePiece's, which cuts nothing,
    and for WordPiece's and Unigram's, which have rules of their own.

    Raises ModelFileError if the vocabulary or its pre-tokenizer is unknown.
    """
    model = file.string("tokenizer.ggml.model")
    if model in ("llama", WORD_PIECE, UNIGRAM):
        return None
    if model == "gemma4":  # whatever the file calls its pre-tokenizer
        return PRE_TOKENIZERS["gemma4"]
    if model != "gpt2":
        what = f" ({_OTHER_MODELS[model]})" if model in _OTHER_MODELS else ""
        file.fail(
            f"tokenizer.ggml.model: {model!r}{what} is not supported; supported are gpt2, llama, gemma4, "
            f"{WORD_PIECE}, {UNIGRAM}"
        )
    name = file.string("tokenizer.ggml.pre", default="")
    if name not in PRE_TOKENIZERS:
        # Guessing would tokenise most text slightly wrong and nobody would see why answers got worse.
        what = f"{name!r} is not supported" if name else "the key is missing"
        file.fail(
            f"tokenizer.ggml.pre: {what}; supported are {', '.join(PRE_TOKENIZERS)}. "
            "If a file lacks the key, set it with gguf-new-metadata --pre-tokenizer"
        )
    return PRE_TOKENIZERS[name]
