"""Thoughts are found by a template's marks, and marks that a reader needs are shown in texts."""

from pathlib import Path

import pytest

from nightmill.jobs.base.contract import Markup
from nightmill.jobs.reply.reasoning import CHANNELS
from nightmill.jobs.reply.tool_calls import _STYLES
from nightmill.worker.model.chat import ChatTemplate
from nightmill.worker.model.chat.template import thinking_marks
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer import Tokenizer
from nightmill.worker.model.tokenizer.vocabulary import _MARKS
from tests.support.ggufs import CHATML, byte_vocabulary, write_model
from tests.support.needs import Need, missing
from tests.unit.model.conftest import DOWNLOADED


@pytest.mark.parametrize(
    ("ending", "opened"),
    [("<|im_start|>assistant\n", False), ("<think>\n", True), ("<think>\n\n</think>\n", False)],
)
def test_a_prompt_may_open_the_thinking(tmp_path: Path, ending: str, opened: bool) -> None:
    vocabulary = byte_vocabulary(extra=[("<think>", 4)])
    path = write_model(tmp_path / "m.gguf", layers=1, vocabulary=vocabulary)
    with GgufFile.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file)
    source = f"{{% for m in messages %}}{{{{ m.content.split('</think>')[-1] }}}}{{% endfor %}}{ending}"
    template = ChatTemplate(source, tokenizer, "model.gguf")
    try:
        ids = template.encode([{"role": "user", "content": "<think>"}])
        markup = template.markup(None, ids)
        assert markup == Markup(None, ("<think>", "</think>"), opened)
        assert markup is not None and markup.closed is ending.endswith("</think>\n")
    finally:
        template.close()


def test_real_templates_say_how_their_models_think() -> None:
    if not (DOWNLOADED / "templates").exists():
        missing(Need.VOCABULARIES)
    marked = {
        "Qwen-Qwen3-0.6B": "</think>",
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "</think>",
        "HuggingFaceTB-SmolLM3-3B": "</think>",
        "mistralai-Ministral-3-14B-Reasoning-2512": "[/THINK]",
        "ByteDance-Seed-OSS": "</seed:think>",
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "<|END_THINKING|>",
        "openai-gpt-oss-120b": CHANNELS[1],
        "google-gemma-4-31B-it": "<channel|>",
        "Qwen-Qwen2.5-7B-Instruct": None,
        "meta-llama-Llama-3.1-8B-Instruct": None,
    }
    for name, end in marked.items():
        source = (DOWNLOADED / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
        marks = thinking_marks(source)
        assert (None if marks is None else marks[1]) == end, name


def test_marks_of_a_template_are_shown_in_texts(tmp_path: Path) -> None:
    vocabulary = byte_vocabulary(extra=[("[TOOL_CALLS]", 3), ("[ARGS]", 3)])
    source = "{{ '[TOOL_CALLS]' }}" + CHATML
    path = write_model(tmp_path / "m.gguf", layers=1, vocabulary=vocabulary, chat_template=source)
    with GgufFile.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file)
    ids = [tokenizer.markers[text] for text in ("[TOOL_CALLS]", "[ARGS]", "<|im_end|>")]
    assert tokenizer.decode(ids) == "[TOOL_CALLS]"  # the others mean nothing to this template's model


def test_what_begins_and_ends_calls_is_shown_in_texts() -> None:
    """Whoever reads a text looks for these marks, which are control tokens of some vocabularies."""
    marks = {mark for style in _STYLES.values() for mark in (style.begin, style.end) if mark}
    assert len(marks) > 15 and marks <= _MARKS


def test_the_end_of_a_step_is_shown_and_ends_no_text(tmp_path: Path) -> None:
    texts = ["<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>", "<|constrain|>"]
    vocabulary = byte_vocabulary(extra=[(text, 3) for text in texts])
    source = f"{{{{ '{''.join(texts)}' }}}}" + CHATML
    path = write_model(tmp_path / "m.gguf", layers=1, vocabulary=vocabulary, chat_template=source)
    with GgufFile.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file)
    ids = [tokenizer.markers[text] for text in texts]
    assert tokenizer.decode(ids) == "<|start|><|end|><|channel|><|message|><|constrain|>"
    assert ids[1] not in tokenizer.eos_ids and {ids[2], ids[3]} <= tokenizer.eos_ids
