"""Thoughts, answers and calls are told apart, and the same way whether a text comes whole or in pieces."""

import json
import random
from dataclasses import replace
from itertools import product

import pytest

from nightmill.jobs.base.contract import CallFormat, Markup, Tools
from nightmill.jobs.reply.parsing import Reading, Reply, call_id, read_reply
from nightmill.jobs.reply.tool_calls import Calls
from tests.unit.jobs.replies import THINK, TOOLS, in_pieces

HERMES, LLAMA, MISTRAL, NAMED, JSON = (
    CallFormat.HERMES, CallFormat.LLAMA, CallFormat.MISTRAL, CallFormat.MISTRAL_NAMED, CallFormat.JSON
)  # fmt: skip
CALL = '{"name": "weather", "arguments": {"place": "Bonn"}}'
BONN = ("weather", {"place": "Bonn"})
BEGIN, CALLED, SEP, END, ALL = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)  # fmt: skip
"""DeepSeek's marks."""
# (format, text, content, calls)
CASES: list[tuple[CallFormat, str, str, list[tuple[str, object]]]] = [
    (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", [BONN]),
    (HERMES, f"Let me see.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call> \n",
     "Let me see.", [BONN, BONN]),
    (HERMES, f"<tool_call>{CALL}</tool_call>\n\nDone.", "\n\nDone.", [BONN]),
    (HERMES, f"<tool_call>{CALL}", "", [BONN]),  # cut after the call, or an end that is not written
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"place": "</tool_call>"}}</tool_call>',
     "", [("weather", {"place": "</tool_call>"})]),
    (HERMES, '<tool_call>{"name": "weather", "arguments": "{\\"place\\": \\"Bonn\\"}"}</tool_call>',
     "", [BONN]),
    (HERMES, "<tool_call>{bad}</tool_call> or", "<tool_call>{bad}</tool_call> or", []),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"n": NaN}}</tool_call>',
     '<tool_call>{"name": "weather", "arguments": {"n": NaN}}</tool_call>', []),
    (HERMES,
     '<tool_call>{"name": "weather", "arguments": {"place": "' + 20 * "</tool_call>" + '"}}</tool_call>.',
     ".", [("weather", {"place": 20 * "</tool_call>"})]),
    (HERMES,
     '<tool_call>{"name": "weather", "arguments": {"a": "\\\\", "b": "\\"</tool_call>\\""}}</tool_call>.',
     ".", [("weather", {"a": "\\", "b": '"</tool_call>"'})]),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"n": "\\ud800"}}</tool_call>',
     '<tool_call>{"name": "weather", "arguments": {"n": "\\ud800"}}</tool_call>', []),
    (HERMES, '<tool_call>{"name": "wea', '<tool_call>{"name": "wea', []),
    (HERMES, "1 < 2, <tool", "1 < 2, <tool", []),
    (HERMES, "<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, []),
    (LLAMA, '{"name": "weather", "parameters": {"place": "Bonn"}}', "", [BONN]),
    (LLAMA, '<|python_tag|>{"name": "weather", "parameters": {"place": "Bonn"}}; {"name": "news"}',
     "", [BONN, ("news", {})]),
    (LLAMA, '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),
    (LLAMA, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (LLAMA, " It rains. ", " It rains. ", []),
    (MISTRAL, f'[TOOL_CALLS][{CALL[:-1]}, "id": "abcdefghi"}}, {CALL}]', "", [BONN, BONN]),
    (MISTRAL, "Well: [TOOL", "Well: [TOOL", []),
    (NAMED, '[TOOL_CALLS]weather[ARGS]{"place": "Bonn"}[TOOL_CALLS]news{}', "", [BONN, ("news", {})]),
    (NAMED, 'I look.[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"place": "Bonn"}', "I look.", [BONN]),
    (NAMED, "[TOOL_CALLS]weather, please", "[TOOL_CALLS]weather, please", []),
    (CallFormat.QWEN_XML,
     "I look.\n<tool_call>\n<function=weather>\n<parameter=place>\nBonn\n</parameter>\n</function>\n"
     "</tool_call>", "I look.", [BONN]),
    (CallFormat.QWEN_XML,
     '<tool_call>\n<function=weather>\n<parameter=n>\n[1, {"a": "b"}]\n</parameter>\n<parameter=f>\nFalse\n'
     "</parameter>\n<parameter=s>\n5\" \npipe\n</parameter>\n</function>\n</tool_call> done",
     " done", [("weather", {"n": [1, {"a": "b"}], "f": False, "s": '5" \npipe'})]),
    (CallFormat.QWEN_XML, "<tool_call>\n<function=weather>\n<parameter=place>\nBo",
     "<tool_call>\n<function=weather>\n<parameter=place>\nBo", []),
    (CallFormat.QWEN_XML, "<tool_call>\n<function=weather>\nBonn\n</function>\n</tool_call>",
     "<tool_call>\n<function=weather>\nBonn\n</function>\n</tool_call>", []),
    (CallFormat.GLM_XML,
     "<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>Bonn</arg_value>\n</tool_call>", "", [BONN]),
    (CallFormat.GLM_XML, "<tool_call>news</tool_call><tool_call>gossip</tool_call>",
     "<tool_call>gossip</tool_call>", [("news", {})]),
    (CallFormat.GEMMA, '<|tool_call>call:weather{place:<|"|>Bonn<|"|>}<tool_call|>', "", [BONN]),
    (CallFormat.GEMMA,
     '<|tool_call>call:weather{a:[1,None,true,{b:<|"|>}<|"|>}],"c d":-1.5e3,e:{}}<tool_call|>.',
     ".", [("weather", {"a": [1, None, True, {"b": "}"}], "c d": -1500.0, "e": {}})]),
    (CallFormat.GEMMA, '<|tool_call>call:weather{place:<|"|>Bonn',
     '<|tool_call>call:weather{place:<|"|>Bonn', []),
    (CallFormat.GEMMA, "<|tool_call>call:weather{a:NaN}<tool_call|>",
     "<|tool_call>call:weather{a:NaN}<tool_call|>", []),
    (CallFormat.LFM2, "Well.<|tool_call_start|>[weather(place='Bonn'), a.b(n=-1, t=(1, true), d={'x': None})]"
     "<|tool_call_end|>", "Well.", [BONN, ("a.b", {"n": -1, "t": [1, True], "d": {"x": None}})]),
    (CallFormat.LFM2, "<|tool_call_start|>[weather(open('/etc'))]<|tool_call_end|>",
     "<|tool_call_start|>[weather(open('/etc'))]<|tool_call_end|>", []),
    (CallFormat.LFM2, "<|tool_call_start|>[weather(a=1e999)]<|tool_call_end|>",
     "<|tool_call_start|>[weather(a=1e999)]<|tool_call_end|>", []),
    (CallFormat.PYTHONIC, '[weather(place="Bonn"), news()]', "", [BONN, ("news", {})]),
    (CallFormat.PYTHONIC, "[gossip()]", "[gossip()]", []),
    (CallFormat.PYTHONIC, "[1, 2]", "[1, 2]", []),
    (CallFormat.GRANITE, f"<|tool_call|>[{CALL}]", "", [BONN]),
    (CallFormat.GIGACHAT, f"Well. <|function_call|>{CALL}", "Well.", [BONN]),
    (CallFormat.GIGACHAT, "<|function_call|>Bonn", "<|function_call|>Bonn", []),
    (CallFormat.PHI, f"<|tool_call|>[{CALL}, {CALL}]<|/tool_call|>", "", [BONN, BONN]),
    (CallFormat.NEMOTRON, f"<TOOLCALL>[{CALL}]</TOOLCALL>", "", [BONN]),
    (CallFormat.TOOL_CALLS, f"<tool_calls>\n{CALL}\n{CALL}\n</tool_calls>", "", [BONN, BONN]),
    (CallFormat.DEEPSEEK,
     f'Well.{BEGIN}{CALLED}weather{SEP}{{"place": "Bonn"}}{END}{CALLED}news{SEP}{{}}{END}{ALL}',
     "Well.", [BONN, ("news", {})]),
    (CallFormat.DEEPSEEK, f"{BEGIN}{CALLED}weather{SEP}Bonn{END}{ALL}",
     f"{BEGIN}{CALLED}weather{SEP}Bonn{END}{ALL}", []),
    (CallFormat.DEEPSEEK_R1,
     f'{BEGIN}{CALLED}function{SEP}weather\n```json\n{{"place": "{ALL}"}}\n```{END}\n'
     f"{CALLED}function{SEP}news\n```json\n{{}}\n```{END}", "", [("weather", {"place": ALL}), ("news", {})]),
    (CallFormat.KIMI,
     "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
     '{"place": "Bonn"}<|tool_call_end|><|tool_call_begin|>a.news:11<|tool_call_argument_begin|>{}'
     "<|tool_call_end|><|tool_calls_section_end|> ok", " ok", [BONN, ("a.news", {})]),
    (CallFormat.COHERE,
     '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
     '{"place": "Bonn"}}\n]<|END_ACTION|>', "", [BONN]),
    (CallFormat.SEED,
     "<seed:tool_call>\n<function=weather>\n<parameter=place>\nBonn </parameter>\n"
     "<parameter=n>7</parameter>\n</function>\n</seed:tool_call>",
     "", [("weather", {"place": "\nBonn ", "n": 7})]),
    (CallFormat.MINIMAX,
     'I look.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="place">Bonn</parameter>\n'
     '</invoke>\n<invoke name="news">\n</invoke>\n</minimax:tool_call>', "I look.", [BONN, ("news", {})]),
    (CallFormat.MINIMAX, '<minimax:tool_call><invoke name="weather">Bonn</invoke></minimax:tool_call>',
     '<minimax:tool_call><invoke name="weather">Bonn</invoke></minimax:tool_call>', []),
    (JSON, f"```json\n[{CALL}]\n```", "", [BONN]),
    (JSON, f" {CALL}\n", "", [BONN]),
    (JSON, '{"place": "Bonn"}', '{"place": "Bonn"}', []),
    (JSON, "[1, 2]", "[1, 2]", []),
]  # fmt: skip


@pytest.mark.parametrize(("written", "text", "content", "calls"), CASES)
def test_calls_are_read_and_what_is_none_stays_text(
    written: CallFormat, text: str, content: str, calls: list[tuple[str, object]]
) -> None:
    draw = random.Random(len(text))
    for thinking, opened in ((None, False), (THINK, False), (THINK, True)):
        thought = (
            "" if thinking is None else ("" if opened else " <think>") + "\nIs it </thin?\n\n</think>\n\n"
        )
        markup = Markup(written, thinking, opened)
        whole = read_reply(thought + text, markup, TOOLS, "j")
        assert whole.reasoning == (None if thinking is None else "Is it </thin?")
        assert whole.content == (content if thinking is None or calls else content.lstrip())
        assert [(call.name, call.parsed) for call in whole.tool_calls] == calls
        for _ in range(1 if len(text) > 1_000 else 8):
            assert in_pieces(thought + text, markup, draw) == whole


MUST = Tools(TOOLS.functions, required=True)
NEWS_CALL = '{"name": "news", "arguments": {"of": [1, {}]}}'
TWO = [("news", {"of": [1, {}]}), BONN]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (HERMES, f"<tool_call>\n{NEWS_CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"),
        (LLAMA, f"{NEWS_CALL}; {CALL}".replace("arguments", "parameters")),
        (MISTRAL, f"[TOOL_CALLS][{NEWS_CALL}, {CALL}]"),
        (NAMED, '[TOOL_CALLS]news[ARGS]{"of": [1, {}]}[TOOL_CALLS]weather[ARGS]{"place": "Bonn"}'),
        (JSON, f"[{NEWS_CALL}, {CALL}]"),
        (
            CallFormat.DEEPSEEK,
            f'{BEGIN}{CALLED}news{SEP}{{"of": [1, {{}}]}}{END}'
            f'{CALLED}weather{SEP}{{"place": "Bonn"}}{END}{ALL}',
        ),
        (
            CallFormat.KIMI,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.news:0<|tool_call_argument_begin|>"
            '{"of": [1, {}]}<|tool_call_end|><|tool_call_begin|>functions.weather:1'
            '<|tool_call_argument_begin|>{"place": "Bonn"}<|tool_call_end|><|tool_calls_section_end|>',
        ),
        (
            CallFormat.MINIMAX,
            '<minimax:tool_call>\n<invoke name="news">\n<parameter name="of">[1, {}]</parameter>\n'
            '</invoke>\n<invoke name="weather">\n<parameter name="place">Bonn</parameter>\n</invoke>\n'
            "</minimax:tool_call>",
        ),
    ],
)
def test_of_calls_that_had_to_be_made_those_before_a_cut_count(written: CallFormat, text: str) -> None:
    whole = {
        NAMED: "{}]}",
        CallFormat.DEEPSEEK: "{}]}",
        CallFormat.KIMI: "{}]}",
        CallFormat.MINIMAX: "</invoke>",
    }
    end = whole.get(written, "{}]}}")
    first = text.index(end) + len(end)
    for length in range(len(text) + 1):
        cut = text[:length]
        reply = read_reply(cut, Markup(written), MUST, "j")
        called = [(call.name, call.parsed) for call in reply.tool_calls]
        assert called == TWO[: len(called)] and (len(called) > 0) == (length >= first)
        assert not (called and reply.content)  # what begins one more is left out
        assert called or reply.content == cut
        joined = Reading(Markup(written), MUST, "j")
        parts = [part for character in cut for part in joined.push(character)] + joined.end()
        assert [part.call for part in parts if part.call] == list(reply.tool_calls)
    assert called == TWO


