"""Where thoughts stand in a reply: at its beginning, in channels, or between the parts of an answer."""

import random
from dataclasses import replace

import pytest

from nightmill.jobs.base.contract import CallFormat, Markup
from nightmill.jobs.reply.parsing import Reply, read_reply
from nightmill.jobs.reply.reasoning import CHANNELS, GEMMA
from nightmill.jobs.reply.structure import structure_of
from tests.unit.jobs.replies import THINK, TOOLS, in_pieces


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("yes", False, None, "yes"),
        ("<think>\nhm", False, "hm", ""),
        ("hm", True, "hm", ""),
        ("", True, None, ""),
        ("<think>\n\n</think>\n\nyes", False, None, "yes"),
        ("a <think>b</think>", False, None, "a <think>b</think>"),
        ("<thi", False, None, "<thi"),
        (" \n", False, None, " \n"),
        ("hm</think>a</think>b", True, "hm", "a</think>b"),
    ],
)
def test_thoughts_stand_at_the_beginning(
    text: str, opened: bool, reasoning: str | None, content: str
) -> None:
    unfinished = not content and "</think>" not in text and (opened or "<think>" in text)
    expected = Reply(content, reasoning, unfinished=unfinished)
    assert read_reply(text, Markup(None, THINK, opened), None, "j") == expected


HARMONY = Markup(CallFormat.HARMONY, CHANNELS)
THOUGHT, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
START = "<|start|>assistant"
BEFORE = " to=functions.weather<|channel|>commentary json<|message|>"
BEHIND = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
PLACE = '{"place": "<b> Bonn"}'


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls", "unfinished"),
    [
        (f"{THOUGHT}hm<|end|>{START}{FINAL}yes", "hm", "yes", 0, False),
        (f"{THOUGHT}hm<|end|>{START}{THOUGHT}well<|end|>{START}{FINAL}yes<|return|>",
         "hm\nwell", "yes", 0, False),
        (f"{THOUGHT}hm{START}{FINAL}yes", "hm", "yes", 0, False),  # as rows of older workers have it
        (f"{FINAL}yes", None, "yes", 0, False),
        (f"<|start|>assistant{FINAL}yes", None, "yes", 0, False),
        (f"{THOUGHT}hm<|end|><|start|>", "hm", "", 0, True),
        (f"{THOUGHT}hm<|en", "hm<|en", "", 0, True),
        (THOUGHT, None, "", 0, True),
        ("<|channel|>fin", None, "<|channel|>fin", 0, False),
        ("yes", None, "yes", 0, False),
        ("", None, "", 0, False),
        ("<|channel|>analysis" + "x" * 600, None, "<|channel|>analysis" + "x" * 600, 0, False),
        (f"{THOUGHT}hm<|end|>and so on", "hm", "and so on", 0, False),
        (f"{BEFORE}{PLACE}<|call|>", None, "", 1, False),
        (f"{BEHIND}{PLACE}", None, "", 1, False),
        (f"{THOUGHT}hm<|end|>{START}{BEHIND}{PLACE}<|call|>", "hm", "", 1, False),
        (f"<|channel|>commentary<|message|>I look.<|end|>{START}{BEFORE}{PLACE}<|call|>",
         None, "I look.", 1, False),
        (f"{BEFORE}{PLACE}<|call|>{START}{BEHIND}{PLACE}<|call|>", None, "", 2, False),
        (f"{BEHIND}{PLACE[:9]}", None, BEHIND + PLACE[:9], 0, False),  # half a call
        (f"{BEHIND}no JSON<|end|>{START}{FINAL}yes", None, f"{BEHIND}no JSON\nyes", 0, False),
        (f"{BEHIND}[1]", None, f"{BEHIND}[1]", 0, False),
        (f"{THOUGHT}{BEHIND}{PLACE}<|end|>{START}{FINAL}yes", f"{BEHIND}{PLACE}", "yes", 0, False),
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "1 + 1", "", 0, True),
        ("<|channel|>commentary to=python code<|message|>1 + 1", None, "1 + 1", 0, False),
    ],
)  # fmt: skip
def test_a_model_may_write_messages_to_channels(
    text: str, reasoning: str | None, content: str, calls: int, unfinished: bool
) -> None:
    reply = read_reply(text, HARMONY, TOOLS, "j")
    assert (reply.content, reply.reasoning, reply.unfinished) == (content, reasoning, unfinished)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("weather", PLACE)] * calls
    draw = random.Random(len(text))
    for _ in range(5):
        assert in_pieces(text, HARMONY, draw) == replace(reply, unfinished=False)
    if not calls and BEHIND not in text:
        assert read_reply(text, Markup(None, CHANNELS), None, "j") == reply


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "unfinished"),
    [
        ("<|channel>thought\nhm\n<channel|>yes", "hm", "yes", False),
        ("<|channel>thought\n<channel|>yes", None, "yes", False),
        ("yes", None, "yes", False),
        ("a<|channel>thought\nb<channel|> c<|channel>thought d", "bd", "ac", False),
        ("<|channel>thought\nhm", "hm", "", True),
        ("<|channel>th", None, "<|channel>th", False),
        ("<channel|>yes", None, "<channel|>yes", False),
    ],
)
def test_a_model_may_reason_more_than_once(
    text: str, reasoning: str | None, content: str, unfinished: bool
) -> None:
    markup = Markup(None, GEMMA)
    reply = read_reply(text, markup, None, "j")
    assert reply == Reply(content, reasoning, unfinished=unfinished)
    for seed in range(8):
        assert in_pieces(text, markup, random.Random(seed)) == replace(reply, unfinished=False)


STYLES = (None, THINK, CHANNELS, GEMMA)


def test_any_pieces_of_a_hostile_text_are_read_as_the_whole() -> None:
    draw = random.Random(38)
    marks = [
        *THINK, *GEMMA, THOUGHT, FINAL, START, BEFORE, BEHIND, "<|channel|>", "<|message|>", "<|end|>",
        "<|start|>", "<|call|>", "to=functions.", "<|constrain|>", "analysis", "final", PLACE, "{", '"', "<|",
        "<", " ", "\n", "\n\n", "hm", "é",
    ]  # fmt: skip
    for _ in range(1_000):
        text = "".join(draw.choices(marks, k=draw.randrange(12)))
        calls = draw.choice((None, CallFormat.HERMES, CallFormat.HARMONY))
        markup = Markup(calls, draw.choice(STYLES), draw.random() < 0.3)
        whole = read_reply(text, markup, TOOLS, "j")
        assert in_pieces(text, markup, draw) == replace(whole, unfinished=False), text
        structure, cut = structure_of(markup, TOOLS), draw.randrange(len(text) + 1)
        one = structure_of(markup, TOOLS)
        one.push(text[:cut])
        one.push(text[cut:])
        structure.push(text)
        assert (one.over, one.inside, one.closable) == (structure.over, structure.inside, structure.closable)
        assert one.answer_from == structure.answer_from
        one.end()
        structure.end()
        assert one.answer_from == structure.answer_from, (text, markup)
