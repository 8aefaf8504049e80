"""A file's template for chats with tools, and the special tokens of templates that stay out of reach."""

import re
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType

from nightmill.jobs.base.contract import CallFormat, Rendering, Tools
from nightmill.jobs.errors import ChatTemplateError
from nightmill.worker.model.chat import ChatTemplate
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer import Tokenizer
from tests.support.ggufs import CHATML, byte_vocabulary, write_model
from tests.support.needs import Need, missing
from tests.support.thinning import thinned
from tests.unit.model.conftest import DOWNLOADED
from tests.unit.model.plain_jinja import TEMPLATES

pytestmark = pytest.mark.heavy

KEY = "tokenizer.chat_template.tool_use"
TOOL_USE = (
    "<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for call in m.tool_calls %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n<think>{# </think> #}"
)
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
TOOLS = Rendering(tools=Tools([{"type": "function", "function": {"name": "weather", "parameters": {}}}]))


def opened(
    path: Path, *, calls: CallFormat | None = None, **model: Any
) -> tuple[ChatTemplate, Tokenizer, str]:
    with GgufFile.open(write_model(path / "m.gguf", layers=1, **model)) as file:
        tokenizer = Tokenizer.from_gguf(file)
        return ChatTemplate.from_gguf(file, tokenizer, calls=calls), tokenizer, file.digest()


def test_chats_with_tools_go_through_the_template_that_is_for_them(tmp_path: Path) -> None:
    template, tokenizer, _ = opened(tmp_path, metadata={KEY: TOOL_USE})
    try:
        assert template.render(ASKED) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        assert template.render(ASKED, TOOLS).startswith('<|im_start|>system\n[{"type": "function"')
        renderings = [Rendering(), TOOLS, TOOLS, Rendering()]
        together = template.encode_all([ASKED] * 4, renderings)
        assert together == [template.encode(ASKED, rendering) for rendering in renderings]
        texts = [tokenizer.decode(ids, special=True) for ids in together if isinstance(ids, list)]
        assert ["weather" in text for text in texts] == [False, True, True, False]
        assert template.markup(Rendering(), [1]) is None
        markup = template.markup(TOOLS, template.encode(ASKED, TOOLS))
        assert markup is not None and markup.calls is CallFormat.HERMES and markup.opened
    finally:
        template.close()


def test_tools_that_are_told_in_words_need_no_template_for_them(tmp_path: Path) -> None:
    template, _, _ = opened(tmp_path, metadata={KEY: TOOL_USE}, calls=CallFormat.JSON)
    try:
        assert "You may call these functions" in template.render(ASKED, TOOLS)
    finally:
        template.close()


def test_a_template_for_tools_alone_serves_all_chats(tmp_path: Path) -> None:
    template, _, _ = opened(tmp_path, chat_template=None, metadata={KEY: TOOL_USE})
    try:
        assert template.for_tools() is template
        assert "Hello" in template.render(ASKED) and "weather" in template.render(ASKED, TOOLS)
    finally:
        template.close()


def test_a_broken_template_for_tools_fails_chats_with_tools_alone(tmp_path: Path) -> None:
    template, _, _ = opened(tmp_path, metadata={KEY: "{% if %}"})
    try:
        plain, with_tools = template.encode_all([ASKED, ASKED], [Rendering(), TOOLS])
        assert isinstance(plain, list)
        assert isinstance(with_tools, ChatTemplateError) and f"{KEY}: " in str(with_tools)
        with pytest.raises(ChatTemplateError, match="Expected an expression"):
            template.render(ASKED, TOOLS)
    finally:
        template.close()


def test_both_templates_are_part_of_what_names_the_model(tmp_path: Path) -> None:
    digests = []
    for number, source in enumerate((CHATML, TOOL_USE, TOOL_USE + " ")):
        folder = tmp_path / str(number)
        folder.mkdir()
        template, _, digest = opened(folder, metadata={KEY: source})
        template.close()
        digests.append(digest)
    assert len(set(digests)) == 3


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (TokenType.NORMAL, "writes <|turn|>, which the file types as ordinary text"),
        (TokenType.CONTROL, None),
        (TokenType.USER_DEFINED, None),
    ],
)
def test_control_tokens_that_a_file_types_as_text_are_found(
    kind: TokenType, fault: str | None, tmp_path: Path
) -> None:
    """The template spells them out, and they become characters: 26 tokens in place of 12."""
    vocabulary = byte_vocabulary(extra=[("<|turn|>", kind)])
    source = CHATML.replace("<|im_start|>", "<|turn|>")
    template, tokenizer, _ = opened(tmp_path, vocabulary=vocabulary, chat_template=source)
    try:
        found = template.reach().fault
        ids = template.encode(ASKED)
    finally:
        template.close()
    assert (fault is None) is (found is None) and (fault or "") in (found or "")
    assert (vocabulary.id("<|turn|>") in ids) is (fault is None)
    assert tokenizer.markers.keys() >= ({"<|turn|>"} if fault is None else set())


@pytest.mark.parametrize("name", thinned(TEMPLATES or ["none"], 4, 2))
def test_no_real_template_is_blamed_for_what_its_vocabulary_has(name: str, tmp_path: Path) -> None:
    """With the tokens that stand in it as control tokens, no template has a fault."""
    if name == "none":
        missing(Need.VOCABULARIES)
    source = (DOWNLOADED / "templates" / name).read_text(encoding="utf-8")
    own = set(re.findall(r"<\|[^|<>\s]{1,60}\|>|<｜[^｜<>\s]{1,60}｜>|</?[a-z]+(?:_[a-z]+)+>", source))
    own -= {"<|im_start|>", "<|im_end|>", "<|endoftext|>"}
    vocabulary = byte_vocabulary(extra=[(text, TokenType.CONTROL) for text in sorted(own)])
    try:
        template, _, _ = opened(tmp_path, vocabulary=vocabulary, chat_template=source)
    except ChatTemplateError:
        return  # it cannot be served, and `check` says why
    try:
        found = template.reach()
        assert found.ordinary == ()
        assert [text for text in found.unknown if text in source] == []  # Hy3's composes its tokens
    finally:
        template.close()