def test_text_without_marks_is_not_looked_at() -> None:
    text = f"<think>hm</think><tool_call>{CALL}</tool_call>"
    assert read_reply(text, None, TOOLS, "j") == Reply(text)
    assert read_reply(text, Markup(HERMES), None, "j") == Reply(text)  # it was not told of tools


@pytest.mark.parametrize(
    "number",
    ["1e999", "1.50E1844520", "-0.10", "12345678901234567890.0", "7" * 5_000, "-" + "7" * 5_000 + ".5e-7"],
)
def test_numbers_are_what_the_model_wrote(number: str) -> None:
    text = f'<tool_call>{{"name": "weather", "arguments": {{"n": [{number}], "{{": "1e5"}}}}</tool_call>'
    (call,) = read_reply(text, Markup(HERMES), TOOLS, "j").tool_calls
    assert call.arguments == f'{{"n": [{number}], "{{": "1e5"}}'


def test_marks_in_strings_cost_no_parsing() -> None:
    count = 0

    def parse(text: str) -> list[tuple[str, str]]:
        nonlocal count
        count += 1
        return []

    calls = Calls(HERMES, TOOLS)
    calls._style = calls._style._replace(parse=parse)
    text = '<tool_call>{"name": "weather", "arguments": {"a": "' + 5_000 * "</tool_call>" + '"}}'
    assert list(calls.push(text)) == [] and "".join(map(str, calls.end())) == text
    assert count == 1  # at the end


