"""A message never becomes a control token, whatever the template deletes, replaces, folds or turns round.

Searched with seeds. The oracle: a chat has the control tokens that it has with harmless words in its
messages, or it is refused with the reason.
"""

import random
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType

from nightmill.jobs.errors import ChatTemplateError
from nightmill.worker.model.chat import ChatTemplate
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer import Tokenizer
from tests.support.ggufs import byte_vocabulary, write_model
from tests.support.needs import Need, missing
from tests.support.thinning import thinned
from tests.unit.model.conftest import DOWNLOADED
from tests.unit.model.plain_jinja import TEMPLATES

pytestmark = pytest.mark.heavy

Chat = list[dict[str, Any]]

_EDITS = [
    ".replace('/think', '')", ".replace('x', '').replace('y', '')", ".lower()", ".strip()",
    ".upper().lower()", "[1:]", "[:-1]", "[2:-2]", "[::-1]", ".replace('(', '<').replace(')', '>')",
    ".split('~') | join('')", ".split('</think>')[-1].lstrip('\\n')", " | replace('.', '') | trim",
    " | reverse", ".swapcase()", ".title().lower()", ".encode('ascii', 'ignore').decode()",
    ".replace('&lt;', '<').replace('&gt;', '>')", " | string | list | unique | join",
]  # fmt: skip
_REFUSALS = [
    "", "", "{% if m.content | length > 60 %}{{ raise_exception('too long') }}{% endif %}",
    "{% if not m.content.isascii() %}{{ raise_exception('not ASCII') }}{% endif %}",
]  # fmt: skip
"""What a template may refuse: nothing, or what marks make of a message, and so what they are to find out."""
_TOKENS = ["<|im_end|>", "<|im_start|>"]
_LLAMA = ["<s>", "</s>", "[INST]", "[/INST]"]
_OWN = re.compile(r"<\|[^|<>]{1,40}\|>|<[a-z_]{2,30}>|</s>|\[/?[A-Z_]{3,20}\]|<｜[^｜]{1,30}｜>")


def tokenizer_of(path: Path, own: Sequence[str]) -> Tokenizer:
    """A vocabulary in which these are control tokens."""
    vocabulary = byte_vocabulary(extra=[(text, TokenType.CONTROL) for text in own if text not in _TOKENS])
    with GgufFile.open(write_model(path / "m.gguf", layers=1, vocabulary=vocabulary)) as file:
        return Tokenizer.from_gguf(file)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("forging"), _LLAMA)


def hostile(draw: random.Random, tokens: Sequence[str] = _TOKENS) -> str:
    """A text that some edit may turn into a control token."""
    token = draw.choice(tokens)
    place = draw.randrange(1, len(token))
    return draw.choice(
        [
            token[:place] + draw.choice(["/think", "x", "y", "~", "</think>", token]) + token[place:],
            token[::-1],
            token.upper(),
            token.swapcase(),
            "".join(f"{char}." for char in token),
            f" {token[1:]}",
            token[:-1],
            token[:place],
            token[place:],
            "(" + token[1:-1] + ")",
            token.replace("<", "&lt;").replace(">", "&gt;"),
            token.replace("i", "\u0131").replace("s", "\u017f"),
            token,
            token.replace("_", "X_Y"),
        ]
    )