def test_one_call_at_most() -> None:
    one = Tools(TOOLS.functions, parallel=False)
    text = f"<tool_call>{CALL}</tool_call>" * 3
    assert len(read_reply(text, Markup(HERMES), one, "j").tool_calls) == 1


def test_ids_of_calls_follow_from_the_job() -> None:
    text = f"<tool_call>{CALL}</tool_call>" * 2
    calls = read_reply(text, Markup(HERMES), TOOLS, "j", 1).tool_calls
    assert [call.id for call in calls] == [call_id("j", 1, 0), call_id("j", 1, 1)]
    ids = {call_id(job, answer, number) for job, answer, number in product("jk", range(9), range(9))}
    assert len(ids) == 162 and all(len(one) == 9 and one.isalnum() for one in ids)


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (CallFormat.LFM2, "<|tool_call_start|>[weather(a={[1]: 2})]<|tool_call_end|>"),
        (CallFormat.LFM2, "<|tool_call_start|>[weather(a={**{}})]<|tool_call_end|>"),
        (CallFormat.PYTHONIC, "[weather(a={[1]: 2})]"),
        (CallFormat.PYTHONIC, "[weather(a={{}: 2})]"),
        (
            CallFormat.QWEN_XML,
            "<tool_call><function=weather><parameter=a>{[1]: 2}</parameter></function></tool_call>",
        ),
        (
            CallFormat.GLM_XML,
            "<tool_call>weather<arg_key>a</arg_key><arg_value>{[1]: 2}</arg_value></tool_call>",
        ),
    ],
)  # fmt: skip
def test_a_key_that_cannot_be_one_raises_nothing(calls: CallFormat, text: str) -> None:
    reply = read_reply(text, Markup(calls), TOOLS, "j")
    if reply.tool_calls:  # in XML it is a text
        assert json.loads(reply.tool_calls[0].arguments) == {"a": "{[1]: 2}"}
    else:
        assert reply.content == text


def test_what_models_may_write_never_raises_and_loses_nothing() -> None:
    draw = random.Random(5)
    pieces = [
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>",
        "weather", "{", "}", "[", "]", '"', ":", ",", '{"name": "weather", "arguments": {}}', "\\u12", "1e9",
        "é", "\n", " ", "```", "<function=weather>", "<parameter=a>", "</parameter>", "</function>",
        "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call>", "call:weather{", '<|"|>',
        "<tool_call|>", "<|tool_call_start|>[", "weather(a=", ")", "]<|tool_call_end|>", "<|tool_call|>",
        "<|/tool_call|>", "'", "<TOOLCALL>", "</TOOLCALL>", "<tool_calls>", "</tool_calls>", "<|end|>",
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>", "<|START_ACTION|>", "<|END_ACTION|>", "<minimax:tool_call>",
        '<invoke name="weather">', '<parameter name="a">', "</invoke>", "<seed:tool_call>",
        "<|python_start|>", "-" * 3_000, "{[1]: 2}", "{**{}}", "{1}",
    ]  # fmt: skip
    for _ in range(4_000):
        text = "".join(draw.choices(pieces, k=draw.randrange(14)))
        markup = Markup(draw.choice(list(CallFormat)), draw.choice((None, THINK)), draw.random() < 0.3)
        whole = read_reply(text, markup, TOOLS, "j")
        assert in_pieces(text, markup, draw) == replace(whole, unfinished=False)
        for call in whole.tool_calls:
            assert isinstance(json.loads(call.arguments), dict)
        if markup.thinking is None and not whole.tool_calls:
            assert whole.content == text