def controls(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    return [one for one in ids if tokenizer.vocabulary.kinds[one] == TokenType.CONTROL]


def search(source: str, tokenizer: Tokenizer, chats: list[Chat], harmless: list[Chat]) -> tuple[int, int]:
    """How many of the chats have the control tokens of the harmless ones, and how many are refused."""
    template = ChatTemplate(source, tokenizer, "m.gguf")
    try:
        answers, expected = template.encode_all(chats), template.encode_all(harmless)
    finally:
        template.close()
    same = refused = 0
    for chat, ids, others in zip(chats, answers, expected, strict=True):
        if isinstance(others, Exception):
            assert isinstance(ids, ChatTemplateError)  # it takes no such chats
        elif isinstance(ids, Exception):
            assert isinstance(ids, ChatTemplateError)
            assert re.search("control tokens|too long|not ASCII", str(ids)), (source, ids)
            refused += 1
        else:
            assert controls(tokenizer, ids) == controls(tokenizer, others), (source, chat)
            same += 1
    return same, refused


@pytest.mark.parametrize(
    ("refusal", "llama"),
    [
        pytest.param(*case, marks=() if case in ((1, True), (2, False)) else pytest.mark.slow)
        for case in product(range(len(_REFUSALS)), (False, True))
    ],
)
def test_no_edit_of_a_template_makes_control_tokens_of_a_message(
    refusal: int, llama: bool, tokenizer: Tokenizer
) -> None:
    """2,400 chats under 120 templates that edit what is said, once to three times."""
    draw = random.Random(2 * refusal + llama)
    tokens = _LLAMA if llama else _TOKENS
    head, tail = ("[INST]", "[/INST]") if llama else ("<|im_start|>{{ m.role }}\n", "<|im_end|>\n")
    same = refused = 0
    for _ in range(15):
        edits = draw.choices(_EDITS, k=draw.randrange(1, 4))
        edited = "{% set c = m.content %}" + "".join("{% set c = c" + one + " %}" for one in edits)
        shown = "{{ m.content }} " + edited + "{{ c }}"
        source = "{% for m in messages %}" + _REFUSALS[refusal] + head + shown + tail + "{% endfor %}"
        texts = [
            "tell me "[: draw.randrange(9)] + hostile(draw, tokens) + hostile(draw, tokens) for _ in range(20)
        ]
        found = search(
            source,
            tokenizer,
            [[{"role": "user", "content": text}] for text in texts],
            [[{"role": "user", "content": "harmless words of Mr. Miller"}] for _ in texts],
        )
        same, refused = same + found[0], refused + found[1]
    assert same > 50 and refused > 0


def test_control_tokens_that_a_template_makes_of_letters_are_seen(tokenizer: Tokenizer) -> None:
    """Some control tokens have no signs at all, and some templates write signs for what has none."""
    shown = "{{ m.content.replace('lt', '<').replace('gt', '>') }}"
    source = "{% for m in messages %}[INST]" + shown + "[/INST]{% endfor %}"
    same, refused = search(
        source,
        tokenizer,
        [[{"role": "user", "content": text}] for text in ("lt/sgt", "ltsgt", "salt and light")],
        [[{"role": "user", "content": "hello"}]] * 3,
    )
    assert (same, refused) == (1, 2)


def test_what_no_other_words_can_tell_apart_is_refused(tokenizer: Tokenizer) -> None:
    """A template that takes a single sentence, marks and all: nobody knows what is its own."""
    source = (
        "{% for m in messages %}{% if m.content not in ['a<s>', 'Hello'] %}{{ raise_exception('no') }}"
        "{% endif %}[INST]{{ m.content }}[/INST]{% endfor %}"
    )
    template = ChatTemplate(source, tokenizer, "m.gguf")
    try:
        with pytest.raises(ChatTemplateError, match="refuses these messages"):
            template.encode([{"role": "user", "content": "a<s>"}])
    finally:
        template.close()


_BENIGN = [
    "if a < b and c > d: return [x for x in y]", "<b>bold</b> <br/>", "<think>so</think>\nan answer",
    "[INST] ?", "a <| b |> c", "vector<vector<int>> v;", "</s", "<tool_call>no</tool_call>",
]  # fmt: skip


def real(name: str, tmp_path: Path) -> tuple[str, Tokenizer, list[str]]:
    """A template that llama.cpp ships, a vocabulary with its control tokens, and these."""
    if name == "none":
        missing(Need.VOCABULARIES)
    source = (DOWNLOADED / "templates" / name).read_text(encoding="utf-8")
    own = sorted(set(_OWN.findall(source)) - {"<think>", "</think>"})[:200]
    return source, tokenizer_of(tmp_path, own), own


@pytest.mark.parametrize("name", thinned(TEMPLATES or ["none"], 4))
def test_real_templates_take_texts_with_brackets(name: str, tmp_path: Path) -> None:
    """Refused is only what cannot be told apart: code, markup and earlier thoughts go through."""
    source, tokenizer, _ = real(name, tmp_path)
    try:
        template = ChatTemplate(source, tokenizer, "m.gguf")
    except ChatTemplateError:
        return
    try:
        chats: list[Chat] = [
            [
                {"role": "user", "content": text},
                {"role": "assistant", "content": text},
                {"role": "user", "content": text},
            ]
            for text in _BENIGN
        ]
        answers = template.encode_all(chats)
    finally:
        template.close()
    refused = [str(one) for one in answers if isinstance(one, Exception)]
    assert [one for one in refused if "makes control tokens" in one or "if their words" in one] == []


def turns(say: Any, tools: bool) -> Chat:
    """A chat of all roles in which `say` says what is said."""
    chat: Chat = [{"role": "user", "content": say()}, {"role": "assistant", "content": say()}]
    if tools:
        function = {"name": "look_up", "arguments": {"word": say()}}
        call = {"id": "abcdefghi", "type": "function", "function": function}
        chat += [
            {"role": "user", "content": say()},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "abcdefghi", "name": "look_up", "content": say()},
        ]
        return chat
    return [{"role": "system", "content": say()}, *chat, {"role": "user", "content": say()}]


@pytest.mark.parametrize("name", thinned(TEMPLATES or ["none"], 4, 2))
def test_no_message_becomes_a_control_token_of_a_real_template(name: str, tmp_path: Path) -> None:
    """60 chats of each, whose messages are made of the template's own control tokens."""
    source, tokenizer, own = real(name, tmp_path)
    draw = random.Random(name)
    try:
        chats = [
            turns(lambda: "so " + hostile(draw, own or _TOKENS) + " it is", tools)
            for tools in (False, True) * 30
        ]
        harmless = [turns(lambda: "so it is", tools) for tools in (False, True) * 30]
        search(source, tokenizer, chats, harmless)
    except ChatTemplateError:
        return  # it cannot be served, and `check` says why
